"""envs-registry.yaml -> gymnasium.register.

A registry file is `schema: 1` and `envs:`, a list of entries with the fields of EnvEntry. All of a file is checked
before any of it is registered. Errors are ValueErrors that begin with file and line.
"""

import difflib
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import yaml

VARIABLE = "SKYRL_ENVS_REGISTRY"
OPENENV, OPENENV_ID = "openenv:", "skyrl/openenv-v0"
"""How an environment behind a server is named, openenv:ws://host:port, and the one that plays it."""
_CLIENT = "skyrl_gym.openenv.client:OpenEnv"  # in no list, for it has no tasks of its own
_ID = re.compile(r"([\w.-]+/)?[\w.-]+-v\d+")
_ENTRY_POINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """One environment of a registry file."""

    id: str
    """"namespace/name-v0", for gymnasium.make."""
    entry_point: str
    """"package.module:Class"."""
    description: str
    action_grammar: str = ""
    splits: tuple[str, ...] = ()
    reward_range: tuple[float, float] | None = None
    """The lowest and the highest sum of an episode's rewards."""
    max_episode_steps: int | None = None
    """The step limit (Gymnasium's TimeLimit), or none."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Given to the class."""
    source: str = ""
    """The file and line that it comes from; not a field of the file."""


def _holds(items: Any, kind: Any, *types: type) -> bool:
    return isinstance(items, kind) and all(type(item) in types for item in items)


_RULES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "id": ("of the form 'namespace/name-v0'", lambda x: isinstance(x, str) and _ID.fullmatch(x)),
    "entry_point": ("of the form 'package.module:Class'", lambda x: isinstance(x, str) and _ENTRY_POINT.fullmatch(x)),
    "description": ("a string", lambda x: isinstance(x, str)),
    "action_grammar": ("a string", lambda x: isinstance(x, str)),
    "splits": ("a list of names", lambda x: _holds(x, list, str)),
    "reward_range": ("a list of two numbers", lambda x: _holds(x, list, int, float) and len(x) == 2 and x[0] <= x[1]),
    "max_episode_steps": ("a whole number above 0", lambda x: x is None or (type(x) is int and x > 0)),
    "kwargs": ("a mapping of argument names", lambda x: _holds(x, dict, str)),
}
"""What each field of a file's entry must be, in words and as a test."""

_entries: dict[str, EnvEntry] = {}


def register_all() -> None:
    """Registers the built-in list, then the files in SKYRL_ENVS_REGISTRY (separated as in PATH)."""
    folder = Path(__file__).resolve().parent  # in a wheel; else the root of the checkout
    built_in = [file for place in (folder, *folder.parents[2:3]) if (file := place / "envs-registry.yaml").is_file()]
    if not built_in:
        raise FileNotFoundError(f"There is no envs-registry.yaml in {folder}; install skyrl-gym again.")
    load_registry(built_in[0])
    add_env(OPENENV_ID, _CLIENT)
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        load_registry(path)


def load_registry(path: str | Path) -> list[EnvEntry]:
    """Registers a file's environments, once, and returns them. ValueError names file, line and field that are wrong."""
    entries, new = _read(Path(path)), dict[str, EnvEntry]()
    for entry in entries:
        if entry.id in new:
            raise ValueError(f"{entry.source}: field 'id': {entry.id!r} is also the id of {new[entry.id].source}.")
        known = _entries.get(entry.id)
        if known is not None and replace(known, source=entry.source, description=entry.description) == entry:
            continue
        if entry.id in gymnasium.registry:
            owner = known.source if known else "a call of gymnasium.register"
            raise ValueError(f"{entry.source}: field 'id': {entry.id!r} is already registered by {owner}; rename one.")
        new[entry.id] = entry
    for entry in new.values():
        add_env(entry.id, entry.entry_point, max_episode_steps=entry.max_episode_steps, kwargs=dict(entry.kwargs))
        _entries[entry.id] = entry
    return entries


def add_env(env_id: str, entry_point: Any, **arguments: Any) -> None:
    """Registers with Gymnasium, for vectors of environments, too; an id that it knows stays as it is."""
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, entry_point, vector_entry_point=f"skyrl_gym.vector:{env_id}", **arguments)


def list_envs() -> list[EnvEntry]:
    """Everything that registry files have registered, in their order."""
    return list(_entries.values())


def resolve_env_id(name: str) -> str:
    """The id that gymnasium.make takes: "text_math" -> "skyrl/text_math-v0". ValueError names the nearest ones.
    "openenv:ws://host:port" gets an id of this process alone; `portable_env` gives one of every process.
    """
    if name.startswith(OPENENV):
        url = name.removeprefix(OPENENV)
        add_env(env_id := f"openenv/{url.encode().hex()}-v0", _CLIENT, kwargs={"url": url})
        return env_id
    module, _, env_id = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(f"Environment {name!r} names the module {module!r}, which fails: {error}.") from error
    if env_id in gymnasium.registry:
        return name
    if f"skyrl/{name}-v0" in gymnasium.registry:
        return f"skyrl/{name}-v0"
    short = [each.id[6:].removesuffix("-v0") for each in list_envs() if each.id.startswith("skyrl/")]
    listed = f"`python -m skyrl_gym` lists those of registry files; `module:{env_id}` imports a module first."
    raise ValueError(f"There is no environment {name!r}.{_nearest(env_id, [*short, *gymnasium.registry])} {listed}")


def portable_env(name: str) -> tuple[str, dict[str, Any]]:
    """An id that every process knows, and the options of reset that are part of it."""
    if name.startswith(OPENENV):
        return OPENENV_ID, {"url": name.removeprefix(OPENENV)}
    return resolve_env_id(name), {}


def _read(path: Path) -> list[EnvEntry]:
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        document = loader.construct_document(node) if node else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"The environment registry {path} cannot be read: {problem}.") from error
    if not isinstance(document, dict) or document.get("schema") != 1 or not isinstance(document.get("envs"), list):
        raise ValueError(f"{path}: expected 'schema: 1' and a list 'envs:' at the top of an environment registry.")
    if len(document) < len(node.value):  # YAML itself lets the last one win
        raise ValueError(f"{path}: a field stands twice at the top.")
    if unknown := document.keys() - {"schema", "envs"}:
        raise ValueError(f"{path}: unknown field {unknown.pop()!r} at the top; valid ones are schema, envs.")
    entry_nodes = next(value.value for key, value in node.value if key.value == "envs")
    return [_entry(path, entry_node, raw) for entry_node, raw in zip(entry_nodes, document["envs"], strict=True)]


def _entry(path: Path, node: yaml.Node, raw: Any) -> EnvEntry:
    source = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: an entry of 'envs' is a mapping with id, entry_point and so on, got {raw!r}.")
    lines = {key.value: f"{path}:{key.start_mark.line + 1}" for key, _ in node.value}
    if len(raw) < len(node.value):
        raise ValueError(f"{source}: an entry has a field twice; it has {[key.value for key, _ in node.value]}.")
    for name in raw:
        if name not in _RULES:
            near = _nearest(str(name), list(_RULES))
            raise ValueError(f"{lines.get(name, source)}: unknown field {name!r}.{near} Valid: {', '.join(_RULES)}.")
    for name, (expected, fits) in _RULES.items():
        if name in raw and not fits(raw[name]):
            raise ValueError(f"{lines[name]}: field {name!r} must be {expected}, got {raw[name]!r}.")
        if name not in raw and name in ("id", "entry_point", "description"):
            raise ValueError(f"{source}: field {name!r} is missing.")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    return EnvEntry(**values, source=source)


def _nearest(name: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""
