"""`PolicyLoss`: the four functions of a loss as methods, and the options that it understands.

GRPO is a PolicyLoss, and so is each mixin: a class of both takes what the mixin overrides (learner/compose.py).
A micro-batch always holds whole trajectories.
"""

from typing import ClassVar

from torch import Tensor

from skyrl_trainer.algorithms.corrections import correct, correction_range
from skyrl_trainer.algorithms.losses import Reports, SampledTokens, k1, k2, k3, ppo_clip, sequence_mean, token_ratio
from skyrl_trainer.algorithms.options import CommonOptions, LossOptions, read_options
from skyrl_trainer.settings import Config

KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


class PolicyLoss:
    """GRPO's choices (arXiv 2402.03300): token ratio, PPO's clip, mean over trajectories of their token means."""

    Options: ClassVar[type[LossOptions]] = CommonOptions
    ignores: ClassVar[frozenset[str]] = frozenset()
    """Options of the classes it inherits from that an algorithm has no use for; they are refused."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options = read_options(type(self), config)
        self.beta = float(self.options.beta)  # moves where there is a kl_target
        estimator, _, self.kl_form = self.options.kl_estimator.partition("_")
        self.kl_estimator = KL_ESTIMATORS[estimator]
        self.correction_range = correction_range(self.options, config)
        self.epsilon = self.options.epsilon
        self.epsilon_high = self.epsilon if self.options.epsilon_high is None else self.options.epsilon_high

    def ratio(self, tokens: SampledTokens) -> Tensor:
        return token_ratio(tokens)

    def surrogate(self, ratio_N: Tensor, tokens: SampledTokens) -> tuple[Tensor, Reports]:
        """The loss of each token, and what it reports: `clip_fraction`, and metrics of a loss's own."""
        return ppo_clip(ratio_N, tokens.advantages_N, self.epsilon, self.epsilon_high)

    def reduction(self, lengths_M: Tensor) -> Tensor:
        """The weight of each token of a trajectory, from the lengths of the whole mini-batch."""
        return sequence_mean(lengths_M)

    def correction(self, tokens: SampledTokens) -> tuple[Tensor, Reports]:
        """The weight of each token for the engine's error, without a gradient, and what it reports."""
        return correct(self.correction_range, tokens)

    def kl(self, ratio_N: Tensor, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
        kl_N = self.kl_estimator(logprobs_N, reference_N)
        return kl_N * ratio_N if self.kl_form == "ratio" else kl_N
