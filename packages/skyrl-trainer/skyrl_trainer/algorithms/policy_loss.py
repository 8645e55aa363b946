"""`PolicyLoss`: the four functions of a loss as methods, and the options that it understands.

A trainer class is a PolicyLoss, and so is a mixin: `class SAPOTrainer(SAPOLossMixin, GRPOTrainer)` takes what the
mixin overrides. GSPO's ratio and sequence masks are right because a micro-batch always holds whole trajectories.
"""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from skyrl_trainer.algorithms.corrections import correct, correction_range
from skyrl_trainer.algorithms.kl import k1, k2, k3
from skyrl_trainer.algorithms.losses import SampledTokens, ppo_clip, sequence_mean, token_ratio
from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError

KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


class LossOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PolicyLoss:
    """GRPO's choices (arXiv 2402.03300): token ratio, PPO's clip, mean over trajectories of their token means."""

    class Options(LossOptions):
        # Of `trainer.algorithm.options`, known to every algorithm; a mixin's own `Options` are added, or replace them.
        epsilon: float = Field(0.2, ge=0)
        epsilon_high: float | None = Field(None, ge=0)  # None: as epsilon
        beta: float = Field(0.0, ge=0)  # weight of the KL to the policy that the run started from; 0 loads no reference
        kl_in: Literal["loss", "reward"] = "loss"
        kl_estimator: Literal["k1", "k2", "k3"] | None = None  # None: k3 in the loss, k1 in the reward
        kl_target: float | None = Field(None, gt=0)  # beta adapts itself until a token's mean KL is this
        use_bias_correction_kl: bool = False  # multiply the KL by the ratio, with its gradient; TRL 1.16 has True
        entropy_coef: float = 0.0  # weight of the entropy, which is to be large
        correction: Literal["auto", "none", "tis", "mis", "sequence_tis", "sequence_mask"] = "auto"
        correction_min: float | None = Field(None, ge=0)
        correction_max: float | None = Field(None, gt=0)
        old_logprobs: Literal["recompute", "rollout"] = "recompute"  # rollout: the engine's; saves a forward pass
        scale_rewards: Literal["group", "batch", "none"] = "group"  # whose standard deviation divides the advantages
        gamma: float = Field(1.0, gt=0, le=1)  # discount a token, of the estimators that look ahead
        sampler: str = "uniform"  # a registered sampler; dynamic draws until every group has rewards that differ
        max_draws: int = Field(4, gt=0)  # of the dynamic sampler: batches drawn in a step at most
        overlong_filter: bool = False  # a trajectory that its token budget cut off is not learned from
        overlong_cache: int = Field(0, ge=0)  # the last tokens of the budget, over which a penalty of 1 builds up

    ignores: ClassVar[frozenset[str]] = frozenset()
    """Options of the classes it inherits from that an algorithm has no use for; they are refused."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options = self.read_options(config)
        self.beta = float(self.options.beta)  # moves where there is a kl_target
        in_reward = self.options.kl_in == "reward"
        self.kl_estimator = KL_ESTIMATORS[self.options.kl_estimator or ("k1" if in_reward else "k3")]
        self.correction_range = correction_range(self.options, config)
        self.epsilon = self.options.epsilon
        self.epsilon_high = self.epsilon if self.options.epsilon_high is None else self.options.epsilon_high

    def ratio(self, tokens: SampledTokens) -> torch.Tensor:
        return token_ratio(tokens)

    def surrogate(self, ratio_N: torch.Tensor, tokens: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token, and whether a clip took its gradient."""
        return ppo_clip(ratio_N, tokens.advantages_N, self.epsilon, self.epsilon_high)

    def reduction(self, lengths_M: torch.Tensor) -> torch.Tensor:
        """The weight of each token of a trajectory, from the lengths of the whole mini-batch."""
        return sequence_mean(lengths_M)

    def correction(self, tokens: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of each token for the engine's error, without a gradient, and whether it was cut or masked."""
        return correct(self.correction_range, tokens)

    def kl(self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
        kl_N = self.kl_estimator(logprobs_N, reference_N)
        return kl_N * ratio_N if self.options.use_bias_correction_kl else kl_N

    @classmethod
    def read_options(cls, config: Config) -> Any:
        """`trainer.algorithm.options`, checked against the options of this class and of all that it inherits from."""
        own = tuple(base.__dict__["Options"] for base in cls.__mro__ if "Options" in base.__dict__)
        known: type[BaseModel] = create_model("Options", __base__=own)
        name, given = config.trainer.algorithm.name, config.trainer.algorithm.options
        names = sorted(known.model_fields.keys() - cls.ignores)
        options: Any = None
        problem = ""
        if unknown := sorted(given.keys() - set(names)):
            option, near = unknown[0], difflib.get_close_matches(unknown[0], names, 1, 0.5)
            problem = f"is not an option of {name}" + (f", did you mean {near[0]}?" if near else "")
        else:
            try:
                options = known.model_validate(given)
            except ValidationError as error:
                option = str(error.errors()[0]["loc"][0])
                wanted = error.errors()[0]["msg"].removeprefix("Input should be ")
                problem = f"is {given[option]!r}, but should be {wanted}"
        if (given.get("kl_estimator"), given.get("kl_in", "loss")) == ("k1", "loss"):
            option, problem = (
                "kl_estimator",
                "is k1, whose gradient in a loss is 0 on average (take k2 or kl_in=reward)",
            )
        if problem:
            raise UserError(f"trainer.algorithm.options.{option} {problem}; {name} has {', '.join(names)}.")
        return options
