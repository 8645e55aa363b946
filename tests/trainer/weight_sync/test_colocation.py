"""Who may use the GPU when: the states of sleeping engines, and the order of calls in a training step."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from skyrl_trainer.errors import LearnersWait, NothingLearned, UserError
from skyrl_trainer.run.loop import Loop
from skyrl_trainer.run.run import Run
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch
from skyrl_trainer.weight_sync.colocation import Colocation, shares_gpus

WAKE_WEIGHTS, WAKE_CACHE = ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])


class Recorded(Colocation):
    """Writes down what engines would be told."""

    def __init__(self, level: int = 2, shared: bool = True, calls: list[Any] | None = None) -> None:
        self.calls: list[Any] = [] if calls is None else calls
        super().__init__([], level, shared, lambda: self.calls.append("release"), self._hold)

    def _hold(self, held: bool) -> None:
        self.calls.append("clocks stand" if held else "clocks go")

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        return []


@pytest.mark.parametrize("level", [1, 2])
def test_a_whole_turn_frees_everything_and_takes_weights_before_the_cache(level: int) -> None:
    colocation = Recorded(level)
    colocation.sleep()
    assert colocation.state == "asleep"
    with colocation.publishing():
        assert colocation.state == "weights awake"
        colocation.calls.append("sync")
    assert colocation.state == "awake"
    assert colocation.calls == [
        *(("sleep", level), "clocks stand", "release", WAKE_WEIGHTS, "clocks stand"),
        *("sync", "release", WAKE_CACHE, "clocks go"),
    ]


def test_before_the_first_update_a_sync_finds_the_engines_awake() -> None:
    colocation = Recorded()
    with colocation.publishing():
        pass
    assert colocation.calls == [] and colocation.state == "awake"


def test_sleeping_twice_and_publishing_within_a_sync_are_refused() -> None:
    colocation = Recorded()
    colocation.sleep()
    with pytest.raises(RuntimeError, match="are asleep cannot become asleep: they have to be awake"):
        colocation.sleep()
    with colocation.publishing():
        with pytest.raises(RuntimeError, match="are weights awake cannot become asleep"):
            colocation.sleep()
        with pytest.raises(RuntimeError, match="cannot become weights awake"), colocation.publishing():
            pass


def test_a_sync_that_fails_leaves_the_cache_asleep() -> None:
    colocation = Recorded()
    colocation.sleep()
    with pytest.raises(ValueError, match="sync"), colocation.publishing():
        raise ValueError("sync")
    assert colocation.state == "weights awake" and WAKE_CACHE not in colocation.calls


def test_apart_engines_are_told_nothing_but_the_order_is_still_kept() -> None:
    colocation = Recorded(shared=False)
    colocation.sleep()
    with pytest.raises(RuntimeError):
        colocation.sleep()
    with colocation.publishing():
        pass
    assert colocation.calls == []


@pytest.mark.parametrize(("gpus", "together", "shared"), [(0, True, False), (1, True, True), (4, False, False)])
def test_memory_is_shared_on_gpus_that_take_turns(gpus: int, together: bool, shared: bool) -> None:
    place = {"policy_num_gpus_per_node": gpus, "colocate_all": together}
    assert shares_gpus(Config.model_validate({"trainer": {"placement": place}})) is shared


class OneStep:
    """The parts of a run as far as a step's update and its publishing need them; `publish` is the real one."""

    publish, enough = Run.publish, False

    def __init__(self, calls: list[Any]) -> None:
        def record(name: str, result: Any) -> Any:
            return lambda *arguments, **named: [calls.append(name), result][1]

        self.config = Config()
        self.colocation = Recorded(calls=calls)
        self.algorithm = SimpleNamespace(update=record("update", {}))
        self.tries = SimpleNamespace(learned=record("store", None), state_dict=dict)
        report = SimpleNamespace(engine_checksums=["same"])
        self.sync = SimpleNamespace(sync=record("sync", report), report=report, away=set())
        self.processes = SimpleNamespace(watch=SimpleNamespace(check=lambda wait: False))
        self.canary = SimpleNamespace(check=record("canary", {}))
        self.learner = SimpleNamespace(token_logprobs=None)
        self.table = SimpleNamespace(phase=lambda name: None)
        self.evaluate = record("evaluate", {})
        self.log = record("log", None)
        self.save = record("save", None)

    def resume(self) -> tuple[int, dict[str, float]]:
        return 9, {}


def test_in_a_step_engines_sleep_while_the_learner_computes_and_are_awake_for_the_canary() -> None:
    calls: list[Any] = []
    trainer = Loop(OneStep(calls), SimpleNamespace(interruptible=nullcontext, check=lambda: None))  # type: ignore[arg-type]
    trainer.seconds = {"time/rollout": 1.0}
    trainer.learn(RewardBatch(RolloutBatch(10, []), [], [], []), {"tokens": 1.0})
    trainer.finish_step()
    calls = [call for call in calls if not str(call).startswith("clocks")]
    turn = [("sleep", 2), "update", "store", "release", WAKE_WEIGHTS, "sync", "release", WAKE_CACHE]
    assert calls == [*turn, "canary", "evaluate", "log", "save"]


def test_a_run_that_has_enough_ends_after_a_step_that_is_written_and_not_unfinished() -> None:
    run: Any = OneStep([])
    run.stack = SimpleNamespace(enter_context=lambda context: None)
    run.log = lambda *logged: setattr(run, "enough", True)
    saved: list[Any] = []
    run.save = lambda step, state: saved.append((step, state["unfinished"]))
    Loop(run, SimpleNamespace(interruptible=nullcontext, check=lambda: None)).train()  # type: ignore[arg-type]
    assert saved == [(9, None)]


def test_learners_that_wait_for_ever_are_asked_for_no_checkpoint() -> None:
    calls: list[Any] = []
    run: Any = OneStep(calls)
    run.publish = Mock(side_effect=LearnersWait("an engine died"))
    with pytest.raises(LearnersWait, match="an engine died"):
        Loop(run, SimpleNamespace(interruptible=nullcontext, check=lambda: None)).train()  # type: ignore[arg-type]
    assert "save" not in calls


def test_a_step_that_is_logged_after_it_was_resumed_counts_all_its_phases() -> None:
    run: Any = OneStep([])
    run.resume = lambda: (9, {"time/rollout": 10.0, "time/train": 5.0})
    logged: dict[str, float] = {}
    run.log = lambda step, metrics, spans: logged.update(metrics)
    Loop(run, SimpleNamespace(interruptible=nullcontext, check=lambda: None)).finish_step()  # type: ignore[arg-type]
    phases = [value for name, value in logged.items() if name.startswith("time/") and name != "time/step"]
    assert logged["time/step"] == sum(phases) > 15


@pytest.mark.parametrize(("error", "saved"), [(NothingLearned("refused"), True), (UserError("half-way"), False)])
def test_the_last_whole_step_is_saved_unless_an_update_was_cut_in_two(error: Exception, saved: bool) -> None:
    calls: list[Any] = []
    run: Any = OneStep(calls)
    run.stack = SimpleNamespace(enter_context=lambda context: None)

    def fails(rewards: Any) -> Any:
        raise error

    run.algorithm.update = fails
    trainer = Loop(run, SimpleNamespace(interruptible=nullcontext, check=lambda: None))  # type: ignore[arg-type]
    trainer.seconds, trainer.unfinished = {"time/rollout": 1.0}, None
    batch = RewardBatch(RolloutBatch(10, []), [], [], [])
    trainer.next_batch = lambda: (batch, {"tokens": 1.0})  # type: ignore[method-assign]
    with pytest.raises(UserError):
        trainer.train()
    assert ("save" in calls) is saved
