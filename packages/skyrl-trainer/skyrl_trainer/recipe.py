"""YAML recipes and `a.b=c` overrides as plain assignments, each with the place where it was made."""

import os
import re
from collections.abc import Collection, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from skyrl_trainer.errors import UserError

UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)


class Setting(NamedTuple):
    """One assignment, its value not yet made of the YAML node (a text may look like a number)."""

    name: str
    node: yaml.Node
    source: str


# YAML in which 1e-6 is a number too (YAML 1.1 reads a text), and texts have $HOME and ~/ expanded.
class _Loader(yaml.SafeLoader):
    pass


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:str", lambda loader, node: text_of(node))


def text_of(node: yaml.Node) -> str:
    return os.path.expanduser(os.path.expandvars(node.value))


def value_of(setting: Setting) -> Any:
    try:
        return _Loader("").construct_document(setting.node)
    except UNREADABLE as error:
        raise _broken(f"The value of {setting.name} ({setting.source})", error) from None


def read_recipe(recipe: str, sections: Collection[str]) -> Iterator[Setting]:
    """Of a bundled recipe's name, or a path. Descends into `sections` only."""
    bundled = Path(str(files("skyrl_trainer"))) / "recipes"
    path = next((path for path in (bundled / f"{recipe}.yaml", Path(recipe).expanduser()) if path.is_file()), None)
    if path is None:
        names = ", ".join(sorted(file.stem for file in bundled.glob("*.yaml")))
        raise UserError(f"There is no recipe {recipe!r}, neither as a file nor bundled ({names}).")
    try:
        root = _parse(path.read_text(encoding="utf-8"), f"The recipe {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The recipe {path} cannot be read: {error}.") from None
    yield from walk(root, "", sections, path)


def walk(node: yaml.Node, prefix: str, sections: Collection[str], place: Path | str) -> Iterator[Setting]:
    """The settings below a section. place: the recipe's path, or the name of what is not a file."""
    if node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        what = f"recipe {place}, line {node.start_mark.line + 1}," if isinstance(place, Path) else place
        under = f" under {prefix[:-1]}" if prefix else ", such as `trainer:`"
        raise UserError(f"The {what} must hold `name: value` lines{under}.")
    keys = [key.value for key, _ in node.value]
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        source = f"{place.name}, line {key.start_mark.line + 1}" if isinstance(place, Path) else place
        if keys.count(key.value) > 1:
            raise UserError(f"{name} is set twice in one mapping ({source}).")
        if name in sections:
            yield from walk(value, f"{name}.", sections, place)
        else:
            yield Setting(name, value, source)


def parse_override(text: str) -> Setting:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text!r} is not an override: write name=value, for example trainer.max_steps=10.")
    return Setting(name, _parse(value, f"The value of {name} on the command line, {value!r}"), "command line")


def _parse(text: str, what: str) -> yaml.Node:
    try:
        return yaml.compose(text, _Loader) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
    except UNREADABLE as error:
        raise _broken(what, error) from None


def _broken(what: str, error: Exception) -> UserError:
    mark = getattr(error, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    return UserError(f"{what}{line}, is not valid YAML: {getattr(error, 'problem', None) or error}.")
