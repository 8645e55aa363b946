"""RolloutWorkers that die while groups are in flight, as with staleness: each group comes back once, and no other."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.rollout_worker import RolloutWorker
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Sample, Trajectory
from tests.trainer.fakes import FakeEngine, tiny_tokenizer

ENV_FILE = """
import time

import gymnasium


class Slow(gymnasium.Env):
    metadata = {"render_modes": [], "waits": True}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return "go", {}

    def step(self, action):
        self.count += 1
        time.sleep(0.2)
        return "on", 0.0, self.count == 4, False, {}


gymnasium.register("test/Slow-v0", Slow)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, two_cores: None) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "env.py").write_text(ENV_FILE)
    return folder


@pytest.fixture
def rollouts(folder: Path) -> Iterator[Rollouts]:
    """Two engines; an episode takes a second or more."""
    generator = {"max_turns": 6, "max_model_len": 512, "max_concurrency": 4, "max_completion_length": 4}
    config = Config.model_validate({"generator": generator, "environment": {"num_workers": 1}})
    engines = [ray.remote(FakeEngine).options(num_cpus=0).remote() for _ in range(2)]
    made = Rollouts(config, engines, str(folder / "tokenizer"))
    assert made.stop_token_ids
    yield made
    made.close()


def kill(worker: Any) -> None:
    os.kill(ray.get(worker.__ray_call__.remote(lambda worker: os.getpid())), signal.SIGKILL)


def start(rollouts: Rollouts, folder: Path, numbers: range) -> dict[int, list[Trajectory]]:
    samples = {i: Sample(f"s{i}", "test/Slow-v0", i, env_file=str(folder / "env.py")) for i in numbers}
    groups = {i: rollouts.new_group(f"1/{i}", sample, 2) for i, sample in samples.items()}
    rollouts.start(list(groups.values()))
    return groups


@pytest.mark.parametrize("pause", [0.0, pytest.param(1.0, marks=pytest.mark.full)])
def test_a_worker_that_dies_while_nobody_asks_loses_no_group(rollouts: Rollouts, folder: Path, pause: float) -> None:
    """The driver learns when it dies; it draws others before it asks for any."""
    groups = start(rollouts, folder, range(4))
    done = rollouts.finished(groups)
    groups = {number: group for number, group in groups.items() if number not in done}
    kill(rollouts._workers[0])
    time.sleep(pause)  # before Ray notices, or while it restarts the worker
    groups |= start(rollouts, folder, range(4, 8))
    while len(done) < 8:
        ended = rollouts.finished(groups)
        assert not ended.keys() & done.keys(), "none twice"
        groups = {number: group for number, group in groups.items() if number not in ended}
        done |= ended
    assert {number: [t.trajectory_id for t in group] for number, group in done.items()} == {
        number: [f"1/{number}/0", f"1/{number}/1"] for number in range(8)
    }
    assert all(len(each.turns) == 4 and not each.stop_reason.failed for group in done.values() for each in group)
    assert not any(rollouts._in_play) and not rollouts._ended


def test_a_worker_that_cannot_begin_is_said_at_once_in_one_line(folder: Path, tmp_path: Path) -> None:
    """Ray starts it no more."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    rollouts = Rollouts(Config.model_validate({"environment": {"num_workers": 1}}), [None], str(tmp_path))
    with pytest.raises(UserError, match=r"^A RolloutWorker died in its start: .*has no chat template.*$"):
        assert rollouts.stop_token_ids
    rollouts.close()


def test_an_evaluation_waits_for_its_own_episodes_only() -> None:
    """Where training episodes play beside it, a worker answers when one has ended, whichever it is."""
    rollouts: Any = SimpleNamespace(_ended={}, _in_play=[{"train/0": 1, "eval/0": 1, "eval/1": 1}])

    def collect(at_least: int | None) -> None:
        asked.append(at_least)
        rollouts._ended |= played

    asked, rollouts._collect = list[int | None](), collect
    groups: Any = {n: [SimpleNamespace(trajectory_id=f"eval/{n}")] for n in range(2)}
    played = {each.trajectory_id: each for (each,) in groups.values()}
    assert Rollouts.finished(rollouts, groups, wait_for_all=True) == groups and asked == [1]
    del rollouts._in_play[0]["train/0"]
    assert Rollouts.finished(rollouts, groups, wait_for_all=True) and asked == [1, None]


def test_what_has_ended_is_handed_out_before_the_error_that_ends_the_others(tmp_path: Path) -> None:
    """An endpoint that dies costs nobody the tries that are over and paid for."""

    async def scenario() -> None:
        worker = RolloutWorker("", Config().generator, "c")
        worker._ended = [SimpleNamespace(trajectory_id=name) for name in ("1/0/0", "1/0/1")]  # type: ignore[misc]
        worker._error = UserError("The endpoint is gone.")
        ended = await worker.finished(5, 1.0, None)
        assert ended is not None and [each.trajectory_id for each in ended] == ["1/0/0", "1/0/1"]
        with pytest.raises(UserError, match="is gone"):
            await worker.finished(5, 1.0, None)

    asyncio.run(scenario())
