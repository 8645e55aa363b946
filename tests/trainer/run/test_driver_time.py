"""The fakes around the real driver (benchmarks/driver.py), and what the driver need not do."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import driver
from skyrl_trainer.learner.group import LearnerProcess
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.loop import Loop
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RolloutBatch, Sample, Trajectory, Turn


def test_the_fakes_play_every_episode_and_the_clock_counts_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ray", "start_env_workers"):  # the benchmark replaces them
        monkeypatch.setattr(driver.workers, name, getattr(driver.workers, name))
    trainer = {"run_dir": str(tmp_path), "train_batch_size": 6, "max_steps": 4, "max_staleness": 1}
    trainer |= {"eval_interval": 0, "eval_before_train": False, "deterministic": False}
    config = Config.model_validate({"trainer": trainer, "generator": {"num_generations": 8}})
    run = driver.FakeRun(config, argparse.Namespace(engines=3, gpus=5, tokens=20))
    Loop(run, StopSignal()).train()  # type: ignore[arg-type]
    assert len(run.rows) == 5 and all(0 < row["driver_seconds"] < row["step_seconds"] for row in run.rows[1:])
    last = JsonlTrajectoryStore(tmp_path / "trajectories").read(4)
    assert [len(group) for group in last.groups] == [8] * 6
    assert all(len(turn.advantages) == len(turn.output_ids) > 0 for each in last.trajectories for turn in each.turns)
    assert run.tries.flow.drawn == 24 and not any(run.rollouts._in_play)


def test_one_learner_answers_with_the_advantages() -> None:
    """Each has them all: of 38 learners the driver read 38 times as much."""
    turn = Turn([1], [2, 3], [-0.5, -0.5], [0, 0], "x", advantages=[0.5, 0.5])
    group = [Trajectory("1/0/0", Sample("s", "e", 0), 0, 0, [turn])]
    batch: Any = SimpleNamespace(rollouts=RolloutBatch(1, [group]), trajectories=group)
    answers = []
    for rank in range(2):
        learner = LearnerProcess.__new__(LearnerProcess)
        learner.rank, learner.reference = rank, None
        learner.algorithm = SimpleNamespace(update=lambda batch: {"loss": 1.0})
        answers.append(learner.update(batch, (), {})[1])
    assert answers == [[[[0.5, 0.5]]], []]


def test_numbers_of_any_kind_are_stored(tmp_path: Path) -> None:
    """The encoder of token ids knows plain numbers; an agent's may be numpy's, and a loss may be no number."""
    turn = Turn(
        [np.int64(7)], [2, 3], [float("-inf"), np.float32(-0.1)], [0, 0], "\ud800", advantages=[float("nan"), 1e-7]
    )  # type: ignore[list-item]
    store = JsonlTrajectoryStore(tmp_path)
    store.write(RolloutBatch(1, [[Trajectory("1/0/0", Sample("s", "e", 0), 0, 0, [turn])]]))
    (read,) = store.read(1).trajectories[0].turns
    assert read.prompt_ids == [7] and read.action == "\ud800"
    assert read.logprobs == [float("-inf"), float(np.float32(-0.1))]
    assert np.isnan(read.advantages[0]) and read.advantages[1] == 1e-7
