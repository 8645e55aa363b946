"""The tries of tasks on their way from the draw to the batch that is learned from, and through a resume.

A group of tries is stored as soon as it has ended, before a reward function sees it, in `trajectories/waiting`, and
once it has been learned from in the step's file. A checkpoint names the open groups. A resumed run takes those that are
stored, and plays the others again under the same names and seeds.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.errors import UserError
from skyrl_trainer.protocols import Sampler
from skyrl_trainer.rollout.flow import Flow, Group
from skyrl_trainer.rollout.manager import check_not_all_failed
from skyrl_trainer.rollout.store import JsonlTrajectoryStore, plain_sample
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RolloutBatch, Sample

COUNTERS = ("drawn", "given_back", "redraws", "lost")
"""The fields of a Flow that a checkpoint keeps beside its groups."""


class Tries:
    """Draws tasks, has them played, stored and judged, and gives the oldest as a batch."""

    def __init__(
        self,
        config: Config,
        max_draws: int,
        sampler: Sampler,
        rewards: Rewards,
        store: JsonlTrajectoryStore,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """check: called before anything is stored."""
        trainer = config.trainer
        self.flow = Flow(trainer.train_batch_size, trainer.max_staleness, trainer.max_steps, max_draws)
        self.rollouts: Any = None  # a Rollouts or StoredRollouts, set before the first draw
        self._size = config.generator.num_generations
        self._in_order = trainer.deterministic or trainer.max_staleness == 0
        if lacks := [x for x in ("next_tasks", "accept", "state_dict", "load_state_dict") if not hasattr(sampler, x)]:
            raise UserError(f"The sampler has no {lacks[0]}: make a subclass of UniformSampler (docs/plug-ins.md).")
        self._sampler, self._rewards, self._store, self._check = sampler, rewards, store, check
        self._waiting = store.inside("waiting")
        self._playing: dict[int, Group] = {}
        """Still empty trajectories."""
        self._refused: dict[int, Group] = {}
        """Since the last batch, with which they will be stored."""
        self._taken: tuple[dict[int, Group], dict[int, Group]] = {}, {}
        """The batch, and what was refused with it, until it has been learned from."""
        self._found: dict[int, Group] = {}
        """What an earlier process had stored and not learned from."""
        self._unplayed: dict[int, Sample] = {}
        """Drawn by an earlier process, or all failed: the next draw has them played."""
        self._files: dict[int, set[int]] = {}
        """The groups of each waiting file, which is named for the first of them."""

    def draw(self, version: int) -> None:
        """Begins to play as many tasks as the engines, which hold this version, have room for."""
        numbers = self.flow.draw(self.flow.room(version))
        samples = self._sampler.next_tasks(len(numbers))
        if len(samples or ()) != len(numbers):
            raise UserError(f"next_tasks of the sampler gave {samples!r:.60}, and should give {len(numbers)} samples.")
        drawn = self._unplayed | dict(zip(numbers, samples, strict=True))
        self._unplayed = {}
        for number, sample in drawn.items():
            batch, place = divmod(number, self.flow.size)
            self._playing[number] = group = self.rollouts.new_group(f"{batch + 1}/{place}", sample, self._size)
            # A refused group may be accepted now, which moves those behind it to later batches: too old ones go.
            oldest = (number - self.flow.given_back) // self.flow.size - self.flow.max_staleness
            found = self._found.get(number)
            if found and not (_tries_of(group[0].sample, found) and min(_versions(found)) >= oldest):
                del self._found[number]
        self.rollouts.start([self._playing[number] for number in drawn if number not in self._found])

    def collect(self, interruptible: AbstractContextManager[object]) -> None:
        """Waits until a group has ended (in order: all); stores, judges, accepts or refuses it."""
        with interruptible:
            ended = {number: self._found.pop(number) for number in self._playing if number in self._found}
            if not ended:
                ended = self.rollouts.finished(self._playing, wait_for_all=self._in_order)
                self._keep(ended)
            if self._rewards.judge([each for group in ended.values() for each in group]):
                self._keep(ended)
        for number, group in sorted(ended.items()):
            del self._playing[number]
            judged = self._rewards.judged(group)
            teaches = not all(map(self._rewards.cut_off, judged))  # else a sampler sees returns that are all equal
            returns = [sum(self._rewards.per_turn(each)) if teaches else 0.0 for each in judged]
            accepted = self._sampler.accept(judged, returns)
            if accepted is None:
                raise UserError("accept of the sampler gave None, but should say True or False (docs/plug-ins.md).")
            self.flow.finish(number, group, accepted)
            if not accepted:
                self._refused[number] = group

    def take(self, version: int) -> tuple[RolloutBatch, int] | None:
        """The next batch, and how many of its groups are accepted, these first; None: not yet. UserError: all fail."""
        if self._in_order and self._playing:  # no update meets an episode
            return None
        taken = self.flow.take(version)
        if taken is None:
            return None
        rollouts = RolloutBatch(version + 1, [*taken.values(), *self._refused.values()])
        try:
            check_not_all_failed(rollouts, "step")
        except UserError:
            # A resumed run tries these once more, and others in the places that it lacked.
            self.flow.given_back += self.flow.size - len(taken)
            self._unplayed |= {number: group[0].sample for number, group in taken.items()}
            raise
        self._taken, self._refused = (taken, self._refused), {}
        return rollouts, len(taken)

    def learned(self, rollouts: RolloutBatch) -> None:
        """Stores a batch for good, with its advantages."""
        self._check()
        self._store.write(rollouts)
        self._taken = {}, {}
        for first, numbers in list(self._files.items()):
            if not numbers & {*self.flow.groups, *self._refused}:
                self._waiting.path(first).unlink(missing_ok=True)
                del self._files[first]

    def _keep(self, groups: dict[int, Group]) -> None:
        self._check()
        first, known = min(groups), self.flow.groups | self._found | self._refused | self._taken[0] | self._taken[1]
        groups = {number: group for number in self._files.get(first, ()) if (group := known.get(number))} | groups
        self._waiting.write(RolloutBatch(first, [groups[number] for number in sorted(groups)]))
        self._files[first] = set(groups)

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the flow, and every open group with the sampler's verdict, if given."""
        taken, refused = self._taken
        ended = taken | {number: group for number, group in self.flow.groups.items() if group is not None}
        refused = refused | self._refused
        opened = {number: group[0].sample for number, group in (ended | self._playing | refused).items()}
        opened |= self._unplayed
        verdicts = dict.fromkeys(opened) | dict.fromkeys(ended, True) | dict.fromkeys(refused, False)
        return {
            **{name: getattr(self.flow, name) for name in COUNTERS},
            "sampler": self._sampler.state_dict(),
            "open": [[number, verdicts[number], plain_sample(opened[number])] for number in sorted(opened)],
        }

    def forget(self) -> None:
        """Deletes what a process that saved no checkpoint has stored: this run begins at the beginning."""
        self._store.forget(-1)

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """`step`: of the checkpoint. What newer weights have sampled is deleted."""
        for name in COUNTERS:
            setattr(self.flow, name, state[name])
        self._sampler.load_state_dict(state["sampler"])
        self._found = self._stored(step, {number for number, accepted, _ in state["open"] if accepted is False})
        for number, accepted, entry in state["open"]:
            sample = Sample(**entry)
            group = self._found.get(number)
            known = group is not None and _tries_of(sample, group)
            if accepted is None or not known:
                self._unplayed |= {} if accepted is False else {number: sample}
            elif accepted:
                self.flow.groups[number] = self._found.pop(number)
            else:
                self._refused[number] = self._found.pop(number)
        self.flow.groups |= dict.fromkeys(self._unplayed)
        self.flow.groups = dict(sorted(self.flow.groups.items()))

    # Whole groups by number, no token newer than the checkpoint, of two the newer; moves them to one file.
    def _stored(self, step: int, refused: set[int]) -> dict[int, Group]:
        stores = [(self._waiting, number) for number in self._waiting.steps()]
        stores += [(self._store, number) for number in self._store.steps() if number > step]
        last = step + 1 + self.flow.max_staleness  # later files have newer tokens
        groups = [g for store, n in stores if store is self._waiting or n <= last for g in store.read(n).groups]
        groups.sort(key=lambda group: min(_versions(group)))
        found = {self._number(group): group for group in groups if self._counts(group, step, refused)}
        if found:
            self._keep(found)
        for store, number in stores:
            if store is self._store or number not in self._files:
                store.path(number).unlink()
        return found

    def _counts(self, group: Group, step: int, refused: set[int]) -> bool:
        # Not one whose tries all failed or whose reward is no number, unless refused: the env may be mended.
        sound = all(math.isfinite(t.env_reward) for t in group) and not all(t.stop_reason.failed for t in group)
        return len(group) == self._size and max(_versions(group)) <= step and (sound or self._number(group) in refused)

    def _number(self, group: Group) -> int:
        batch, place, _ = map(int, group[0].trajectory_id.split("/"))
        return (batch - 1) * self.flow.size + place


def _versions(group: Group) -> list[int]:
    return [version for each in group for turn in each.turns for version in turn.weight_versions] or [0]


def _tries_of(sample: Sample, group: Group) -> bool:
    then = group[0].sample
    same = Path(then.sample_id).name == Path(sample.sample_id).name
    same = same and replace(then, sample_id=sample.sample_id, env_file=sample.env_file) == sample
    for each in group if same else []:
        each.sample = sample
    return same
