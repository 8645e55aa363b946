"""The law of staleness, on random schedules of a loop without processes."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from heapq import heappop, heappush
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_trainer.rollout.flow import Flow, staleness
from skyrl_trainer.types import Sample, Trajectory, Turn

SCHEDULES = 3000 if os.environ.get("SKYRL_TEST_FULL") else 300


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


class Greedy(Flow):
    """Learns from what has ended first, as systems do that do not wait for the oldest."""

    def take(self, version: int) -> dict[int, list[Trajectory]] | None:
        self.groups = dict(sorted(self.groups.items(), key=lambda item: item[1] is None))
        return super().take(version)


def lengths_learned(flow: Flow, chance: random.Random, refused: float) -> Iterator[float]:
    """What the first half of a run learns from, on a pool where an episode lasts as long as it is: the quantiles of
    the lengths, which are log-normal. Groups wait for a slot, and the learner takes time meanwhile."""
    now, update, spread, tries = 0.0, chance.uniform(0, 5), chance.uniform(0.2, 2), chance.randint(1, 4)
    free, playing = [0.0] * chance.randint(1, 12), list[tuple[float, int]]()
    drawn: dict[int, int] = {}
    lengths: dict[int, list[float]] = {}
    for version in range(math.ceil(flow.steps / 2)):
        while (taken := flow.take(version)) is None:
            for number in flow.draw(flow.room(version)):
                drawn[number], lengths[number] = version, [chance.random() for _ in range(tries)]
                end = max(now, heappop(free)) + math.exp(spread * NormalDist().inv_cdf(max(lengths[number])))
                heappush(free, end)
                heappush(playing, (end, number))
            end, number = heappop(playing)
            now = max(now, end)
            flow.finish(number, group(number, [drawn[number], version]), chance.random() >= refused)
        if not isinstance(flow, Greedy):
            staleness([trajectory for each in taken.values() for trajectory in each], version, flow.max_staleness)
        yield from (length for number in taken for length in lengths[number])
        now += update


@pytest.mark.parametrize("flow", [Flow, Greedy])
def test_the_lengths_that_are_learned_from_are_those_that_were_drawn(flow: type[Flow]) -> None:
    """Kolmogorov and Smirnov's test at 1 %, which finds those of a greedy one; no token is beyond the bound."""
    chance, seen = random.Random(0), list[float]()
    for _ in range(SCHEDULES):
        size, bound, steps = chance.randint(1, 6), chance.randint(1, 5), chance.randint(2, 12)
        seen += lengths_learned(flow(size, bound, steps, max_draws=4), chance, chance.choice([0.0, 0.0, 0.3]))
    quantiles, ranks = np.sort(seen), np.arange(len(seen))
    distance = max(np.abs(quantiles - ranks / len(seen)).max(), np.abs(quantiles - (ranks + 1) / len(seen)).max())
    print(f"{flow.__name__}: {SCHEDULES} schedules, {len(seen)} episodes, {distance * math.sqrt(len(seen)):.2f}")
    assert (distance * math.sqrt(len(seen)) < 1.628) == (flow is Flow)


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
    ages = {"staleness/0": 0.6, "staleness/1": 0.0, "staleness/2": 0.4}
    metrics = staleness(group(0, [3, 5, 5, 5]) + group(1, [3]), 5, 2)
    assert metrics == {"staleness/mean": 0.8, "staleness/max": 2, "staleness/span": 1.0, **ages}
    with pytest.raises(AssertionError, match="3 updates old"):
        staleness(group(0, [2, 5]), 5, 2)
