"""Micro-batches: their cut, their padding, and that padding needs no attention mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_batch, make_config, save_model

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import Row, collate, cut, make_rows
from skyrl_trainer.learner.learner import Learner
from skyrl_trainer.types import AdvantageBatch


def row(length: int, name: str = "t") -> Row:
    ids = np.arange(length)
    return Row(name, ids, ids > 0, np.ones(length), np.zeros(length))


def test_cut_keeps_the_budget_with_the_longest_first_and_loses_nobody() -> None:
    rows = [row(n) for n in (5, 9, 5, 30, 2, 0, 9)]
    batches = cut(rows, range(7), token_budget=18)
    assert batches == [[3], [1, 6], [0, 2, 4]]  # 30 is over the budget alone; the empty row is in none
    assert cut(rows, [4, 0], token_budget=1) == [[0], [4]]


def test_rows_end_at_the_last_sampled_token_and_start_with_a_prompt() -> None:
    batch = make_batch(groups=1, generations=1, turns=2)
    trajectory = batch.trajectories[0]
    trajectory.turns[-1].output_ids, trajectory.turns[-1].logprobs = [], []  # ends with an observation
    first = trajectory.turns[0]
    (made,) = make_rows(AdvantageBatch(batch, [[1.0] * len(trajectory.token_ids())]))
    assert made.token_ids.tolist() == first.prompt_ids + first.output_ids
    assert made.num_sampled == len(first.output_ids)
    first.prompt_ids = []
    with pytest.raises(UserError, match=r"1/0/0 starts with a sampled token"):
        make_rows(AdvantageBatch(batch, [[1.0] * len(trajectory.token_ids())]))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_padded_rows_score_as_each_alone_and_as_the_plain_model(tmp_path: Path, kind: str) -> None:
    """Several turns, temperature 0.7; against log-softmax of the whole model on each unpadded sequence."""
    config = make_config(generator={"temperature": 0.7})
    learner = Learner(config, save_model(tmp_path, kind), 1)
    batch = make_batch(turns=3)
    rows = make_rows(AdvantageBatch(batch, [[1.0] * len(t.token_ids()) for t in batch.trajectories]))
    padded = collate(rows, range(len(rows)), learner.device, learner.dtype)
    with torch.no_grad():
        logprobs, entropy = learner.logprobs(padded)
        expected_logprobs, expected_entropy = [], []
        for each in rows:
            ids = torch.from_numpy(each.token_ids)
            distribution = (learner.model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            chosen = torch.from_numpy(each.mask[1:])
            expected_logprobs.append(distribution.gather(1, ids[1:, None])[:, 0][chosen])
            expected_entropy.append(torch.distributions.Categorical(logits=distribution).entropy()[chosen])
    torch.testing.assert_close(logprobs, torch.cat(expected_logprobs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), rtol=1e-4, atol=1e-5)


def test_causal_attention_gets_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path: `is_causal` and no mask tensor, though rows differ in length."""
    learner = Learner(make_config(), save_model(tmp_path), 1)
    calls = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False, **kwargs: object):  # type: ignore[no-untyped-def]
        calls.append((attn_mask, is_causal))
        return plain(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    batch = make_batch()
    rows = make_rows(AdvantageBatch(batch, [[1.0] * len(t.token_ids()) for t in batch.trajectories]))
    learner.logprobs(collate(rows, range(len(rows)), learner.device, learner.dtype))
    assert calls == [(None, True)] * 2
