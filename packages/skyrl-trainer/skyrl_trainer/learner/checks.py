"""What a run refuses to learn from or with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_trainer.algorithms.losses import Reports
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import Row, collate
from skyrl_trainer.learner.ranks import Ranks
from skyrl_trainer.settings import OPTIONS, Config
from skyrl_trainer.types import AdvantageBatch, RewardBatch

SOME_READ = {"scale_rewards", "gamma", "gae_lambda"}
"""Options that not all estimators read. One of the user's may read any."""
READS = {
    "grpo": {"scale_rewards"},
    "rloo": set[str](),
    "maxrl": set[str](),
    "reinforce++": {"gamma"},
    "gae": {"gamma", "gae_lambda"},
}
TAKEN = {"loss", "lr", "grad_norm", "entropy", "kl", "ratio", "logprobs", "advantage", "value", "tokens"}
"""How metrics begin that no loss may report."""


def check_options(config: Config, options: Any, own_estimator: str | None) -> None:
    """UserError for options that contradict each other or do nothing. own_estimator: the algorithm's, if it has one."""
    chosen = config.trainer.algorithm
    name, tries = own_estimator or chosen.advantage_estimator, config.generator.num_generations
    estimator = f"trainer.algorithm.advantage_estimator={name}"
    if options.correction in ("bypass", "sequence_tis", "sequence_mask") and config.generator.top_p < 1:
        raise UserError(
            f"{OPTIONS}.correction={options.correction} needs generator.top_p=1: the engine's logprobs are "
            "renormalised over the nucleus and the learner's are not."
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
    if tries == 1 and (options.sampler == "dynamic" or name in ("grpo", "rloo", "maxrl")):
        raise UserError(
            f"generator.num_generations=1 gives {compares} nothing to compare a try with, so that nothing would be "
            "learned: make it at least 2, or take trainer.algorithm.name=ppo."
        )


def check_shapes(algorithm: object, wanted: Tensor, **parts: Tensor) -> Tensor:
    """Returns the last of `parts`, which methods of these names gave. Broadcast, a mean would count once per token."""
    for name, values in parts.items():
        if (shape := getattr(values, "shape", None)) != wanted.shape:
            gave = f"{values!r:.60}" if shape is None else f"a tensor of shape {tuple(shape)}"
            raise UserError(
                f"{name} of {type(algorithm).__name__} gave {gave}, but it should be "
                f"of shape {tuple(wanted.shape)}: a number per {'trajectory' if name == 'reduction' else 'token'}."
            )
    return values


def check_pair(algorithm: object, wanted: Tensor, **part: Any) -> tuple[Tensor, Reports]:
    """What a method gave: a number per token, and metrics of its own."""
    ((name, pair),) = part.items()
    method = f"{name} of {type(algorithm).__name__}"
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict)):
        raise UserError(f"{method} gave {pair!r:.60}, but should give a pair: a tensor, and a dict of metrics.")
    if taken := [metric for metric in pair[1] if metric.partition("/")[0] in TAKEN]:
        raise UserError(f"{method} reports {taken[0]!r}, a name that docs/metrics.md has: give it another.")
    if name == "surrogate" and not getattr(pair[0], "requires_grad", True):
        raise UserError(f"{method} gave numbers without a gradient: detach nothing of the ratio.")
    return check_shapes(algorithm, wanted, **{name: pair[0]}), pair[1]


def check_layout(given: Any, batch: RewardBatch) -> AdvantageBatch:
    """What an estimator gave."""
    wanted = [each.num_output_tokens for each in batch.trajectories]
    parts = [given.advantages, given.returns] if isinstance(given, AdvantageBatch) else [[]]
    if any(part is not None and [len(row) for row in part if isinstance(row, list)] != wanted for part in parts):
        raise UserError(
            "The estimator gave no AdvantageBatch with a list for each trajectory, a number for each of its sampled "
            "tokens: `by_group` and `spread_over_tokens` make one (docs/plug-ins.md)."
        )
    return given


def check_finite(what: str, step: int, rows: Sequence[Row], of_each: Sequence[Any]) -> None:
    """of_each: the numbers of each row. Looked at before a group's mean or a loss spreads them to others."""
    bad = [row.trajectory_id for row, values in zip(rows, of_each, strict=True) if not np.isfinite(values).all()]
    if bad:
        source = "the env or the reward function that gave it" if what == "reward" else "the estimator"
        raise UserError(f"The {what} of step {step} is not finite in trajectories {shown(bad)}: mend {source}.")


def check_weights(tensors: Mapping[str, Tensor], step: int) -> None:
    """UserError for weights, or an optimizer's state, that nobody can learn on from: they are not saved."""
    bad = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise UserError(
            f"After step {step}, {len(bad)} of {len(tensors)} tensors of the learner ({bad[0]}, ...) are not finite: "
            "nothing is saved. Start anew in another trainer.run_dir with a lower trainer.learning_rate."
        )


def not_finite(
    rows: Sequence[Row],
    passes: list[tuple[list[int], bool]],
    losses: list[Tensor],
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
        "trainer.max_grad_norm, or look at a loss of yours and these trajectories' rewards and logprobs: "
        f"{config.run_path / 'trajectories'} holds them."
    )


def shown(ids: list[str]) -> str:
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")


@torch.no_grad()
def check_architecture(scorer: Any) -> None:
    """Some models change logits behind the head, or attend in a way of their own: wrong, and silently so."""
    vocabulary = scorer.model.config.vocab_size
    rows = []
    for answer in ([5, 6, 7], [8]):
        ids = np.array([1, 2, 3, *answer]) % vocabulary
        mask = np.arange(len(ids)) >= 3
        rows.append(Row("check", ids, mask, np.zeros(len(ids)), np.zeros(len(ids))))
    ours_N, _ = scorer.logprobs(collate(rows, [0, 1], scorer.device, scorer.dtype))
    theirs = []
    for row in rows:
        ids_1T = torch.from_numpy(row.token_ids)[None].to(scorer.device)
        with scorer.accelerator.autocast():
            logits_TV = scorer.model(ids_1T, use_cache=False).logits[0].float() * scorer.inverse_temperature
        theirs.append(logits_TV.log_softmax(-1)[2:-1].gather(1, ids_1T[0, 3:, None])[:, 0])
    rounding = 1e-3 if scorer.published_dtype == torch.float32 else 0.5
    if not torch.allclose(ours_N, torch.cat(theirs).to(ours_N.dtype), rtol=0.0, atol=rounding):
        raise UserError(
            f"{scorer.model_path} ({type(scorer.model).__name__}) changes its logits after the output layer (a soft "
            "cap or a scale) or has attention of its own, which this learner does not compute; take another model."
        )
