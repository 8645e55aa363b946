"""Tries under staleness: killed and resumed at random points, each task is learned from once, or refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.algorithms.samplers import CurriculumSampler
from skyrl_trainer.data import SampleSource
from skyrl_trainer.rollout.flow import staleness
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.run.tries import Tries
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Sample, StopReason, Trajectory, Turn

SIZE, STEPS, TRIES = 3, 12, 2


class Killed(BaseException):
    pass


class RandomEnds:
    """In place of Rollouts: groups end in a random order; now and then the process is killed while it waits."""

    def __init__(self, chance: random.Random, kills: float) -> None:
        self.chance, self.kills, self.version = chance, kills, 0
        self.begun: dict[str, int] = {}

    def new_group(self, name: str, sample: Sample, size: int) -> list[Trajectory]:
        return [Trajectory(f"{name}/{i}", sample, i, 0) for i in range(size)]

    def start(self, groups: list[list[Trajectory]]) -> None:
        self.begun |= {trajectory.trajectory_id: self.version for group in groups for trajectory in group}

    def finished(self, groups: Mapping[int, list[Trajectory]], wait_for_all: bool) -> dict[int, list[Trajectory]]:
        if self.chance.random() < self.kills:
            raise Killed
        number = self.chance.choice(list(groups)[: 2 * SIZE])
        for each in groups[number]:
            versions = [self.begun[each.trajectory_id], self.version]
            won = float(self.chance.random() < 0.5)
            each.turns = [Turn([1], [2, 3], [-0.5, -0.5], versions, "x", reward=won, info={"success": bool(won)})]
            if self.chance.random() < 0.05:
                each.stop_reason = StopReason.ENV_ERROR
        return {number: groups[number]}


class Refusing(CurriculumSampler):
    """A curriculum that refuses groups whose returns are equal, as dynamic sampling does."""

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        super().accept(group, returns)
        return len(set(returns)) > 1


def config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "trainer": {
                "run_dir": str(folder), "train_batch_size": SIZE, "max_staleness": 2, "max_steps": STEPS,
            },
            "generator": {"num_generations": TRIES},
        }
    )  # fmt: skip


def made(folder: Path, rollouts: Any) -> Tries:
    parts = [[Sample(f"{kind}#{i}", "test/None-v0", i) for i in range(500)] for kind in ("a", "b")]
    rewards = Rewards(config(folder), SimpleNamespace(overlong_filter=False))
    store = JsonlTrajectoryStore(folder / "trajectories")
    tries = Tries(config(folder), 4, Refusing(SampleSource(parts), 0), rewards, store)
    tries.rollouts = rollouts
    return tries


def live(folder: Path, checkpoint: list[str], chance: random.Random, kills: float) -> None:
    """One process: from the newest checkpoint to its end or death; saves every third step."""
    rollouts = RandomEnds(chance, kills)
    tries, step = made(folder, rollouts), 0
    if checkpoint:
        saved = json.loads(checkpoint[-1])
        step = saved["step"]
        tries.load_state_dict(saved["tries"], step)
    else:
        tries.forget()
        assert not list((folder / "trajectories").rglob("*.gz"))
    while step < STEPS:
        rollouts.version = step
        tries.draw(step)
        while (taken := tries.take(step)) is None:
            tries.collect(StopSignal())
            tries.draw(step)
        learned = [trajectory for group in taken[0].groups[: taken[1]] for trajectory in group]
        staleness(learned, step, 2)
        if chance.random() < kills:
            if chance.random() < 0.5:  # the update was refused, and the last whole step is saved
                checkpoint.append(json.dumps({"step": step, "tries": tries.state_dict()}))
            raise Killed
        tries.learned(taken[0])
        step += 1
        if step % 3 == 0:
            checkpoint.append(json.dumps({"step": step, "tries": tries.state_dict()}))


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_learns_from_every_task_once(tmp_path: Path, seed: int) -> None:
    chance, checkpoint, deaths = random.Random(seed), list[str](), 0
    while True:
        try:
            live(tmp_path, checkpoint, chance, kills=0.04 if deaths < 20 else 0.0)
            break
        except Killed:
            deaths += 1
    assert deaths
    store = JsonlTrajectoryStore(tmp_path / "trajectories")
    assert store.steps() == list(range(1, STEPS + 1))
    everyone = [group for step in store.steps() for group in store.read(step).groups]
    assert all(len(group) == TRIES for group in everyone)
    numbers = [SIZE * (int(group[0].trajectory_id.split("/")[0]) - 1) + int(group[0].trajectory_id.split("/")[1])
               for group in everyone]  # fmt: skip
    assert len(numbers) == len(set(numbers)), "none twice"
    last = json.loads(checkpoint[-1])["tries"]
    assert sorted(numbers) == list(range(last["drawn"])), "none left"
    tasks = [group[0].sample.sample_id for group in everyone]
    assert len(tasks) == len(set(tasks)), "no task twice before an epoch is over"
