"""Rollouts: what the driver asks for trajectories, while it trains, and for benchmarks."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.episode import How, derive_seed
from skyrl_trainer.rollout.flow import Group
from skyrl_trainer.rollout.workers import Workers
from skyrl_trainer.types import PromptBatch, RolloutBatch, Sample, SamplingOptions, Trajectory


class Rollouts(Workers):
    def new_group(self, name: str, sample: Sample, size: int) -> Group:
        """Still empty trajectories, `name`/0 and on, with the seeds that their names stand for."""
        seed = self._config.trainer.seed
        sample = replace(sample, agent=self._config.generator.agent.run)
        ids = [f"{name}/{number}" for number in range(size)]
        return [Trajectory(each, sample, number, derive_seed(seed, each)) for number, each in enumerate(ids)]

    def start(self, groups: list[Group], eval: bool = False, sampling: SamplingOptions | None = None) -> None:
        """Begins to play still empty trajectories; each group (same prompt, one cache) by one engine."""
        generator, deterministic = self._config.generator, self._config.trainer.deterministic
        sampling = sampling or SamplingOptions(
            max_tokens=generator.max_completion_length,
            temperature=generator.eval_temperature if eval else generator.temperature,
            top_p=1.0 if eval else generator.top_p,
            stop_token_ids=self.stop_token_ids,
        )
        self._start(groups, How(sampling, deterministic, deterministic, eval))

    def finished(self, groups: Mapping[int, Group], wait_for_all: bool = False) -> dict[int, Group]:
        """Of these groups, which were started, those that have ended: waits for one of them, or for all."""
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
            others = sum(map(len, self._in_play)) + len(self._ended) > sum(map(len, groups.values()))
            self._collect(min(map(len, groups.values())) if others or not wait_for_all else None)

    def run(self, batch: PromptBatch, eval: bool = False, sampling: SamplingOptions | None = None) -> RolloutBatch:
        """For evaluations and benchmarks: blocks until all tries of every sample are back, failed ones included.
        `eval` takes generator.eval_temperature, and places beside what plays already; `sampling` replaces the recipe's
        options. EngineDied when an engine is gone, UserError when every episode failed, but for `eval`.
        """
        name = f"{'eval/' if eval else ''}{batch.step}"
        groups = {
            number: self.new_group(f"{name}/{number}", sample, batch.num_generations)
            for number, sample in enumerate(batch.samples, batch.offset)
        }
        self.start(list(groups.values()), eval, sampling)
        done = self.finished(groups, wait_for_all=True)
        rollouts = RolloutBatch(batch.step, [done[number] for number in groups])
        if not eval:
            check_not_all_failed(rollouts, "step")
        return rollouts

    def play(self, trajectories: Iterable[Trajectory], sampling: SamplingOptions, seeded: bool) -> Iterator[Trajectory]:
        """Plays still empty trajectories and yields each as it ends, generator.max_concurrency an engine at a time.
        They are taken from the iterable as there is room. seeded: as in How. EngineDied
        when an engine is gone, UserError when an endpoint answers no more.
        """
        waiting = iter(trajectories)
        room = self._config.generator.max_concurrency * len(self._workers)
        self._news = time.monotonic()
        while True:
            new = itertools.islice(waiting, room - sum(map(len, self._in_play)))
            self._start([[each] for each in new], How(sampling, seeded, False, True))
            if not any(self._in_play):
                return
            self._collect(1)
            ended, self._ended = self._ended, {}
            yield from ended.values()


def check_not_all_failed(rollouts: RolloutBatch, what: str) -> None:
    """UserError with the first error where not one episode could be played."""
    failed = [each for each in rollouts.trajectories if each.stop_reason.failed]
    if failed and len(failed) == len(rollouts.trajectories):
        raise UserError(
            f"All {len(failed)} episodes of {'the ' if ' ' in what else ''}{what} {rollouts.step} failed; the first, "
            f"{failed[0].trajectory_id} ({failed[0].sample.env_id}), ended with {failed[0].stop_reason.value}: "
            f"{failed[0].error}"
        )
