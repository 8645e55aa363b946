"""TRL's arguments: every field of its config is honoured, or refused by its name; columns, models, callbacks."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import pickle
import re
import threading
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, get_peft_model
from ray import cloudpickle
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig

import skyrl_trainer
from skyrl_trainer import (
    DAPOTrainer,
    DualClipTrainer,
    GRPOTrainer,
    GSPOTokenTrainer,
    GSPOTrainer,
    PPOTrainer,
    SAPOTrainer,
)
from skyrl_trainer.algorithms.rewards import call, reward_function
from skyrl_trainer.config import load_config
from skyrl_trainer.data import load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_worker import EnvWorker
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.run import Run
from skyrl_trainer.run.trl_arguments import loss_name, table
from skyrl_trainer.run.trl_callbacks import Callbacks, ToldRun
from skyrl_trainer.settings import Config, leaf_fields
from skyrl_trainer.types import Sample, StopReason, Trajectory, Turn
from tests.trainer.learner.tiny_models import save_model

FIELDS = [field.name for field in dataclasses.fields(GRPOConfig)]
ROWS = Dataset.from_dict({"prompt": [f"{n} + 1 = ?" for n in range(40)], "solution": [str(n + 1) for n in range(40)]})


def score(completions: Any, **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def half(x: float) -> float:
    """Halves a number."""
    return x / 2


def peft_model() -> Any:
    return get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))  # type: ignore


def with_adapter() -> Any:
    """As AutoModelForCausalLM makes it of a folder with an adapter."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, num_key_value_heads=1, head_dim=8, **sizes))
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return model


def arguments(folder: Path, **given: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": str(folder), "use_cpu": True, "bf16": False, "max_steps": 8} | given)


@cache
def usual() -> GRPOConfig:
    return arguments(Path("nowhere"))


def trainer(folder: Path, kind: type[GRPOTrainer] = GRPOTrainer, rows: Any = ROWS, **given: Any) -> GRPOTrainer:
    """Whatever TRL's config has goes there, the rest to the trainer."""
    mine = {name: given.pop(name) for name in list(given) if name not in FIELDS}
    return kind(**{"reward_funcs": score} | mine, args=arguments(folder, **given), train_dataset=rows)


def settings(folder: Path, **given: Any) -> Config:
    return trainer(folder, **given).config


# The table.


def test_the_table_speaks_of_fields_and_settings_that_there_are() -> None:
    known, ours = table(), set(leaf_fields())
    sections = (known["same"], known["options"], known["translated"], known["either"], known["values"])
    names = [name for section in sections for name in section]
    assert len(names) == len(set(names)) and set(names) <= set(FIELDS)
    for settings in [*known["same"].values(), *(setting for setting, _ in known["translated"].values())]:
        for setting in settings.split(", "):
            assert setting in ours or setting.startswith("trainer.algorithm.options."), setting
    assert set(known["losses"].values()) <= {kind.recipe_name for kind in GRPOTrainer.__subclasses__()} | {"grpo"}


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs/agents/your-script.md").read_text()
    shown = re.findall(r"^\| `(\w+)` \| (?:also )?(`[\w.`, ]+`|any value|`.+`) \| ?(.*) \|$", page, re.MULTILINE)
    known = table()
    rows = {name: (f"`{setting}`", "") for name, setting in known["same"].items()}
    rows |= {name: (f"`trainer.algorithm.options.{name}`", "") for name in known["options"]}
    rows |= {name: (f"`{setting}`", note) for name, (setting, note) in known["translated"].items()}
    rows |= {name: ("any value", why) for name, why in known["either"].items()}
    rows |= {name: (", ".join(f"`{value}`" for value in values), "") for name, values in known["values"].items()}
    assert {name: (setting, note) for name, setting, note in shown if name in FIELDS} == rows


OTHER: dict[str, Any] = {
    "max_steps": 12,
    "num_train_epochs": 2.0,
    "output_dir": "elsewhere",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 1},
    "warmup_steps": 3,
    "report_to": ["tensorboard"],
    "loss_type": "sapo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "reward_weights": [0.5],
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "no",
    "save_total_limit": 3,
    "run_name": "mine",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_max_model_length": 3000,
    "max_tool_calling_iterations": 3,
    "max_completion_length": 32,
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 3,
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "chat_template_kwargs": {"enable_thinking": False},
    "delta": 4.0,
    "epsilon_high": 0.3,
}
BESIDE: dict[str, dict[str, Any]] = {
    "num_train_epochs": {"max_steps": -1},
    "importance_sampling_level": {"loss_type": "grpo"},
    "delta": {"loss_type": "grpo"},
    "sapo_temperature_pos": {"loss_type": "sapo"},
    "sapo_temperature_neg": {"loss_type": "sapo"},
    "eval_steps": {"eval_strategy": "steps"},
    "use_bias_correction_kl": {"beta": 0.1},
    "vllm_importance_sampling_clip_max": {"vllm_importance_sampling_mode": "token_mask"},
    "vllm_importance_sampling_clip_min": {"vllm_importance_sampling_mode": "token_mask"},
    "max_tool_calling_iterations": {"tools": [half]},
}
"""What a field needs beside it to have an effect."""
SAME_HERE = {"use_cpu"}
"""Decided by the machine."""


def changed(name: str) -> Any:
    """A value that is not TRL's default."""
    value = getattr(usual(), name)
    if name in OTHER:
        return OTHER[name]
    if name in table()["values"]:
        return table()["values"][name][0]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float | int):
        return value / 2 if isinstance(value, float) and value else value + 1
    return 0.5 if value is None else "other"


HONOURED = [*table()["same"], *table()["options"], *table()["translated"]]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder, and the settings in it with what a field needs beside it and without the field, made once each."""
    folder, made = tmp_path_factory.mktemp("without"), dict[str, Config]()

    def before(beside: dict[str, Any]) -> tuple[Path, Config]:
        return folder, made.get(str(beside)) or made.setdefault(str(beside), settings(folder, **beside))

    return before


@pytest.mark.parametrize("name", sorted(set(HONOURED) - SAME_HERE))
def test_an_honoured_field_changes_the_settings(name: str, without: Any) -> None:
    beside = BESIDE.get(name, {})
    folder, before = without(beside)
    value = folder / "b" if name == "output_dir" else changed(name)
    assert settings(folder, **beside | {name: value}) != before, f"{name} changes nothing"


@pytest.mark.parametrize("name", sorted(set(FIELDS) - set(HONOURED)))
def test_any_other_field_is_refused_by_its_name_or_makes_no_difference(name: str, tmp_path: Path) -> None:
    """As an object is what a script has, the value is put into it: TRL itself refuses some at once."""
    args, kept = copy.copy(usual()), name in table()["either"] or name in table()["values"]
    args.output_dir = str(tmp_path)
    before = GRPOTrainer(None, score, args, ROWS).config if kept else None
    object.__setattr__(args, name, changed(name))
    if kept:
        assert GRPOTrainer(None, score, args, ROWS).config == before
    else:
        with pytest.raises(UserError, match=rf"^GRPOConfig\.{name} is .*: leave it at") as raised:
            GRPOTrainer(None, score, args, ROWS)
        assert "\n" not in str(raised.value)


def test_the_default_of_every_field_is_taken(tmp_path: Path) -> None:
    config = settings(tmp_path, max_steps=-1)
    assert (config.trainer.algorithm.name, config.trainer.max_steps) == ("dapo", 3 * 40)
    assert config.trainer.algorithm.options["sampler"] == "uniform", "TRL's dapo draws no groups again"
    assert config.trainer.algorithm.options["epsilon_high"] == config.trainer.algorithm.options["epsilon"] == 0.2


@pytest.mark.parametrize(
    "given, ours",
    [  # prompts, mini-batches, rollouts
        ({}, (1, 1, 8)),
        ({"per_device_train_batch_size": 16, "num_generations": 4}, (4, 1, 8)),
        ({"gradient_accumulation_steps": 4}, (4, 1, 8)),
        ({"steps_per_generation": 4}, (4, 4, 2)),
        ({"steps_per_generation": 4, "num_iterations": 2, "max_steps": 9}, (4, 4, 2)),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, (2, 1, 8)),
        ({"generation_batch_size": 16, "max_steps": -1, "num_train_epochs": 1}, (2, 2, 20)),
        ({"gradient_accumulation_steps": 16, "max_steps": -1, "num_train_epochs": 1.5}, (16, 1, 3)),
    ],
)
def test_batches_and_steps_are_trls(given: dict[str, Any], ours: tuple[int, int, int], tmp_path: Path) -> None:
    """An optimizer step has as many completions, and an epoch as many of them, as TRL's sampler makes."""
    config = settings(tmp_path, **given).trainer
    assert (config.train_batch_size, config.num_mini_batches, config.max_steps) == ours
    args = arguments(tmp_path, **given)
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert config.train_batch_size * args.num_generations == step * config.num_mini_batches
    if args.max_steps > 0:
        assert 0 <= config.max_steps * config.num_mini_batches * config.num_iterations - args.max_steps < 8


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"loss_type": "luspo"}, "luspo token; there are dapo token; grpo token"),
        ({"max_steps": -1, "rows": "owner/name"}, "max_steps is needed: the length .*not known"),
        ({"max_steps": -1, "rows": ["a.jsonl"]}, "max_steps is needed: the length .*not known"),
        (
            {"max_steps": -1, "rows": ROWS.select([0, 1]), "gradient_accumulation_steps": 4},
            "is 2, and a step has 4 prompts",
        ),
        ({"max_grad_norm": 0.0}, r"trainer.max_grad_norm is 0.0 \(GRPOConfig\), but should be greater than 0"),
        ({"max_completion_length": None}, "max_completion_length is null"),
        ({"report_to": ["wandb", "tensorboard"]}, "trainer.logger is"),
        ({"save_strategy": "best"}, "GRPOConfig.save_strategy is 'best'; here it can be no or steps or epoch"),
        ({"per_device_train_batch_size": 24, "generation_batch_size": None, "num_generations": 12}, None),
        ({"delta": 2.0}, "dapo token delta; there are"),
        ({"sapo_temperature_pos": 2.0}, "GRPOConfig.sapo_temperature_pos is 2.0, which DAPOTrainer has no use for"),
        ({"vllm_importance_sampling_clip_max": 2.0}, "'sequence_mask' with a range of its own"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 weights for 1 reward functions"),
        ({"reward_funcs": None}, "reward_funcs is needed"),
        ({"rows": None}, "train_dataset is needed: only environments bring"),
        ({"reward_funcs": "/no/model"}, "The reward model ./no/model. cannot be used: "),
        ({"rollout_func": print}, "rollout_func is nothing that these trainers take"),
        ({"optimizers": (object(), None)}, "optimizers is nothing that these trainers take"),
        ({"rows": {"train": ROWS}}, "train data is a dict of str; give one Dataset"),
        ({"rows": [["a", "b"]]}, "train data is a list of list; give one Dataset"),
        ({"rows": iter([{"prompt": "a", "picture": b"x"}])}, "Row 0 of train holds what JSON cannot .*bytes"),
        ({"model": "tiny", "processing_class": object()}, "processing_class cannot be taken with model='tiny'"),
        (
            {"model": "some/model", "processing_class": "name"},
            "processing_class is a str; these trainers take",
        ),
        (
            {"model": with_adapter()},
            r"of type Qwen3ForCausalLM; .* a model of transformers without adapters",
        ),
        ({"model": peft_model()}, "model is of type PeftModel; give a name, a folder, or a model of transformers"),
        (
            {"reward_funcs": torch.nn.Linear(1, 1)},
            "reward_funcs has Linear.*; these trainers take functions and reward models",
        ),
        ({"reward_funcs": 3}, "reward_funcs has 3; these trainers take functions and reward models"),
        ({"reward_funcs": []}, "reward_funcs is needed"),
        ({"reward_funcs": {len: "much"}}, "reward_funcs: .much. is no weight"),
        ({"model": object()}, "model is of type object; give a name, a folder, or a model of transformers"),
    ],
)
def test_what_cannot_be_is_one_sentence(given: dict[str, Any], sentence: str | None, tmp_path: Path) -> None:
    if sentence is None:
        assert settings(tmp_path, **given).trainer.train_batch_size == 2
        return
    with pytest.raises(UserError, match=sentence):
        trainer(tmp_path, **given)


def test_none_is_no_callback_and_no_tool(tmp_path: Path) -> None:
    """TRL's own default of both."""
    assert settings(tmp_path, callbacks=None, tools=None) == settings(tmp_path)


def test_a_script_leaves_the_files_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Its env workers read them when they start again."""
    made = trainer(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with RunFolder(made.config), pytest.raises(UserError, match="is in use by process"):
        trainer(tmp_path, rows=Dataset.from_list([{"prompt": "another"}]))
    assert {path: path.read_bytes() for path in before} == before


def test_a_learner_of_several_makes_its_trainer_while_the_run_holds_the_folder(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with RunFolder(made.config):
        assert type(made)(made.config).config == made.config


def test_a_run_goes_on_by_itself_and_from_nowhere_else(tmp_path: Path) -> None:
    for given in (False, "checkpoint-100"):
        made = trainer(tmp_path)
        (made.config.run_path / "checkpoints").mkdir(exist_ok=True)
        with pytest.raises(UserError, match="resume_from_checkpoint: a run goes on from its newest one"):
            made.train(resume_from_checkpoint=given)
    with pytest.raises(UserError, match="has no expert to clone"):  # it goes on to the start: nothing has begun there
        trainer(tmp_path / "new", model="tiny").train(resume_from_checkpoint=False)


def test_other_rows_do_not_go_on_in_a_run_that_has_begun(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    (made.config.run_path / "checkpoints").mkdir()
    assert trainer(tmp_path).config.data == made.config.data
    kept = Path(made.config.data.train_data[0]).read_text()
    with pytest.raises(UserError, match=r"began with other rows: give another output_dir\.$"):
        trainer(tmp_path, rows=Dataset.from_list([{"prompt": "Other", "answer": "1"}] * 8))
    assert Path(made.config.data.train_data[0]).read_text() == kept
    assert [file.name for file in Path(made.config.data.train_data[0]).parent.iterdir()] == ["train.jsonl"]


def test_a_longer_run_reads_more_of_data_without_an_end(tmp_path: Path) -> None:
    def rows() -> Any:
        yield from ({"prompt": f"{number}"} for number in range(1000))

    endless = IterableDataset.from_generator(rows)
    made = trainer(tmp_path, rows=endless)
    (made.config.run_path / "checkpoints").mkdir()
    files = [Path(trainer(tmp_path, rows=endless, max_steps=n).config.data.train_data[0]) for n in (8, 16, 4)]
    assert len(files[0].read_text().splitlines()) > 1


def test_a_row_without_a_prompt_is_named_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Row 0 of train has no 'prompt'; it has question, answer\.$"):
        trainer(tmp_path, rows=Dataset.from_list([{"question": "1+1", "answer": "2"}] * 8))


def test_an_environment_alone_must_give_a_reward(tmp_path: Path) -> None:
    class Silent:
        def reset(self, **columns: Any) -> str:
            return "Begin."

    for given in (Silent, {"silent": Silent}):
        with pytest.raises(UserError, match="Nothing gives a reward: give reward_funcs, or the environment a method"):
            trainer(tmp_path, rows=None, reward_funcs=None, environment_factory=given)
    assert trainer(tmp_path, environment_factory=Silent).config.trainer.algorithm.reward_funcs


@pytest.mark.parametrize("name", ["compute_loss", "_calculate_rewards", "log"])
def test_a_subclass_that_overrides_what_nobody_calls_is_refused(tmp_path: Path, name: str) -> None:
    kind = type("Mine", (GRPOTrainer,), {name: lambda self, *given, **named: None, "recipe_name": "mine"})
    with pytest.raises(UserError, match=rf"^{name} is not called here; docs"):
        trainer(tmp_path, kind)


def test_what_a_script_of_trls_looks_for_in_vain_is_told(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with pytest.raises(AttributeError, match=r"no 'evaluate' here; of TRL's there is train\(\), save_model\(\)"):
        made.evaluate()
    assert not hasattr(made, "push_to_hub")
    policy = made.config.run_path / "model" / "last"
    policy.mkdir(parents=True)
    (policy / "model.safetensors").write_bytes(b"weights")
    made.save_model()
    assert (made.config.run_path / "model.safetensors").read_bytes() == b"weights"


def test_the_context_is_the_models_up_to_4096(tmp_path: Path) -> None:
    assert trainer(tmp_path / "a").config.generator.max_model_len == 4096
    assert trainer(tmp_path / "b", max_completion_length=3000).config.generator.max_model_len == 6000
    assert trainer(tmp_path / "c", vllm_max_model_length=700).config.generator.max_model_len == 700
    assert trainer(tmp_path / "e", model="nobody/has-downloaded-this").config.generator.max_model_len == 4096
    few = save_model(tmp_path / "model", max_position_embeddings=2048)
    assert trainer(tmp_path / "d", model=few).config.generator.max_model_len == 2048


def test_other_arguments_than_these_are_refused() -> None:
    with pytest.raises(UserError, match=r"args is a dict; give a trl\.GRPOConfig, or what load_config returns"):
        GRPOTrainer(args={})


# The loss.


@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"loss_type": "grpo", "delta": 3.0},
    ],
    ids=lambda given: f"{loss_name(GRPOConfig('x', use_cpu=True, **given))}-{given.get('scale_rewards', 'default')}",
)
def test_grpo_trainer_is_the_trainer_of_trls_loss(given: dict[str, Any], tmp_path: Path) -> None:
    """Its options are TRL's values; one that the arguments do not have keeps our default."""
    made, args = trainer(tmp_path, **given), arguments(tmp_path, **given)
    assert type(made).recipe_name == made.config.trainer.algorithm.name == loss_name(args)
    options = made.config.trainer.algorithm.options
    assert all(getattr(args, name) in (value, None) for name, value in options.items() if name in FIELDS)
    again = pickle.loads(cloudpickle.dumps(made))  # as other learners have it
    assert (type(again), again.options.model_dump()) == (type(made), made.options.model_dump())


class Mine(GRPOTrainer):
    """With a loss of its own."""


def test_the_other_trainers_keep_their_own_defaults(tmp_path: Path) -> None:
    assert trainer(tmp_path, GSPOTrainer).options.epsilon == 3e-4
    assert trainer(tmp_path, DAPOTrainer).options.sampler == "dynamic"
    assert trainer(tmp_path, DAPOTrainer, epsilon_high=0.3).options.epsilon_high == 0.3
    assert trainer(tmp_path, PPOTrainer).config.trainer.algorithm.name == "ppo"
    as_trl_has_it = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    assert trainer(tmp_path, GSPOTrainer, **as_trl_has_it).options.epsilon == 3e-4
    assert trainer(tmp_path, GSPOTrainer, importance_sampling_level="sequence").options.epsilon == 3e-4
    assert trainer(tmp_path, DualClipTrainer, loss_type="grpo", delta=4.0).options.delta == 4.0
    assert (
        trainer(tmp_path, DualClipTrainer, loss_type="grpo").options.delta
        == trainer(tmp_path, DualClipTrainer).options.delta
    )
    with pytest.raises(UserError, match=r"GRPOConfig\.delta is 4\.0, which Mine has no use for"):
        trainer(tmp_path, Mine, loss_type="grpo", delta=4.0)
    for kind, level in ((DAPOTrainer, "sequence"), (GSPOTrainer, "sequence_token"), (GSPOTokenTrainer, "sequence")):
        with pytest.raises(UserError, match=rf"importance_sampling_level is '{level}', which these trainers cannot do"):
            trainer(tmp_path, kind, importance_sampling_level=level)
    for kind, loss in ((Mine, "dr_grpo"), (Mine, "bnpo"), (DAPOTrainer, "sapo"), (PPOTrainer, "grpo")):
        with pytest.raises(UserError, match=rf"GRPOConfig\.loss_type is '{loss}', which these trainers cannot do"):
            trainer(tmp_path, kind, loss_type=loss)
    with pytest.raises(UserError, match=r"GRPOConfig\.epsilon is 0\.1, which SAPOTrainer has no use for"):
        trainer(tmp_path, SAPOTrainer, epsilon=0.1)


def test_another_algorithm_in_the_settings_than_the_trainers_is_refused(tmp_path: Path) -> None:
    def made(kind: type[GRPOTrainer], name: str) -> str:
        words = [f"trainer.run_dir={tmp_path}", f"trainer.algorithm.name={name}"]
        return kind("tiny", args=load_config("quickstart", words)).config.trainer.algorithm.name

    assert made(SAPOTrainer, "sapo") == made(SAPOTrainer, "grpo") == "sapo"
    mine = type("Mine", (SAPOTrainer,), {})
    assert {made(mine, "sapo"), made(mine, "Mine"), made(mine, "grpo")} == {"Mine"}, "the name of what it is made of"
    for kind, name in ((GRPOTrainer, "sapo"), (DAPOTrainer, "sapo"), (GRPOTrainer, "nonsense")):
        with pytest.raises(UserError, match=rf"^trainer.algorithm.name={name}, but this is {kind.__name__}: take"):
            made(kind, name)


@pytest.mark.parametrize("options", [{}, {"gae_lambda": 0.9}])
def test_gae_without_a_critic_is_refused_before_anything_starts(tmp_path: Path, options: dict[str, Any]) -> None:
    words = [f"trainer.run_dir={tmp_path / 'run'}", "trainer.algorithm.advantage_estimator=gae"]
    config = load_config("quickstart", [*words, f"trainer.algorithm.options={json.dumps(options)}"])
    for kind in (GRPOTrainer, SAPOTrainer):
        with pytest.raises(UserError, match=r"advantage_estimator=gae needs a critic: take .*, or PPOTrainer\.$"):
            kind(args=config)
    assert not (tmp_path / "run").exists()


def test_every_registered_algorithm_has_a_trainer() -> None:
    from skyrl_trainer.learner.compose import ALGORITHMS

    kinds = [getattr(skyrl_trainer, name) for name in skyrl_trainer.__all__ if name.endswith("Trainer")]
    assert {kind.recipe_name for kind in kinds} >= set(ALGORITHMS.built_in)


def test_masks_of_importance_sampling_may_have_no_upper_end(tmp_path: Path) -> None:
    given = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5}
    made = trainer(tmp_path, **given, vllm_importance_sampling_clip_max=None)
    assert made.correction_range == ("mis", 0.5, 1e9)


def test_adapters_are_pefts(tmp_path: Path) -> None:
    config = settings(tmp_path, peft_config=LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM"))
    lora = config.trainer.policy.model.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 8.0, ["q_proj", "v_proj"])
    qlora = load_config("quickstart", [f"trainer.run_dir={tmp_path}", "trainer.policy.model.lora.quantization=nf4"])
    lora = GRPOTrainer("tiny", args=qlora, peft_config=LoraConfig(r=4)).config.trainer.policy.model.lora
    assert (lora.rank, lora.quantization) == (4, "nf4"), "which peft has no word for"
    given = LoraConfig(target_modules="all-linear")
    assert settings(tmp_path, peft_config=given).trainer.policy.model.lora.target_modules == "all-linear"
    with pytest.raises(UserError, match=r"LoraConfig\.lora_dropout is 0\.1, which these trainers cannot do"):
        trainer(tmp_path, peft_config=LoraConfig(lora_dropout=0.1))
    with pytest.raises(UserError, match=r'lora\.target_modules is ".*q_proj" \(LoraConfig\), but should be'):
        trainer(tmp_path, peft_config=LoraConfig(target_modules=r".*\.q_proj"))
    with pytest.raises(UserError, match="peft_config is a dict"):
        trainer(tmp_path, peft_config={})


def test_other_learners_get_the_trainer_without_what_stays_in_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks and reward functions may hold what cannot be sent; here they go on."""
    callback: Any = TrainerCallback()
    callback.lock = threading.Lock()
    made: Any = trainer(tmp_path, callbacks=[callback])
    made.ours, made.config.trainer.placement.policy_num_nodes = 10.0, 2
    run, group = Run.__new__(Run), Mock()
    run.config, run.alone, run.stack = made.config, made, Mock()
    monkeypatch.setattr("skyrl_trainer.run.run.load", lambda name: group)
    run._start_learner("model", 1)
    (_, sent, *_), _ = group.call_args
    again = pickle.loads(cloudpickle.dumps(sent))
    assert (type(again), again.ours) == (type(made), 10.0) and not again.callbacks and not again.functions
    assert made.state.log_history == [] and made.functions, "as it was"


# Rows and columns.


def tried(sample: Sample, *said: str) -> Trajectory:
    turns = [Turn([1, 2], [5, 6], [-1.0] * 2, [0] * 2, text, "and?", 0.0) for text in said]
    task = sample.options["task"]
    return Trajectory("1/0/0", sample, 0, 0, turns, StopReason.TERMINATED, prompt=task["prompt"])


def columns_of(folder: Path, rows: Any, *said: str, **given: Any) -> dict[str, Any]:
    """What a reward function is called with, for the first rows and these answers."""
    got: dict[str, Any] = {}

    async def judge(**columns: Any) -> list[float]:
        await asyncio.sleep(0)
        got.update(columns)
        return [1.0] * len(columns["prompts"])

    made = trainer(folder, rows=rows, reward_funcs=[judge], **given)
    config = made.config
    samples = load_samples(config.data.train_data, config.environment.env_class, env_file=config.environment.env_file)
    assert call("judge", reward_function("judge"), [tried(sample, *said) for sample in samples[:2]])
    assert got.pop("trainer_state") is made.state
    return got


def test_a_function_gets_every_column_of_the_data_set(tmp_path: Path) -> None:
    got = columns_of(tmp_path, ROWS, "1")
    assert got["prompts"] == ["0 + 1 = ?", "1 + 1 = ?"] and got["completions"] == ["1", "1"]
    assert (got["solution"], got["completion_ids"]) == (["1", "2"], [[5, 6], [5, 6]])
    talks = [{"prompt": [{"role": "user", "content": f"q{n}"}], "ground_truth": n, "task": f"t{n}"} for n in range(3)]
    got = columns_of(tmp_path, Dataset.from_list(talks), "a", "b", tools=[half])
    assert got["prompts"][1] == [{"role": "user", "content": "q1"}] and got["ground_truth"] == [0, 1]
    assert [message["content"] for message in got["completions"][0]] == ["a", "and?", "b"]
    assert got["task"] == ["t0", "t1"], "a column of this name is the data set's"
    got = columns_of(tmp_path, ROWS, "a", "b", tools=[half])
    assert got["completions"] == ["aand?b", "aand?b"], "all that came after the prompt, as TRL decodes it"


def test_data_without_an_end_is_read_as_far_as_the_run_goes(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows=({"prompt": f"{n}"} for n in count()), per_device_train_batch_size=16)
    [path] = made.config.data.train_data
    assert isinstance(path, str) and len(Path(path).read_text().splitlines()) == 8 * 2
    assert made.config.data.val_data == made.config.data.train_data and made.config.data.val_size == 1


def test_what_a_function_asks_for_and_cannot_have_is_refused(tmp_path: Path) -> None:
    def judged(environments: Any, **columns: Any) -> list[float]:
        return []

    with pytest.raises(UserError, match=r"'judged' asks for 'environments', .* a method get_reward"):
        trainer(tmp_path, reward_funcs=judged)


def test_weights_are_the_functions(tmp_path: Path) -> None:
    def other(**columns: Any) -> list[float]:
        return []

    made = trainer(tmp_path, reward_funcs=[score, other], reward_weights=[0.5, 2.0])
    assert made.config.trainer.algorithm.reward_funcs == {"score": 0.5, "other": 2.0}
    with pytest.raises(UserError, match="two functions of one name"):
        trainer(tmp_path, reward_funcs=[score, score])


def test_a_file_and_an_env_can_be_named_beside_trls_arguments(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ?", "solution": "2"}\n')
    got = columns_of(tmp_path, [str(tmp_path / "rows.jsonl")], "2")
    assert got["solution"] == ["2"] and got["prompts"][0] == [{"role": "user", "content": "1 + 1 = ?"}]
    config = settings(tmp_path, rows="text_math?split=train", reward_funcs=None)
    assert config.data.train_data == ["text_math?split=train"] and config.trainer.algorithm.reward_funcs == {}


def test_tools_and_environments_without_rows(tmp_path: Path) -> None:
    """The model's template shows the tools, and the environment has the say: as many empty rows as a step has."""
    made = trainer(tmp_path, rows=None, reward_funcs=None, environment_factory=Game, gradient_accumulation_steps=2)
    config = made.config
    assert (config.generator.agent.tools, config.generator.max_turns) == ("template", 512 // 8)
    samples = load_samples(config.data.train_data, config.environment.env_class, env_file=config.environment.env_file)
    assert len(samples) == 2 and samples[0].env_id == config.environment.env_class
    with pytest.raises(UserError, match="cannot be sent to another process"):
        trainer(tmp_path, environment_factory=threading.Lock())


class Game:
    def reset(self, **columns: Any) -> str:
        return "Begin."

    def move(self, to: str) -> str:
        """Moves."""
        return to

    def get_reward(self) -> float:
        return 0.0


def test_a_process_of_envs_plays_a_class_that_only_the_script_has(tmp_path: Path) -> None:
    class Ladder:
        def reset(self, goal: int, **columns: Any) -> str:
            self.height, self.goal = 0, goal
            return f" Climb to {goal}."

        def climb(self, rungs: int) -> str:
            """Climbs."""
            self.height += rungs
            return f"You are at {self.height}."

        def get_reward(self) -> float:
            return float(self.height >= self.goal)

    def look(far: bool) -> str:
        """Looks up."""
        return "Clouds." if far else "Rungs."

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}], "goal": 3}] * 2)
    config = settings(tmp_path, rows=rows, environment_factory=Ladder, tools=[look])
    environment = config.environment
    [first, _] = load_samples(config.data.train_data, environment.env_class, env_file=environment.env_file)
    calls: list[Any] = [("reset", "a", first)]
    for name, given in (("climb", {"rungs": 3}), ("look", {"far": True})):
        text = json.dumps({"name": name, "arguments": given})
        calls.append(("step", "a", f"<tool_call>{text}</tool_call>"))
    worker = EnvWorker(30.0)
    begun, climbed, looked, over = worker.call_many([*calls, ("step", "a", "There.")])
    worker.shutdown()
    assert begun.observation == "Go. Climb to 3." and len(begun.info["tools"]) == 2
    assert "You are at 3." in climbed.observation and (climbed.reward, climbed.terminated) == (1.0, False)
    assert "Clouds." in looked.observation and looked.reward == 0.0
    assert (over.terminated, over.info["success"], over.error) == (True, True, None)


# The model.


def test_a_tokenizer_stands_beside_the_model_that_it_is_given_with(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = save_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{{ messages[0].content }}"
    before = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    for model in (str(path), AutoModelForCausalLM.from_pretrained(path)):
        found = settings(tmp_path / "run", model=model, processing_class=tokenizer).trainer.policy.model.path
        assert AutoTokenizer.from_pretrained(found).chat_template == tokenizer.chat_template
        assert AutoModelForCausalLM.from_pretrained(found).config.hidden_size > 0
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == before, "the model given is as it was"
    for given in (str(path), Path(path)):
        assert settings(tmp_path / "run", model=given).trainer.policy.model.path == str(path)
    made_here = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(path).config)
    made_here.name_or_path = ""
    with pytest.raises(UserError, match="give its tokenizer as processing_class"):
        settings(tmp_path / "run", model=made_here)


def test_there_is_nothing_to_save_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no policy in .*: call train\(\) first"):
        trainer(tmp_path).save_model(tmp_path / "out")


# Callbacks.


class Stop(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        control.should_training_stop = state.global_step >= 2


class Wants(TrainerCallback):
    def __init__(self, what: str = "should_save") -> None:
        self.what = what

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        setattr(control, self.what, True)


class Epochs(TrainerCallback):
    def on_epoch_end(self, *given: Any, **known: Any) -> None: ...


class Fails(TrainerCallback):
    def on_save(self, *given: Any, **known: Any) -> None:
        raise KeyError("where")


def test_callbacks_are_told_and_may_ask_for_the_end_only(tmp_path: Path) -> None:
    callbacks = Callbacks([Stop, Stop()], "args")
    callbacks.state.global_step = 2
    callbacks.tell("on_log", logs={})
    assert callbacks.control.should_training_stop
    with pytest.raises(UserError, match="Wants sets should_evaluate; only should_training_stop has an effect"):
        Callbacks([Wants("should_evaluate")], None).tell("on_step_end")
    with pytest.raises(UserError, match=r"Epochs.on_epoch_end is never called; there are on_init_end"):
        trainer(tmp_path, callbacks=[Epochs])
    with pytest.raises(UserError, match=r"Fails.on_save failed: KeyError: 'where' \(.*test_trl_arguments.py, line \d+"):
        Callbacks([Fails], None).tell("on_save")


def test_rows_of_ours_are_ours_where_the_configuration_is(tmp_path: Path) -> None:
    """A Config of ours keeps its env; its data sets have our rows."""
    rows = Dataset.from_list([{"prompt": "1 + 1 = ?", "ground_truth": "2"}])
    made = GRPOTrainer(args=Config.model_validate({"trainer": {"run_dir": str(tmp_path)}}), train_dataset=rows)
    assert made.config.environment.env_class == "text_math"
    assert json.loads((tmp_path / "data/train.jsonl").read_text()) == {"prompt": "1 + 1 = ?", "ground_truth": "2"}


def test_rows_of_ours_without_an_end_are_read_as_far_as_the_run_can_go(tmp_path: Path) -> None:
    def endless() -> Any:
        for number in count():
            yield {"prompt": f"{number} + 1 = ?", "ground_truth": str(number + 1)}

    sizes = {"max_steps": 2, "train_batch_size": 8, "num_mini_batches": 1}
    config = Config.model_validate({"trainer": {"run_dir": str(tmp_path), **sizes}})
    GRPOTrainer(args=config, train_dataset=IterableDataset.from_generator(endless))
    lines = (tmp_path / "data/train.jsonl").read_text().splitlines()
    assert len(lines) == 16 and json.loads(lines[15])["ground_truth"] == "16"
    made = GRPOTrainer(args=config, train_dataset=tmp_path / "data/train.jsonl")
    assert made.config.data.train_data == [str(tmp_path / "data/train.jsonl")]
    for given in (("text_math",), DatasetDict(train=ROWS)):
        with pytest.raises(UserError, match=r"train data is a (tuple|DatasetDict): give sources' names"):
            GRPOTrainer(args=config, train_dataset=given)


def test_each_trainer_of_a_process_has_its_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(value: float) -> Any:
        def score(completions: Any, **columns: Any) -> list[float]:
            return [value for _ in completions]

        return score

    made = [trainer(tmp_path / str(value), reward_funcs=[constant(value)]) for value in (0.25, 0.75)]
    paid = []
    judge = lambda *_, **__: paid.extend(reward_function("score")(prompts=[], completions=["x"]))  # noqa: E731
    monkeypatch.setattr("skyrl_trainer.run.trainers.train", judge)
    monkeypatch.setattr("skyrl_trainer.run.trainers.read_metrics", lambda _: [{}])
    for each in made:
        each.train()
    assert paid == [0.25, 0.75]


@pytest.mark.parametrize("unfinished, steps", [(None, [0, 1, 2]), ({}, [0, 1])])
def test_a_run_that_goes_on_has_forgotten_who_stopped_it_and_knows_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfinished: Any, steps: list[int]
) -> None:
    """`unfinished`: the checkpoint's step will be logged again."""

    def found(run: Any, config: Config, folder: RunFolder, algorithm: Any) -> None:
        run.config, run.first_step, run.train_tasks = config, 2, range(8)
        run.checkpoint = SimpleNamespace(extra={"unfinished": unfinished})

    monkeypatch.setattr(Run, "__init__", found)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}.0}}\n' for step in range(3)))
    callbacks = Callbacks([Stop], None)
    callbacks.control.should_training_stop = True
    run = ToldRun(Config(), SimpleNamespace(path=tmp_path), SimpleNamespace(callbacks=callbacks))  # type: ignore
    assert not callbacks.control.should_training_stop
    assert [row["step"] for row in callbacks.state.log_history] == [step * run.updates for step in steps]
    monkeypatch.setattr(Run, "evaluate", lambda self, step: {"at": self.callbacks.state.global_step})
    assert run.evaluate(3) == {"at": 3 * run.updates}, "reward functions see it while they judge held-out tries"
