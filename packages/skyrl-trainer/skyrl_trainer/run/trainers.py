"""The Python API, in TRL's shape: a trainer is an algorithm that can run a whole training.

    trainer = GRPOTrainer(model="tiny", reward_funcs=[brief], args=load_config("quickstart", []))
    trainer.train()

`args` may be a trl.GRPOConfig, too (trl_arguments.py). A loss mixin makes another trainer of it:
`class MineTrainer(MineLossMixin, GRPOTrainer): ...`.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedModel, TrainerState

from skyrl_trainer.algorithms.cispo import CISPOLossMixin
from skyrl_trainer.algorithms.dapo import DAPOLossMixin
from skyrl_trainer.algorithms.dr_grpo import DrGRPOLossMixin
from skyrl_trainer.algorithms.dual_clip import DualClipLossMixin
from skyrl_trainer.algorithms.gspo import GSPOLossMixin, GSPOTokenLossMixin
from skyrl_trainer.algorithms.rewards import register_reward
from skyrl_trainer.algorithms.sapo import SAPOLossMixin
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.compose import ALGORITHMS, register_algorithm
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.ppo import PPO
from skyrl_trainer.learner.reward_model import RewardModel
from skyrl_trainer.protocols import RewardFunction
from skyrl_trainer.report.history import read_metrics
from skyrl_trainer.run.commands import train
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.model_shape import positions
from skyrl_trainer.run.trl_arguments import is_trls, lora, loss_name, table, translated
from skyrl_trainer.run.trl_callbacks import Callbacks, ToldRun
from skyrl_trainer.run.trl_rows import ENV_ID, with_columns, write_environment, write_model, write_rows
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StepMetrics
from skyrl_trainer.user_file import load_plugin

LONGEST_CONTEXT = 4096
"""Where neither the script nor the model says less."""
Reward: TypeAlias = RewardFunction | PreTrainedModel | str
RewardFunctions: TypeAlias = Reward | Sequence[Reward] | Mapping[Reward, float]


class GRPOTrainer(GRPO):
    """GRPO with TRL's arguments. `train` runs what `skyrl-trainer train` runs."""

    recipe_name = "grpo"
    """What config.yaml calls the algorithm; one of yours has its own name."""
    by_loss = False
    """Whether loss_type chose the class."""

    def __new__(cls, model: Any = None, funcs: Any = None, args: Any = None, *rest: Any, **named: Any) -> Any:
        """TRL's loss is one of its arguments: GRPOTrainer makes the trainer that has it."""
        by_loss = cls is GRPOTrainer and is_trls(args)
        made = super().__new__(BY_LOSS[loss_name(args)] if by_loss else cls)
        made.by_loss = by_loss
        return made

    def __init__(
        self,
        model: Any = None,
        reward_funcs: RewardFunctions | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        """UserError names what cannot be honoured.

        model: a Hugging Face folder or name, an object, or `tiny`; or a Config alone, which is as args. args: a
        trl.GRPOConfig, or what `load_config` gives. reward_funcs: one, several, or a dictionary with weights, of
        functions and reward models. train_dataset, eval_dataset: as `data.train_data`, or a `datasets.Dataset`, whose
        rows are ours with a Config, and TRL's otherwise and with environment_factory or tools.
        """
        model, args = (None, model) if isinstance(model, Config) else (model, args)
        for name in [name for name in others if others[name] not in (None, (None, None))]:
            raise UserError(f"{name} is nothing that these trainers take: leave it out.")
        if unheard := [name for name in table()["methods"] if hasattr(type(self), name)]:
            raise UserError(f"{unheard[0]} is not called here; docs/plug-ins.md has what is.")
        agent = environment_factory is not None or bool(tools)
        rows = not isinstance(train_dataset, str | list | None)
        trls = agent or is_trls(args) or (rows and not isinstance(args, Config))
        needed = {"reward_funcs": reward_funcs or None, "train_dataset": train_dataset}
        for name in [name for name in needed if needed[name] is None]:
            if trls and environment_factory is None and not isinstance(train_dataset, str | list):
                raise UserError(f"{name} is needed: only environments bring rewards and tasks.")
        config = self._config(args, train_dataset, agent)
        folder, policy = config.run_path, config.trainer.policy.model
        self.callbacks = Callbacks(callbacks, args)
        if processing_class is not None and model is None:
            raise UserError("processing_class needs a model beside it.")
        writes = any(each is not None for each in (model, *needed.values(), eval_dataset, environment_factory, tools))
        with RunFolder(config) if writes else nullcontext():  # a run that goes on may read these files
            if trls and train_dataset is None:
                train_dataset = tuple({} for _ in range(config.trainer.train_batch_size))
            _take_data(config, folder, train_dataset, eval_dataset, trls, environment_factory is not None)
            if model is not None:
                policy.path = write_model(folder / "init" / "given", model, processing_class)
            if peft_config is not None:
                policy.lora = lora(peft_config, policy.lora.quantization)
            self.functions = _take_rewards(config, reward_funcs, getattr(args, "reward_weights", None), self.state)
            if trls:
                if config.environment.env_file:
                    raise UserError("environment.env_file has no use beside environment_factory and tools.")
                config.environment.env_class = ENV_ID
                rewarded = bool(config.trainer.algorithm.reward_funcs)
                config.environment.env_file = write_environment(folder, environment_factory, tools, rewarded)
            if is_trls(args) and args.vllm_max_model_length is None:
                room = min(positions(config) or LONGEST_CONTEXT, LONGEST_CONTEXT)
                config.generator.max_model_len = max(config.generator.max_model_len, room)
        load_plugin(config)
        super().__init__(config)

    def _config(self, args: Any, rows: Any, tools: bool) -> Config:
        if is_trls(args):
            known = len(rows) if hasattr(rows, "__len__") and not isinstance(rows, str | list) else None
            config = translated(args, type(self), self.by_loss, known, tools)
        elif isinstance(args, Config | None):
            config = (args or Config()).model_copy(deep=True)
        else:
            raise UserError(f"args is a {type(args).__name__}; give a trl.GRPOConfig, or what load_config returns.")
        asked, name = config.trainer.algorithm.name, type(self).__dict__.get("recipe_name", type(self).__name__)
        if asked not in ("grpo", name, self.recipe_name):
            raise UserError(f"trainer.algorithm.name={asked}, but this is {type(self).__name__}: take that one's.")
        config.trainer.algorithm.name = name
        return config

    @property
    def state(self) -> TrainerState:
        """As callbacks see it: `log_history` has every step's metrics."""
        return self.callbacks.state

    def train(self, resume_from_checkpoint: bool | None = None) -> StepMetrics:
        """Runs or resumes the run, as the command line does; its last step's metrics."""
        begun = (self.config.run_path / "checkpoints").exists()
        if resume_from_checkpoint not in ((None, True) if begun else (None, True, False)):
            raise UserError("resume_from_checkpoint: a run goes on from its newest one, or has another output_dir.")
        for name, function in self.functions.items():  # another trainer's may have this name
            register_reward(name)(function)
        name = self.config.trainer.algorithm.name
        if name not in ALGORITHMS.names:
            register_algorithm(name)(type(self))
        train(self.config, self, kind=ToldRun)
        return read_metrics(self.config.run_path)[-1]

    def __getattr__(self, name: str) -> Any:
        there = "train(), save_model() and state, whose log_history has evaluations"
        raise AttributeError(f"There is no {name!r} here; of TRL's there is {there}.")

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copies the last checkpoint's policy, by default into the run folder."""
        policy = self.config.run_path / "model" / "last"
        if not policy.is_dir():
            raise UserError(f"There is no policy in {policy} yet: call train() first.")
        shutil.copytree(policy, output_dir or self.config.run_path, dirs_exist_ok=True)


class PPOTrainer(GRPOTrainer, PPO):
    recipe_name = "ppo"


class SAPOTrainer(SAPOLossMixin, GRPOTrainer):
    recipe_name = "sapo"


class GSPOTrainer(GSPOLossMixin, GRPOTrainer):
    recipe_name = "gspo"


class GSPOTokenTrainer(GSPOTokenLossMixin, GRPOTrainer):
    recipe_name = "gspo_token"


class DAPOTrainer(DAPOLossMixin, GRPOTrainer):
    recipe_name = "dapo"


class DrGRPOTrainer(DrGRPOLossMixin, GRPOTrainer):
    recipe_name = "dr_grpo"


class CISPOTrainer(CISPOLossMixin, GRPOTrainer):
    recipe_name = "cispo"


class DualClipTrainer(DualClipLossMixin, GRPOTrainer):
    recipe_name = "dual_clip"


BY_LOSS: dict[str, type[GRPOTrainer]] = {
    kind.recipe_name: kind
    for kind in (GRPOTrainer, SAPOTrainer, GSPOTrainer, DAPOTrainer, DrGRPOTrainer, CISPOTrainer, DualClipTrainer)
}


def _take_rewards(config: Config, given: RewardFunctions | None, weights: Any, state: TrainerState) -> dict[str, Any]:
    functions: list[Any] = list(given or ()) if isinstance(given, list | tuple | Mapping | None) else [given]
    functions = [RewardModel(each) if isinstance(each, str | PreTrainedModel) else each for each in functions]
    if bad := [each for each in functions if not callable(each) or hasattr(each, "forward")]:
        raise UserError(f"reward_funcs has {bad[0]!r:.60}; these trainers take functions and reward models.")
    for model in [each for each in functions if isinstance(each, RewardModel)]:
        model.load()  # a wrong name is told now
    names = [getattr(each, "__name__", type(each).__name__) for each in functions]
    if len(set(names)) < len(names):
        raise UserError(f"reward_funcs has two functions of one name ({', '.join(names)}); rename one of them.")
    if weights and len(weights) != len(names):
        raise UserError(f"GRPOConfig.reward_weights has {len(weights)} weights for {len(names)} reward functions.")
    own = given.values() if isinstance(given, Mapping) else weights or ()
    if wrong := [each for each in own if not isinstance(each, Real)]:
        raise UserError(f"reward_funcs: {wrong[0]!r:.60} is no weight.")
    settings = config.trainer.algorithm
    taken = {name: with_columns(name, function, state) for name, function in zip(names, functions, strict=True)}
    for name, function in taken.items():
        register_reward(name)(function)
    settings.reward_funcs = dict.fromkeys(names, 1.0) | settings.reward_funcs | dict(zip(names, own, strict=False))
    return taken


# trls: whether rows are TRL's, or ours. Data without an end is read as far as the run can go.
def _take_data(config: Config, folder: Path, train: Any, held_out: Any, trls: bool, speaks: bool) -> None:
    most = config.trainer.max_steps * config.trainer.train_batch_size
    for name, given in (("train", train), ("val", held_out)):
        if given is None:
            continue
        path = folder / "data" / f"{name}.jsonl"
        rows = isinstance(given, list) and any(isinstance(x, list | dict) and "env" not in x for x in given)
        if isinstance(given, str | Path | list) and not rows:
            source = given if isinstance(given, list) else [str(given)]
        elif trls:
            source = [write_rows(path, name, given, None if hasattr(given, "__len__") else most, speaks)]
        else:
            if not hasattr(given, "to_json"):
                raise UserError(f"{name} data is a {type(given).__name__}: give sources' names, or a datasets.Dataset.")
            path.parent.mkdir(parents=True, exist_ok=True)
            (given if hasattr(given, "__len__") else given.take(most)).to_json(path)
            source = [str(path)]
        setattr(config.data, f"{name}_data", source)
    if trls and held_out is None:  # there is always a last evaluation
        config.data.val_data, config.data.val_size = config.data.train_data, 1
