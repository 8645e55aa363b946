"""Estimators of KL(policy || reference) from tokens that the policy sampled (Schulman, "Approximating KL divergence").

With d = logp - ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. All are [N] -> [N] on sampled tokens only. k3 is the
one in GRPO's loss (arXiv 2402.03300, equation 4); it is never negative, but its gradient is not the KL's, k2's is.
"""

from __future__ import annotations

import torch

from skyrl_trainer.algorithms.losses import MAX_LOG_RATIO


def k1(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Unbiased, of high variance. In a loss its expected gradient is zero: for rewards and metrics only."""
    return logprobs_N - reference_N


def k2(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Biased, of low variance; its gradient is the reverse KL's."""
    return (logprobs_N - reference_N).square() / 2


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Unbiased, of low variance, never negative."""
    minus_d_N = (reference_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return minus_d_N.exp() - minus_d_N - 1


def adapted(beta: float, kl: float, target: float) -> float:
    """The next beta, by proportional control (arXiv 1909.08593, section 2.2): at most 2 % up or down a rollout.

    kl: mean of a token in the rollout.
    """
    return beta * (1 + 0.1 * min(0.2, max(-0.2, kl / target - 1)))
