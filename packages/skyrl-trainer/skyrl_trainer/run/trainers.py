"""The Python API, in TRL's shape: a trainer is an algorithm that can run a whole training.

    trainer = GRPOTrainer(model="tiny", reward_funcs=[brief], args=load_config("quickstart", []))
    trainer.train()

A loss mixin makes another of it: `class MineTrainer(MineLossMixin, GRPOTrainer): ...`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_trainer.algorithms.dapo import DAPOLossMixin
from skyrl_trainer.algorithms.gspo import GSPOLossMixin
from skyrl_trainer.algorithms.rewards import register_reward
from skyrl_trainer.algorithms.sapo import SAPOLossMixin
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.compose import ALGORITHMS, register_algorithm
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.ppo import PPO
from skyrl_trainer.protocols import RewardFunction
from skyrl_trainer.report.history import read_metrics
from skyrl_trainer.run.commands import train
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StepMetrics
from skyrl_trainer.user_file import load_plugin

RewardFunctions = Sequence[RewardFunction] | Mapping[RewardFunction, float]


class GRPOTrainer(GRPO):
    """GRPO with TRL's arguments. `train` runs what `skyrl-trainer train` runs."""

    recipe_name = "grpo"
    """What the run folder's config.yaml calls the algorithm; a class of your own is called by its own name."""

    def __init__(
        self,
        args: Config | None = None,
        *,
        model: str | None = None,
        reward_funcs: RewardFunctions | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        """args: a configuration (`load_config`); the others replace its settings, in TRL's shape.

        model: a Hugging Face folder or name, or `tiny`. reward_funcs: functions, or a dictionary with their weights,
        added to the env's own reward. train_dataset, eval_dataset: what `data.train_data` takes, one or a list, or a
        `datasets.Dataset` with the columns of our rows.
        """
        config = configured(args or Config(), model, reward_funcs, train_dataset, eval_dataset)
        config.trainer.algorithm.name = type(self).__dict__.get("recipe_name", type(self).__name__)
        load_plugin(config)
        super().__init__(config)

    def train(self) -> StepMetrics:
        """Runs or resumes the whole run with this algorithm, as the command line does; its last step's metrics."""
        name = self.config.trainer.algorithm.name
        if name not in ALGORITHMS.names:
            register_algorithm(name)(type(self))
        train(self.config, self)
        return read_metrics(self.config.run_path.expanduser())[-1]


class PPOTrainer(GRPOTrainer, PPO):
    recipe_name = "ppo"


class SAPOTrainer(SAPOLossMixin, GRPOTrainer):
    recipe_name = "sapo"


class GSPOTrainer(GSPOLossMixin, GRPOTrainer):
    recipe_name = "gspo"


class DAPOTrainer(DAPOLossMixin, GRPOTrainer):
    recipe_name = "dapo"


def configured(config: Config, model: str | None, funcs: Any, train: Any, held_out: Any) -> Config:
    """A copy of the configuration with the Python API's arguments in it; functions are registered by their names."""
    config = config.model_copy(deep=True)
    named = [(getattr(function, "__name__", type(function).__name__), function) for function in funcs or ()]
    if len(dict(named)) < len(named):
        names = ", ".join(name for name, _ in named)
        raise UserError(f"reward_funcs has two functions of one name ({names}); rename one of them.")
    weights = dict(config.trainer.algorithm.reward_funcs)
    for name, function in named:
        register_reward(name)(function)
        weights[name] = funcs[function] if isinstance(funcs, Mapping) else weights.get(name, 1.0)
    config.trainer.algorithm.reward_funcs = weights
    if model is not None:
        config.trainer.policy.model.path = model
    if train is not None:
        config.data.train_data = _source(config, "train", train)
    if held_out is not None:
        config.data.val_data = _source(config, "val", held_out)
    return config


def _source(config: Config, name: str, given: Any) -> list[Any]:
    """A `datasets.Dataset` becomes a file of rows in the run folder."""
    if not hasattr(given, "to_json"):
        return [given] if isinstance(given, str) else list(given)
    path = config.run_path.expanduser() / "data" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    given.to_json(path)
    return [str(path)]
