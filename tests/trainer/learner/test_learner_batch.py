"""Micro-batches: their cut, and that neither padding nor a shared prompt changes a score."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_batch, make_config, save_model
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import segments as segments_module
from skyrl_trainer.learner.batch import Row, collate, cut, make_rows
from skyrl_trainer.learner.loading import compile_layers
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.learner.segments import Segments


def row(length: int, name: str = "t") -> Row:
    ids = np.arange(length)
    return Row(name, ids, ids > 0, np.ones(length), np.zeros(length))


def test_cut_keeps_the_budget_with_the_longest_first_and_loses_nobody() -> None:
    rows = [row(n) for n in (5, 9, 5, 30, 2, 0, 9)]  # the same prompt of one token; the last token is left out
    batches = cut(rows, range(7), token_budget=15)
    assert batches == [[3], [1], [6, 0, 2, 4]]  # 30 is over the budget alone; the empty row is in none
    assert cut(rows, range(7), token_budget=13) == [[3], [1], [6], [0, 2, 4]]
    assert cut(rows, [4, 0], token_budget=1) == [[0], [4]]
    rows[2].token_ids = rows[2].token_ids + 1  # another prompt
    assert cut(rows, [0, 1, 2], token_budget=15) == [[1, 0, 2]] and cut(rows, [0, 1, 2], 14) == [[1], [0, 2]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 60))
def test_as_few_micro_batches_as_can_be_and_none_a_remainder(tokens: list[int], budget: int) -> None:
    rows = [row(n + 1) for n in tokens]
    for i, each in enumerate(rows):
        each.token_ids = each.token_ids + i  # no prompt is shared

    def needed(budget: int) -> int:
        count, used = 0, budget
        for size in sorted(tokens, reverse=True):
            used += size
            count, used = (count + 1, size) if used > budget else (count, used)
        return count

    sizes = [sum(tokens[i] for i in part) for part in cut(rows, range(len(rows)), budget)]
    assert len(sizes) == needed(budget) and max(sizes) <= max(budget, *tokens)
    assert max(sizes) == max(tokens) or needed(max(sizes) - 1) > len(sizes)  # no smaller budget would do


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
def test_segments_of_a_trajectory_score_as_the_plain_model_scores_each_context(tmp_path: Path, kind: str) -> None:
    """Three contexts of one trajectory know nothing of each other; its tokens stay together, in order."""
    learner = Learner(make_config(), save_model(tmp_path, kind), 1)
    batch = make_batch(turns=4, rewritten=(1, 3))
    rows = make_rows(batch.trajectories)
    assert [len(row.later) for row in rows] == [2] * 16
    batches = [collate(rows, part, learner.device, learner.dtype) for part in cut(rows, range(16), 200)]
    assert len(batches) > 1
    expected: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad():
        for i, trajectory in enumerate(batch.trajectories):
            for first, second in ((0, 1), (1, 3), (3, 4)):
                ids, sampled = list[int](), list[int]()
                for turn in trajectory.turns[first:second]:
                    ids += turn.prompt_ids
                    sampled += range(len(ids), len(ids) + len(turn.output_ids))
                    ids += turn.output_ids
                distribution = learner.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
                chosen = distribution.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                expected.setdefault(i, []).append(chosen[torch.tensor(sampled) - 1])
        for collated in batches:
            logprobs, _ = learner.logprobs(collated)
            for i in collated.trajectory_N.unique().tolist():
                actual = logprobs[collated.trajectory_N == i]
                torch.testing.assert_close(actual, torch.cat(expected[i]), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind, tolerance", [("qwen3", 1e-5), ("gpt2", 1e-10)])
def test_every_cut_equals_padded_rows_in_the_plain_model(
    tmp_path: Path, kind: str, tolerance: float, shared: bool
) -> None:
    """Logprobs and gradient against transformers' own forward with an attention mask; observations inside the rows."""
    path = save_model(tmp_path, kind)
    learner, plain = Learner(make_config(), path, 1), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if kind == "gpt2":
        learner.model.double(), plain.double()
    rollouts = make_batch(groups=5 if shared else 20, generations=4 if shared else 1, turns=3)
    rows = make_rows(rollouts.trajectories)
    weights = [torch.rand(row.num_sampled, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(rows)]
    ids_BT = pad_sequence([torch.from_numpy(row.token_ids) for row in rows], batch_first=True)
    real_BT = pad_sequence([torch.ones(len(row.token_ids)) for row in rows], batch_first=True)
    logits_BTV = plain.eval()(ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1]
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    expected = [logprobs_BT[i][np.flatnonzero(row.mask) - 1] for i, row in enumerate(rows)]
    torch.stack([(w * e).sum() for w, e in zip(weights, expected, strict=True)]).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
    total = sum(len(row.token_ids) for row in rows)
    for parts in (1, 2, 4):
        micro_batches = cut(rows, range(len(rows)), total // parts)
        assert len(micro_batches) >= parts - 1 and sorted(i for part in micro_batches for i in part) == list(
            range(len(rows))
        )
        learner.clear_gradients()
        for indices in micro_batches:
            actual, _ = learner.logprobs(collate(rows, indices, learner.device, learner.dtype))
            wanted = torch.cat([expected[i] for i in indices]).detach()
            torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)
            (torch.cat([weights[i] for i in indices]) * actual).sum().backward()
        ours = torch.cat([p.grad.flatten() for p in learner.parameters])
        assert (ours - gradient).norm() <= tolerance * gradient.norm()


def test_blocks_hold_each_segment_once_and_pad_little() -> None:
    draw = np.random.default_rng(0)
    lengths = [int(n) for n in draw.integers(1, 2000, 60)]
    segments = Segments(lengths, [-1] * 20 + [int(n) for n in draw.integers(0, 20, 40)], torch.device("cpu"))
    _, tokens, places_P = segments._padded
    assert len(set(places_P.tolist())) == sum(lengths)
    queries = torch.cat([queries_BT.flatten() for queries_BT, _ in tokens])
    assert torch.equal(queries[places_P], torch.arange(sum(lengths)))
    computed = sum(queries_BT.shape[0] * queries_BT.shape[1] * keys_BK.shape[1] for queries_BT, keys_BK in tokens)
    useful = int((segments.lengths_S * (segments.lengths_S + segments.before_S)).sum())
    assert useful <= computed <= 1.25 * useful + len(tokens) * 2**14


def test_ragged_attention_takes_the_same_keys_as_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's kernel itself needs a GPU; here its arguments go through a plain loop with its definition."""

    def kernel(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, scale: float, **others: Any) -> torch.Tensor:
        assert others["window_size"] == (-1, 0) and (others["max_q"], others["max_k"]) in ((7, 11), (7, 7))
        outs = []
        for i in range(len(cu_seq_q) - 1):
            qs, ks = slice(*cu_seq_q[i : i + 2]), slice(*cu_seq_k[i : i + 2])
            seen = torch.ones(len(q[qs]), len(k[ks]), dtype=torch.bool).tril(len(k[ks]) - len(q[qs]))
            heads = (x.transpose(0, 1)[None] for x in (q[qs], k[ks], v[ks]))
            out = scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    monkeypatch.setattr(segments_module, "varlen_attn", kernel)
    draw = torch.Generator().manual_seed(0)
    for prefix_S in ([-1, -1, 0, 0, 1], [-1] * 5):
        segments = Segments([5, 4, 6, 1, 7], prefix_S, torch.device("cpu"))
        heads = [torch.randn(23, h, 8, generator=draw, dtype=torch.float64) for h in (4, 2, 2)]
        ragged, padded = segments.ragged_attention(heads, 0.3), segments.padded_attention(heads, 0.3)
        torch.testing.assert_close(ragged, padded, rtol=0, atol=1e-12)


def test_elsewhere_than_on_a_cpu_no_heads_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """There attention over them in float32 would hold all (query, key) pairs; scores are the same."""
    seen = []

    def attend(*heads: torch.Tensor, enable_gqa: bool, **others: Any) -> torch.Tensor:
        seen.append((enable_gqa, *(x.shape[1] for x in heads[:3])))
        return scaled_dot_product_attention(*heads, enable_gqa=True, **others)

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> Any:
            return torch.device("meta")

    segments = Segments([5, 4, 6], [-1, 0, -1], torch.device("cpu"))
    heads = [torch.randn(15, h, 8) for h in (4, 2, 2)]
    expected = segments.padded_attention(heads, 0.3)
    monkeypatch.setattr(segments_module, "scaled_dot_product_attention", attend)
    actual = segments.padded_attention([x.as_subclass(Elsewhere) for x in heads], 0.3)
    torch.testing.assert_close(actual.as_subclass(torch.Tensor), expected)
    assert set(seen) == {(False, 4, 4, 4)}


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


def test_a_model_with_large_logits_is_taken_in_bfloat16(tmp_path: Path) -> None:
    """Rounding alone must not look like another architecture: both sides compute in the same precision."""
    path = save_model(tmp_path, initializer_range=1.0)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    model.save_pretrained(tmp_path)
    AcceleratorState._reset_state()  # one precision a process
    try:
        learner = Learner(make_config(trainer={"policy": {"model": {"dtype": "bfloat16"}}}), path, 1)
        assert learner.published_dtype == torch.bfloat16
        with learner.accelerator.autocast():  # which would keep a copy of every weight, of sharded ones, too
            assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    finally:
        AcceleratorState._reset_state()


def test_compiled_layers_share_one_compilation_and_change_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where oneDNN has no part in it; by dynamo alone, without its code generator."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    counts = []
    for layers in (2, 5):
        learner = Learner(make_config(), save_model(tmp_path / str(layers), num_hidden_layers=layers), 1)
        rows = make_rows(make_batch().trajectories)
        batch = collate(rows, range(len(rows)), learner.device, learner.dtype)
        expected, _ = learner.logprobs(batch)
        counter = CompileCounter()
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
        compile_layers(learner.model)
        monkeypatch.undo()
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        found, _ = learner.logprobs(batch)
        torch.testing.assert_close(found, expected)
        counts.append(counter.frame_count)
        torch._dynamo.reset()
    assert counts[0] == counts[1] > 0
