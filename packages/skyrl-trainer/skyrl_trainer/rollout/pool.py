"""Starts and ends the EnvWorkers. Ray restarts one that dies."""

import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_trainer.rollout.env_worker import EnvWorker

CLOSE_SECONDS = 5.0
"""How long envs may take to close."""
MAX_ALONE = 64
"""Calls at a time to envs of one EnvWorker that have processes of their own; the others' come in turn."""


def at(node: str, only: bool = False) -> dict[str, Any]:
    """Ray's options for an actor there, or, unless `only`, elsewhere when the node has died or is full."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=not only, _spill_on_unavailable=not only)
    return {"scheduling_strategy": strategy}


def start_env_workers(
    number: int, step_timeout: float, agent: str | list[str] | None = None, **where: Any
) -> list[Any]:
    """So many actors. step_timeout: seconds of one env call. agent: `generator.agent.run`. where: Ray's options."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "concurrency_groups": {"alone": MAX_ALONE}}
    actor = ray.remote(**options | where)(EnvWorker)
    return [actor.remote(step_timeout, agent) for _ in range(number)]


def close_env_workers(workers: list[Any]) -> None:
    """Closes all envs and ends the processes, whether they answer or not."""
    calls = [worker.shutdown.remote() for worker in workers]
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait(calls, num_returns=len(calls), timeout=CLOSE_SECONDS)
    for worker in workers:
        ray.kill(worker)
