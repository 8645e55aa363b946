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
from skyrl_trainer.algorithms.kl import k2, k3
from skyrl_trainer.algorithms.losses import SampledTokens, ppo_clip, sequence_mean, token_ratio
from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError


class LossOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PolicyLoss:
    """GRPO's choices (arXiv 2402.03300): token ratio, PPO's clip, mean over trajectories of their token means."""

    class Options(LossOptions):
        # Of `trainer.algorithm.options`, known to every algorithm; a mixin's own `Options` are added to them.
        kl_estimator: Literal["k2", "k3"] = "k3"
        use_bias_correction_kl: bool = False  # multiply the KL by the ratio, with its gradient; TRL 1.16 has True
        correction: Literal["auto", "none", "tis", "mis", "sequence_mask"] = "auto"
        correction_min: float | None = Field(None, ge=0)
        correction_max: float | None = Field(None, gt=0)
        gamma: float = Field(1.0, gt=0, le=1)  # discount a token, of the estimators that look ahead

    clip_range: ClassVar[tuple[float, float | None]] = (0.2, None)
    """`epsilon` and `epsilon_high` where the recipe gives none; a high of None is the low one."""
    fixed: ClassVar[dict[str, Any]] = {}  # settings of `trainer.algorithm` that are the algorithm's, not the recipe's

    def __init__(self, config: Config) -> None:
        self.config = config
        self.algorithm = config.trainer.algorithm.model_copy(update=self.fixed)
        self.options = self.read_options(config)
        self.correction_range = correction_range(self.options, config)
        low, high = self.algorithm.epsilon, self.algorithm.epsilon_high
        self.epsilon = self.clip_range[0] if low is None else low
        self.epsilon_high = next((x for x in (high, self.clip_range[1]) if x is not None), self.epsilon)

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
        kl_N = {"k2": k2, "k3": k3}[self.options.kl_estimator](logprobs_N, reference_N)
        return kl_N * ratio_N if self.options.use_bias_correction_kl else kl_N

    @classmethod
    def read_options(cls, config: Config) -> Any:
        """`trainer.algorithm.options`, checked against the options of this class and of all that it inherits from."""
        own = tuple(base.__dict__["Options"] for base in cls.__mro__ if "Options" in base.__dict__)
        known: type[BaseModel] = create_model("Options", __base__=own)
        name, given = config.trainer.algorithm.name, config.trainer.algorithm.options
        try:
            return known.model_validate(given)
        except ValidationError as error:
            option, wanted = str(error.errors()[0]["loc"][0]), error.errors()[0]["msg"].removeprefix("Input should be ")
            problem = f"is {given[option]!r}, but should be {wanted}"
            if (option, given[option]) == ("kl_estimator", "k1"):
                problem += ", because k1's gradient in a loss is 0 on average"
            if option not in known.model_fields:
                near = difflib.get_close_matches(option, known.model_fields, 1, 0.5)
                problem = f"is not an option of {name}" + (f", did you mean {near[0]}?" if near else "")
            names = ", ".join(sorted(known.model_fields))
            raise UserError(f"trainer.algorithm.options.{option} {problem}; {name} has {names}.") from None
