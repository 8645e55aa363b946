"""Cloning: tokens as a rollout makes them, a loss on the expert's words only, same seed same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_trainer.agent.prompt import load_chat_prompt
from skyrl_trainer.data import Conversation, conversation_texts, load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import segments
from skyrl_trainer.tiny.clone import clone_loss, collate, encode_conversation, micro_batches, shared_lengths, warmstart
from skyrl_trainer.tiny.init_policy import init_policy

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
SPEC = "text_math?split=train"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(out, conversation_texts(load_samples([SPEC]), 100, 0), SMALL, seed=0)
    return out


def clone(policy: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyrl_trainer.tiny.clone", "--policy", str(policy), "--out", str(out)]
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


def test_a_batch_computes_a_shared_system_message_once_and_the_same_loss(policy: Path) -> None:
    """Against transformers' own loss of each demonstration by itself, two system messages and none in one batch."""
    prompt, model = load_chat_prompt(str(policy)), AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    episodes: list[Conversation] = [
        [
            *([{"role": "system", "content": system}] if system else []),
            {"role": "user", "content": f"{n} + {n}?"},
            {"role": "assistant", "content": str(2 * n)},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "No." * n},
        ]
        for n, system in enumerate(["Be brief.", "", "Be brief.", "Answer at length.", "", "Be brief."])
    ]
    pairs = [encode_conversation(prompt, prompt._tokenizer, episode) for episode in episodes]
    shared = shared_lengths(episodes, pairs)
    assert len({tuple(ids[:n]) for (ids, _), n in zip(pairs, shared, strict=True)}) == 3
    rows = [{"input_ids": i, "labels": la, "shared": n} for (i, la), n in zip(pairs, shared, strict=True)]
    batch = collate(rows)
    assert len(batch["ids_P"]) < sum(len(ids) for ids, _ in pairs) - 10
    losses = [
        model(torch.tensor([ids]), labels=torch.tensor([labels])).loss * sum(label >= 0 for label in labels)
        for ids, labels in pairs
    ]
    model.set_attn_implementation(segments.NAME)
    assert clone_loss(model, batch).item() == pytest.approx(sum(losses).item(), rel=1e-6)
    cut = micro_batches(rows * 100)["batches"]
    assert len(cut) > 1 and sum(len(part["targets_N"]) for part in cut) == 100 * len(batch["targets_N"])


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
