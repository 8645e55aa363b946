"""Supervised fine-tuning: the loss is transformers' own, whatever the cut. Several learners: test_learner_group.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_chats, make_config, save_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from skyrl_trainer.agent.tokenizer import load_tokenizer
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import model as learner_module
from skyrl_trainer.learner.batch import Row, collate
from skyrl_trainer.learner.loading import load_model
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.learner.ranks import whole
from skyrl_trainer.learner.sft import SFTTrainer, fit, share_beginning
from skyrl_trainer.replay.recompute import load_scorer


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """A tensor whose new name is empty is left out."""
    file = folder / "model.safetensors"
    tensors = {new(name): tensor for name, tensor in load_file(file).items() if new(name)}
    save_file(tensors, file, {"format": "pt"})


def overwrite(file: Path, new: Callable[[bytes], bytes]) -> None:
    file.write_bytes(new(file.read_bytes()))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer is missing": (
        lambda folder: rename(folder, lambda name: "" if ".layers.1." in name else name),
        "its files lack model.layers.1.",
    ),
    "names of a compiled model": (lambda folder: rename(folder, "_orig_mod.{}".format), "its files lack "),
    "other sizes": (
        lambda folder: overwrite(folder / "config.json", lambda text: text.replace(b": 101", b": 99")),
        "ignore_mismatched_sizes",
    ),
    "torn": (lambda folder: overwrite(folder / "model.safetensors", lambda old: old[:5000]), "deserializing header"),
    "a pointer of Git LFS": (
        lambda folder: overwrite(folder / "model.safetensors", lambda _: b"version https://git-lfs.github.com/spec/v1"),
        "header too large",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_is_not_whole_is_a_sentence(tmp_path: Path, fault: str, tied: bool) -> None:
    """Learning would begin with random weights. A head that is the embedding need not be in the file."""
    path = save_model(tmp_path, tie_word_embeddings=tied)
    load_model(path, torch.float32)
    damage, said = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(UserError, match="could not be loaded as a causal language model") as caught:
        load_model(path, torch.float32)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("sampled", [{"temperature": 0.6, "top_p": 0.9}, {"top_k": 20, "do_sample": False}, {}])
def test_a_model_that_samples_without_saying_so_is_saved_as_it_was(
    tmp_path: Path, sampled: dict[str, Any], rank: int
) -> None:
    """transformers loads sampling values without do_sample, but does not save them. A greedy model stays greedy."""
    path = save_model(tmp_path / "base")
    generation = {"eos_token_id": [1, 2], "pad_token_id": 3, "max_length": 99, **sampled}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(generation))
    lora = {"policy": {"model": {"lora": {"rank": rank}}}}
    learner = learner_module.make_learner(make_config(trainer=lora), path, 1)
    learner.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_bytes())
    expected = generation | ({"do_sample": True} if sampled else {})
    assert saved == {**expected, "transformers_version": saved["transformers_version"]}
    ends = [tokenizer.model_ends for tokenizer in (learner.tokenizer, load_tokenizer(str(tmp_path / "out")))]
    assert ends == [[1, 2], [1, 2]], "what is served ends its answers as in training"


@pytest.mark.parametrize("text", [None, "{"])
def test_a_model_without_a_whole_tokenizer_is_a_sentence_where_it_learns_and_where_it_scores(
    tmp_path: Path, text: str | None
) -> None:
    path, file = save_model(tmp_path), tmp_path / "tokenizer.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    for load in (lambda: Learner(make_config(), path, 1), lambda: load_scorer(make_config(), path)):
        with pytest.raises(UserError, match=r"tokenizer of .* cannot be loaded: the folder holds no usable one"):
            load()


LOAD_MODEL = learner_module.load_model


def load_double(*arguments: Any) -> Any:
    return LOAD_MODEL(*arguments).double()


def gradient(learner: Learner) -> torch.Tensor:
    found = torch.cat([whole(p.grad).flatten().clone() for p in learner.parameters])
    learner.clear_gradients()
    return found


def after(trainer: SFTTrainer, rows: list[Row]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one update, which is not made."""
    seen: list[torch.Tensor] = []
    trainer.learner.step = lambda: (seen.append(gradient(trainer.learner)), 0.0)[1]  # type: ignore[method-assign]
    loss = trainer.update(rows)["loss"]
    del trainer.learner.step
    return loss, seen[0]


@pytest.mark.parametrize("system", [9, 0])
@pytest.mark.parametrize("budget", [60, 10**6])
def test_loss_and_gradient_are_the_cross_entropy_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, system: int
) -> None:
    """In float64, each chat alone and whole; ours in one micro-batch or in many, a shared beginning once."""
    path, rows = save_model(tmp_path, "gpt2"), make_chats(system)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    losses, tokens = [], sum(row.num_sampled for row in rows)
    for row in rows:
        labels_1T = torch.from_numpy(np.where(row.mask, row.token_ids, -100))[None]
        out = plain(torch.from_numpy(row.token_ids)[None], labels=labels_1T)
        losses.append(cross_entropy(out.logits[0, :-1], labels_1T[0, 1:], reduction="sum") / tokens)
        assert out.loss.item() * row.num_sampled / tokens == pytest.approx(losses[-1].item(), rel=1e-6)  # in float32
    expected = torch.stack(losses).sum()
    expected.backward()
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])

    monkeypatch.setattr(learner_module, "load_model", load_double)
    config = make_config(trainer={"micro_batch_tokens": budget, "max_grad_norm": 1e9})
    trainer = SFTTrainer(config).start(Learner(config, path, 10))
    for shared in (False, True):
        if shared:
            share_beginning(rows)
            assert {row.shared for row in rows} == {system or None}
        loss, found = after(trainer, rows)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert (found - wanted).norm() <= 1e-10 * wanted.norm()
        assert trainer.update(rows, learn=False) == {
            "loss": pytest.approx(expected.item(), rel=1e-12),
            "exact_match": 0,
        }


def test_a_shared_beginning_is_computed_once(tmp_path: Path) -> None:
    rows, config = make_chats(system=30), make_config()
    learner = Learner(config, save_model(tmp_path), 1)
    apart = collate(rows, range(len(rows)), learner.device, learner.dtype)
    share_beginning(rows)
    together = collate(rows, range(len(rows)), learner.device, learner.dtype)
    assert len(apart.ids_P) - len(together.ids_P) == 30 * (len(rows) - 1)
    assert together.prefix_S == [-1] + [0] * len(rows)
    with torch.no_grad():
        torch.testing.assert_close(learner.logprobs(apart)[0], learner.logprobs(together)[0], rtol=0, atol=1e-5)


def test_exact_match_is_the_share_of_chats_that_greedy_decoding_repeats(tmp_path: Path) -> None:
    config, rows = make_config(trainer={"learning_rate": 1e-2, "micro_batch_tokens": 60}), make_chats(count=4)
    learner = Learner(config, save_model(tmp_path), 100)
    trainer = SFTTrainer(config).start(learner)
    while trainer.update(rows[:1], learn=False)["exact_match"] < 1:
        assert learner.optimizer_steps < 100
        trainer.update(rows[:1])
    repeated = []
    with torch.no_grad():
        for row in rows:
            greedy = learner.model(torch.from_numpy(row.token_ids)[None]).logits[0, :-1].argmax(-1).numpy()
            repeated.append((greedy == row.token_ids[1:])[row.mask[1:]].all())
    assert repeated == [True, False, False, False]
    assert trainer.update(rows, learn=False)["exact_match"] == 0.25


def test_a_loss_that_is_not_finite_names_the_chats_and_changes_nothing(tmp_path: Path) -> None:
    config, rows = make_config(), make_chats(count=2)
    learner = Learner(config, save_model(tmp_path), 10)
    trainer = SFTTrainer(config).start(learner)
    with torch.no_grad():
        learner.parameters[-1].fill_(float("nan"))
    before = [p.clone() for p in learner.parameters]
    with pytest.raises(UserError, match=r"of the chats chats.jsonl:1, chats.jsonl:2 is not finite; lower trainer\."):
        trainer.update(rows)
    assert learner.optimizer_steps == 0
    assert all(
        torch.equal(
            a,
            b,
        )
        or a.isnan().any()
        for a, b in zip(before, learner.parameters, strict=True)
    )


def test_the_order_is_the_seeds_and_every_pass_has_each_chat_once() -> None:
    rows, seen = make_chats(count=10), list[list[str]]()

    def update(batch: list[Row]) -> dict[str, float]:
        seen.append([row.trajectory_id for row in batch])
        return {"loss": 1.0}

    state = torch.get_rng_state()
    metrics = list(fit(update, rows, 4, 5, seed=3))
    first = [name for batch in seen for name in batch]
    assert len(first) == 20 and sorted(first[:10]) == sorted(first[10:]) == sorted(row.trajectory_id for row in rows)
    assert first[:10] != first[10:] and metrics[-1]["epoch"] == 2.0
    seen.clear()
    list(fit(update, rows, 4, 5, seed=3))
    assert [name for batch in seen for name in batch] == first
    seen.clear()
    list(fit(update, rows, 4, 5, seed=4))
    assert [name for batch in seen for name in batch] != first
    assert torch.equal(torch.get_rng_state(), state)
    seen.clear()
    assert len(list(fit(update, rows, 64, 2, seed=0))) == 2 and [len(batch) for batch in seen] == [10, 10]
