"""Watches the engines: one that died is waited for, brought to the policy in force, and goes on.

A call that never returns hangs in every engine: it fails as soon as the process is gone.
"""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from skyrl_trainer.errors import EngineDied, EngineLost, UserError

MAX_RESTARTS = 3
"""Of one engine in a step: one that dies again and again has a reason that a restart does not mend."""
RESTART_SECONDS = 300.0
"""Limit of one restart: a new process, the model loaded again."""
FOREVER = 1e8


class EngineWatch:
    """`restore(index)` gives a restarted, paused engine its weights and resumes it; by default only that."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines
        self.away: set[int] = set()
        """Engines that nobody waits for: in a cluster (run/cluster.py)."""
        self._deaths = [0] * len(engines)
        self._calls: dict[Any, int] = {}
        self.restore: Callable[[int], None] = lambda index: ray.get(engines[index].resume.remote())
        for index in range(len(engines)):
            self._hang(index)

    def new_step(self) -> int:
        """How many died in the step that ends; in the next each may die as often."""
        deaths, self._deaths = sum(self._deaths), [0] * len(self._deaths)
        return deaths

    def check(self, wait: float = 0.0) -> bool:
        """Brings back every engine that died, which may take minutes; whether there was one. Raises EngineDied.
        wait: seconds to look for a death that was noticed elsewhere."""
        for name, _ in ray._private.worker._global_node.dead_processes():  # of a Ray of our own
            if name in ("gcs_server", "raylet"):
                raise EngineDied(f"Ray's {name} was killed, or ran out of memory: start the run again, and it goes on.")
        ended, _ = ray.wait(list(self._calls), timeout=wait)
        dead = []
        for call in ended and ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
            index = self._calls.pop(call)
            try:
                ray.get(call)
            except RayActorError:
                dead.append(index)
            except RayTaskError:
                continue  # its step loop raised, which ends whatever waits for it
        for index in dead:
            self._bring_back(index)
        return bool(dead)

    def _hang(self, index: int) -> None:
        self._calls[self._engines[index].collect.remote("watch", FOREVER)] = index

    def _bring_back(self, index: int) -> None:
        while True:
            self._count(index)
            self._wait_ready(index)
            self._hang(index)
            try:
                return self.restore(index)
            except (EngineLost, RayActorError):
                self._calls = {call: i for call, i in self._calls.items() if i != index}

    def _count(self, index: int) -> None:
        self._deaths[index] += 1
        if self._deaths[index] > MAX_RESTARTS:
            raise EngineDied(
                f"Engine {index} died {self._deaths[index]} times in one step, and was restarted {MAX_RESTARTS} "
                "times: see ray-logs in the run's folder; if memory ran out, lower generator.max_concurrency "
                "or engine_kwargs.kv_cache_memory_bytes."
            )

    def _wait_ready(self, index: int) -> None:
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                ray.get(self._engines[index].ready.remote(), timeout=max(1.0, deadline - time.monotonic()))
                return
            except (ActorDiedError, GetTimeoutError, RayTaskError) as error:
                cause = getattr(error, "cause", error)
                reason = str(cause) if isinstance(cause, UserError) else f"It did not come back: {cause!r}"
                raise EngineDied(f"Engine {index} died and could not be restarted. {reason}") from error
            except RayActorError as error:  # Ray has not started it yet: calls fail at once
                if time.monotonic() > deadline:
                    raise EngineDied(f"Engine {index} died and did not come back in time: {error}") from error
                time.sleep(0.2)
