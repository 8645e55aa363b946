"""A policy loss is ratio x surrogate x reduction x correction: four small pure functions.

    loss = sum over sampled tokens t of   weight_t * correction_t * surrogate(ratio_t, advantage_t)

All work on the sampled tokens of a micro-batch laid out flat, [N]: prompts, observations and padding are not there,
so nothing (no NaN either) can leak from them, and padded, packed or segmented rows look the same. `trajectory_N`
says whose token each is: "sequence" in every formula is a trajectory. The reduction is a weight for each token that
is computed over the whole mini-batch before its first micro-batch; so the gradient does not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Exponents are clamped to this range: a ratio beyond e^20 is a mistake, and must not become inf."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a loss may look at. Example: two trajectories of 3 and 2 tokens have trajectory_N [0, 0, 0, 1, 1]."""

    logprobs_N: torch.Tensor
    """Of the policy that is learning; the only one with a gradient."""
    old_logprobs_N: torch.Tensor
    """Of the policy before the first update of this rollout."""
    rollout_logprobs_N: torch.Tensor
    """Of the engine that sampled."""
    advantages_N: torch.Tensor
    trajectory_N: torch.Tensor
    """int64: index of the trajectory in the rollout."""


def token_ratio(tokens: SampledTokens) -> torch.Tensor:
    """r_t = exp(logp_t - old_t), [N]; of PPO (arXiv 1707.06347) and GRPO."""
    return (tokens.logprobs_N - tokens.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), of PPO (arXiv 1707.06347, equation 7).

    Returns the loss of each token and whether the clip took its gradient, both [N].
    """
    clipped_ratio_N = ratio_N.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    too_low_N = (ratio_N < 1 - epsilon_low) & (advantages_N < 0)
    too_high_N = (ratio_N > 1 + epsilon_high) & (advantages_N > 0)
    return loss_N, too_low_N | too_high_N
