"""`trainer.algorithm.options`: hyper-parameters, for algorithms that have a use for them, refused elsewhere."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError


class LossOptions(BaseModel):
    """Base of the `Options` that an algorithm or a mixin nests: a field each, its default the algorithm's own."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CommonOptions(LossOptions):
    """Known to every algorithm; a mixin's own are added, or replace them."""

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


def read_options(algorithm: type, config: Config) -> Any:
    """The options, checked against the `Options` of this class and of all that it inherits from.

    `algorithm.ignores` names those that it has no use for. Raises UserError, which lists what there is.
    """
    own = tuple(base.__dict__["Options"] for base in algorithm.__mro__ if "Options" in base.__dict__)
    known: type[BaseModel] = create_model("Options", __base__=own)
    name, given = config.trainer.algorithm.name, config.trainer.algorithm.options
    names = sorted(known.model_fields.keys() - algorithm.ignores)  # type: ignore[attr-defined]

    def wrong(option: str, problem: str) -> UserError:
        return UserError(f"trainer.algorithm.options.{option} {problem}; {name} has {', '.join(names)}.")

    for option in sorted(given.keys() - set(names)):
        near = difflib.get_close_matches(option, names, 1, 0.5)
        raise wrong(option, f"is not an option of {name}" + (f", did you mean {near[0]}?" if near else ""))
    if (given.get("kl_estimator"), given.get("kl_in", "loss")) == ("k1", "loss"):
        raise wrong("kl_estimator", "is k1, whose gradient in a loss is 0 on average (take k2 or kl_in=reward)")
    try:
        return known.model_validate(given)
    except ValidationError as error:
        option = str(error.errors()[0]["loc"][0])
        wanted = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise wrong(option, f"is {given[option]!r}, but should be {wanted}") from None
