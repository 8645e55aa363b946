"""Advantages from rewards: estimators by name, each RewardBatch -> AdvantageBatch.

An estimator of your own is a function with this signature under `@register_estimator("name")`; a recipe names it in
`trainer.algorithm.advantage_estimator`. It gets `trainer.algorithm.options`, checked and complete (`options.gamma`).
`values` are a critic's, of the sampled tokens of each trajectory, and None without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skyrl_trainer.algorithms.registry import Registry
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import AdvantageBatch, RewardBatch

Estimator = Callable[[RewardBatch, Any, Sequence[torch.Tensor] | None], AdvantageBatch]

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

_ESTIMATORS: Registry[Estimator] = Registry("trainer.algorithm.advantage_estimator")
register_estimator = _ESTIMATORS.register
estimator = _ESTIMATORS.get


def trajectory_returns(rewards: RewardBatch) -> torch.Tensor:
    """The sum of the rewards of all turns of each trajectory, float64 [M]."""
    return torch.tensor([sum(turns) for turns in rewards.rewards], dtype=torch.float64)


def groups_of(rewards: RewardBatch) -> list[torch.Tensor]:
    """The indices of the trajectories of each sample: failed ones are not in it, so sizes differ."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(rewards.group_index):
        members.setdefault(group, []).append(index)
    return [torch.tensor(indices) for indices in members.values()]


def spread_over_tokens(rewards: RewardBatch, advantages_M: torch.Tensor) -> AdvantageBatch:
    """Gives every sampled token of a trajectory the trajectory's advantage."""
    per_token = [
        [advantage * bit for bit in trajectory.loss_mask()]
        for trajectory, advantage in zip(rewards.trajectories, advantages_M.tolist(), strict=True)
    ]
    return AdvantageBatch(rewards, per_token)


def by_group(rewards: RewardBatch, advantages_of: Callable[[torch.Tensor], torch.Tensor]) -> AdvantageBatch:
    """Applies a function of a group's returns to every group. A group of one and a group of equal returns give exactly
    0: rounding of the mean must not be blown up by a tiny std."""
    returns_M = trajectory_returns(rewards)
    advantages_M = torch.zeros_like(returns_M)
    for members in groups_of(rewards):
        group = returns_M[members]
        if not (group == group[0]).all():
            advantages_M[members] = advantages_of(group)
    return spread_over_tokens(rewards, advantages_M)


@register_estimator("grpo")
def grpo(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """(R_i - mean_g) / (std + 1e-4), std with n - 1 (arXiv 2402.03300).

    `scale_rewards`: std of the group, of the batch, or `none` for no division (Dr.GRPO, arXiv 2503.20783).
    """
    if options.scale_rewards == "none":
        return by_group(rewards, lambda group: group - group.mean())
    std_of = (lambda _: trajectory_returns(rewards).std()) if options.scale_rewards == "batch" else torch.std
    return by_group(rewards, lambda group: (group - group.mean()) / (std_of(group) + STD_EPSILON))


@register_estimator("rloo")
def rloo(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """R_i minus the mean return of the others of its group (arXiv 2402.14740)."""
    return by_group(rewards, lambda group: group - (group.sum() - group) / (len(group) - 1))


@register_estimator("maxrl")
def maxrl(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """(R_i - mean_g) / (mean_g + 1e-4), of returns from 0 up (arXiv 2602.02710): a rare success weighs more."""
    if (least := min(trajectory_returns(rewards).tolist(), default=0.0)) < 0:
        name = "trainer.algorithm.advantage_estimator"
        raise UserError(f"{name}=maxrl divides by mean returns: none may be negative, but one is {least:g}; take grpo.")
    return by_group(rewards, lambda group: (group - group.mean()) / (group.mean() + STD_EPSILON))


@register_estimator("reinforce++")
def reinforce_pp(rewards: RewardBatch, options: Any, values: object = None) -> AdvantageBatch:
    """The discounted return to go of each token, whitened over the batch's sampled tokens (arXiv 2501.03262).

    A turn's reward sits on its last sampled token; prompts and observations are no steps in time. Where all tokens
    have the same return the advantages are exactly 0. Option: `gamma`, 1 by default.
    """
    gamma = options.gamma
    rows, masks = [], []
    for trajectory, turn_rewards in zip(rewards.trajectories, rewards.rewards, strict=True):
        to_go = 0.0
        backwards: list[float] = []
        for turn, reward in zip(reversed(trajectory.turns), reversed(turn_rewards), strict=True):
            to_go += reward
            for _ in turn.output_ids:
                backwards.append(to_go)
                to_go *= gamma
            backwards += [0.0] * len(turn.prompt_ids)
        rows.append(torch.tensor(backwards[::-1], dtype=torch.float64))
        masks.append(torch.tensor(trajectory.loss_mask(), dtype=torch.bool))
    returns_N = torch.cat([row[mask] for row, mask in zip(rows, masks, strict=True)]) if rows else torch.zeros(1)
    spread = 0.0 if (returns_N == returns_N[:1]).all() else 1 / (returns_N.std() + STD_EPSILON)
    whitened = [(row - returns_N.mean()) * spread * mask for row, mask in zip(rows, masks, strict=True)]
    return AdvantageBatch(rewards, [row.tolist() for row in whitened])
