"""The RolloutWorkers, one per engine: which of them plays what, what has come back, and what a death costs."""

import itertools
import math
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import cached_property
from operator import itemgetter
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.episode import How
from skyrl_trainer.rollout.pool import close_env_workers, start_env_workers
from skyrl_trainer.rollout.rollout_worker import RolloutWorker, places
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Trajectory

START_LIMIT = 300.0
"""Seconds that processes have to start and load the tokenizer."""
CHECK_INTERVAL = 2.0
MAX_RESTARTS = 3
"""Of one RolloutWorker before it gives anything; Ray also reports one that was out of reach for a moment."""
POLL_SECONDS = 10.0
"""How long a call waits in a RolloutWorker for trajectories to end."""


class Workers:
    """An episode sticks to its worker, and so to its engine; all of them use the same EnvWorkers."""

    def __init__(self, config: Config, engines: list[Any], tokenizer_path: str) -> None:
        """`engines`: handles of actors with protocols.InferenceEngine's methods, made `ready` by the caller, or
        `Endpoint`s; `tokenizer_path` is "" where those take messages. Does not wait for the processes."""
        self._config = config
        self._engines = engines
        self.watch: Callable[[], object] = lambda: None
        """Called every CHECK_INTERVAL seconds while episodes run: brings back engines that died."""
        self._checked = 0.0
        self._new = tokenizer_path, config.generator, uuid.uuid4().hex[:8]
        self.env_workers = self._start_env_workers()
        self._workers = [self._start_worker(index) for index in range(len(engines))]
        self._present = list(range(len(engines)))
        """Who gets something to play."""
        self._in_play: list[dict[str, tuple[Trajectory, How]]] = [{} for _ in self._workers]
        """What each worker plays: still empty trajectories, by their ids."""
        _, self._places = places(config.generator)
        self._waiting: deque[tuple[list[Trajectory], How]] = deque()
        """Groups that no worker has a place for: they go to the one that is first to have one."""
        self._ended: dict[str, Trajectory] = {}
        """What has come back and was not yet asked for."""
        self._deaths = [0] * len(self._workers)
        """Of each worker, since it last gave something."""
        self._sent: list[Any] = [None] * len(self._workers)
        """What each worker's last `start` returns: Ray may run calls of an asyncio actor in another order."""
        self._polls: dict[Any, int] = {}

    def _start_env_workers(self) -> list[Any]:
        environment, agent = self._config.environment, self._config.generator.agent
        return start_env_workers(environment.num_workers, environment.step_timeout, agent.run)

    def _start_worker(self, index: int, **where: Any) -> Any:
        """where: Ray's options."""
        actor: Any = ray.remote(RolloutWorker).options(num_cpus=0, max_restarts=-1, max_task_retries=0, **where)
        return actor.remote(*self._new)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        return _alive(self._workers[self._present[0]], "its start")

    def hold(self, held: bool) -> None:
        for worker in self._workers:
            worker.hold.remote(held)

    def close(self) -> None:
        close_env_workers(self.env_workers)
        for worker in self._workers:
            ray.kill(worker)

    def _start(self, groups: list[list[Trajectory]], how: How) -> None:
        new = deque((group, how) for group in groups)
        if how.in_rounds or how.first or len(self._workers) == 1:
            return self._hand_out(new, math.inf)
        self._waiting += new
        self._hand_out(self._waiting, self._places)

    def _hand_out(self, groups: deque[tuple[list[Trajectory], How]], places: float) -> None:
        shares: dict[tuple[int, How], list[Trajectory]] = {}
        while groups:
            index = min(self._present, key=lambda i: len(self._in_play[i]))
            if len(self._in_play[index]) >= places:
                break
            group, how = groups.popleft()
            shares.setdefault((index, how), []).extend(group)
            self._in_play[index] |= {each.trajectory_id: (each, how) for each in group}
        for (index, how), share in shares.items():
            self._send(index, share, how)

    def _send(self, index: int, share: list[Trajectory], how: How) -> None:
        self._sent[index] = self._workers[index].start.remote(self._engines[index], self.env_workers, share, how)

    # Takes what has ended within CHECK_INTERVAL seconds into `_ended`; looks after the engines meanwhile.
    # at_least: trajectories that a worker may wait for before it answers; None: all that it plays.
    def _collect(self, at_least: int | None) -> None:
        for index, playing in enumerate(self._in_play):
            if playing and index not in self._polls.values():
                wanted = 1 if self._waiting else min(at_least or len(playing), len(playing))  # its place is another's
                poll = self._workers[index].finished.remote(wanted, POLL_SECONDS, self._sent[index])
                self._polls[poll] = index
        done, _ = ray.wait(list(self._polls), timeout=CHECK_INTERVAL)
        if time.monotonic() >= self._checked + CHECK_INTERVAL:
            self._checked = time.monotonic()
            self.watch()
        for ref in (each for each in done if each in self._polls):  # not of one that has been given up
            self._receive(ref, self._polls.pop(ref))
        generator = self._config.generator
        waves = math.ceil(max(map(len, self._in_play)) / generator.max_concurrency)
        limit = START_LIMIT + generator.episode_timeout * (waves + 1)
        if time.monotonic() > self._news + limit:
            raise UserError(f"Waited {limit:.0f} seconds for the episodes, in vain: a RolloutWorker hangs.")

    def _receive(self, ref: Any, index: int) -> None:
        playing = self._in_play[index]
        try:
            ended: list[Trajectory] | None = ray.get(ref)
        except (RayActorError, ObjectLostError):  # lost with its node
            ended = None
        except RayTaskError as error:
            self._in_play = [{} for _ in self._workers]  # nothing more comes of them
            self._waiting.clear()
            if isinstance(error.cause, UserError):
                raise type(error.cause)(str(error.cause)) from None
            raise
        if ended is None and playing:
            self._play_again(index)
        for trajectory in ended or ():
            if playing.pop(trajectory.trajectory_id, None):
                self._ended[trajectory.trajectory_id] = trajectory
                self._deaths[index], self._news = 0, time.monotonic()
        self._hand_out(self._waiting, self._places)

    def _play_again(self, index: int) -> None:
        self.watch()
        if not self._in_play[index]:  # others play them by now
            return
        self._deaths[index] += 1
        if self._deaths[index] > MAX_RESTARTS:
            raise UserError(f"A RolloutWorker died {self._deaths[index]} times in a row: see ray-logs.")
        _alive(self._workers[index], "the episodes")
        for how, again in itertools.groupby(self._in_play[index].values(), key=itemgetter(1)):
            self._send(index, [trajectory for trajectory, _ in again], how)


# The worker's `stop_token_ids`, once Ray has started it: calls fail at once meanwhile.
def _alive(worker: Any, what: str) -> tuple[int, ...]:
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            return ray.get(worker.stop_token_ids.remote(), timeout=START_LIMIT)
        except (RayActorError, GetTimeoutError) as error:
            if getattr(error, "actor_init_failed", False) or time.monotonic() > deadline:
                raise UserError(f"A RolloutWorker died in {what}: {str(error).strip().splitlines()[-1]}") from None
            time.sleep(0.2)
