"""SAPO, soft adaptive policy optimization (arXiv 2511.20347, equations 5 and 6): a smooth gate instead of a clip.

    loss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t,    tau = 1.0 where A_t > 0, else 1.05

Its gradient is -w r A grad logp with w = 4 p (1 - p), p = sigmoid(tau (r - 1)): 1 at r = 1 for every tau, and fading
on both sides, faster for negative advantages. `epsilon` is refused, and `clip_fraction` is 0.
"""

from typing import Literal

import torch
from pydantic import Field

from skyrl_trainer.algorithms.losses import Reports, SampledTokens
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss


class SAPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        sapo_gate: Literal["paper", "sigmoid"] = "paper"
        """paper: 4/tau sigmoid(tau (r - 1)); sigmoid: sigmoid((r - 1) / tau)."""
        sapo_temperature_pos: float = Field(1.0, gt=0)
        """tau where the advantage is above 0."""
        sapo_temperature_neg: float | None = Field(None, gt=0)
        """tau elsewhere; null: 1.05 with the paper's gate, else as sapo_temperature_pos."""

    ignores = frozenset({"epsilon", "epsilon_high"})

    def surrogate(self, ratio_N: torch.Tensor, tokens: SampledTokens) -> tuple[torch.Tensor, Reports]:
        paper, positive = self.options.sapo_gate == "paper", self.options.sapo_temperature_pos
        negative = self.options.sapo_temperature_neg or (1.05 if paper else positive)
        tau_N = torch.full_like(ratio_N, negative).masked_fill(tokens.advantages_N > 0, positive)
        gate_N = (tau_N * (ratio_N - 1)).sigmoid() * 4 / tau_N if paper else ((ratio_N - 1) / tau_N).sigmoid()
        return -gate_N * tokens.advantages_N, {}
