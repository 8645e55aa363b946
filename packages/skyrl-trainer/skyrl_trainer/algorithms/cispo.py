"""CISPO, clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    loss_t = -sg[min(r_t, cap)] A_t logp_t,   mean over all tokens of the mini-batch   (sg: no gradient)

No token loses its gradient, only its weight is capped; `clip_fraction` counts the capped ones. The cap is
`epsilon_high` itself, by default ScaleRL's 5.0 (arXiv 2510.13786).
"""

import torch
from pydantic import Field

from skyrl_trainer.algorithms.losses import Reports, SampledTokens, token_mean
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss


class CISPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        epsilon_high: float = Field(5.0, gt=0)

    ignores = frozenset({"epsilon"})
    reduction = staticmethod(token_mean)

    def surrogate(self, ratio_N: torch.Tensor, tokens: SampledTokens) -> tuple[torch.Tensor, Reports]:
        weight_N = ratio_N.detach().clamp(max=self.epsilon_high)
        reports = {"clip_fraction": ratio_N > self.epsilon_high}
        return -weight_N * tokens.advantages_N * tokens.logprobs_N, reports
