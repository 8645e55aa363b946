"""`trainer.algorithm.options`: hyper-parameters, for algorithms that have a use for them, refused elsewhere."""

import difflib
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, create_model

from skyrl_trainer.config import wrong_value
from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import OPTIONS, Config, Section


class LossOptions(Section):
    """Base of the `Options` that an algorithm or a mixin nests: a field each, its default the algorithm's own."""

    model_config = ConfigDict(strict=True)


class CommonOptions(LossOptions):
    """Known to every algorithm; a mixin's own are added, or replace them."""

    epsilon: float = Field(0.2, ge=0)
    """Lower half of the clip range: the ratio is clipped at 1 - epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper half: clipped at 1 + epsilon_high; of cispo, the cap itself. null: as epsilon."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the policy that the run started from; 0 loads no reference."""
    kl_estimator: Literal["k2", "k3", "k3_ratio", "k1_in_reward", "k2_in_reward", "k3_in_reward"] = "k3"
    """Of the KL, in the loss or off the rewards; k3_ratio: times the ratio (TRL's use_bias_correction_kl)."""
    kl_target: float | None = Field(None, gt=0)
    """Lets beta adapt itself until the mean KL per token is this."""
    entropy_coef: float = 0.0
    """How much of a token's entropy is taken off its loss."""
    correction: Literal["auto", "none", "tis", "mis", "sequence_tis", "sequence_mask", "bypass"] = "auto"
    """Weight of a token for the engine's own log-probabilities, which bypass takes for the old ones."""
    correction_range: list[float] | None = None
    """Smallest and largest weight; null: the correction's own."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the advantages."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, of the estimators that look ahead."""
    sampler: str = "uniform"
    """A registered sampler: uniform, curriculum, yours; dynamic draws until every group has rewards that differ."""
    max_draws: int = Field(4, gt=0)
    """Batches that the dynamic sampler draws per step, at most; trainer.max_staleness=k allows k more."""
    overlong_filter: bool = False
    """A trajectory that its token budget cut off is not learned from."""


def algorithm_name(config: Config) -> str:
    """`trainer.algorithm.name`; grpo with the estimator gae is what SkyRL means by it, PPO."""
    chosen = config.trainer.algorithm
    return "ppo" if (chosen.name, chosen.advantage_estimator) == ("grpo", "gae") else chosen.name


def options_class(algorithm: type) -> type[LossOptions]:
    """The `Options` of this class and of all that it inherits from, as one."""
    own = dict.fromkeys(base.__dict__["Options"] for base in algorithm.__mro__ if "Options" in base.__dict__)
    return create_model("Options", __base__=tuple(own))


def read_options(algorithm: type, config: Config) -> Any:
    """The options, checked against those that the class knows. UserError, which lists what there is."""
    known, given = options_class(algorithm), config.trainer.algorithm.options
    name = algorithm_name(config)
    names = sorted(known.model_fields.keys() - algorithm.ignores)  # type: ignore[attr-defined]
    for option in sorted(given.keys() - set(names)):
        near = difflib.get_close_matches(option, names, 1, 0.7)
        hint = f", did you mean {near[0]}?" if near else ""
        raise UserError(f"{OPTIONS}.{option} is not an option of {name}{hint}; {name} has {', '.join(names)}.")
    try:
        return known.model_validate(given)
    except ValidationError as error:
        raise wrong_value(error, given, prefix=f"{OPTIONS}.") from None
