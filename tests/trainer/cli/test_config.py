"""Settings from recipes and overrides: what is accepted, and the sentence for what is not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.write_settings import configuration_markdown, options, recipe_schema
from skyrl_trainer.config import Config, flatten, load_config, resolve, to_yaml
from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import OPTIONS, leaf_fields

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))
RECIPES = sorted((ROOT / "packages/skyrl-trainer/skyrl_trainer/recipes").glob("*.yaml"))

SKYRL_COMMAND = r"""printf '%s\0' \
   data.train_data="['$HOME/data/gsm8k/train.parquet']" \
   data.val_data="['$HOME/data/gsm8k/validation.parquet']" \
   trainer.algorithm.advantage_estimator="grpo" \
   trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \
   trainer.strategy=fsdp2 \
   trainer.placement.colocate_all=true \
   trainer.placement.policy_num_gpus_per_node=4 \
   trainer.eval_batch_size=1024 \
   trainer.eval_before_train=true \
   trainer.eval_interval=5 \
   trainer.ckpt_interval=10 \
   generator.backend=vllm \
   generator.num_inference_engines=4 \
   generator.inference_engine_tensor_parallel_size=1 \
   generator.weight_sync_backend=nccl \
   environment.env_class=gsm8k \
   trainer.logger="wandb" \
   trainer.project_name="gsm8k" \
   trainer.run_name="gsm8k_test"
"""
"""The overrides of SkyRL's documentation (README, "Launching a Job"), comments left out, as a shell reads them."""


def refusal(recipe: str | None = None, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, list(overrides))
    return str(caught.value)


def test_overrides_of_the_skyrl_command_are_accepted_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = (
        subprocess.run(["sh", "-c", SKYRL_COMMAND], capture_output=True, text=True, check=True).stdout[:-1].split("\0")
    )
    resolved = resolve(None, words)
    values = flatten(resolved.config)
    assert len(words) == 19 and set(resolved.sources.values()) == {"command line"}
    assert {name: values[name] for name in resolved.sources} == {
        "data.train_data": ["/home/me/data/gsm8k/train.parquet"],
        "data.val_data": ["/home/me/data/gsm8k/validation.parquet"],
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "trainer.placement.colocate_all": True,
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.eval_batch_size": 1024,
        "trainer.eval_before_train": True,
        "trainer.eval_interval": 5,
        "trainer.ckpt_interval": 10,
        "generator.backend": "vllm",
        "generator.num_inference_engines": 4,
        "generator.inference_engine_tensor_parallel_size": 1,
        "generator.weight_sync_backend": "nccl",
        "environment.env_class": "gsm8k",
        "trainer.logger": "wandb",
        "trainer.project_name": "gsm8k",
        "trainer.run_name": "gsm8k_test",
    }


def test_there_are_at_most_ninety_settings_and_each_says_what_it_is() -> None:
    leaves = leaf_fields()
    assert len(leaves.keys() - {OPTIONS}) + len(options()) <= 90
    assert [name for name, field in (leaves | options()).items() if not field.description] == []


def test_the_page_and_the_schema_are_what_the_code_writes() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_markdown(), "run scripts/write_settings.py"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    starts = ("| `", "| setting", "|---")
    assert all(row.startswith(starts) and row.endswith("|") for row in rows), "a row is one line"
    assert recipe_schema() == SCHEMA, "run scripts/write_settings.py"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_an_editor_that_follows_the_schema_takes_every_recipe(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    place = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert place and (recipe.parent / place[1]).resolve() == ROOT / "docs" / "recipe.schema.json"
    jsonschema.validate(yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize(
    "recipe",
    [
        {"trainer": {"max_stepz": 3}},
        {"trainer": {"policy": {"model": {"lora": {"r": 3}}}}},
        {"generator": {"agent": {"memory": "half"}}},
        {"trainer": {"algorithm": {"options": {"epsilon": -1}}}},
    ],
)
def test_the_schema_marks_what_a_run_would_refuse(recipe: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(recipe, SCHEMA)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("trainer.learning_rate=1e-6", "trainer.learning_rate", 1e-6),
        ("trainer.learning_rate=1", "trainer.learning_rate", 1.0),
        ("trainer.eval_before_train=false", "trainer.eval_before_train", False),
        ("trainer.algorithm.options.epsilon_high=null", "trainer.algorithm.options", {"epsilon_high": None}),
        ("trainer.run_name=2026_11", "trainer.run_name", "2026_11"),
        ("trainer.run_name=a=b", "trainer.run_name", "a=b"),
        ("data.val_data=[{env: text_math, split: val}]", "data.val_data", [{"env": "text_math", "split": "val"}]),
        ("environment.env_file=~/envs.py", "environment.env_file", "/home/me/envs.py"),
        ("generator.engine_kwargs.block_size=32", "generator.engine_kwargs", {"block_size": 32}),
        (
            "trainer.optimizer_kwargs.eps=1e-7",
            "trainer.optimizer_kwargs",
            {"betas": [0.9, 0.99], "weight_decay": 0.0, "eps": 1e-7},
        ),
    ],
)
def test_values_are_yaml(monkeypatch: pytest.MonkeyPatch, override: str, name: str, value: object) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert flatten(load_config(None, [override]))[name] == value


def test_the_last_override_wins_and_an_override_beats_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer:\n  seed: 1\n  max_steps: 7\n  algorithm:\ngenerator: {num_generations: 4}\n")
    resolved = resolve(str(recipe), ["trainer.seed=2", "trainer.seed=3"])
    assert (resolved.config.trainer.seed, resolved.config.trainer.max_steps) == (3, 7)
    assert resolved.sources == {
        "trainer.seed": "command line",
        "trainer.max_steps": "mine.yaml, line 3",
        "generator.num_generations": "mine.yaml, line 5",
    }


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["lora.rank=16"], {"lora.rank": 16, "lora.alpha": 32.0}),
        (["lora={rank: 16}"], {"lora.rank": 16, "lora.alpha": 32.0}),
        (["lora.alpha=8", "lora={rank: 16}"], {"lora.rank": 16, "lora.alpha": 32.0}),
        (["lora={rank: 16}", "lora.alpha=8"], {"lora.rank": 16, "lora.alpha": 8.0}),
        (["lora={quantization: nf4}"], {"lora.rank": 32, "lora.quantization": "nf4"}),
        (["lora={rank: 16}", "lora={}"], {"lora.rank": 0}),
        (["warmstart={num_demonstrations: 5}"], {"warmstart.num_demonstrations": 5, "warmstart.epochs": 8.0}),
        (["warmstart.optimizer={muon: 1.0e-3}"], {"warmstart.optimizer": {"muon": 0.001}}),
        (["tiny.config_kwargs.hidden_size=64"], {"tiny.config_kwargs": {"hidden_size": 64}}),
        (["tiny.induction=true", "tiny={spaces: after}"], {"tiny.induction": False, "tiny.spaces": "after"}),
    ],
)
def test_a_section_is_set_by_its_entries_or_as_a_whole(overrides: list[str], settings: dict[str, Any]) -> None:
    prefix = "trainer.policy.model."
    values = flatten(load_config(None, [prefix + override for override in overrides]))
    assert {name: values[prefix + name] for name in settings} == settings


def test_each_entry_of_a_section_has_its_source(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "generator:\n  agent: {memory: window:2,\n    tools: env}\ntrainer: {algorithm: {options: {beta: 0.1}}}\n"
    )
    overrides = ["generator.agent.tools=template", "trainer.algorithm.options.epsilon=0.1"]
    assert resolve(str(recipe), overrides).sources == {
        "generator.agent.memory": "mine.yaml, line 2",
        "generator.agent.tools": "command line",
        OPTIONS: "command line",
        f"{OPTIONS}.beta": "mine.yaml, line 4",
        f"{OPTIONS}.epsilon": "command line",
    }


def test_a_config_of_when_sections_were_dictionaries_is_still_read(tmp_path: Path) -> None:
    """As such run folders have it: entries that were given, and no others."""
    recipe = tmp_path / "config.yaml"
    model = "{path: tiny, lora: {}, warmstart: {epochs: 2}}"
    trainer = f"{{resume_mode: latest, policy: {{model: {model}}}}}"
    recipe.write_text(f"trainer: {trainer}\ngenerator: {{agent: {{tools: template}}}}\n")
    config = load_config(str(recipe), [])
    made = config.trainer.policy.model
    assert (made.lora.rank, made.warmstart.epochs, config.generator.agent.tools) == (0, 2.0, "template")


def test_a_run_folders_config_is_a_recipe(tmp_path: Path) -> None:
    config = load_config(None, ["trainer.learning_rate=1e-6", "data.train_data=[{env: text_math}]"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert flatten(load_config(str(tmp_path / "config.yaml"), [])) == flatten(config)


def test_a_single_source_of_data_needs_no_list() -> None:
    given = ["data.train_data=chats.jsonl", "data.val_data={env: text_math, split: val}"]
    data = load_config(None, given).data
    assert data.train_data == ["chats.jsonl"] and data.val_data == [{"env": "text_math", "split": "val"}]
    jsonschema.validate({"data": {"train_data": "chats.jsonl", "val_data": {"env": "text_math"}}}, SCHEMA)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.max_stepz=3", "trainer.max_stepz (command line) is not a setting; did you mean trainer.max_steps?"),
        (
            "num_generations=3",
            "num_generations (command line) is not a setting; did you mean generator.num_generations?",
        ),
        (
            "trainer.resume_mode=none",
            "trainer.resume_mode (command line) can only be latest here.",
        ),
        ("trainer.seed.x=3", "trainer.seed.x (command line) is not a setting; did you mean trainer.seed?"),
        (
            "trainer.policy_mini_batch_size=4",
            "trainer.policy_mini_batch_size (command line) is not a setting; here it is "
            "trainer.num_mini_batches (trainer.train_batch_size over the size).",
        ),
        (
            "trainer.total_epochs=4",
            "trainer.total_epochs (command line) is not a setting; here it is trainer.max_steps (epochs times tasks "
            "over trainer.train_batch_size).",
        ),
        (
            "trainer.policy.optimizer_config.lr=1e-6",
            "trainer.policy.optimizer_config.lr (command line) is not a setting; here it is trainer.learning_rate "
            "(a critic's is trainer.algorithm.options.critic_learning_rate).",
        ),
        (
            "trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.algorithm.dynamic_sampling.type (command line) is not a setting; here it is "
            "trainer.algorithm.options.sampler (dynamic) and max_draws.",
        ),
        (
            "trainer.algorithm.norm_by_stdev=false",
            "trainer.algorithm.norm_by_stdev (command line) is not a setting; docs/configuration.md lists them all.",
        ),
        ("zzz=3", "zzz (command line) is not a setting; docs/configuration.md lists them all."),
        ("ray=x", "ray (command line) is a section: set one of ray.address."),
        (
            "trainer.max_steps=many",
            'trainer.max_steps is "many" (command line), but should be a valid integer.',
        ),
        ("trainer.max_steps=true", "trainer.max_steps is true (command line), but should be a valid integer."),
        ("trainer.max_steps=-1", "trainer.max_steps is -1 (command line), but should be greater than or equal to 0."),
        ("trainer.seed=-1", "trainer.seed is -1 (command line), but should be greater than or equal to 0."),
        ("generator.top_p=2", "generator.top_p is 2 (command line), but should be less than or equal to 1."),
        (
            "trainer.policy.model.warmstart.optimizer.muon=1.0",
            'trainer.policy.model.warmstart.optimizer is {"adamw": 0.001, "muon": 1.0} (command line), '
            "but should be at most 1 item.",
        ),
        (
            "trainer.policy.model.tiny.spaces=none",
            "trainer.policy.model.tiny.spaces is \"none\" (command line), but should be 'before' or 'after'.",
        ),
        ("trainer.deterministic=3", "trainer.deterministic is 3 (command line), but should be a valid boolean."),
        (
            "data.train_data=3",
            "data.train_data is 3 (command line), but should be a valid list.",
        ),
        (
            "data.train_data=[3]",
            "data.train_data is [3] (command line), but should be a valid string or a valid dictionary.",
        ),
        (
            "trainer.logger=nobody",
            "trainer.logger is \"nobody\" (command line), but should be 'tensorboard', 'wandb', 'trackio', 'mlflow', "
            "'swanlab', 'prometheus' or 'none'.",
        ),
        (
            "trainer.policy.model.warmstart.target_exact_matc=0.1",
            "trainer.policy.model.warmstart.target_exact_matc (command line) is not a setting; did you mean "
            "trainer.policy.model.warmstart.target_exact_match?",
        ),
        (
            "trainer.policy.model.warmstart={num_demonstrations: -1}",
            "trainer.policy.model.warmstart.num_demonstrations is -1 (command line), but should be greater than or "
            "equal to 0.",
        ),
        (
            "trainer.policy.model.lora={r: 8}",
            "trainer.policy.model.lora.r (command line) is not a setting; did you mean trainer.policy.model.lora.rank?",
        ),
        (
            "trainer.policy.model.lora={rank: 8, rank: 9}",
            "trainer.policy.model.lora.rank is set twice in one mapping (command line).",
        ),
        (
            "trainer.policy.model={lora: 8}",
            "The command line must hold `name: value` lines under trainer.policy.model.lora.",
        ),
        (
            "trainer.policy.model.lora=8",
            "trainer.policy.model.lora (command line) is a section: set one of trainer.policy.model.lora.rank, "
            "trainer.policy.model.lora.alpha, trainer.policy.model.lora.target_modules, "
            "trainer.policy.model.lora.quantization.",
        ),
        (
            "generator.agent.memry=full",
            "generator.agent.memry (command line) is not a setting; did you mean generator.agent.memory?",
        ),
        (
            "generator.agent={memory: half}",
            "generator.agent.memory is \"half\" (command line), but should be 'full', 'no_thinking', 'window' or "
            "'summary' or '^(window|summary):[1-9][0-9]*$'.",
        ),
        ("trainer.seed", "'trainer.seed' is not an override: write name=value, for example trainer.max_steps=10."),
        (
            "trainer.max_steps=2024-13-45",
            "The value of trainer.max_steps (command line), is not valid YAML: month must be in 1..12.",
        ),
        (
            "trainer.learning_rate=.inf",
            "trainer.learning_rate is Infinity (command line), but should be a finite number.",
        ),
        (
            "generator.episode_timeout=.inf",
            "generator.episode_timeout is Infinity (command line), but should be a finite number.",
        ),
        (
            "data.val_data=['a",
            'The value of data.val_data on the command line, "[\'a", line 1, is not valid YAML: '
            "found unexpected end of stream.",
        ),
    ],
)
def test_a_wrong_override_is_refused_in_one_sentence(override: str, sentence: str) -> None:
    assert refusal(None, override) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("generator:\n  tempratur: 1\n", "generator.tempratur (r.yaml, line 2) is not a setting; did you mean "),
        ("trainer:\n  seed: x\n", 'trainer.seed is "x" (r.yaml, line 2), but should be a valid integer.'),
        ("trainer:\n  seed: 3\n  seed: 4\n", "trainer.seed is set twice in one mapping (r.yaml, line 2)."),
        ("trainer: 3\n", "line 1, must hold `name: value` lines under trainer."),
        ("- a\n", "line 1, must hold `name: value` lines, such as `trainer:`."),
        ("trainer:\n  seed: [1\nx: 2\n", "line 3, is not valid YAML: "),
        ("trainer:\n\tseed: 1\n", "line 2, is not valid YAML: "),
    ],
)
def test_a_broken_recipe_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    assert sentence in refusal(str(recipe))


def test_a_missing_recipe_names_those_that_there_are() -> None:
    assert refusal("no-such-recipe").startswith(
        "There is no recipe 'no-such-recipe', neither as a file nor bundled (alfworld_lite, kuhn_poker, mixture, nim, "
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("generator.max_completion_length=64", "generator.max_model_len=64"),
        ("generator.max_model_len=5",),  # the canary asks for five tokens, and one more
        ("trainer.train_batch_size=2", "generator.num_generations=2", "trainer.num_mini_batches=5"),
        ("trainer.deterministic=true", "trainer.algorithm.options.correction=bypass"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: tuple[str, ...]) -> None:
    assert all(override.partition("=")[0].rpartition(".")[2] in refusal(None, *overrides) for override in overrides)


def test_every_default_is_valid_and_is_read_back() -> None:
    assert load_config(None, []) == Config()
