"""Reward models: what a sequence classifier says of a whole conversation, against transformers one by one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from skyrl_trainer import GRPOTrainer, load_config
from skyrl_trainer.algorithms.rewards import Rewards, register_reward
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.reward_model import READ_AT_ONCE, RewardModel
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Sample, Trajectory, Turn
from tests.trainer.fakes import tiny_policy, tiny_tokenizer


def save_reward_model(folder: Path, outputs: int = 1) -> str:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_labels=outputs, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_reward_model(tmp_path_factory.mktemp("rewards") / "likes-0.1B")


def without_tokenizer(folder: Path) -> str:
    save_reward_model(folder)
    for file in folder.glob("*token*"):
        file.unlink()
    return str(folder)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PROMPTS = [[user(f"{n} + {n} = ?")] for n in range(READ_AT_ONCE + 3)]
COMPLETIONS = [[said("x" * n), user("And?"), said("12")] if n % 2 else [said("12" * n)] for n in range(len(PROMPTS))]


@torch.no_grad()
def score(path: str, text: str) -> float:
    model = Qwen3ForSequenceClassification.from_pretrained(path, num_labels=1).eval()
    return float(model(torch.tensor([tiny_tokenizer().encode(text)])).logits[0, 0])


def test_it_scores_conversations_of_any_length_as_one_by_one(path: str) -> None:
    found = RewardModel(path)(prompts=PROMPTS, completions=COMPLETIONS, level=[1] * len(PROMPTS))
    whole = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    texts = [tiny_tokenizer().apply_chat_template(each, tokenize=False) for each in whole]
    assert found == pytest.approx([score(path, text) for text in texts], abs=1e-5)
    assert len(set(found)) == len(found)
    loaded = Qwen3ForSequenceClassification.from_pretrained(path)
    assert RewardModel(loaded)(prompts=PROMPTS, completions=COMPLETIONS) == found


def test_a_tokenizer_that_begins_every_text_puts_no_second_beginning_before_one(path: str, tmp_path: Path) -> None:
    """As Llama's does, whose template has it already."""
    shutil.copytree(path, tmp_path / "begins")
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(tmp_path / "begins" / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(tmp_path / "begins").encode("12")[0] == 0
    scores = [RewardModel(each)(prompts=PROMPTS, completions=COMPLETIONS) for each in (path, tmp_path / "begins")]
    assert scores[0] == scores[1]


def test_texts_are_read_as_texts(path: str) -> None:
    found = RewardModel(path)(prompts=["12 + 34 = ", "a"], completions=["46", "bcd"])
    assert found == pytest.approx([score(path, "12 + 34 = 46"), score(path, "abcd")], abs=1e-5)


def test_a_run_asks_it_by_its_name(path: str) -> None:
    register_reward("likes")(RewardModel(path))
    config = Config()
    config.trainer.algorithm.reward_funcs = {"likes": 1.0}
    turn = Turn([1], [5, 6], [0.0, 0.0], [0, 0], "46", reward=1.0, terminated=True)
    tried = Trajectory("1/0/0", Sample("a#0", "skyrl/text_math-v0", 0), 0, 7, [turn], prompt=[user("12 + 34 = ?")])
    Rewards(config, overlong_filter=False).judge([tried])
    text = tiny_tokenizer().apply_chat_template([user("12 + 34 = ?"), said("46")], tokenize=False)
    assert tried.scores["likes"] == pytest.approx(score(path, text), abs=1e-5)


def test_a_script_of_trls_gives_one_by_name_or_loaded(path: str, tmp_path: Path) -> None:
    loaded = Qwen3ForSequenceClassification.from_pretrained(path)
    for given in (path, f"{path}/", loaded, [path], {path: 1.0}):
        trainer = GRPOTrainer("tiny", given, load_config("quickstart", [f"trainer.run_dir={tmp_path}"]), "text_math")
        assert trainer.config.trainer.algorithm.reward_funcs == {"likes-0.1B": 1.0}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (tiny_policy, "its files lack score.weight"),
        (lambda folder: save_reward_model(folder, outputs=3), "its files lack score.weight of one output"),
        (lambda folder: f"{folder}/nothing", ""),
        (without_tokenizer, "it has no tokenizer"),
    ],
    ids=["a policy", "three outputs", "nothing", "no tokenizer"],
)
def test_what_is_no_reward_model_is_a_sentence(make: Any, why: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    with pytest.raises(UserError, match=rf"^The reward model '{path}' cannot be used: .*({why}).*\.$"):
        RewardModel(path).load()


def test_a_loaded_model_with_several_outputs_is_refused(tmp_path: Path) -> None:
    loaded = Qwen3ForSequenceClassification.from_pretrained(save_reward_model(tmp_path / "three", outputs=3))
    with pytest.raises(UserError, match="it has 3 outputs, and a reward is one"):
        RewardModel(loaded).load()
