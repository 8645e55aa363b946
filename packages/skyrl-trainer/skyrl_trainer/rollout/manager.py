"""Rollouts: what the driver asks for trajectories, while it trains, and for benchmarks."""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.episode import derive_seed
from skyrl_trainer.rollout.pool import close_env_workers, start_env_workers
from skyrl_trainer.rollout.rollout_worker import RolloutWorker
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, RolloutBatch, SamplingOptions, Trajectory

START_LIMIT = 300.0
"""Seconds that the processes have to start and load the tokenizer."""
CHECK_INTERVAL = 2.0
How = tuple[SamplingOptions, bool, bool]
"""The sampling options, and RolloutWorker.start's `seeded` and `in_rounds`."""
MAX_RESTARTS = 3
"""Of one RolloutWorker in a rollout; Ray also reports one that was only out of reach for a moment."""
POLL_SECONDS = 10.0
"""How long one call waits in a RolloutWorker for trajectories to end."""


class Rollouts:
    """One RolloutWorker an engine (an episode sticks to its engine), all of them over the same EnvWorkers."""

    def __init__(self, config: Config, engines: list[Any], tokenizer_path: str) -> None:
        """`engines`: handles of actors with protocols.InferenceEngine's methods, made `ready` by the caller, or
        `Endpoint`s; `tokenizer_path` is "" where those take messages.

        Returns at once; `run` and `play` wait for the processes.
        """
        self._config = config
        self._engines = engines
        self.watch: Callable[[], object] = lambda: None
        """Called every CHECK_INTERVAL seconds while episodes run: brings back engines that died."""
        self._checked = 0.0
        environment = config.environment
        self.env_workers = start_env_workers(environment.num_workers, environment.step_timeout)
        actor: Any = ray.remote(RolloutWorker).options(num_cpus=0, max_restarts=-1, max_task_retries=0)
        run = uuid.uuid4().hex[:8]
        self._workers = [
            actor.remote(tokenizer_path, config.generator, f"{run}-{index}") for index in range(len(engines))
        ]
        self._in_play: list[dict[str, Trajectory]] = [{} for _ in self._workers]
        """What each worker plays: still empty trajectories, by their ids."""
        self._sent: list[Any] = [None] * len(self._workers)
        """What each worker's last `start` returns: Ray may run calls of an asyncio actor in another order."""
        self._polls: dict[Any, int] = {}

    def run(self, batch: PromptBatch, eval: bool = False, sampling: SamplingOptions | None = None) -> RolloutBatch:
        """Plays every sample `num_generations` times; blocks until all episodes are back, failed ones included.

        `eval` takes generator.eval_temperature; `sampling` replaces the recipe's options altogether. Raises
        EngineDied when an engine is gone, UserError when every single episode failed.
        """
        groups = [
            [self._new_trajectory(batch, number, generation, eval) for generation in range(batch.num_generations)]
            for number in range(len(batch.samples))
        ]
        deterministic = self._config.trainer.deterministic
        how = (sampling or self._sampling(eval), deterministic, deterministic)
        self._begin()
        self._start(groups, how)
        by_id: dict[str, Trajectory] = {}
        while any(self._in_play):
            by_id |= {trajectory.trajectory_id: trajectory for trajectory in self._finished(how, wait_for_all=True)}
        rollouts = RolloutBatch(batch.step, [[by_id[empty.trajectory_id] for empty in group] for group in groups])
        failed = [trajectory for trajectory in rollouts.trajectories if trajectory.stop_reason.failed]
        if failed and len(failed) == len(by_id):
            what = "of the evaluation at step" if eval else "of step"
            raise UserError(
                f"All {len(failed)} episodes {what} {batch.step} failed; the first, {failed[0].trajectory_id} "
                f"({failed[0].sample.env_id}), ended with {failed[0].stop_reason.value}: {failed[0].error}"
            )
        return rollouts

    def play(self, trajectories: Iterable[Trajectory], sampling: SamplingOptions, seeded: bool) -> Iterator[Trajectory]:
        """Plays still empty trajectories and yields each as it ends, generator.max_concurrency an engine at a time.

        They are taken from the iterable as there is room. seeded: every request has a generator of its own. Raises
        EngineDied when an engine is gone, UserError when an endpoint answers no more.
        """
        waiting, room = iter(trajectories), self._config.generator.max_concurrency * len(self._workers)
        how = (sampling, seeded, False)
        self._begin()
        while True:
            self._start([[each] for each in islice(waiting, room - sum(map(len, self._in_play)))], how)
            if not any(self._in_play):
                return
            yield from self._finished(how)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        return _alive(self._workers[0], "the RolloutWorker's start")

    def close(self) -> None:
        close_env_workers(self.env_workers)
        for worker in self._workers:
            ray.kill(worker)

    def _new_trajectory(self, batch: PromptBatch, number: int, generation: int, eval: bool) -> Trajectory:
        name = f"{'eval/' if eval else ''}{batch.step}/{batch.offset + number}/{generation}"
        seed = derive_seed(self._config.trainer.seed, name)
        return Trajectory(name, batch.samples[number], generation, seed)

    def _sampling(self, eval: bool) -> SamplingOptions:
        generator = self._config.generator
        return SamplingOptions(
            max_tokens=generator.max_completion_length,
            temperature=generator.eval_temperature if eval else generator.temperature,
            top_p=1.0 if eval else generator.top_p,
            stop_token_ids=self.stop_token_ids,
        )

    # The RolloutWorkers.

    def _begin(self) -> None:
        """Forgets what an earlier rollout that failed has left in play."""
        self._in_play = [{} for _ in self._workers]
        self._deaths = [0] * len(self._workers)
        self._news = time.monotonic()

    def _start(self, groups: list[list[Trajectory]], how: How) -> None:
        """Each group to the worker that plays the fewest."""
        shares: list[list[Trajectory]] = [[] for _ in self._workers]
        for group in groups:
            index = min(range(len(shares)), key=lambda i: len(self._in_play[i]))
            shares[index] += group
            self._in_play[index] |= {trajectory.trajectory_id: trajectory for trajectory in group}
        for index, share in enumerate(shares):
            if share:
                self._send(index, share, how)

    def _send(self, index: int, share: list[Trajectory], how: How) -> None:
        start = self._workers[index].start
        self._sent[index] = start.remote(self._engines[index], self.env_workers, share, *how)

    def _finished(self, how: How, wait_for_all: bool = False) -> list[Trajectory]:
        """What has ended after a wait of CHECK_INTERVAL seconds at most; looks after the engines meanwhile."""
        for index, playing in enumerate(self._in_play):
            if playing and index not in self._polls.values():
                at_least = len(playing) if wait_for_all else 1
                poll = self._workers[index].finished.remote(at_least, POLL_SECONDS, self._sent[index])
                self._polls[poll] = index
        done, _ = ray.wait(list(self._polls), timeout=CHECK_INTERVAL)
        self._check()
        ended = [trajectory for ref in done for trajectory in self._collected(ref, self._polls.pop(ref), how)]
        if ended:
            self._news = time.monotonic()
        generator = self._config.generator
        waves = math.ceil(max(map(len, self._in_play)) / generator.max_concurrency)
        limit = START_LIMIT + generator.episode_timeout * (waves + 1)
        if time.monotonic() > self._news + limit:
            raise UserError(f"Waited {limit:.0f} seconds for the episodes, in vain: a RolloutWorker hangs.")
        return ended

    def _check(self) -> None:
        if time.monotonic() >= self._checked + CHECK_INTERVAL:
            self._checked = time.monotonic()
            self.watch()

    def _collected(self, ref: Any, index: int, how: How) -> list[Trajectory]:
        """What a worker has answered. One that died is restarted by Ray, and plays its trajectories once more."""
        playing = self._in_play[index]
        try:
            ended: list[Trajectory] | None = ray.get(ref)
        except RayActorError:
            ended = None
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise type(error.cause)(str(error.cause)) from None
            raise
        if ended is None and playing:
            self.watch()
            self._deaths[index] += 1
            if self._deaths[index] > MAX_RESTARTS:
                raise UserError(f"A RolloutWorker died {self._deaths[index]} times in one rollout: see its log.")
            _alive(self._workers[index], "the episodes")
            self._send(index, list(playing.values()), how)
        return [trajectory for trajectory in ended or () if playing.pop(trajectory.trajectory_id, None)]


def _alive(worker: Any, what: str) -> tuple[int, ...]:
    """The worker's `stop_token_ids`, once Ray has started it: calls fail at once meanwhile."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            return ray.get(worker.stop_token_ids.remote(), timeout=START_LIMIT)
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise UserError(f"A RolloutWorker died while it was waited for {what}: {error}") from None
            time.sleep(0.2)
