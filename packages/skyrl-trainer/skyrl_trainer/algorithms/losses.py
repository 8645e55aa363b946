"""The pure functions of losses. A policy loss has a ratio, a surrogate, a reduction and a correction.

    loss = sum over sampled tokens t of   weight_t * correction_t * surrogate(ratio_t, advantage_t)

All work on the sampled tokens of a micro-batch laid out flat, [N]; "sequence" in every formula is a trajectory. The
reduction is a weight for each token, from the lengths of all trajectories of the mini-batch: known before its first
micro-batch, so the gradient does not depend on the cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Reports = dict[str, Tensor]
"""What a loss reports beside itself, by the metric's name: a value per token, [N], whose mean becomes the metric."""
MAX_LOG_RATIO = 20.0
"""Exponents are clamped to this range: a ratio beyond e^20 is a mistake, and must not become inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What a loss may look at. Example: two trajectories of 3 and 2 tokens have trajectory_N [0, 0, 0, 1, 1]."""

    logprobs_N: Tensor
    """Of the policy that is learning; the only one with a gradient."""
    old_logprobs_N: Tensor
    """Of the policy before the first optimizer step on this rollout."""
    rollout_logprobs_N: Tensor
    """Of the engine that sampled."""
    advantages_N: Tensor
    trajectory_N: Tensor
    """int64: index of the trajectory in the rollout."""
    turn_N: Tensor
    """int64: in which turn of it, from 0."""
    group_N: Tensor
    """int64: index of the sample that it is a try of."""
    entropy_N: Tensor
    """Of the policy that is learning, where each token was sampled; has a gradient if `entropy_coef` is set."""
    reference_N: Tensor | None = None
    """Log-probabilities of the policy that the run started from; None without a KL in the loss."""


def token_ratio(tokens: SampledTokens) -> Tensor:
    """r_t = exp(logp_t - old_t), [N] (PPO, arXiv 1707.06347)."""
    return (tokens.logprobs_N - tokens.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(ratio_N: Tensor, advantages_N: Tensor, epsilon_low: float, epsilon_high: float) -> tuple[Tensor, Reports]:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), [N] (PPO, arXiv 1707.06347, equation 7), and as
    `clip_fraction` whether the clip took a token's gradient."""
    clipped_ratio_N = ratio_N.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    too_low_N = (ratio_N < 1 - epsilon_low) & (advantages_N < 0)
    too_high_N = (ratio_N > 1 + epsilon_high) & (advantages_N > 0)
    return loss_N, {"clip_fraction": too_low_N | too_high_N}


def sequence_mean(lengths_M: Tensor) -> Tensor:
    """Mean over trajectories of the mean over their tokens (GRPO, arXiv 2402.03300): 1 / (M * length).
    lengths_M: sampled tokens of each trajectory of the whole mini-batch. Returns a token's weight, float64 [M]."""
    return 1.0 / (lengths_M.double().clamp(min=1.0) * len(lengths_M))


def token_mean(lengths_M: Tensor) -> Tensor:
    """Mean over all tokens of the mini-batch (DAPO, arXiv 2503.14476): 1 / (sum of lengths)."""
    return (1.0 / lengths_M.double().sum().clamp(min=1.0)).expand(len(lengths_M))


def trajectory_mean(values_N: Tensor, trajectory_N: Tensor) -> Tensor:
    """The mean over the tokens of each trajectory, given back to each of them, [N]."""
    _, place_N, count_M = trajectory_N.unique(return_inverse=True, return_counts=True)
    sum_M = values_N.new_zeros(len(count_M)).index_add(0, place_N, values_N)
    return (sum_M / count_M)[place_N]


# Estimators of KL(policy || reference), [N] -> [N], with d = logp - ref (Schulman, "Approximating KL divergence").


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """d: unbiased, of high variance. In a loss its expected gradient is zero: for rewards only."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """d^2 / 2: biased, of low variance; its gradient is the reverse KL's on tokens of the present policy."""
    return (logprobs_N - reference_N).square() / 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(-d) + d - 1 >= 0: unbiased, of low variance; its gradient is not the KL's (arXiv 2402.03300, equation 4)."""
    minus_d_N = (reference_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return minus_d_N.exp() - minus_d_N - 1


def adapted(beta: float, kl: float, target: float) -> float:
    """The next beta, by proportional control (arXiv 1909.08593, section 2.2): at most 2 % up or down per rollout."""
    return beta * (1 + 0.1 * min(0.2, max(-0.2, kl / target - 1)))
