"""Watches the engines, in each of which a call hangs: one that died is brought to the policy in force, and goes on."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from skyrl_trainer.errors import EngineDied, EngineLost, UserError

MAX_RESTARTS, HOURS = 3, 4
"""Of one engine in a step and in HOURS: one that dies again and again has a reason that a restart does not mend."""
RESTART_SECONDS = 300.0
"""Limit of one restart: a new process, the model loaded again."""
FOREVER = 1e8


class EngineWatch:
    """`restore(index)` gives a restarted, paused engine its weights and resumes it; by default only that."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines
        self.away: set[int] = set()
        """Engines that nobody waits for: in a cluster (run/cluster.py)."""
        self._deaths: list[tuple[int, float]] = []
        self._calls: dict[int, Any] = {}
        self.restore: Callable[[int], None] = lambda index: ray.get(engines[index].resume.remote())
        for index in range(len(engines)):
            self._hang(index)

    def new_step(self) -> int:
        """How many died in the step that ends; in the next each may die as often."""
        deaths, self._deaths = len(self._deaths), []
        return deaths

    def check(self, wait: float = 0.0) -> bool:
        """Brings back every engine that died, which may take minutes; whether there was one. EngineDied.
        wait: seconds to look for a death that was noticed elsewhere."""
        for name, _ in ray._private.worker._global_node.dead_processes():  # of a Ray of our own
            if name in ("gcs_server", "raylet"):
                raise EngineDied(f"Ray's {name} was killed, or ran out of memory: start the run again, and it goes on.")
        ray.wait(list(self._calls.values()), timeout=wait)
        ended = [index for index, call in self._calls.items() if ray.wait([call], timeout=0)[0]]
        for index in ended:
            try:
                ray.get(self._calls.pop(index))
            except RayActorError:
                self._bring_back(index)
            except RayTaskError as error:  # its step loop raised
                known = isinstance(error.cause, UserError)
                raise EngineDied(f"{error.cause}" if known else f"An engine failed: {error.cause!r}") from error
        return bool(ended)

    def _hang(self, index: int) -> None:
        self._calls[index] = self._engines[index].collect.remote("watch", FOREVER)

    def _bring_back(self, index: int) -> None:
        while True:
            self._count(index)
            for each in range(len(self._engines)):  # NCCL's group needs all
                self._wait_ready(each)
            self._hang(index)
            try:
                return self.restore(index)
            except (EngineLost, RayActorError):
                continue

    def _count(self, index: int) -> None:
        now = time.monotonic()
        self._deaths.append((index, now))
        if sum(who == index and now - when < HOURS * 3600 for who, when in self._deaths) > MAX_RESTARTS:
            raise EngineDied(f"Engine {index} died {MAX_RESTARTS + 1} times within {HOURS} hours: see ray-logs.")

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
