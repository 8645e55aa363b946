"""Reductions: the weight that a token carries, from the lengths of all trajectories of the mini-batch.

Computed before the first micro-batch, so that the gradient does not depend on the cut. "Sequence" is a trajectory.
"""

from __future__ import annotations

import torch


def sequence_mean(lengths_M: torch.Tensor) -> torch.Tensor:
    """Mean over trajectories of the mean over their tokens (GRPO, arXiv 2402.03300): 1 / (M * length).

    lengths_M: sampled tokens of each of the M trajectories of the whole mini-batch, over all learners. Returns the
    weight that each token of a trajectory carries, float64 [M].
    """
    return 1.0 / (lengths_M.double().clamp(min=1.0) * len(lengths_M))


def token_mean(lengths_M: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens of the mini-batch (DAPO, arXiv 2503.14476): 1 / (sum of lengths); weights, float64 [M]."""
    return (1.0 / lengths_M.double().sum().clamp(min=1.0)).expand(len(lengths_M))


def trajectory_mean(values_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of each trajectory, given back to each of them, [N]."""
    _, place_N, count_M = trajectory_N.unique(return_inverse=True, return_counts=True)
    sum_M = values_N.new_zeros(len(count_M)).index_add(0, place_N, values_N)
    return (sum_M / count_M)[place_N]
