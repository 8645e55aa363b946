"""Dual clip (arXiv 1912.09729, equation 5): bounds the loss of an unlikely token that became likely and was bad.

for A_t < 0:  loss_t = min(the base's loss_t, -delta A_t),   delta = 3
"""

import torch
from pydantic import Field

from skyrl_trainer.algorithms.losses import Reports, SampledTokens
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss


class DualClipLossMixin(PolicyLoss):
    class Options(LossOptions):
        delta: float = Field(3.0, gt=1)
        """Bound of the loss for negative advantages, as a ratio."""

    def surrogate(self, ratio_N: torch.Tensor, tokens: SampledTokens) -> tuple[torch.Tensor, Reports]:
        loss_N, reports = super().surrogate(ratio_N, tokens)
        bound_N = torch.where(tokens.advantages_N < 0, -self.options.delta * tokens.advantages_N, torch.inf)
        clipped_N = (loss_N > bound_N) | reports.get("clip_fraction", loss_N > bound_N)
        return torch.minimum(loss_N, bound_N), {**reports, "clip_fraction": clipped_N}
