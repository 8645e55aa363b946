"""Advantages from rewards: estimators by name, each RewardBatch -> AdvantageBatch.

An estimator of your own is a function with this signature under `@register_estimator("name")`; a recipe names it in
`trainer.algorithm.advantage_estimator`. `values` are a critic's, [T] a trajectory, and None without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from skyrl_trainer.algorithms.registry import Registry
from skyrl_trainer.config import AlgorithmConfig
from skyrl_trainer.types import AdvantageBatch, RewardBatch

Estimator = Callable[[RewardBatch, AlgorithmConfig, Sequence[torch.Tensor] | None], AdvantageBatch]

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


@register_estimator("grpo")
def grpo(rewards: RewardBatch, config: AlgorithmConfig, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """(R_i - mean_g) / (std + 1e-4), std with n - 1 (arXiv 2402.03300).

    `scale_rewards`: std of the group, of the batch, or `none` for no division (Dr.GRPO, arXiv 2503.20783). A group of
    one and a group of equal returns give exactly 0: rounding of the mean must not be blown up by a tiny std.
    """
    returns_M = trajectory_returns(rewards)
    advantages_M = torch.zeros_like(returns_M)
    batch_std = returns_M.std() if len(returns_M) > 1 else torch.zeros(())
    for members in groups_of(rewards):
        group = returns_M[members]
        if (group == group[0]).all():
            continue
        std = {"group": group.std(), "batch": batch_std}.get(config.scale_rewards)
        scale = 1.0 if std is None else std + STD_EPSILON
        advantages_M[members] = (group - group.mean()) / scale
    return spread_over_tokens(rewards, advantages_M)


@register_estimator("rloo")
def rloo(rewards: RewardBatch, config: AlgorithmConfig, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """R_i minus the mean return of the others of its group (arXiv 2402.14740); a group of one gives 0."""
    returns_M = trajectory_returns(rewards)
    advantages_M = torch.zeros_like(returns_M)
    for members in groups_of(rewards):
        group = returns_M[members]
        if not (group == group[0]).all():
            advantages_M[members] = group - (group.sum() - group) / (len(group) - 1)
    return spread_over_tokens(rewards, advantages_M)
