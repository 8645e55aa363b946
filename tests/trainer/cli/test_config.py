"""Settings from recipes and overrides: what is accepted, and the sentence for what is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skyrl_trainer.config import Config, configuration_markdown, flatten, leaf_fields, load_config, resolve, to_yaml
from skyrl_trainer.errors import UserError

ROOT = Path(__file__).parents[3]

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
        "trainer.strategy": "fsdp2",
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


def test_there_are_at_most_sixty_settings_and_each_says_what_it_is() -> None:
    leaves = leaf_fields()
    assert len(leaves) <= 60
    assert [name for name, field in leaves.items() if not field.description] == []


def test_the_configuration_page_is_what_the_code_writes() -> None:
    page = ROOT / "docs" / "configuration.md"
    hint = "run `python -m skyrl_trainer.config > docs/configuration.md`"
    assert page.read_text(encoding="utf-8") == configuration_markdown(), hint
    rows = page.read_text(encoding="utf-8").partition("| setting |")[2].splitlines()[2:]
    assert all(row.startswith(("| `", "## ", "| setting", "|---")) for row in rows if row), "a row is one line"


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


def test_a_run_folders_config_is_a_recipe(tmp_path: Path) -> None:
    config = load_config(None, ["trainer.learning_rate=1e-6", "data.train_data=[{env: text_math}]"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert flatten(load_config(str(tmp_path / "config.yaml"), [])) == flatten(config)


def test_a_single_source_of_data_needs_no_list() -> None:
    given = ["data.train_data=chats.jsonl", "data.val_data={env: text_math, split: val}"]
    data = load_config(None, given).data
    assert data.train_data == ["chats.jsonl"] and data.val_data == [{"env": "text_math", "split": "val"}]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.max_stepz=3", "trainer.max_stepz (command line) is not a setting; did you mean trainer.max_steps?"),
        (
            "num_generations=3",
            "num_generations (command line) is not a setting; did you mean generator.num_generations?",
        ),
        ("trainer.seed.x=3", "trainer.seed.x (command line) is not a setting; did you mean trainer.seed?"),
        ("zzz=3", "zzz (command line) is not a setting; docs/configuration.md lists them all."),
        ("ray=x", "ray (command line) is a section: set one of ray.address."),
        (
            "trainer.max_steps=many",
            'trainer.max_steps is "many" (command line), but should be a valid integer.',
        ),
        ("trainer.max_steps=true", "trainer.max_steps is true (command line), but should be a valid integer."),
        ("trainer.max_steps=-1", "trainer.max_steps is -1 (command line), but should be greater than or equal to 0."),
        ("generator.top_p=2", "generator.top_p is 2 (command line), but should be less than or equal to 1."),
        (
            "generator.backend=x",
            "generator.backend is \"x\" (command line), but should be 'vllm', 'openai_server' or 'transformers'.",
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
            "trainer.logger is \"nobody\" (command line), but should be 'tensorboard', 'wandb', 'trackio' or 'none'.",
        ),
        (
            "trainer.policy.model.warmstart.target_los=0.1",
            "trainer.policy.model.warmstart.target_los is not a setting; there are batch_size, epochs, learning_rate, "
            "num_demonstrations, target_loss.",
        ),
        (
            "trainer.policy.model.warmstart={num_demonstrations: -1}",
            "trainer.policy.model.warmstart.num_demonstrations is -1, but should be greater than or equal to 0; "
            "there are batch_size, epochs, learning_rate, num_demonstrations, target_loss.",
        ),
        ("trainer.seed", "'trainer.seed' is not an override: write name=value, for example trainer.max_steps=10."),
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
        ("trainer:\n  seed: 3\n  seed: 4\n", "trainer.seed is set twice in one recipe (r.yaml, line 2)."),
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
        "There is no recipe 'no-such-recipe', neither as a file nor bundled (alfworld_lite, mixture, quickstart, "
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("generator.max_completion_length=64", "generator.max_model_len=64"),
        ("trainer.train_batch_size=2", "generator.num_generations=2", "trainer.num_mini_batches=5"),
        ("trainer.deterministic=true", "trainer.algorithm.options.old_logprobs=rollout"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: tuple[str, ...]) -> None:
    assert all(override.partition("=")[0].rpartition(".")[2] in refusal(None, *overrides) for override in overrides)


def test_every_default_is_valid_and_is_read_back() -> None:
    assert load_config(None, []) == Config()
