"""EnvPool: the EnvWorkers, owned by the driver, which watches their health and counts their restarts."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import ray

from skyrl_trainer.rollout.env_worker import EnvWorker


class EnvPool:
    """Ray restarts a worker that died, and RLlib's FaultTolerantActorManager tells which ones are in service.

    The RolloutWorkers call the workers directly (`handles`) and see for themselves when one dies; the driver's view
    is for the record: `restarts`, `unhealthy`.
    """

    def __init__(self, num_workers: int, step_timeout: float) -> None:
        from ray.rllib.utils.actor_manager import FaultTolerantActorManager  # seconds to import

        actor: Any = ray.remote(EnvWorker).options(max_restarts=-1, max_task_retries=0, num_cpus=0)
        run = uuid.uuid4().hex[:12]
        self.handles: list[Any] = [actor.remote(step_timeout, f"{run}-{index}") for index in range(num_workers)]
        self._manager = FaultTolerantActorManager(self.handles, max_remote_requests_in_flight_per_actor=1)
        self._pids: dict[int, int] = {}
        self.restarts = 0
        self.check()

    def check(self) -> None:
        """Collects the answers to the pings under way and sends new ones; never waits for a worker."""
        answers: Any = self._manager.fetch_ready_async_reqs(timeout_seconds=0.0, mark_healthy=True)
        for answer in answers:
            if answer.ok:
                # The manager counts a restart only when a ping met the dead process; a new pid tells of any.
                pid = answer.get().pid
                self.restarts += self._pids.setdefault(answer.actor_id, pid) != pid
                self._pids[answer.actor_id] = pid
        self._manager.foreach_actor_async(lambda worker: worker.ping(), healthy_only=False)

    @property
    def unhealthy(self) -> list[int]:
        return sorted(set(self._manager.actor_ids()) - set(self._manager.healthy_actor_ids()))

    def close(self, timeout: float = 5.0) -> None:
        """Closes all envs, then ends the processes; one that does not answer is ended all the same."""
        calls = [handle.shutdown.remote() for handle in self.handles]
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(calls, num_returns=len(calls), timeout=timeout)
        self._manager.clear()
