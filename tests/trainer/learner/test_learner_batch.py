"""Micro-batches: their cut, and that neither padding nor a shared prompt changes a score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_batch, make_config, save_model

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import Row, collate, cut, make_rows
from skyrl_trainer.learner.learner import Learner


def row(length: int, name: str = "t") -> Row:
    ids = np.arange(length)
    return Row(name, ids, ids > 0, np.ones(length), np.zeros(length))


def test_cut_keeps_the_budget_with_the_longest_first_and_loses_nobody() -> None:
    rows = [row(n) for n in (5, 9, 5, 30, 2, 0, 9)]  # the same prompt of one token; the last token is left out
    batches = cut(rows, range(7), token_budget=15)
    assert batches == [[3], [1, 6], [0, 2, 4]]  # 30 is over the budget alone; the empty row is in none
    assert cut(rows, range(7), token_budget=14) == [[3], [1], [6, 0, 2, 4]]
    assert cut(rows, [4, 0], token_budget=1) == [[0], [4]]
    rows[2].token_ids = rows[2].token_ids + 1  # another prompt
    assert cut(rows, [0, 1, 2], token_budget=15) == [[1, 0, 2]] and cut(rows, [0, 1, 2], 14) == [[1, 0], [2]]


def test_rows_end_at_the_last_sampled_token_and_start_with_a_prompt() -> None:
    batch = make_batch(groups=1, generations=1, turns=2)
    trajectory = batch.trajectories[0]
    trajectory.turns[-1].output_ids, trajectory.turns[-1].logprobs = [], []  # ends with an observation
    first = trajectory.turns[0]
    (made,) = make_rows(batch.trajectories)
    assert made.token_ids.tolist() == first.prompt_ids + first.output_ids
    assert made.num_sampled == len(first.output_ids)
    first.prompt_ids = []
    with pytest.raises(UserError, match=r"1/0/0 starts with a sampled token"):
        make_rows(batch.trajectories)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_rows_together_score_as_each_alone_and_as_the_plain_model(tmp_path: Path, kind: str) -> None:
    """Several turns, temperature 0.7; against log-softmax of the whole model on each unpadded sequence."""
    config = make_config(generator={"temperature": 0.7})
    learner = Learner(config, save_model(tmp_path, kind), 1)
    batch = make_batch(turns=3)
    rows = make_rows(batch.trajectories)
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


def test_a_prompt_goes_through_the_model_once_however_many_answers_it_has(tmp_path: Path) -> None:
    learner = Learner(make_config(), save_model(tmp_path), 1)
    batch = make_batch(groups=3, generations=4)
    rows = make_rows(batch.trajectories)
    together = collate(rows, range(len(rows)), learner.device, learner.dtype)
    assert together.prefix_S.count(-1) == 3 and len(together.lengths_S) <= 3 + 12
    seen = []
    learner.model.get_input_embeddings().register_forward_hook(lambda module, ids, out: seen.append(ids[0].numel()))
    learner.logprobs(together)
    prompts = {row.prompt.tobytes(): len(row.prompt) for row in rows}
    assert seen == [sum(prompts.values()) + sum(len(row.rest) for row in rows)]  # and nothing is padded


def test_a_trajectory_longer_than_a_sliding_window_is_refused(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    learner = Learner(make_config(), save_model(tmp_path, **window), 1)
    batch = make_batch()
    rows = make_rows(batch.trajectories)
    with pytest.raises(UserError, match=r"sliding window of 8.*generator\.max_model_len"):
        learner.logprobs(collate(rows, range(len(rows)), learner.device, learner.dtype))
