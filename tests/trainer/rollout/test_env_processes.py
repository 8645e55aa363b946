"""Real EnvWorker and RolloutWorker processes on a fake engine: envs that raise, hang or take their process along."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_worker import EnvWorker
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.metrics import rollout_metrics
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, RolloutBatch, Sample, SamplingOptions, StopReason, Trajectory
from tests.trainer import fakes
from tests.trainer.fakes import FakeEngine, tiny_tokenizer

ENV_FILE = '''
import itertools
import os
import signal
import time

import gymnasium


class Scripted(gymnasium.Env):
    """Does in step `at` what the option `do` says; ends after `turns` steps. Counts its closes in a file."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options, self.count, self.total = options, 0, int(self.np_random.integers(1000))
        return f"start {self.total}" + "x" * options.get("first", 0), {"instructions": "Be brief."}

    def step(self, action):
        self.count += 1
        self.total += len(action)
        if self.count == self.options.get("at"):
            self.misbehave(self.options["do"])
        time.sleep(self.options.get("sleep", 0))
        over = self.count >= self.options.get("turns", 1)
        said = "x" * 10_000_000 if self.options.get("flood") == self.count else f"now {self.total}"
        return said, float(over), over, False, {"success": over, "reward_parts": {"done": float(over)}}

    def misbehave(self, what):
        if what == "raise":
            raise ValueError("no such move")
        if what == "hang":
            while True:
                try:
                    time.sleep(0.01)
                except Exception:
                    pass
        if what == "hang in C":
            max(itertools.repeat(0))  # for ever, and no signal is looked at
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)

    def close(self):
        with open(self.options["closes"], "a") as file:
            file.write("closed\\n")


gymnasium.register("test/Scripted-v0", Scripted)
'''


WAITING = """
import time

import gymnasium


class Waiting(gymnasium.Env):
    metadata = {"render_modes": [], "waits": True}

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action):
        if action == "raise":
            raise ValueError("nobody answered")
        time.sleep(8 if action == "hang" else 0.5)
        return action, 1.0, False, False, {}


gymnasium.register("test/Waiting-v0", Waiting)
"""


LOADED = """
import sys

import gymnasium


class Loaded(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return "", {name: name in sys.modules for name in ("ray", "torch", "pydantic")}


gymnasium.register("test/Loaded-v0", Loaded)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rollout")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "envs.py").write_text(ENV_FILE)
    (folder / "broken.py").write_text("import gymnasium\nregister(\n")
    ray.cloudpickle.register_pickle_by_value(fakes)  # its module is not installed where the actors run
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield folder
    ray.shutdown()


@pytest.fixture(scope="module")
def rollouts(cluster: Path) -> Iterator[Rollouts]:
    """Two EnvWorkers, with half a second for an env call."""
    config = Config(
        generator={"max_turns": 6, "max_model_len": 2048, "max_concurrency": 8, "max_completion_length": 16},
        environment={"num_workers": 2, "step_timeout": 0.5},
    )
    engine = ray.remote(FakeEngine).options(num_cpus=0).remote()
    made = Rollouts(config, [engine], str(cluster / "tokenizer"))
    yield made
    made.close()


def batch(folder: Path, options: list[dict[str, Any]], step: int = 1, file: str = "envs.py") -> PromptBatch:
    closes = str(folder / f"closes-{step}")
    samples = [
        Sample(f"s{i}", "test/Scripted-v0", i, {"closes": closes, "turns": 4} | option, env_file=str(folder / file))
        for i, option in enumerate(options)
    ]
    return PromptBatch(step, samples, 1)


def process_id(worker: Any) -> int:
    return ray.get(worker.__ray_call__.remote(lambda worker: os.getpid()))


def reasons(done: RolloutBatch) -> list[bool]:
    return [trajectory.stop_reason is StopReason.ENV_ERROR for trajectory in done.trajectories]


def closes(folder: Path, step: int) -> int:
    return len((folder / f"closes-{step}").read_text().splitlines())


def test_every_episode_is_played_and_closed(rollouts: Rollouts, cluster: Path) -> None:
    done = rollouts.run(batch(cluster, [{}] * 12))
    assert [trajectory.trajectory_id for trajectory in done.trajectories] == [f"1/{i}/0" for i in range(12)]
    metrics = rollout_metrics(done)
    assert metrics["success"] == metrics["reward/mean"] == metrics["reward/done"] == 1.0
    assert metrics["turns/mean"] == 4.0 and metrics["failed"] == 0.0
    assert sum(metrics[f"stop/{reason.value}"] for reason in StopReason) == 12
    assert closes(cluster, 1) == 12


@pytest.mark.parametrize(
    ("step", "do", "says"),
    [
        (10, "raise", "ValueError: no such move (envs.py, line"),
        (11, "hang", "environment.step_timeout=0.5 seconds"),
        (12, "hang in C", "hung or crashed its EnvWorker"),
        (13, "crash", "hung or crashed its EnvWorker"),
    ],
)
def test_only_the_misbehaving_episode_fails(rollouts: Rollouts, cluster: Path, step: int, do: str, says: str) -> None:
    options: list[dict[str, Any]] = [{}] * 6
    done = rollouts.run(batch(cluster, [*options[:3], {"at": 2, "do": do}, *options[3:]], step))
    assert reasons(done) == [False, False, False, True, False, False, False]
    assert says in str(done.trajectories[3].error)
    assert len(done.trajectories[3].turns) == 2, "what happened until then is on record"


def test_every_request_is_made_once(rollouts: Rollouts, cluster: Path) -> None:
    """`start` waits for the handles in its arguments; a `finished` that overtakes it must not look like a death."""
    [engine] = rollouts._engines  # a RolloutWorker keeps the first one that it was given
    before = len(ray.get(engine.asked.remote()))
    for step in range(30, 40):
        rollouts.run(batch(cluster, [{}] * 4, step))
        assert rollouts._deaths == [0]
    asked = ray.get(engine.asked.remote())[before:]
    assert len(asked) == len(set(asked)) == 10 * 4 * 4


def test_ten_megabytes_end_their_episode_at_once_and_no_other(rollouts: Rollouts, cluster: Path) -> None:
    began = time.monotonic()
    options: list[dict[str, Any]] = [{"flood": 2}, {"flood": 4}, {"first": 10_000_000}, {}] * 4
    done = rollouts.run(batch(cluster, options, step=15)).trajectories
    assert time.monotonic() - began < 20
    for later, last, first, other in zip(*[iter(done)] * 4, strict=True):
        assert later.stop_reason is StopReason.LENGTH and len(later.turns) == 2
        assert first.stop_reason is StopReason.ENGINE_ERROR and "generator.max_model_len=2048" in str(first.error)
        assert last.success and other.success, "behind the last answer nothing is read"
        kept = [len(later.turns[1].observation), len(last.turns[3].observation), len(first.prompt[-1]["content"])]
        assert all(10_000 < length < 2_000_000 for length in kept), "the record is bounded too"


def test_killed_worker_is_replaced_and_its_episodes_go_on(rollouts: Rollouts, cluster: Path) -> None:
    options = [{"sleep": 0.1}] * 8
    undisturbed = rollouts.run(batch(cluster, options, step=20))
    pid = process_id(rollouts.env_workers[0])
    threading.Timer(0.7, os.kill, (pid, signal.SIGKILL)).start()
    done = rollouts.run(batch(cluster, options, step=20))
    assert [t.token_ids() for t in done.trajectories] == [t.token_ids() for t in undisturbed.trajectories]
    assert rollout_metrics(done)["env_replays"] > 0
    assert process_id(rollouts.env_workers[0]) != pid


def test_env_file_that_cannot_be_loaded_is_one_sentence_for_the_whole_batch(rollouts: Rollouts, cluster: Path) -> None:
    with pytest.raises(UserError, match=r"All 3 episodes of step 30 .*broken\.py failed with SyntaxError"):
        rollouts.run(batch(cluster, [{}] * 3, step=30, file="broken.py"))


def test_killed_rollout_worker_starts_again(rollouts: Rollouts, cluster: Path) -> None:
    pid = process_id(rollouts._workers[0])
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    done = rollouts.run(batch(cluster, [{"sleep": 0.1}] * 8, step=40))
    assert not any(reasons(done))


@pytest.mark.parametrize("killed", [False, True])
def test_play_hands_over_each_trajectory_once_and_takes_no_more_than_may_be_in_play(
    rollouts: Rollouts, cluster: Path, killed: bool
) -> None:
    samples = batch(cluster, [{"sleep": 0.05}] * 40, step=50).samples
    taken, back = [], []

    def empty() -> Iterator[Trajectory]:
        for number, sample in enumerate(samples):
            taken.append(number)
            assert len(taken) - len(back) <= 8, "generator.max_concurrency"
            yield Trajectory(f"{killed}/{number}", sample, 0, seed=number)

    if killed:
        pid = process_id(rollouts._workers[0])
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    for played in rollouts.play(empty(), SamplingOptions(16, 0.0), seeded=True):
        assert played.success and len(played.turns) == 4
        back.append(played.trajectory_id)
    assert sorted(back) == sorted(f"{killed}/{number}" for number in range(40))


def test_envs_that_wait_do_so_all_at_once_and_one_that_fails_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    worker = EnvWorker(step_timeout=3.0)
    keys = [f"k{i}" for i in range(32)]
    sample = Sample("s", "test/Waiting-v0", 0, env_file=str(tmp_path / "waiting.py"))
    worker.call_many([("reset", key, sample) for key in keys])
    began = time.monotonic()
    replies = worker.call_many([("step", key, key) for key in keys])
    assert [reply.observation for reply in replies] == keys and time.monotonic() - began < 8, "not 16 seconds"
    replies = worker.call_many([("step", f"k{i}", action) for i, action in enumerate(["a", "raise", "hang", "b"])])
    assert [reply.kind for reply in replies] == ["", "raised", "timeout", ""]
    assert "nobody answered" in str(replies[1].error) and "step_timeout=3 seconds" in str(replies[2].error)
    worker.shutdown()


def test_env_workers_never_load_torch(rollouts: Rollouts) -> None:
    loaded = rollouts.env_workers[0].__ray_call__.remote(lambda worker: "torch" in __import__("sys").modules)
    assert ray.get(loaded) is False


def test_processes_of_envs_load_neither_ray_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(LOADED)
    worker = EnvWorker(step_timeout=30.0)
    sample = Sample("s", "test/Loaded-v0", 0, env_file=str(tmp_path / "loaded.py"))
    [reply] = worker.call_many([("reset", "key", sample)])
    worker.shutdown()
    assert reply.info == {"ray": False, "torch": False, "pydantic": False}
