"""Cloning: tokens as a rollout makes them, a loss on the expert's words only, same seed same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_trainer.agent.prompt import load_chat_prompt
from skyrl_trainer.data import Conversation, conversation_texts, load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.init_policy import init_policy
from skyrl_trainer.warmstart import encode_conversation, warmstart

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
SPEC = "text_math?split=train"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(out, conversation_texts(load_samples([SPEC]), 100, 0), SMALL, seed=0)
    return out


def clone(policy: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyrl_trainer.warmstart", "--policy", str(policy), "--out", str(out)]
    command += ["--data", SPEC, "--num-demonstrations", "64", "--epochs", "20", "--batch-size", "32", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_demonstrations_are_tokenized_as_at_rollout(policy: Path) -> None:
    prompt = load_chat_prompt(str(policy))
    tokenizer = prompt._tokenizer
    episode: Conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "\n3"},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "2"},
    ]
    ids, labels = encode_conversation(prompt, tokenizer, episode)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n\n3<|im_end|>\n"
        "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    first = prompt.first("Be brief.", "1+1?")
    action = [*tokenizer.encode("\n3"), prompt.end_of_turn_id]
    assert ids[: len(first) + len(action)] == first + action
    assert labels[: len(first) + len(action)] == [-100] * len(first) + action
    assert tokenizer.decode([label for label in labels if label >= 0]) == "\n3<|im_end|>2<|im_end|>"
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_a_clone_learns_leaves_only_a_model_and_is_the_same_each_time(policy: Path, tmp_path: Path) -> None:
    first = clone(policy, tmp_path / "a", "--learning-rate", "3e-3")
    assert first.returncode == 0, first.stderr
    loss_before, loss_after = (
        float(part.rstrip(".")) for part in first.stdout.split("loss ")[1].split(". ")[0].split(" -> ")
    )
    assert loss_after < 0.5 * loss_before
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == {path.name for path in policy.iterdir()}
    second = clone(policy, tmp_path / "b", "--learning-rate", "3e-3")
    assert second.returncode == 0, second.stderr
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_bad_input_is_one_sentence(policy: Path, tmp_path: Path) -> None:
    result = clone(policy, tmp_path / "c", "--data", "text_meth")
    assert result.returncode != 0
    assert "text_meth" in result.stderr and "Traceback" not in result.stderr
    with pytest.raises(UserError, match="no demonstrations"):
        warmstart(policy, tmp_path / "d", [])
    assert not list(tmp_path.iterdir())
