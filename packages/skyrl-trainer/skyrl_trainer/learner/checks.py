"""What a run refuses to learn from or with, a sentence each.

Options that nothing would read, a plug-in's tensors of another shape, numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import OPTIONS, Config

READS = {"grpo": {"scale_rewards"}, "rloo": {}, "maxrl": {}, "reinforce++": {"gamma"}, "gae": {"gamma", "gae_lambda"}}
"""What each of our estimators reads of the options that not all read. One of the user's may read any."""
BY_GROUP = ("grpo", "rloo", "maxrl")
SHOWN = 8


def check_options(config: Config, options: Any, own_estimator: str | None) -> None:
    """Raises UserError for options that contradict each other, and for those that would change or train nothing.

    own_estimator: the algorithm's, where the recipe does not choose.
    """
    chosen = config.trainer.algorithm
    name, tries = own_estimator or chosen.advantage_estimator, config.generator.num_generations
    estimator = f"trainer.algorithm.advantage_estimator={name}"
    if options.correction == "bypass" and config.generator.top_p < 1:
        raise UserError(
            f"{OPTIONS}.correction=bypass needs generator.top_p=1, because the engine's logprobs are renormalised over "
            "the nucleus and the learner's are not; change one of them."
        )
    if options.kl_target is not None and options.beta == 0:
        raise UserError(f"{OPTIONS}.kl_target adapts beta, which is 0: give it a value to start at.")
    if chosen.advantage_estimator not in (name, "grpo"):
        asked = f"trainer.algorithm.advantage_estimator={chosen.advantage_estimator}"
        raise UserError(f"{asked} has no effect with {chosen.name}, whose estimator is always {name}: leave it out.")
    for option in sorted(chosen.options.keys() & {"scale_rewards", "gamma", "gae_lambda"} - set(READS.get(name, ()))):
        if name in READS:
            reads = " and ".join(sorted(READS[name])) or "none of them"
            raise UserError(f"{OPTIONS}.{option} has no effect with {estimator}, which reads {reads}: leave it out.")
    compares = f"{OPTIONS}.sampler=dynamic" if options.sampler == "dynamic" else estimator
    if tries == 1 and (options.sampler == "dynamic" or name in BY_GROUP):
        raise UserError(
            f"generator.num_generations=1 gives {compares} nothing to compare a try with, so that nothing would be "
            "learned: make it at least 2, or take trainer.algorithm.name=ppo."
        )


def check_shapes(algorithm: object, wanted: torch.Tensor, **parts: torch.Tensor) -> None:
    """parts: what methods of these names gave. Broadcast, a mean would count once per token."""
    for name, values in parts.items():
        if values.shape != wanted.shape:
            raise UserError(
                f"{name} of {type(algorithm).__name__} gave a tensor of shape {tuple(values.shape)}, but it should be "
                f"of shape {tuple(wanted.shape)}: a number per {'trajectory' if name == 'reduction' else 'token'}."
            )


def check_finite(what: str, step: int, of_each: Iterable[tuple[str, Any]], whose: str) -> None:
    """of_each: a trajectory's id, and its numbers. whose: who gives them, and has to be mended."""
    bad = [trajectory_id for trajectory_id, values in of_each if not np.isfinite(values).all()]
    if bad:
        raise UserError(f"The {what} of step {step} is not finite in trajectories {shown(bad)}: mend {whose}.")


def shown(ids: list[str]) -> str:
    return ", ".join(ids[:SHOWN]) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")
