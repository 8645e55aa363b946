"""The configuration of a run (settings.py), from a recipe and overrides, with who set what; and back to YAML."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from skyrl_trainer.errors import UserError
from skyrl_trainer.recipe import Setting, parse_override, read_recipe, text_of, value_of, walk
from skyrl_trainer.registry import load
from skyrl_trainer.settings import OPTIONS, Config, leaf_fields

FIXED = {"trainer.strategy": "fsdp2", "trainer.resume_mode": "latest"}
"""Words of SkyRL and of earlier run folders that can have one value here, and so are no settings."""


def flatten(config: Config) -> dict[str, Any]:
    """Full name -> value, as JSON knows it."""
    plain = config.model_dump(mode="json")
    return {name: reduce(getitem, name.split("."), plain) for name in leaf_fields()}


class Resolved(NamedTuple):
    config: Config
    sources: dict[str, str]
    """Who set a setting ("quickstart.yaml, line 7"; "command line"); defaults are not in it."""


def load_config(recipe: str | None, overrides: list[str]) -> Config:
    """A recipe's name or path (None: defaults only), then `a.b=c` in order; raises UserError with one sentence."""
    return resolve(recipe, overrides).config


def resolve(recipe: str | None, overrides: list[str]) -> Resolved:
    """As `load_config`, and remembers where each value came from."""
    sections = _sections()
    settings = list(read_recipe(recipe, sections)) if recipe else []
    for setting in map(parse_override, overrides):
        if setting.name in sections and isinstance(setting.node, yaml.MappingNode):  # it is set as a whole
            settings = [each for each in settings if not each.name.startswith(f"{setting.name}.")]
            settings += walk(setting.node, f"{setting.name}.", sections, setting.source)
        else:
            settings.append(setting)
    return _resolved(settings)


def saved_config(saved: dict[str, Any], source: str = "checkpoint") -> Config:
    """Of a checkpoint, this version's or an earlier one's. UserError, which names the source."""
    return _resolved(walk(yaml.compose(yaml.safe_dump(saved)), "", _sections(), source)).config


def _sections() -> set[str]:
    return {OPTIONS} | {name[:dot] for name in leaf_fields() for dot in range(len(name)) if name[dot] == "."}


def _resolved(settings: Iterable[Setting]) -> Resolved:
    fields = leaf_fields()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in settings:
        name = setting.name
        if name in FIXED:
            if value_of(setting) == FIXED[name]:
                continue
            raise UserError(f"{name} ({setting.source}) can only be {FIXED[name]} here.")
        leaf = next((leaf for leaf in fields if f"{name}.".startswith(f"{leaf}.")), None)
        if leaf is None:
            raise load("skyrl_trainer.dry_run.elsewhere:unknown")(setting, list(fields))
        if name == leaf:
            is_text = fields[leaf].annotation is str and isinstance(setting.node, yaml.ScalarNode)
            values[leaf] = text_of(setting.node) if is_text else value_of(setting)
        else:  # one entry of a dictionary
            entry, entries = name[len(leaf) + 1 :], values.get(leaf, fields[leaf].default)
            if not isinstance(entries, dict) or "." in entry:
                raise load("skyrl_trainer.dry_run.elsewhere:unknown")(setting, list(fields))
            values[leaf] = entries | {entry: value_of(setting)}
        sources[leaf] = sources[name] = setting.source
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), path, nested)[last] = value
    try:
        config = Config.model_validate(nested, strict=True)
    except ValidationError as error:
        raise wrong_value(error, values, sources) from None
    _check(config)
    return Resolved(config, sources)


def wrong_value(
    error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str] = {}, prefix: str = ""
) -> UserError:
    """One sentence on the first of the values that is wrong; prefix: of the setting, before a value's name."""
    places = [(".".join(map(str, item["loc"])) + ".", item["msg"]) for item in error.errors()]
    name = next((name for name in values if places[0][0].startswith(f"{name}.")), None)
    if name is None:
        return UserError(f"{prefix}{places[0][0][:-1]} is missing: give it a value.")
    idle = r"^(Input|String|Dictionary) should (be|match pattern|have) | after validation.*"
    wanted = " or ".join(dict.fromkeys(re.sub(idle, "", text) for at, text in places if at.startswith(f"{name}.")))
    value = json.dumps(values[name], ensure_ascii=False, default=str)
    source = f" ({sources[name]})" if name in sources else ""
    return UserError(f"{prefix}{name} is {value}{source}, but should be {wanted}.")


def _check(config: Config) -> None:
    generator, trainer = config.generator, config.trainer
    episodes = trainer.train_batch_size * generator.num_generations
    if generator.max_completion_length >= generator.max_model_len:
        raise UserError(
            f"generator.max_completion_length is {generator.max_completion_length} and generator.max_model_len is "
            f"{generator.max_model_len}, but an episode must hold a prompt and a whole answer: raise max_model_len."
        )
    if not isinstance(kwargs := generator.chat_template_kwargs, dict):
        name = "generator.engine_kwargs.default_chat_template_kwargs"
        raise UserError(f"{name} is {kwargs!r}, but should be a mapping such as {{enable_thinking: false}}.")
    if generator.agent.run and generator.agent.memory != "full":
        raise UserError("An agent of yours keeps its own history: leave out generator.agent.memory.")
    if trainer.num_mini_batches > episodes:
        raise UserError(
            f"trainer.num_mini_batches is {trainer.num_mini_batches}, but a step has only {episodes} episodes "
            "(trainer.train_batch_size times generator.num_generations)."
        )
    if trainer.max_staleness and trainer.algorithm.options.get("correction") == "none":
        raise UserError(f"{OPTIONS}.correction=none corrects nothing for trainer.max_staleness: leave it at auto.")
    if trainer.deterministic and trainer.max_staleness > 1:
        raise UserError(
            f"trainer.max_staleness={trainer.max_staleness} must be 0 or 1 with trainer.deterministic=true."
        )
    if trainer.deterministic and trainer.algorithm.options.get("correction") == "bypass":
        raise UserError(
            f"{OPTIONS}.correction=bypass rounds otherwise in each run: not with trainer.deterministic=true."
        )


def to_yaml(config: Config) -> str:
    """The whole configuration as a recipe: what a run folder's config.yaml holds."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
