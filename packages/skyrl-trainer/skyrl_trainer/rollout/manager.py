"""Rollouts: what the driver's loop asks for trajectories."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.episode import derive_seed
from skyrl_trainer.rollout.pool import EnvPool
from skyrl_trainer.rollout.rollout_worker import RolloutWorker
from skyrl_trainer.types import PromptBatch, RolloutBatch, SamplingOptions, Trajectory

START_LIMIT = 300.0
"""Seconds that the processes have to start and load the tokenizer."""
CHECK_INTERVAL = 2.0


class Rollouts:
    """One RolloutWorker an engine (an episode sticks to its engine), all of them over the same EnvWorkers."""

    def __init__(self, config: Config, engines: list[Any], tokenizer_path: str) -> None:
        """`engines`: handles of actors with protocols.InferenceEngine's methods, made `ready` by the caller.

        Returns at once; `run` waits for the processes.
        """
        self._config = config
        self._engines = engines
        self.watch: Callable[[], object] = lambda: None
        """Called every CHECK_INTERVAL seconds while episodes run: brings back engines that died."""
        self.env_pool = EnvPool(config.environment.num_workers, config.environment.step_timeout)
        actor: Any = ray.remote(RolloutWorker).options(num_cpus=0, max_restarts=-1, max_task_retries=0)
        run = uuid.uuid4().hex[:8]
        self._workers = [
            actor.remote(tokenizer_path, config.generator, f"{run}-{index}") for index in range(len(engines))
        ]
        self._stop_token_ids: tuple[int, ...] | None = None

    def run(self, batch: PromptBatch, eval: bool = False, sampling: SamplingOptions | None = None) -> RolloutBatch:
        """Plays every sample `num_generations` times; blocks until all episodes are back, failed ones included.

        `eval` takes generator.eval_temperature; `sampling` replaces the recipe's options altogether. Raises
        EngineDied when an engine is gone, UserError when every single episode failed.
        """
        groups = [
            [self._new_trajectory(batch, number, generation, eval) for generation in range(batch.num_generations)]
            for number in range(len(batch.samples))
        ]
        sampling = sampling or self._sampling(eval)
        shares = [
            [trajectory for group in groups[index :: len(self._workers)] for trajectory in group]
            for index in range(len(self._workers))
        ]
        generator, deterministic = self._config.generator, self._config.trainer.deterministic
        rest = (sampling, generator.max_turns, deterministic)
        calls = [
            (worker, partial(worker.rollout.remote, engine, self.env_pool.handles, share, *rest))
            for worker, engine, share in zip(self._workers, self._engines, shares, strict=True)
            if share
        ]
        waves = math.ceil(max(map(len, shares), default=0) / generator.max_concurrency)
        done = self._await(calls, START_LIMIT + generator.episode_timeout * (waves + 1), "the episodes")
        by_id = {trajectory.trajectory_id: trajectory for share in done for trajectory in share}
        rollouts = RolloutBatch(batch.step, [[by_id[empty.trajectory_id] for empty in group] for group in groups])
        failed = [trajectory for trajectory in rollouts.trajectories if trajectory.stop_reason.failed]
        if failed and len(failed) == len(by_id):
            what = "of the evaluation at step" if eval else "of step"
            raise UserError(
                f"All {len(failed)} episodes {what} {batch.step} failed; the first, {failed[0].trajectory_id} "
                f"({failed[0].sample.env_id}), ended with {failed[0].stop_reason.value}: {failed[0].error}"
            )
        return rollouts

    def close(self) -> None:
        self.env_pool.close()
        for worker in self._workers:
            ray.kill(worker)

    def _new_trajectory(self, batch: PromptBatch, number: int, generation: int, eval: bool) -> Trajectory:
        name = f"{'eval/' if eval else ''}{batch.step}/{batch.offset + number}/{generation}"
        seed = derive_seed(self._config.trainer.seed, name)
        return Trajectory(name, batch.samples[number], generation, seed)

    def _sampling(self, eval: bool) -> SamplingOptions:
        if self._stop_token_ids is None:
            worker = self._workers[0]
            self._stop_token_ids = self._await(
                [(worker, worker.stop_token_ids.remote)], START_LIMIT, "the RolloutWorker's start"
            )[0]
        generator = self._config.generator
        return SamplingOptions(
            max_tokens=generator.max_completion_length,
            temperature=generator.eval_temperature if eval else generator.temperature,
            top_p=1.0 if eval else generator.top_p,
            stop_token_ids=self._stop_token_ids,
        )

    def _await(self, calls: Sequence[tuple[Any, Callable[[], Any]]], limit: float, what: str) -> list[Any]:
        """The results of all calls (worker, call), watching the EnvWorkers meanwhile.

        A RolloutWorker that dies is restarted by Ray, and its call is made once more, from the beginning.
        """
        deadline = time.monotonic() + limit
        pending = {call(): index for index, (_, call) in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        repeated: set[int] = set()
        while pending:
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=CHECK_INTERVAL)
            self.env_pool.check()
            self.watch()
            for ref in done:
                index = pending.pop(ref)
                try:
                    results[index] = ray.get(ref)
                except RayActorError as error:
                    if index in repeated:
                        raise UserError(f"A RolloutWorker died twice while it was waited for {what}: {error}") from None
                    repeated.add(index)
                    worker, call = calls[index]
                    _wait_alive(worker, what)
                    pending[call()] = index
                except RayTaskError as error:
                    if isinstance(error.cause, UserError):
                        raise type(error.cause)(str(error.cause)) from None
                    raise
            if pending and time.monotonic() > deadline:
                raise UserError(f"Waited {limit:.0f} seconds for {what}, in vain: a RolloutWorker hangs.")
        return results


def _wait_alive(worker: Any, what: str) -> None:
    """Until Ray has restarted the worker: calls fail at once meanwhile."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            ray.get(worker.pid.remote(), timeout=START_LIMIT)
            return
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise UserError(f"A RolloutWorker died while it was waited for {what}: {error}") from None
            time.sleep(0.2)
