"""docs/configuration.md and docs/recipe.schema.json: every setting, from the classes and the docstrings below fields.

python scripts/write_settings.py
"""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import create_model
from pydantic.fields import FieldInfo

from skyrl_trainer import settings
from skyrl_trainer.algorithms.options import options_class
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.learner.compose import ALGORITHMS, algorithm_class
from skyrl_trainer.settings import FREE, OPTIONS, ROUNDING, Config, Section, leaf_fields

PAGE, SCHEMA = Path("docs/configuration.md"), Path("docs/recipe.schema.json")
HEAD = f"""# Configuration

{inspect.getdoc(settings)}

Written by `scripts/write_settings.py`, as is [recipe.schema.json](recipe.schema.json), by which editors complete and
check recipes: with `# yaml-language-server: $schema=...` and the path or address of that file in their first line.

A run that is resumed keeps its settings; but those marked ● may change, those marked ○ unless the run is
`trainer.deterministic`, and `trainer.max_steps` under a constant learning rate or `inverse_sqrt`. Where `val_data`,
`val_size` or `eval_temperature` changed, the next evaluation makes `model/best` anew: the old score is of other tasks.
To go on otherwise, begin a new run from the weights, `trainer.run_name=b trainer.policy.model.path=runs/a/model/last`:
the optimizer begins anew, and a KL's reference is then this policy.
"""
TABLE = "\n\n| setting | default | values | what it is |\n|---|---|---|---|\n"
OPTIONS_HEAD = f"""
## {OPTIONS}

An algorithm refuses an option that it does not have, and names those that it has; a plug-in's mixin brings its own.
Names and defaults are TRL's where it has them; the page of each [algorithm](algorithms/README.md) says where it is
otherwise."""
MARKS = {FREE: " ●", ROUNDING: " ○"}
SIGNS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@cache
def algorithms() -> dict[str, type[PolicyLoss]]:
    """The registered classes of this package, not those of a plug-in; GRPO, whose options all have, first."""
    found = {name: algorithm_class(name) for name in ALGORITHMS.built_in}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "grpo", item[0])))


@cache
def fields_of(cls: type[PolicyLoss]) -> dict[str, FieldInfo]:
    """The algorithm's options; each look makes a class and reads docstrings from source files."""
    return options_class(cls).model_fields


def option_fields(option: str) -> dict[str, FieldInfo]:
    """The option's field in each algorithm that has it."""
    known = {name: fields_of(cls) for name, cls in algorithms().items() if option not in cls.ignores}
    return {name: fields[option] for name, fields in known.items() if option in fields}


def options() -> dict[str, FieldInfo]:
    """Of all algorithms: the field of the first one that has it."""
    names = dict.fromkeys(name for cls in algorithms().values() for name in fields_of(cls))
    return {name: next(iter(option_fields(name).values())) for name in names}


def kind_text(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return f"`{get_args(kind)[1].metadata[0].pattern}`"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")


def values_of(field: FieldInfo) -> str:
    """`group`, `batch`, `none`; or the type, with its bounds."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    text = " or ".join(kind_text(kind) for kind in kinds if kind is not type(None))
    limits = [asdict(each) for each in field.metadata if is_dataclass(each) and not isinstance(each, type)]
    bounds = [f", {SIGNS[key]} {value:g}" for limit in limits for key, value in limit.items() if key in SIGNS]
    return text + "".join(bounds)


def row(name: str, default: str, field: FieldInfo, more: str = "") -> str:
    told = " ".join((field.description or "").split())
    assert told, f"{name} needs a docstring below its field"
    mark = "".join(sign for mark, sign in MARKS.items() if mark in field.metadata)
    cells = [f"`{name}`{mark}", default, values_of(field), told + more]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def option_row(option: str, field: FieldInfo) -> str:
    """The default that most algorithms have, then the others'."""
    fields, usual = option_fields(option), json.dumps(field.default)
    others = [f"{name} `{json.dumps(each.default)}`" for name, each in fields.items() if each.default != field.default]
    refusing = [name for name in algorithms() if name not in fields]
    more = f" ({', '.join(fields)} only)" if "grpo" in refusing else f" (refused by {', '.join(refusing)})"
    return row(option, "; ".join([f"`{usual}`", *others]), field, more if refusing else "")


def section_texts(section: type[Section] = Config, prefix: str = "") -> dict[str, str]:
    """What the docstrings of sections say, by their full names."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[f"{prefix}{name}"] = inspect.cleandoc(field.annotation.__doc__ or "")
            found |= section_texts(field.annotation, f"{prefix}{name}.")
    return found


def configuration_markdown() -> str:
    tables: dict[str, str] = {}
    for name, field in leaf_fields().items():
        section, _, last = name.rpartition(".")
        if name != OPTIONS:
            default = f"`{json.dumps(field.default, ensure_ascii=False)}`"
            tables[section] = tables.get(section, "") + row(last, default, field)
    page, texts = HEAD, section_texts()
    for section, rows in tables.items():
        text = f"\n\n{texts[section]}" if texts[section] else ""
        page += f"\n## {section}{text}{TABLE}{rows}"
    return page + OPTIONS_HEAD + TABLE + "".join(option_row(*each) for each in options().items())


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors. Options that nobody here knows may be a plug-in's."""
    schema = Config.model_json_schema()
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in options().items()}
    entries = create_model("Options", **fields).model_json_schema()["properties"]
    for entry in entries.values():
        del entry["default"]  # it depends on the algorithm
    schema["$defs"]["AlgorithmConfig"]["properties"]["options"]["properties"] = entries
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(schema)}


def _plain(schema: Any) -> Any:
    """Without the titles, which say a name again, and without the defaults of whole sections."""
    if not isinstance(schema, dict):
        return [_plain(each) for each in schema] if isinstance(schema, list) else schema
    left_out = {"title", "default"} if "$ref" in schema else {"title"}
    return {key: _plain(value) for key, value in schema.items() if key not in left_out}


def main() -> None:
    PAGE.write_text(configuration_markdown(), encoding="utf-8")
    SCHEMA.write_text(json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
