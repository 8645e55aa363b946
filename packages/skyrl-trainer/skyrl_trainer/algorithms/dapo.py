"""The loss of DAPO (arXiv 2503.14476, equation 8): clip-higher and the mean over all tokens of the mini-batch.

    loss = -(1 / number of tokens) sum_t min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.28) A_t)

Long answers weigh by their length. The paper has no KL: leave `beta` at 0. As TRL 1.16's loss_type "dapo", whose
normaliser spans its generation batch; ours spans the mini-batch of an optimizer step.
"""

from pydantic import Field

from skyrl_trainer.algorithms.losses import token_mean
from skyrl_trainer.algorithms.policy_loss import LossOptions, PolicyLoss


class DAPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        epsilon_high: float | None = Field(0.28, ge=0)

    reduction = staticmethod(token_mean)
