"""EngineWatch on real Ray actors without a model: deaths are noticed, counted, bounded, and made good."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from skyrl_trainer.engine.actor import was_restarted
from skyrl_trainer.errors import EngineDied, EngineLost
from skyrl_trainer.run import cluster as cluster_module
from skyrl_trainer.run import engine_watch
from skyrl_trainer.run.cluster import ClusterWatch
from skyrl_trainer.run.engine_watch import EngineWatch
from skyrl_trainer.types import GenerationOutput
from skyrl_trainer.weight_sync.shared_memory import EngineCalls
from tests.trainer.fakes import FakeEngine


class MortalEngine(FakeEngine):
    """Says its pid, and whether it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = was_restarted()
        self.broken: Exception | None = None

    async def ready(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "paused": self.paused}

    async def resume(self) -> None:
        self.paused = False

    async def collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        while not self.broken:
            await asyncio.sleep(0.01)
        raise self.broken

    async def break_step(self, error: Exception) -> None:
        self.broken = error


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    for name in (__name__, FakeEngine.__module__):  # workers cannot import the tests
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def engines(cluster: None) -> Iterator[list[Any]]:
    made = [ray.remote(MortalEngine).options(max_restarts=-1, num_cpus=0).remote() for _ in range(2)]
    ray.get([engine.ready.remote() for engine in made], timeout=60)
    yield made
    for engine in made:
        ray.kill(engine)


def state(engine: Any) -> dict[str, Any]:
    return ray.get(engine.ready.remote(), timeout=30)


def kill(engine: Any) -> int:
    pid = state(engine)["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_an_engine_that_died_is_restarted_paused_and_restored(engines: list[Any]) -> None:
    watch, restored = EngineWatch(engines), []

    def restore(index: int) -> None:
        restored.append((index, state(engines[index])["paused"]))
        ray.get(engines[index].resume.remote())

    watch.restore = restore
    assert not watch.check() and watch.new_step() == 0
    pid = kill(engines[1])
    start = time.monotonic()
    assert watch.check(wait=10)
    assert time.monotonic() - start < 20
    assert restored == [(1, True)] and watch.new_step() == 1
    assert state(engines[1])["pid"] != pid and not state(engines[1])["paused"]
    assert not watch.check() and not state(engines[0])["paused"]


def test_one_that_dies_while_it_is_restored_is_restored_again(engines: list[Any]) -> None:
    watch, tries = EngineWatch(engines), []

    def restore(index: int) -> None:
        tries.append(index)
        if len(tries) == 1:
            kill(engines[index])
            raise EngineLost("again")

    watch.restore = restore
    kill(engines[0])
    assert watch.check(wait=10)
    assert tries == [0, 0] and watch.new_step() == 2 and not watch.check(wait=0.5)


def test_one_that_keeps_dying_in_one_step_is_given_up_with_a_sentence(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "MAX_RESTARTS", 1)
    watch = EngineWatch(engines)
    for _ in range(2):
        kill(engines[0])
        assert watch.check(wait=10) and watch.new_step() == 1
    kill(engines[0])
    assert watch.check(wait=10)
    kill(engines[0])
    with pytest.raises(EngineDied, match="Engine 0 died 2 times within 4 hours"):
        watch.check(wait=10)


def test_one_that_keeps_dying_is_given_up_in_a_cluster_that_waits_for_it(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "MAX_RESTARTS", 1)
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 60.0)
    watch = ClusterWatch(engines, [ray.nodes()[0]["NodeID"]] * 2, waits=True)
    kill(engines[0])
    assert watch.check(wait=10)
    with monkeypatch.context() as with_its_node:
        with_its_node.setattr(watch, "_moved", lambda index: True)
        kill(engines[0])
        assert watch.check(wait=10), "the death of a node is not held against it"
    kill(engines[0])
    with pytest.raises(EngineDied, match="Engine 0 died 2 times"):
        watch.check(wait=10)


def test_one_that_dies_seldom_is_restarted_as_often_as_it_dies(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no steps, as in `serve`."""
    monkeypatch.setattr(engine_watch, "MAX_RESTARTS", 1)
    monkeypatch.setattr(engine_watch, "HOURS", 3 / 3600)
    watch = EngineWatch(engines)
    for _ in range(3):
        kill(engines[0])
        assert watch.check(wait=10)
        time.sleep(3.1)
    assert watch.new_step() == 3


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (EngineDied("The engine of m stopped. It is full."), "The engine of m stopped. It is full."),
        (KeyError("x"), "An engine failed: KeyError('x')"),  # one of the user's
    ],
)
def test_one_whose_step_loop_raised_ends_whatever_watches_it_with_its_sentence(
    engines: list[Any], error: Exception, sentence: str
) -> None:
    """Also where nobody asks it anything, as in `serve`, and however many others there are."""
    watch = EngineWatch(engines)
    assert not watch.check()
    engines[1].break_step.remote(error)
    with pytest.raises(EngineDied) as died:
        watch.check(wait=10)
    assert str(died.value) == sentence


class Pausing:
    def __init__(self, loaded: bool) -> None:
        self.loaded = loaded

    def pause(self) -> bool:
        if not self.loaded:
            raise EngineLost("It was started again and has not loaded yet.")
        return True


def test_a_sync_leaves_out_an_engine_that_was_started_again_and_has_not_loaded(cluster: None) -> None:
    made = [ray.remote(Pausing).options(num_cpus=0).remote(loaded) for loaded in (True, False)]
    calls = EngineCalls(made)
    assert calls._everywhere("pause") == [True, None] and calls._living == [made[0], None]
    for engine in made:
        ray.kill(engine)


class Scripted:
    """The parts of a watch that a test looks at."""

    def __init__(self) -> None:
        self._engines, self._deaths = [None] * 3, list[tuple[int, float]]()
        self.waited = list[int]()

    def _wait_ready(self, index: int) -> None:
        self.waited.append(index)

    def _hang(self, index: int) -> None:
        pass

    def restore(self, index: int) -> None:
        self.waited.append(-index)


def test_the_first_of_two_that_died_together_is_restored_when_both_are_back() -> None:
    """For over NCCL a restore takes all engines into its group."""

    class Watch(Scripted, EngineWatch):
        pass

    watch = Watch()
    watch._bring_back(1)
    assert watch.waited == [0, 1, 2, -1]


def test_an_engine_that_ray_starts_no_more_ends_a_run_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has joined that lacks a package, say: it was asked again for ever. One that died once more is asked."""
    said, cause = "Traceback ...\nModuleNotFoundError: No module named 'vllm'", ModuleNotFoundError("vllm")
    gone = ray.exceptions.ActorDiedError(ray.exceptions.RayTaskError("__init__", said, cause))
    lost = ray.exceptions.RayTaskError("resume", "Traceback ...", EngineLost("It was started again."))
    errors = [gone, lost.as_instanceof_cause()]

    def get(*_: Any, **__: Any) -> Any:
        raise errors.pop()

    watch = object.__new__(ClusterWatch)
    watch._engines = [None, SimpleNamespace(ready=SimpleNamespace(remote=lambda: "again"))]
    watch._coming, watch._calls = {1: "call"}, {}
    monkeypatch.setattr(cluster_module.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(cluster_module.ray, "get", get)
    watch._come_back(1)
    assert watch._coming == {1: "again"}
    with pytest.raises(EngineDied, match=r"Engine 1 died and could not be restarted\. .*No module named 'vllm'"):
        watch._come_back(1)


@pytest.mark.parametrize("error", [ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError("away", None)])
def test_one_that_is_back_and_busy_does_not_end_the_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch(Scripted, ClusterWatch):
        def __init__(self) -> None:
            super().__init__()
            self._waits = True

        def _moved(self, index: int) -> bool:
            raise error

    watch = Watch()
    watch._bring_back(2)
    assert watch.waited[-1] == -2
