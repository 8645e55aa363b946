"""The uniform sampler: every task once an epoch, and a state of a few numbers."""

from __future__ import annotations

import json

import pytest

from skyrl_trainer.algorithms.samplers import UniformSampler, permuted
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample


def source(size: int) -> list[Sample]:
    return [Sample(str(i), "env", i) for i in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permuted_is_a_permutation(size: int) -> None:
    assert sorted(permuted(i, size, "key") for i in range(size)) == list(range(size))


def test_permutations_are_even() -> None:
    """Over many keys each place holds each task about equally often (chi-squared, 49 cells of 7 x 7)."""
    counts = [[0] * 7 for _ in range(7)]
    for key in range(2100):
        for i in range(7):
            counts[i][permuted(i, 7, str(key))] += 1
    assert sum((cell - 300) ** 2 / 300 for row in counts for cell in row) < 80


def test_every_task_comes_once_an_epoch_in_a_new_order_each() -> None:
    sampler = UniformSampler(source(10), seed=3)
    drawn = [sample.sample_id for _ in range(5) for sample in sampler.next_tasks(4)]
    first, second = drawn[:10], drawn[10:20]
    assert sorted(first) == sorted(second) == sorted(str(i) for i in range(10))
    assert first != second
    assert drawn != [s.sample_id for s in UniformSampler(source(10), seed=4).next_tasks(20)]


def test_the_state_is_json_and_continues_exactly() -> None:
    sampler = UniformSampler(source(10), seed=3)
    sampler.next_tasks(7)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = sampler.next_tasks(9)
    resumed = UniformSampler(source(10), seed=3)
    resumed.load_state_dict(state)
    assert resumed.next_tasks(9) == expected
    assert resumed.accept([], [])


def test_other_data_and_no_data_are_refused() -> None:
    state = UniformSampler(source(10), seed=3).state_dict()
    with pytest.raises(UserError, match=r"10 tasks.*holds 11"):
        UniformSampler(source(11), seed=3).load_state_dict(state)
    with pytest.raises(UserError, match=r"data\.train_data"):
        UniformSampler([], seed=3)
