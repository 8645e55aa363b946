"""YAML recipes and `a.b=c` overrides as plain assignments, each with the place where it was made.

Nothing is checked here but the form: config.py knows the settings. Texts have $HOME and ~/ expanded.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from skyrl_trainer.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number too (YAML 1.1 reads it as a text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Setting:
    """One assignment before it is checked: where it was made, and its text where that is a plain word."""

    name: str
    value: Any
    source: str
    text: str | None = None


def find_recipe(recipe: str) -> Path:
    """A bundled recipe by its name, else a path."""
    bundled = Path(str(files("skyrl_trainer"))) / "recipes"
    path = bundled / f"{recipe}.yaml"
    if path.is_file():
        return path
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    names = sorted(file.stem for file in bundled.glob("*.yaml"))
    close = difflib.get_close_matches(recipe, names, 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"bundled ones: {', '.join(names) or 'none'}."
    raise UserError(f"There is no recipe {recipe!r}, neither bundled nor as a file; {hint}")


def read_recipe(path: Path, names: list[str]) -> Iterator[Setting]:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is not None:
            yield from _walk(loader, root, "", path, names, set())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"The recipe {path}{line}, is not valid YAML: {problem}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The recipe {path} cannot be read: {error}.") from None


def _walk(
    loader: _Loader, node: yaml.Node, prefix: str, path: Path, names: list[str], seen: set[str]
) -> Iterator[Setting]:
    """Descends into sections only: what lies below a setting is its value."""
    if not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"The recipe {path}, line {node.start_mark.line + 1}, must hold `name: value` lines"
            + (f" under {prefix[:-1]}." if prefix else ", such as `trainer:`.")
        )
    for key, value in node.value:
        name, where = f"{prefix}{key.value}", f"{path.name}, line {key.start_mark.line + 1}"
        if name in seen:
            raise UserError(f"{name} is set twice in one recipe ({where}).")
        seen.add(name)
        if any(leaf.startswith(f"{name}.") for leaf in names):
            if value.tag != "tag:yaml.org,2002:null":
                yield from _walk(loader, value, f"{name}.", path, names, seen)
        else:
            yield Setting(name, expand(loader.construct_object(value, deep=True)), where)  # type: ignore[no-untyped-call]


def parse_override(text: str) -> Setting:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text!r} is not an override: write name=value, for example trainer.max_steps=10.")
    try:
        parsed = yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise UserError(f"The value of {name} on the command line, {value!r}, is not valid YAML.") from None
    return Setting(name, expand(parsed), "command line", None if isinstance(parsed, str) else value)


def expand(value: Any) -> Any:
    """$HOME and ~/ in every text, however deep."""
    if isinstance(value, str):
        return os.path.expandvars(os.path.expanduser(value) if value.startswith("~/") else value)
    if isinstance(value, list):
        return [expand(item) for item in value]
    return {key: expand(item) for key, item in value.items()} if isinstance(value, dict) else value
