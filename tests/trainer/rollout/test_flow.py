"""The law of staleness, on random schedules of a loop without processes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_trainer.rollout.flow import Flow, staleness
from skyrl_trainer.types import Sample, Trajectory, Turn


def group(number: int, versions: list[int]) -> list[Trajectory]:
    sample = Sample(f"s{number}", "test/None-v0", number, {}, env_file=None)
    turn = Turn(prompt_ids=[1], output_ids=[2] * len(versions), logprobs=[0.0] * len(versions), action="",
                weight_versions=versions)  # fmt: skip
    return [Trajectory(f"1/{number}/0", sample, 0, 0, turns=[turn])]


def simulate(flow: Flow, chance: random.Random, refused: float) -> tuple[list[list[int]], list[int]]:
    """Plays groups in a random order until the run is over; the numbers that were learned from, and those refused."""
    learned: list[list[int]] = []
    gone: list[int] = []
    begun: dict[int, int] = {}
    refusals = 0
    for version in range(flow.steps):
        while (taken := flow.take(version)) is None:
            begun |= dict.fromkeys(flow.draw(flow.room(version)), version)
            ahead = min(version + flow.max_staleness + 1, flow.steps) - version
            assert len(flow.groups) + flow.lost == ahead * flow.size, "as many are open as may be"
            playing = [number for number, done in flow.groups.items() if done is None]
            assert playing, "waits for nothing"
            for number in chance.sample(playing, chance.randint(1, len(playing))):
                accepted = chance.random() >= refused
                flow.finish(number, group(number, [begun[number], version]), accepted)
                gone += [] if accepted else [number]
                refusals += not accepted
        trajectories = [trajectory for each in taken.values() for trajectory in each]
        metrics = staleness(trajectories, version, flow.max_staleness)
        assert not taken or 0 <= metrics["staleness/mean"] <= metrics["staleness/max"] <= flow.max_staleness
        assert len(taken) == flow.size or refusals > (flow.max_draws - 1) * flow.size, "short for its own refusals"
        refusals = 0
        learned.append(list(taken))
    return learned, gone


@settings(max_examples=500, deadline=None)
@given(
    size=st.integers(1, 6),
    bound=st.integers(0, 5),
    steps=st.integers(1, 12),
    refused=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
    max_draws=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_group_is_learned_from_once_or_refused_and_none_is_too_old(
    size: int, bound: int, steps: int, refused: float, max_draws: int, seed: int
) -> None:
    flow = Flow(size, bound, steps, max_draws)
    learned, gone = simulate(flow, random.Random(seed), refused)
    everyone = sorted([number for batch in learned for number in batch] + gone)
    assert everyone == list(range(flow.drawn)), "none twice, none left"
    assert not flow.groups and len(learned) == steps
    if not refused:
        assert learned == [list(range(step * size, (step + 1) * size)) for step in range(steps)], "oldest first"


def test_without_staleness_a_batch_is_drawn_when_the_one_before_was_learned_from() -> None:
    flow = Flow(size=2, max_staleness=0, steps=3, max_draws=1)
    assert list(flow.draw(flow.room(0))) == [0, 1] and flow.room(0) == 0
    flow.finish(1, group(1, [0]), True)
    assert flow.take(0) is None
    flow.finish(0, group(0, [0]), True)
    assert list(flow.take(0) or {}) == [0, 1]
    assert flow.room(0) == 0 and flow.room(1) == 2


def test_a_refused_group_is_replaced_by_one() -> None:
    flow = Flow(size=2, max_staleness=1, steps=9, max_draws=2)
    assert len(flow.draw(flow.room(0))) == 4
    flow.finish(0, group(0, [0]), False)
    assert list(flow.draw(flow.room(0))) == [4] and flow.room(0) == 0
    for number in (1, 2):
        flow.finish(number, group(number, [0]), True)
    assert list(flow.take(0) or {}) == [1, 2]


def test_a_batch_that_costs_too_many_draws_is_learned_from_as_it_is() -> None:
    flow = Flow(size=2, max_staleness=0, steps=9, max_draws=2)
    while room := flow.room(0):
        for number in flow.draw(room):
            flow.finish(number, group(number, [0]), number == 1)
    assert flow.drawn == 4 and list(flow.take(0) or {}) == [1]


def test_a_token_beyond_the_bound_is_an_error() -> None:
    assert staleness(group(0, [3, 5, 5, 5]), 5, 2) == {"staleness/mean": 0.5, "staleness/max": 2.0}
    with pytest.raises(AssertionError, match="3 updates old"):
        staleness(group(0, [2, 5]), 5, 2)
