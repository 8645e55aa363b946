"""DAPO (arXiv 2503.14476): clip-higher, the mean over all tokens, dynamic sampling, and care for overlong answers.

    loss = -(1 / number of tokens) sum_t min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.28) A_t)   (equation 8, by mini-batch)

Long answers weigh by their length. Groups with equal returns are drawn again (`sampler` is dynamic), and a trajectory
that its token budget cut off is not learned from, though it counts in its group's baseline (`overlong_filter`).
"""

from pydantic import Field

from skyrl_trainer.algorithms.losses import token_mean
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss


class DAPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        epsilon_high: float | None = Field(0.28, ge=0)
        sampler: str = "dynamic"
        overlong_filter: bool = True

    reduction = staticmethod(token_mean)
