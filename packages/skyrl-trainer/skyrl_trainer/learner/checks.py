"""What a run refuses to learn from or with, a sentence each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import Row
from skyrl_trainer.learner.ranks import Ranks
from skyrl_trainer.settings import OPTIONS, Config

SOME_READ = {"scale_rewards", "gamma", "gae_lambda"}
"""Options that not all estimators read. One of the user's may read any."""
READS = {
    "grpo": {"scale_rewards"},
    "rloo": set[str](),
    "maxrl": set[str](),
    "reinforce++": {"gamma"},
    "gae": {"gamma", "gae_lambda"},
}
BY_GROUP = ("grpo", "rloo", "maxrl")


def check_options(config: Config, options: Any, own_estimator: str | None) -> None:
    """UserError for options that contradict each other, or would change or train nothing.

    own_estimator: the algorithm's, where the recipe does not choose.
    """
    chosen = config.trainer.algorithm
    name, tries = own_estimator or chosen.advantage_estimator, config.generator.num_generations
    estimator = f"trainer.algorithm.advantage_estimator={name}"
    if options.correction == "bypass" and config.generator.top_p < 1:
        raise UserError(
            f"{OPTIONS}.correction=bypass needs generator.top_p=1: the engine's logprobs are renormalised over the "
            "nucleus and the learner's are not. Change one of them."
        )
    if options.kl_target is not None and options.beta == 0:
        raise UserError(f"{OPTIONS}.kl_target adapts beta, which is 0: give it a value to start at.")
    if chosen.advantage_estimator not in (name, "grpo"):
        raise UserError(
            f"trainer.algorithm.advantage_estimator={chosen.advantage_estimator} has no effect with {chosen.name}, "
            f"whose estimator is always {name}: leave it out."
        )
    read = READS.get(name, SOME_READ)
    for option in sorted(chosen.options.keys() & SOME_READ - read):
        reads = " and ".join(sorted(read)) or "none of them"
        raise UserError(f"{OPTIONS}.{option} has no effect with {estimator}, which reads {reads}: leave it out.")
    compares = f"{OPTIONS}.sampler=dynamic" if options.sampler == "dynamic" else estimator
    if tries == 1 and (options.sampler == "dynamic" or name in BY_GROUP):
        raise UserError(
            f"generator.num_generations=1 gives {compares} nothing to compare a try with, so that nothing would be "
            "learned: make it at least 2, or take trainer.algorithm.name=ppo."
        )


def check_shapes(algorithm: object, wanted: torch.Tensor, **parts: torch.Tensor) -> torch.Tensor:
    """Returns the last of `parts`, which methods of these names gave. Broadcast, a mean would count once per token."""
    for name, values in parts.items():
        if values.shape != wanted.shape:
            raise UserError(
                f"{name} of {type(algorithm).__name__} gave a tensor of shape {tuple(values.shape)}, but it should be "
                f"of shape {tuple(wanted.shape)}: a number per {'trajectory' if name == 'reduction' else 'token'}."
            )
    return values


def check_finite(what: str, step: int, rows: Sequence[Row], of_each: Sequence[Any]) -> None:
    """of_each: the numbers of each row. Looked at before a group's mean or a loss spreads them to others."""
    bad = [row.trajectory_id for row, values in zip(rows, of_each, strict=True) if not np.isfinite(values).all()]
    if bad:
        source = "the env or the reward function that gave it" if what == "reward" else "the estimator"
        raise UserError(f"The {what} of step {step} is not finite in trajectories {shown(bad)}: mend {source}.")


def check_weights(tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Raises UserError for weights, or an optimizer's state, that nobody can learn on from: they are not saved."""
    bad = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise UserError(
            f"After step {step}, {len(bad)} of {len(tensors)} tensors of the learner ({bad[0]}, ...) are not finite: "
            "nothing is saved. Start anew in another trainer.run_dir with a lower trainer.learning_rate."
        )


def not_finite(
    rows: Sequence[Row],
    passes: list[tuple[list[int], bool]],
    losses: list[torch.Tensor],
    step: int,
    ranks: Ranks,
    config: Config,
) -> UserError:
    """Says where the loss or the gradient of an optimizer step went wrong, on whichever learner."""
    mine = [(indices, bool(x.isfinite())) for (indices, counts), x in zip(passes, losses, strict=True) if counts]
    micro_batches = [one for part in ranks.gather(mine) for one in part]
    bad = [indices for indices, finite in micro_batches if not finite]
    ids = [rows[i].trajectory_id for indices in bad or [each for each, _ in micro_batches] for i in indices]
    return UserError(
        f"The {'loss' if bad else 'gradient'} of step {step} is not finite, in the micro-batch of the trajectories "
        f"{shown(ids)}; the weights are as they were before this optimizer step. Lower trainer.learning_rate or "
        "trainer.max_grad_norm, or look at these trajectories' rewards and logprobs: "
        f"{config.run_path / 'trajectories'} holds them."
    )


def shown(ids: list[str]) -> str:
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
