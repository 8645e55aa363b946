"""GSPO, group sequence policy optimization (arXiv 2507.18071): one ratio per trajectory, clipped at 3e-4 and 4e-4.

    s = exp(mean over the trajectory's tokens of (logp_t - old_t))              (equation 7)
    GSPO-token:  s_t = sg[s] exp(logp_t - sg[logp_t])                           (equation 14; sg: no gradient)

Both have the same value, and the same gradient where a trajectory has one advantage and one correction: `tis` and `mis`
weigh its tokens differently. Where advantages differ inside one (a critic's) only the token form is defined, so it is
taken; `gspo_token` takes it always. The range is for thousands of tokens: short trajectories are nearly all clipped.
"""

import torch
from pydantic import Field

from skyrl_trainer.algorithms.losses import MAX_LOG_RATIO, SampledTokens, trajectory_mean
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss


class GSPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        epsilon: float = Field(3e-4, ge=0)
        epsilon_high: float | None = Field(4e-4, ge=0)

    always_token_form = False

    def ratio(self, tokens: SampledTokens) -> torch.Tensor:
        log_ratio_N = trajectory_mean(tokens.logprobs_N - tokens.old_logprobs_N, tokens.trajectory_N)
        ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        token_form_N = ratio_N.detach() * (tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
        _, place_N = tokens.trajectory_N.unique(return_inverse=True)
        any_N = torch.zeros_like(tokens.advantages_N).scatter(0, place_N, tokens.advantages_N)[place_N]
        unlike_N = (tokens.advantages_N != any_N).to(ratio_N.dtype)
        differs_N = trajectory_mean(unlike_N, tokens.trajectory_N) > 0
        return torch.where(differs_N | self.always_token_form, token_form_N, ratio_N)


class GSPOTokenLossMixin(GSPOLossMixin):
    always_token_form = True
