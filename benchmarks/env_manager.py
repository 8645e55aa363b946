"""Who should look after EnvWorkers: RLlib's FaultTolerantActorManager, or whoever calls them?

    python benchmarks/env_manager.py

Both rest on Ray's restart of the actor. Measured side by side in one run: the time from an EnvWorker's death to the
next answered step, what one step call costs, and what the manager's import costs a driver, which has torch already, in
seconds and memory. The last line is one JSON object; `call` and `recovery` are the manager's way over the direct one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.rllib.utils.actor_manager import FaultTolerantActorManager

from skyrl_trainer.rollout.env_worker import EnvWorker
from skyrl_trainer.types import Sample

SAMPLE = Sample("bench", "skyrl/text_math-v0", 1, {"split": "train"})
IMPORT = "import ray, torch, transformers, psutil; {}; print(psutil.Process().memory_info().rss / 2**20)"
MANAGER = "from ray.rllib.utils.actor_manager import FaultTolerantActorManager"
CALLS, ROUNDS, LIMIT = 300, 7, 60.0


class ManagedEnvWorker(EnvWorker):
    def ping(self) -> int:
        return os.getpid()

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the manager calls."""
        return function(self, *args, **kwargs)


class Direct:
    """As rollout/env_client.py does it: the caller sees the death in its own call, and pings until somebody answers."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.worker, method).remote(*arguments), timeout=LIMIT)

    def recover(self) -> None:
        while True:
            try:
                self.call("ping")
                return
            except RayActorError:
                time.sleep(0.1)


class Managed:
    """The manager's own ways: calls through it mark a dead actor, probes bring it back into service."""

    def __init__(self, worker: Any) -> None:
        self.manager = FaultTolerantActorManager([worker])

    def call(self, method: str, *arguments: Any) -> Any:
        answers = list(self.manager.foreach_actor(lambda w: getattr(w, method)(*arguments), timeout_seconds=LIMIT))
        if not answers or not answers[0].ok:  # out of service, or taken out of it just now
            raise RayActorError
        return answers[0].get()

    def recover(self) -> None:
        while not self.manager.num_healthy_actors():
            self.manager.probe_unhealthy_actors(timeout_seconds=LIMIT, mark_healthy=True)
            time.sleep(0.1)


def recovery(way: Direct | Managed) -> float:
    """Seconds from SIGKILL to the next answered reset."""
    os.kill(way.call("ping"), signal.SIGKILL)
    start = time.perf_counter()
    while True:
        try:
            way.call("call_many", [("reset", "bench", SAMPLE)])
            return time.perf_counter() - start
        except RayActorError:
            way.recover()


def per_call(way: Direct | Managed) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        way.call("call_many", [("reset", "bench", SAMPLE)])
    return (time.perf_counter() - start) / CALLS


def in_turns(measure: Callable[[Direct | Managed], float], ways: Sequence[Direct | Managed]) -> list[float]:
    """The median of each way over ROUNDS."""
    return [
        statistics.median(column) for column in zip(*([measure(w) for w in ways] for _ in range(ROUNDS)), strict=True)
    ]


def imported(statement: str) -> tuple[float, float]:
    """Seconds and MiB of a process that runs it; the median of three."""
    runs = []
    for _ in range(3):
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", IMPORT.format(statement)], capture_output=True, check=True)
        runs.append((time.perf_counter() - start, float(out.stdout)))
    return sorted(runs)[1]


def main() -> None:
    (ray_seconds, ray_mib), (seconds, mib) = imported("pass"), imported(MANAGER)
    logging.getLogger("ray.rllib").setLevel(logging.CRITICAL)
    ray.init(log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "concurrency_groups": {"alone": 1}}
    actor: Any = ray.remote(**options)(ManagedEnvWorker)
    ways = Direct(actor.remote(30.0)), Managed(actor.remote(30.0))
    for way in ways:
        way.call("call_many", [("reset", "bench", SAMPLE)])
    direct, managed = in_turns(per_call, ways)
    print(f"a step call: {1e3 * direct:.2f} ms direct, {1e3 * managed:.2f} ms through the manager")
    dead, brought_back = in_turns(recovery, ways)
    print(f"from death to the next answer: {dead:.2f} s direct, {brought_back:.2f} s through the manager")
    print(f"importing it: {seconds:.1f} s, {mib:.0f} MiB; without: {ray_seconds:.1f} s, {ray_mib:.0f} MiB")
    ray.shutdown()
    result = {"call": managed / direct, "recovery": brought_back / dead, "import_seconds": seconds - ray_seconds}
    print(json.dumps({name: round(value, 2) for name, value in (result | {"import_mib": mib - ray_mib}).items()}))


if __name__ == "__main__":
    main()
