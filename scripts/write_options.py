"""docs/algorithms/options.md: every option of every algorithm, from the classes and the comments behind their fields.

python scripts/write_options.py [--out docs/algorithms/options.md]
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.learner.compose import ALGORITHMS, algorithm_class

HEAD = """# Options

`trainer.algorithm.options`, written by `scripts/write_options.py`. Names and defaults are TRL's where it has them; each
page says where it is otherwise. An algorithm refuses an option that it does not have, and names those that it has.

| option | default | values | what it is |
|---|---|---|---|
"""
MEANINGS = {
    "epsilon": "lower half of the clip range: the ratio is clipped at 1 - epsilon",
    "epsilon_high": "upper half: the ratio is clipped at 1 + epsilon_high; of cispo, the cap itself. None: as epsilon",
    "kl_estimator": "None: k3 in the loss, k1 in the reward; k1 is refused in the loss",
    "kl_in": "where the KL goes: into the loss, or off the rewards",
    "correction": "weight of a token for the engine's own log-probabilities; see corrections.md",
    "correction_min": "lower end of the correction's range; None: the correction's own",
    "correction_max": "upper end of the correction's range; None: the correction's own",
    "critic": "a model (with LoRA an adapter) of its own, or a head on the policy's backbone",
    "critic_learning_rate": "learning rate of the critic. None: the policy's",
    "gae_lambda": "lambda of generalized advantage estimation",
    "value_clip": "how far a value may move in a rollout before its loss is clipped",
    "value_coef": "weight of the value loss; matters with critic=backbone only",
    "delta": "bound of the loss for negative advantages, as a ratio",
    "sapo_gate": "paper: 4/tau sigmoid(tau (r - 1)); sigmoid: sigmoid((r - 1) / tau)",
    "sapo_temperature_pos": "tau where the advantage is above 0",
    "sapo_temperature_neg": "tau elsewhere. None: 1.05 with the paper's gate, else as sapo_temperature_pos",
}
"""Of fields without a comment, or with one that needs more words."""


def algorithms() -> dict[str, type[PolicyLoss]]:
    """The registered classes of this package, not those of a plug-in; GRPO, whose options all have, first."""
    found = {name: algorithm_class(name) for name in (*ALGORITHMS.built_in, "dapo_ppo")}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "grpo", item[0])))


def option_classes(cls: type[PolicyLoss]) -> list[type[BaseModel]]:
    """The nested Options of a class and of what it inherits from, nearest first."""
    return [base.__dict__["Options"] for base in cls.__mro__ if "Options" in base.__dict__]


def comments(options: type[BaseModel]) -> dict[str, str]:
    """Field -> the comment behind it; a field is one line."""
    found = (re.match(r"\s+(\w+): .*  # (.+)", line) for line in inspect.getsource(options).splitlines())
    return {match[1]: match[2] for match in found if match}


def values_of(field: FieldInfo) -> str:
    """`group`, `batch`, `none`; or the type, with its bounds."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal or get_origin(kinds[0]) is Literal:
        choices = kinds if get_origin(field.annotation) is Literal else get_args(kinds[0])
        return ", ".join(f"`{choice}`" for choice in choices)
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [f"{signs[name]} {value:g}" for item in field.metadata for name, value in asdict(item).items()]
    return ", ".join(["/".join(getattr(kind, "__name__", str(kind)) for kind in kinds), *bounds])


def row(option: str, classes: dict[str, type[PolicyLoss]]) -> str:
    """Of one option: the default that most algorithms have, then the others'."""
    fields: dict[str, FieldInfo] = {}
    meaning = MEANINGS.get(option, "")
    for name, cls in classes.items():
        if option in cls.ignores:
            continue
        owners = [options for options in option_classes(cls) if option in options.__annotations__]
        if owners:
            fields[name] = owners[0].model_fields[option]
            meaning = meaning or next(filter(None, (comments(owner).get(option) for owner in owners)), "")
    if not meaning:
        raise SystemExit(f"The option {option} needs a comment behind its field, or a line in MEANINGS.")
    first = next(iter(fields.values()))
    defaults = {name: json.dumps(field.default) for name, field in fields.items()}
    usual = next(iter(defaults.values()))
    cells = [f"`{usual}`", *(f"{name} `{value}`" for name, value in defaults.items() if value != usual)]
    if "grpo" not in fields:
        meaning = f"{meaning} ({', '.join(fields)} only)"
    elif refusing := [name for name in classes if name not in fields]:
        meaning = f"{meaning} (refused by {', '.join(refusing)})"
    cells = [f"`{option}`", "; ".join(cells), values_of(first), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def options_markdown() -> str:
    classes = algorithms()
    names = dict.fromkeys(name for cls in classes.values() for own in option_classes(cls) for name in own.model_fields)
    return HEAD + "\n".join(row(name, classes) for name in names) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/algorithms/options.md"))
    parser.parse_args().out.write_text(options_markdown())


if __name__ == "__main__":
    main()
