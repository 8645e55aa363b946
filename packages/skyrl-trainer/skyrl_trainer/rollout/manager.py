"""Rollouts: what the driver asks for trajectories, while it trains, and for benchmarks."""

import itertools
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.episode import derive_seed
from skyrl_trainer.rollout.pool import close_env_workers, start_env_workers
from skyrl_trainer.rollout.rollout_worker import RolloutWorker, places
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, RolloutBatch, Sample, SamplingOptions, Trajectory

START_LIMIT = 300.0
"""Seconds that the processes have to start and load the tokenizer."""
CHECK_INTERVAL = 2.0
MAX_RESTARTS = 3
"""Of one RolloutWorker before it gives anything; Ray also reports one that was only out of reach for a moment."""
POLL_SECONDS = 10.0
"""How long one call waits in a RolloutWorker for trajectories to end."""


class How(NamedTuple):
    """RolloutWorker.start's arguments for all that is started together."""

    sampling: SamplingOptions
    seeded: bool
    in_rounds: bool
    first: bool


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

    def run(self, batch: PromptBatch, eval: bool = False, sampling: SamplingOptions | None = None) -> RolloutBatch:
        """Plays every sample `num_generations` times; blocks until all episodes are back, failed ones included.

        `eval` takes generator.eval_temperature, and places of its own beside what plays already; `sampling` replaces
        the recipe's options altogether. Raises EngineDied when an engine is gone, UserError when every episode failed.
        """
        name = f"{'eval/' if eval else ''}{batch.step}"
        groups = {
            number: self.new_group(f"{name}/{number}", sample, batch.num_generations)
            for number, sample in enumerate(batch.samples, batch.offset)
        }
        self.start(list(groups.values()), eval, sampling)
        done = self.finished(groups, wait_for_all=True)
        rollouts = RolloutBatch(batch.step, [done[number] for number in groups])
        check_not_all_failed(rollouts, "evaluation at step" if eval else "step")
        return rollouts

    def new_group(self, name: str, sample: Sample, size: int) -> list[Trajectory]:
        """Still empty trajectories, `name`/0 and on, with the seeds that their names stand for."""
        seed = self._config.trainer.seed
        ids = [f"{name}/{generation}" for generation in range(size)]
        return [Trajectory(each, sample, number, derive_seed(seed, each)) for number, each in enumerate(ids)]

    def start(
        self, groups: list[list[Trajectory]], eval: bool = False, sampling: SamplingOptions | None = None
    ) -> None:
        """Begins to play still empty trajectories; each group (same prompt, one cache) by one engine."""
        deterministic = self._config.trainer.deterministic
        self._start(groups, How(sampling or self._sampling(eval), deterministic, deterministic, eval))

    def finished(
        self, groups: Mapping[int, list[Trajectory]], wait_for_all: bool = False
    ) -> dict[int, list[Trajectory]]:
        """Of these groups, which were started, those that have ended, played: waits for one of them, or for all."""
        self._news = time.monotonic()
        while True:
            over = {
                number: [self._ended[empty.trajectory_id] for empty in group]
                for number, group in groups.items()
                if all(empty.trajectory_id in self._ended for empty in group)
            }
            if len(over) == len(groups) or (over and not wait_for_all):
                for played in itertools.chain.from_iterable(over.values()):
                    del self._ended[played.trajectory_id]
                return over
            self._collect(None if wait_for_all else min(map(len, groups.values())))

    def play(self, trajectories: Iterable[Trajectory], sampling: SamplingOptions, seeded: bool) -> Iterator[Trajectory]:
        """Plays still empty trajectories and yields each as it ends, generator.max_concurrency an engine at a time.

        They are taken from the iterable as there is room. seeded: every request has a generator of its own. Raises
        EngineDied when an engine is gone, UserError when an endpoint answers no more.
        """
        waiting, room = iter(trajectories), self._config.generator.max_concurrency * len(self._workers)
        self._news = time.monotonic()
        while True:
            new = itertools.islice(waiting, room - sum(map(len, self._in_play)))
            self._start([[each] for each in new], How(sampling, seeded, False, True))
            if not any(self._in_play):
                return
            self._collect(1)
            ended, self._ended = self._ended, {}
            yield from ended.values()

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        return _alive(self._workers[0], "the RolloutWorker's start")

    def hold(self, held: bool) -> None:
        """The clocks of all episodes stand still from hold(True) to hold(False): the engines are asleep."""
        for worker in self._workers:
            worker.hold.remote(held)

    def close(self) -> None:
        close_env_workers(self.env_workers)
        for worker in self._workers:
            ray.kill(worker)

    def _sampling(self, eval: bool) -> SamplingOptions:
        generator = self._config.generator
        return SamplingOptions(
            max_tokens=generator.max_completion_length,
            temperature=generator.eval_temperature if eval else generator.temperature,
            top_p=1.0 if eval else generator.top_p,
            stop_token_ids=self.stop_token_ids,
        )

    # The RolloutWorkers.

    def _start(self, groups: list[list[Trajectory]], how: How) -> None:
        """Each group to the worker that plays the fewest, at once or as soon as it has a place."""
        new = deque((group, how) for group in groups)
        if how.in_rounds or how.first or len(self._workers) == 1:
            return self._hand_out(new, math.inf)
        self._waiting += new
        self._hand_out(self._waiting, self._places)

    def _hand_out(self, groups: deque[tuple[list[Trajectory], How]], places: float) -> None:
        shares: dict[tuple[int, How], list[Trajectory]] = {}
        while groups:
            index = min(range(len(self._workers)), key=lambda i: len(self._in_play[i]))
            if len(self._in_play[index]) >= places:
                break
            group, how = groups.popleft()
            shares.setdefault((index, how), []).extend(group)
            self._in_play[index] |= {trajectory.trajectory_id: (trajectory, how) for trajectory in group}
        for (index, how), share in shares.items():
            self._send(index, share, how)

    def _send(self, index: int, share: list[Trajectory], how: How) -> None:
        start = self._workers[index].start
        self._sent[index] = start.remote(self._engines[index], self.env_workers, share, *how)

    def _collect(self, at_least: int | None) -> None:
        """Takes what has ended within CHECK_INTERVAL seconds into `_ended`; looks after the engines meanwhile.

        at_least: for how many trajectories a worker may wait before it answers; None: for all that it plays.
        """
        for index, playing in enumerate(self._in_play):
            if playing and index not in self._polls.values():
                wanted = min(at_least or len(playing), len(playing))
                wanted = 1 if self._waiting else wanted  # its place is another's
                poll = self._workers[index].finished.remote(wanted, POLL_SECONDS, self._sent[index])
                self._polls[poll] = index
        done, _ = ray.wait(list(self._polls), timeout=CHECK_INTERVAL)
        self._check()
        for ref in done:
            self._receive(ref, self._polls.pop(ref))
        generator = self._config.generator
        waves = math.ceil(max(map(len, self._in_play)) / generator.max_concurrency)
        limit = START_LIMIT + generator.episode_timeout * (waves + 1)
        if time.monotonic() > self._news + limit:
            raise UserError(f"Waited {limit:.0f} seconds for the episodes, in vain: a RolloutWorker hangs.")

    def _check(self) -> None:
        if time.monotonic() >= self._checked + CHECK_INTERVAL:
            self._checked = time.monotonic()
            self.watch()

    def _receive(self, ref: Any, index: int) -> None:
        """What a worker has answered. One that died is restarted by Ray, and plays its trajectories once more."""
        playing = self._in_play[index]
        try:
            ended: list[Trajectory] | None = ray.get(ref)
        except RayActorError:
            ended = None
        except RayTaskError as error:
            self._in_play = [{} for _ in self._workers]  # nothing more comes of them
            self._waiting.clear()
            if isinstance(error.cause, UserError):
                raise type(error.cause)(str(error.cause)) from None
            raise
        if ended is None and playing:
            self.watch()
            self._deaths[index] += 1
            if self._deaths[index] > MAX_RESTARTS:
                raise UserError(f"A RolloutWorker died {self._deaths[index]} times in a row: see its log.")
            _alive(self._workers[index], "the episodes")
            for how, again in itertools.groupby(playing.values(), key=itemgetter(1)):
                self._send(index, [trajectory for trajectory, _ in again], how)
        for trajectory in ended or ():
            if playing.pop(trajectory.trajectory_id, None):
                self._ended[trajectory.trajectory_id] = trajectory
                self._deaths[index], self._news = 0, time.monotonic()
        self._hand_out(self._waiting, self._places)


def check_not_all_failed(rollouts: RolloutBatch, what: str) -> None:
    """UserError with the first error where not one episode could be played."""
    failed = [trajectory for trajectory in rollouts.trajectories if trajectory.stop_reason.failed]
    if failed and len(failed) == len(rollouts.trajectories):
        raise UserError(
            f"All {len(failed)} episodes of {'the ' if ' ' in what else ''}{what} {rollouts.step} failed; the first, "
            f"{failed[0].trajectory_id} ({failed[0].sample.env_id}), ended with {failed[0].stop_reason.value}: "
            f"{failed[0].error}"
        )


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
