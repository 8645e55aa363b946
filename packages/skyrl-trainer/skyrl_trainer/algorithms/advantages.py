"""Advantages from rewards: estimators by name, each RewardBatch -> AdvantageBatch.

One of your own is a function with this signature under `@register_estimator("name")`. `options` are
`trainer.algorithm.options`, complete; `values` a critic's, per sampled token of each trajectory, or None.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from skyrl_trainer.algorithms.rewards import differ
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import Registry
from skyrl_trainer.types import AdvantageBatch, RewardBatch, Trajectory

Estimator = Callable[[RewardBatch, Any, Sequence[Tensor] | None], AdvantageBatch]
SETTING = "trainer.algorithm.advantage_estimator"
STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""
_ESTIMATORS: Registry[Estimator] = Registry(SETTING)
register_estimator = _ESTIMATORS.register
estimator = _ESTIMATORS.get


def trajectory_returns(rewards: RewardBatch) -> Tensor:
    """The sum of the rewards of each trajectory, float64 [M]."""
    return torch.tensor([sum(turns) for turns in rewards.rewards], dtype=torch.float64)


def spans(trajectory: Trajectory) -> list[tuple[int, range]]:
    """Each turn's number and its tokens' places among the sampled ones; the turns in the order of their sampling."""
    ends = [0, *accumulate(len(turn.output_ids) for turn in trajectory.turns)]
    return [(turn, range(ends[turn], ends[turn + 1])) for turn in trajectory.by_time()]


def token_rewards(rewards: RewardBatch) -> list[Tensor]:
    """Per sampled token, float64: a turn's reward is its last token's or, without any, the token's before it."""
    per_token = []
    for trajectory, turn_rewards in zip(rewards.trajectories, rewards.rewards, strict=True):
        tokens_N, last = torch.zeros(trajectory.num_output_tokens, dtype=torch.float64), 0
        for turn, places in spans(trajectory) if len(tokens_N) else ():
            last = places[-1] if places else last
            tokens_N[last] += turn_rewards[turn]
        per_token.append(tokens_N)
    return per_token


def discounted(trajectory: Trajectory, values: list[float], factor: float) -> Tensor:
    """y_t = x_t + factor * y_{t+1}, from the token that was sampled last; float64 [N]."""
    later, result = 0.0, list(values)
    for place in reversed([place for _, places in spans(trajectory) for place in places]):
        later = result[place] = values[place] + factor * later
    return torch.tensor(result, dtype=torch.float64)


def whitened(rewards: RewardBatch, values: Sequence[Tensor], gamma: float) -> list[list[float]]:
    """Mean 0 and standard deviation 1 over the sampled tokens of the whole batch; exactly 0 where all are equal. The KL
    penalties from each token on, discounted, come off with a mean of 0 (see `by_group`)."""
    all_N = torch.cat([*values, torch.zeros(0, dtype=torch.float64)])
    scale = 1 / (all_N.std() + STD_EPSILON) if differ(all_N.tolist()) else 0.0
    white = [(values_N - all_N.mean()) * scale for values_N in values]
    if rewards.kl_penalties is not None:
        kl = [discounted(*pair, gamma) for pair in zip(rewards.trajectories, rewards.kl_penalties, strict=True)]
        mean = torch.cat(kl).mean() if kl else 0.0
        white = [white_N - (kl_N - mean) for white_N, kl_N in zip(white, kl, strict=True)]
    return [white_N.tolist() for white_N in white]


def spread_over_tokens(rewards: RewardBatch, advantages_M: Tensor) -> AdvantageBatch:
    """Gives every sampled token of a trajectory the trajectory's advantage."""
    pairs = zip(rewards.trajectories, advantages_M.tolist(), strict=True)
    return AdvantageBatch(rewards, [[value] * trajectory.num_output_tokens for trajectory, value in pairs])


def by_group(rewards: RewardBatch, advantages_of: Callable[[Tensor], Tensor]) -> AdvantageBatch:
    """Applies a function of a group's returns to every group. Equal returns give exactly 0: a tiny std would blow up
    the mean's rounding. A KL in the reward comes off less the others' mean and undivided, for the same reason."""
    returns_M, group_M = trajectory_returns(rewards), torch.tensor(rewards.group_index)
    kl_M = torch.tensor([sum(tokens) for tokens in rewards.kl_penalties or [[]] * len(returns_M)], dtype=torch.float64)
    sampled_M = torch.tensor([each.num_output_tokens > 0 for each in rewards.trajectories])
    advantages_M = torch.zeros_like(returns_M)
    for number in set(rewards.group_index):
        members_M = group_M == number
        group = returns_M[members_M]
        if differ(group.tolist()):
            values = advantages_of(group)
            if getattr(values, "shape", None) != group.shape:
                raise UserError(f"An estimator gave {values!r:.60} by_group: it should give {len(group)} advantages.")
            advantages_M[members_M] = values.to(advantages_M)
        members_M &= sampled_M
        if members_M.sum() > 1:
            advantages_M[members_M] -= less_the_others(kl_M[members_M])
    return spread_over_tokens(rewards, advantages_M)


def less_the_others(group_M: Tensor) -> Tensor:
    return group_M - (group_M.sum() - group_M) / (len(group_M) - 1)


@register_estimator("grpo")
def grpo(rewards: RewardBatch, options: Any, values: object = None) -> AdvantageBatch:
    """(R_i - mean_g) / (std + 1e-4), std with n - 1, of the group or the batch (arXiv 2402.03300), or undivided."""
    if options.scale_rewards == "none":
        return by_group(rewards, lambda group: group - group.mean())
    std_of = (lambda _: trajectory_returns(rewards).std()) if options.scale_rewards == "batch" else torch.std
    return by_group(rewards, lambda group: (group - group.mean()) / (std_of(group) + STD_EPSILON))


@register_estimator("rloo")
def rloo(rewards: RewardBatch, options: Any, values: object = None) -> AdvantageBatch:
    """R_i minus the mean return of the others of its group (arXiv 2402.14740)."""
    return by_group(rewards, less_the_others)


@register_estimator("maxrl")
def maxrl(rewards: RewardBatch, options: Any, values: object = None) -> AdvantageBatch:
    """(R_i - mean_g) / (mean_g + 1e-4), of returns from 0 up (arXiv 2602.02710): a rare success weighs more."""
    if (least := min(trajectory_returns(rewards).tolist(), default=0.0)) < -1e-9:
        raise UserError(f"{SETTING}=maxrl divides by mean returns: none may be negative (one is {least:g}); take grpo.")
    return by_group(rewards, lambda group: (group - group.mean()) / (group.mean() + STD_EPSILON))


@register_estimator("reinforce++")
def reinforce_pp(rewards: RewardBatch, options: Any, values: object = None) -> AdvantageBatch:
    """The discounted return to go of each sampled token, whitened over the batch (arXiv 2501.03262)."""
    pairs = zip(rewards.trajectories, token_rewards(rewards), strict=True)
    to_go = [discounted(trajectory, rewards_N.tolist(), options.gamma) for trajectory, rewards_N in pairs]
    return AdvantageBatch(rewards, whitened(rewards, to_go, options.gamma))


@register_estimator("gae")
def gae(rewards: RewardBatch, options: Any, values: Sequence[Tensor] | None = None) -> AdvantageBatch:
    """Generalized advantage estimation (arXiv 1506.02438, equations 11 to 16), with a critic's values.

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t

    A step in time is a sampled token: V_{t+1} of a turn's last token is that of the next turn's first one, and 0 behind
    every end, for no token teaches a critic what lies there. values[i]: float64 [N]. Advantages are whitened by batch.
    """
    if values is None:
        raise UserError(f"{SETTING}=gae needs a critic: take trainer.algorithm.name=ppo, or <name>_ppo, or PPOTrainer.")
    advantages, returns = [], []
    for trajectory, rewards_N, values_N in zip(rewards.trajectories, token_rewards(rewards), values, strict=True):
        order = [place for _, places in spans(trajectory) for place in places]
        delta_N = rewards_N - values_N
        delta_N[order[:-1]] += options.gamma * values_N[order[1:]]
        advantages_N = discounted(trajectory, delta_N.tolist(), options.gamma * options.gae_lambda)
        advantages.append(advantages_N)
        returns.append((advantages_N + values_N).tolist())
    return AdvantageBatch(rewards, whitened(rewards, advantages, options.gamma), returns)
