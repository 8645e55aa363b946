"""Advantages from rewards: estimators by name, each RewardBatch -> AdvantageBatch.

One of your own is a function with this signature under `@register_estimator("name")`. `options` are
`trainer.algorithm.options`, complete; `values` a critic's, of the sampled tokens of each trajectory, or None.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skyrl_trainer.algorithms.rewards import differ
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import Registry
from skyrl_trainer.types import AdvantageBatch, RewardBatch

Estimator = Callable[[RewardBatch, Any, Sequence[torch.Tensor] | None], AdvantageBatch]

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

_ESTIMATORS: Registry[Estimator] = Registry("trainer.algorithm.advantage_estimator")
register_estimator = _ESTIMATORS.register
estimator = _ESTIMATORS.get


def trajectory_returns(rewards: RewardBatch) -> torch.Tensor:
    """The sum of the rewards of each trajectory, float64 [M]."""
    return torch.tensor([sum(turns) for turns in rewards.rewards], dtype=torch.float64)


def token_rewards(rewards: RewardBatch) -> list[torch.Tensor]:
    """The reward of each sampled token of each trajectory, float64: a turn's sits on its last one or, without any, on
    the token before it."""
    per_token = []
    for trajectory, turn_rewards in zip(rewards.trajectories, rewards.rewards, strict=True):
        ends_U = torch.tensor([len(turn.output_ids) for turn in trajectory.turns]).cumsum(0)
        tokens_N = torch.zeros(trajectory.num_output_tokens, dtype=torch.float64)
        if len(tokens_N):
            tokens_N.index_add_(0, (ends_U - 1).clamp(min=0), torch.tensor(turn_rewards, dtype=torch.float64))
        per_token.append(tokens_N)
    return per_token


def discounted(values_N: torch.Tensor, factor: float) -> torch.Tensor:
    """y_t = x_t + factor * y_{t+1}, from the end; float64 [N]."""
    later, backwards = 0.0, []
    for value in reversed(values_N.tolist()):
        later = value + factor * later
        backwards.append(later)
    return torch.tensor(backwards[::-1], dtype=torch.float64)


def on_sampled(rewards: RewardBatch, values: Sequence[torch.Tensor]) -> list[list[float]]:
    """Numbers of the sampled tokens of each trajectory, laid out over all its tokens with 0.0 elsewhere."""
    rows = []
    for trajectory, values_N in zip(rewards.trajectories, values, strict=True):
        row_T = torch.zeros(len(trajectory.token_ids()), dtype=torch.float64)
        row_T[torch.tensor(trajectory.loss_mask(), dtype=torch.bool)] = values_N
        rows.append(row_T.tolist())
    return rows


def whitened(rewards: RewardBatch, values: Sequence[torch.Tensor], gamma: float) -> list[list[float]]:
    """Mean 0 and standard deviation 1 over the sampled tokens of the whole batch; exactly 0 where all are equal. The KL
    penalties from each token on, discounted, come off with a mean of 0 (see `by_group`)."""
    all_N = torch.cat([*values, torch.zeros(0, dtype=torch.float64)])
    scale = 1 / (all_N.std() + STD_EPSILON) if differ(all_N.tolist()) else 0.0
    white = [(values_N - all_N.mean()) * scale for values_N in values]
    if rewards.kl_penalties is not None:
        kl = [discounted(torch.tensor(tokens, dtype=torch.float64), gamma) for tokens in rewards.kl_penalties]
        mean = torch.cat(kl).mean() if kl else 0.0
        white = [white_N - (kl_N - mean) for white_N, kl_N in zip(white, kl, strict=True)]
    return on_sampled(rewards, white)


def spread_over_tokens(rewards: RewardBatch, advantages_M: torch.Tensor) -> AdvantageBatch:
    """Gives every sampled token of a trajectory the trajectory's advantage."""
    per_token = [
        [advantage * bit for bit in trajectory.loss_mask()]
        for trajectory, advantage in zip(rewards.trajectories, advantages_M.tolist(), strict=True)
    ]
    return AdvantageBatch(rewards, per_token)


def by_group(rewards: RewardBatch, advantages_of: Callable[[torch.Tensor], torch.Tensor]) -> AdvantageBatch:
    """Applies a function of a group's returns to every group; one of equal returns gets exactly 0, because rounding of
    the mean must not be blown up by a tiny std. A KL in the reward comes off less the others' mean, divided by nothing:
    where returns are equal its noise would become advantages of size one, whatever `beta`."""
    returns_M, group_M = trajectory_returns(rewards), torch.tensor(rewards.group_index)
    kl_M = torch.tensor([sum(tokens) for tokens in rewards.kl_penalties or [[]] * len(returns_M)], dtype=torch.float64)
    advantages_M = torch.zeros_like(returns_M)
    for number in set(rewards.group_index):
        members_M = group_M == number
        group = returns_M[members_M]
        if differ(group.tolist()):
            advantages_M[members_M] = advantages_of(group)
        if len(group) > 1:
            advantages_M[members_M] -= less_the_others(kl_M[members_M])
    return spread_over_tokens(rewards, advantages_M)


def less_the_others(group_M: torch.Tensor) -> torch.Tensor:
    return group_M - (group_M.sum() - group_M) / (len(group_M) - 1)


@register_estimator("grpo")
def grpo(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """(R_i - mean_g) / (std + 1e-4), std with n - 1, of the group or the batch (arXiv 2402.03300), or without (Dr.GRPO,
    arXiv 2503.20783)."""
    if options.scale_rewards == "none":
        return by_group(rewards, lambda group: group - group.mean())
    std_of = (lambda _: trajectory_returns(rewards).std()) if options.scale_rewards == "batch" else torch.std
    return by_group(rewards, lambda group: (group - group.mean()) / (std_of(group) + STD_EPSILON))


@register_estimator("rloo")
def rloo(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """R_i minus the mean return of the others of its group (arXiv 2402.14740)."""
    return by_group(rewards, less_the_others)


@register_estimator("maxrl")
def maxrl(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """(R_i - mean_g) / (mean_g + 1e-4), of returns from 0 up (arXiv 2602.02710): a rare success weighs more."""
    if (least := min(trajectory_returns(rewards).tolist(), default=0.0)) < 0:
        name = "trainer.algorithm.advantage_estimator"
        raise UserError(f"{name}=maxrl divides by mean returns: none may be negative, but one is {least:g}; take grpo.")
    return by_group(rewards, lambda group: (group - group.mean()) / (group.mean() + STD_EPSILON))


@register_estimator("reinforce++")
def reinforce_pp(rewards: RewardBatch, options: Any, values: object = None) -> AdvantageBatch:
    """The discounted return to go of each sampled token, whitened over the batch (arXiv 2501.03262)."""
    to_go = [discounted(rewards_N, options.gamma) for rewards_N in token_rewards(rewards)]
    return AdvantageBatch(rewards, whitened(rewards, to_go, options.gamma))


@register_estimator("gae")
def gae(rewards: RewardBatch, options: Any, values: Sequence[torch.Tensor] | None = None) -> AdvantageBatch:
    """Generalized advantage estimation (arXiv 1506.02438, equations 11 to 16), with a critic's values.

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t

    A step in time is a sampled token: observations between two turns are skipped, so V_{t+1} of a turn's last token is
    the value of the next turn's first. values[i]: float64 [n + 1] for n sampled tokens; the last one stands for what
    lies behind the episode's end, and counts where the episode was truncated, not where the env ended it. Advantages
    are whitened over the batch, returns are not.
    """
    if values is None:
        raise UserError("trainer.algorithm.advantage_estimator=gae needs a critic: take trainer.algorithm.name=ppo.")
    advantages, returns = [], []
    for trajectory, rewards_N, values_N1 in zip(rewards.trajectories, token_rewards(rewards), values, strict=True):
        values_N1 = values_N1.double().clone()
        if trajectory.turns and trajectory.turns[-1].terminated:
            values_N1[-1] = 0.0
        delta_N = rewards_N + options.gamma * values_N1[1:] - values_N1[:-1]
        advantages_N = discounted(delta_N, options.gamma * options.gae_lambda)
        advantages.append(advantages_N)
        returns.append(advantages_N + values_N1[:-1])
    return AdvantageBatch(rewards, whitened(rewards, advantages, options.gamma), on_sampled(rewards, returns))
