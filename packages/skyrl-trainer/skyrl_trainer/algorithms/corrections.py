"""Weights for the gap between the engine that sampled and the learner, from w = exp(old - rollout); no gradient.

`auto` is none where both sides compute in float32 and no token is stale, and tis otherwise. Of stale tokens, old is
what the learner's weights give before the first update: the clip is around them, and w corrects for their age
(decoupled PPO; AReaL, arXiv 2505.24298, equation 5).
"""

from typing import Any

import torch

from skyrl_trainer.algorithms.losses import MAX_LOG_RATIO, Reports, SampledTokens, trajectory_mean
from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import Config

RANGES = {
    "none": (0.0, float("inf")),
    "tis": (0.0, 2.0),  # w, clamped: truncated importance sampling
    "mis": (0.5, 5.0),  # w inside, else 0: masked importance sampling, with IcePop's range
    "sequence_tis": (0.0, 5.0),  # the product of w over the trajectory, clamped
    "sequence_mask": (0.99, 1.01),  # 1 where the trajectory's geometric mean of w is inside, else 0
}
"""Smallest and largest weight of a token by default, by the correction's name."""


def correction_range(options: Any, config: Config) -> tuple[str, float, float]:
    """The correction's name, smallest and largest weight."""
    name = options.correction
    if name == "auto":
        exact = config.trainer.policy.model.dtype == "float32" and not config.trainer.max_staleness
        name = "none" if exact else "tis"
    name = "none" if name == "bypass" else name
    given = options.correction_range
    if given is not None and (name == "none" or not (len(given) == 2 and 0 <= given[0] <= given[1] > 0)):
        none = f"left out: correction={options.correction} has none"
        wanted = none if name == "none" else "two weights, as in [0, 2]"
        raise UserError(f"trainer.algorithm.options.correction_range is {given}, but should be {wanted}.")
    low, high = given or RANGES[name]
    return name, low, high


@torch.no_grad()
def correct(chosen: tuple[str, float, float], tokens: SampledTokens) -> tuple[torch.Tensor, Reports]:
    """The weight of each token, [N], and as `correction/fraction` whether the range changed it. A NaN stays one."""
    name, low, high = chosen
    if name == "none":
        return torch.ones_like(tokens.logprobs_N), {}
    log_N = tokens.old_logprobs_N - tokens.rollout_logprobs_N
    if name.startswith("sequence"):
        log_N = trajectory_mean(log_N, tokens.trajectory_N)
    if name == "sequence_tis":
        log_N = log_N * tokens.trajectory_N.bincount()[tokens.trajectory_N]
    weight_N = log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside_N = (weight_N < low) | (weight_N > high)
    reports = {"correction/fraction": outside_N}
    if name.endswith("tis"):
        return weight_N.clamp(low, high), reports
    return (weight_N if name == "mis" else weight_N / weight_N).masked_fill(outside_N, 0.0), reports
