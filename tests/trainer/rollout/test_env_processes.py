"""Real EnvWorker and RolloutWorker processes on a fake engine: envs that raise, hang or take their process along."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_client import EnvClient, Host, RemoteEnv
from skyrl_trainer.rollout.env_worker import START_LIMIT, EnvProcess, EnvReply, EnvWorker
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.metrics import rollout_metrics
from skyrl_trainer.rollout.pool import close_env_workers, start_env_workers
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, RolloutBatch, Sample, SamplingOptions, StopReason, Trajectory
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


WAITING = '''
import random
import time

import gymnasium


class Waiting(gymnasium.Env):
    """Waits in every step, or does in step 2 what the option `do` says; ends after three."""

    metadata = {"render_modes": [], "waits": True}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options, self.count = options, 0
        return f"go {self.np_random.integers(1000)}", {}

    def step(self, action):
        self.count += 1
        do = self.options.get("do") if self.count == 2 else None
        if do == "raise":
            raise ValueError("nobody answered")
        time.sleep(1000 if do == "hang" else random.random() * 2 * self.options["seconds"])
        over = self.count == 3
        return f"{self.np_random.integers(1000)} {action}", float(over), over, False, {"success": over}

    def close(self):
        if self.options.get("do") == "close":
            raise OSError("nobody is there")


class Even(Waiting):
    def step(self, action):
        time.sleep(1.0)
        return action, 0.0, False, False, {}


gymnasium.register("test/Waiting-v0", Waiting)
gymnasium.register("test/Even-v0", Even)
'''


LOADED = """
import sys

import gymnasium


class Loaded(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return "", {name: name in sys.modules for name in ("ray", "torch", "pydantic")}


gymnasium.register("test/Loaded-v0", Loaded)
"""


LEAVES = """
import subprocess

import gymnasium


class Leaves(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        daemon = "sleep 600 > /dev/null 2>&1 & echo $!"  # a session and an environment of its own; its parent ends
        said = subprocess.run(daemon, shell=True, env={}, start_new_session=True, capture_output=True, text=True)
        return said.stdout, {}


gymnasium.register("test/Leaves-v0", Leaves)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, two_cores: None) -> Path:
    folder = tmp_path_factory.mktemp("rollout")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "envs.py").write_text(ENV_FILE)
    (folder / "broken.py").write_text("import gymnasium\nregister(\n")
    return folder


@pytest.fixture(scope="module")
def rollouts(cluster: Path) -> Iterator[Rollouts]:
    """Two EnvWorkers, with two seconds for an env call: a loaded machine must not make a good env late."""
    config = Config(
        generator={"max_turns": 6, "max_model_len": 2048, "max_concurrency": 8, "max_completion_length": 16},
        environment={"num_workers": 2, "step_timeout": 2.0},
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
    """Of one that may be starting again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ray.get(worker.__ray_call__.remote(lambda worker: os.getpid()))
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


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
        (11, "hang", "environment.step_timeout=2 seconds"),
        pytest.param(12, "hang in C", "hung or crashed its EnvWorker", marks=pytest.mark.full),  # in hostile_envs, too
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
    pid, [engine] = process_id(rollouts.env_workers[0]), rollouts._engines
    enough = len(ray.get(engine.asked.remote())) + 10

    def kill_midway() -> None:
        while len(ray.get(engine.asked.remote())) < enough:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill_midway, daemon=True).start()
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


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.full), True])
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


def waiting(folder: Path, options: list[dict[str, Any]], step: int, env: str = "test/Waiting-v0") -> PromptBatch:
    (folder / "waiting.py").write_text(WAITING)
    file = str(folder / "waiting.py")
    return PromptBatch(step, [Sample(f"w{i}", env, i, option, env_file=file) for i, option in enumerate(options)], 1)


def test_256_envs_that_wait_a_second_take_a_turn_in_under_two(cluster: Path) -> None:
    workers = start_env_workers(1, step_timeout=10.0)
    samples = waiting(cluster, [{}] * 256, 60, "test/Even-v0").samples

    async def one_turn() -> tuple[float, list[EnvReply]]:
        client = EnvClient(workers)
        envs = [RemoteEnv(client, f"even/{i}", sample) for i, sample in enumerate(samples)]
        await asyncio.gather(*(env.reset() for env in envs))
        seconds = []
        for _ in range(3):  # the best of them, as others use this machine, too
            began = time.monotonic()
            replies = await asyncio.gather(*(env.step(str(i)) for i, env in enumerate(envs)))
            seconds.append(time.monotonic() - began)
        await asyncio.gather(*(env.close() for env in envs))
        return min(seconds), replies

    seconds, replies = asyncio.run(one_turn())
    close_env_workers(workers)
    assert [reply.observation for reply in replies] == [str(i) for i in range(256)]
    assert seconds < 2.0


def test_of_64_envs_that_wait_those_that_hang_or_raise_fail_within_the_limit_and_no_other(
    rollouts: Rollouts, cluster: Path
) -> None:
    options: list[dict[str, Any]] = [{"seconds": 0.05} for _ in range(64)]
    for number, do in enumerate(["hang", "raise"] * 3):
        options[2 * number]["do"] = do
    began = time.monotonic()
    done = rollouts.run(waiting(cluster, options, 61))
    assert time.monotonic() - began < 30.0
    assert reasons(done) == ["do" in option for option in options]
    for trajectory, option in zip(done.trajectories, options, strict=True):
        error, seconds = str(trajectory.error), trajectory.metrics["seconds"]
        assert {"hang": "step_timeout=2 seconds", "raise": "nobody answered"}.get(option.get("do", ""), "") in error
        assert trajectory.success or len(trajectory.turns) == 2
        assert option.get("do") != "hang" or trajectory.turns[1].seconds["env"] >= 2.0
        assert seconds < 20.0
    assert rollout_metrics(done)["stop/env_error"] == 6 and rollout_metrics(done).get("env_replays", 0.0) == 0.0


def test_envs_that_wait_answer_the_same_whoever_is_first_and_their_closes_are_counted(
    rollouts: Rollouts, cluster: Path
) -> None:
    options = [{"seconds": 0.1, "do": "close"} for _ in range(16)]
    first, again = (rollouts.run(waiting(cluster, options, 62)) for _ in range(2))
    assert [t.token_ids() for t in first.trajectories] == [t.token_ids() for t in again.trajectories]
    assert all(t.success and t.metrics["env_close_errors"] == 1.0 for t in first.trajectories)


def test_who_waits_holds_up_no_env_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENV_FILE)
    worker = EnvWorker(step_timeout=60.0)
    [late] = waiting(tmp_path, [{"do": "hang", "seconds": 0.0}], 63).samples
    [plain] = batch(tmp_path, [{}], 63).samples
    ask(worker, [("reset", "late", late)])
    worker.call_many([("reset", "plain", plain)])
    ask(worker, [("step", "late", "a")])
    began = time.monotonic()
    replies = worker.call_many([("step", "late", "b"), ("step", "plain", "b"), ("ended", "", ["late"])])
    assert time.monotonic() - began < 30.0
    assert [reply.kind for reply in replies] == ["waiting", "", ""] and replies[1].observation.startswith("now")
    assert replies[2].info == {}
    worker.shutdown()


def test_threads_that_never_come_back_are_bounded(tmp_path: Path) -> None:
    """A process with more than 100 of them ends, and who was in it begins again."""
    worker = EnvWorker(step_timeout=0.5)
    [good, *bad] = waiting(tmp_path, [{"seconds": 0.0}] + [{"do": "hang", "seconds": 0.0}] * 101, 64).samples
    replies = ask(worker, [("reset", "good", good), *[("reset", f"k{i}", sample) for i, sample in enumerate(bad)]])
    for _ in range(2):
        replies = ask(worker, [("step", f"k{i}", "a") for i in range(101)])
    assert all(reply.kind == "timeout" for reply in replies)
    assert ask(worker, [("step", "good", "a")])[0].kind == "lost"
    worker.shutdown()


def ask(worker: EnvWorker, calls: list[Any]) -> list[EnvReply]:
    """The replies of calls that all wait."""
    given = {key: reply for (_, key, _), reply in zip(calls, worker.call_many(calls), strict=True)}
    assert {reply.kind for reply in given.values()} <= {"waiting", "died", "lost", "timeout"}
    # On a busy machine its whole limit may pass before an env says that it waits.
    ended = {key: reply for key, reply in given.items() if reply.kind == "timeout"}
    while len(ended) < len(calls):
        [reply] = worker.call_many([("ended", "", [key for key in given if key not in ended])])
        ended |= {key: EnvReply.read(said) for key, said in reply.info.items()}
        time.sleep(0.01)
    return [ended[key] for key in given]


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


def test_what_an_env_has_started_ends_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    worker = EnvWorker(step_timeout=30.0)
    sample = Sample("s", "test/Leaves-v0", 0, env_file=str(tmp_path / "leaves.py"))
    [reply] = worker.call_many([("reset", "key", sample)])
    daemon = psutil.Process(int(reply.observation))
    assert daemon.name() == "sleep"
    worker.shutdown()
    assert psutil.wait_procs([daemon], timeout=30)[0] == [daemon]


def test_a_process_is_not_left_in_the_middle_of_another_threads_call() -> None:
    """A step that ends while its episode's close is under way hangs up, and the close was told "died"."""
    ours, theirs = socket.socketpair()
    asked, ended = threading.Event(), threading.Event()

    def env() -> None:
        theirs.sendall(b"[]\n")
        theirs.recv(2**16)
        theirs.sendall(b"[[{}, {}]]\n")

    class Process(EnvProcess):
        def _read(self, seconds: float) -> list[EnvReply]:
            if seconds < START_LIMIT:  # it was asked
                asked.set()
                ended.wait(0.5)
            return super()._read(seconds)

        def end(self) -> None:
            super().end()
            ended.set()

    process = Process(lambda note: ours, 5.0)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(env)
        call = pool.submit(process.call, [("close", "1/0/0")])
        assert asked.wait(20)
        end = pool.submit(process.end)
        [reply] = call.result(20)
        end.result(20)
    assert reply.error is None
    theirs.close()


def test_an_env_in_a_process_of_its_own_is_closed_when_its_worker_was_out_of_reach() -> None:
    """Whatever it is doing; and a worker that has lost it starts no process to close it."""
    asked = []

    class Handle:
        def __init__(self) -> None:
            self.alone, self.call_many = SimpleNamespace(remote=self.one), SimpleNamespace(remote=self.many)

        def one(self, call: Any) -> Any:
            asked.append(call)
            return fails() if call[0] == "step" else None

        async def many(self, calls: Any) -> list[EnvReply]:
            return []

    async def fails() -> None:
        raise ray.exceptions.ActorUnavailableError("away", None)

    async def play() -> None:
        host = Host(Handle())
        assert (await host.call(True, "step", "1/0/0", "go")).kind == "lost"
        assert host.recovery is not None
        await host.recovery

    asyncio.run(play())
    assert asked == [("step", "1/0/0", "go"), ("close", "1/0/0")]
    worker = EnvWorker(1.0)
    assert worker.alone(("close", "1/0/0")).error is None and worker._template is None
