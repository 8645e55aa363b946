"""The simulation of many GPUs (benchmarks/scale_sim.py) against what can be worked out by hand, and against figures."""

from __future__ import annotations

from collections import deque

import pytest

from benchmarks.scale_sim import Clock, Engine, Episode, Place, simulate, validation


def alike(number: int) -> list[Episode]:
    return [Episode(f"{number}/{i}", number, deque([(10, 0.0)]), 0) for i in range(2)]


def test_requests_of_an_engine_share_it() -> None:
    clock, ended = Clock(), list[tuple[float, str]]()
    engine = Engine(clock, 3, lambda live, _: float(live), 0.0, lambda e: ended.append((clock.now, e.trajectory_id)))
    for name, tokens in (("short", 10), ("long", 20), ("tool", 10), ("waits", 5)):
        turns = [(tokens, 7.0), (5, 0.0)] if name == "tool" else [(tokens, 0.0)]
        engine.begin(Episode(name, 0, deque(turns), 0))
    clock.run_to(1000.0)
    # Three at 3 s a token until 30, when `short` leaves its place to `waits`, and `tool` asks its tool until 37.
    # `waits` and `long` get 3.5 tokens each until then, `waits` its last 1.5 at 41.5; `long` and `tool` go on.
    assert [name for _, name in ended] == ["short", "waits", "tool", "long"]
    assert [when for when, _ in ended] == pytest.approx([30.0, 41.5, 48.5, 50.0])


def test_engines_and_learners_in_turn_and_beside_each_other() -> None:
    """Two episodes of 10 tokens at 2 s a step of both: 20 s of sampling; an update takes 5 s, or 50, a sync 1."""

    def place(update: float, in_turn: bool) -> Place:
        return Place(1, 8, lambda live, _: float(live), lambda *_: update, 1.0, turns=in_turn)

    for update, in_turn, beside in ((5.0, 26.0, 21.0), (50.0, 71.0, 50.0)):
        assert simulate(place(update, True), alike, 1, 0, 4) == pytest.approx(in_turn)
        assert simulate(place(update, False), alike, 1, 1, 40) == pytest.approx(beside, rel=0.03)


def test_the_simulation_is_near_to_what_was_measured_on_two_cores() -> None:
    errors = {what: simulated / measured - 1 for what, simulated, measured, _ in validation()}
    assert all(abs(error) < 0.25 for what, error in errors.items() if "LoRA" not in what), errors
