"""What a cluster's comings and goings cost episodes: nothing but time."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from skyrl_trainer.rollout import elastic as elastic_module
from skyrl_trainer.rollout import workers as workers_module
from skyrl_trainer.rollout.elastic import ElasticRollouts
from skyrl_trainer.rollout.env_client import EnvClient, Host, RemoteEnv
from skyrl_trainer.rollout.workers import Workers
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Sample
from tests.trainer.fakes import FakeEngine, FakeEnvWorker, tiny_tokenizer
from tests.trainer.rollout.test_workers import ENV_FILE, start


@pytest.mark.parametrize("agent", [None, "my.py:agent"])  # an agent has a process of its own from the start
def test_an_episode_outlives_any_number_of_replaced_env_workers(agent: str | None) -> None:
    async def play() -> list[str]:
        workers = [FakeEnvWorker(restart=1e9) for _ in range(6)]
        client = EnvClient(workers[:1])
        env = RemoteEnv(client, "1/0/0", Sample("s", "fake/env", 0, {"turns": 6}, agent=agent))
        said = [(await env.reset()).observation]
        for worker, successor in itertools.pairwise(workers):
            worker.kill()
            step = asyncio.create_task(env.step("go"))
            await asyncio.sleep(0.05)  # the driver learns of the node's death later
            client.use([successor])
            reply = await asyncio.wait_for(step, 10)
            assert reply.error is None, reply.error
            said.append(reply.observation)
        assert env.replays == 5 and (await env.step("go")).terminated
        return said

    said = asyncio.run(play())
    assert [text.rpartition(" ")[0] for text in said] == [f"turn {number}" for number in range(6)]


def test_a_node_that_takes_two_engines_along_is_left_in_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both their workers' answers are there, and the first tells that the second one is gone, too."""
    received = []

    class Two(Workers):
        def __init__(self) -> None:
            self._config, self._polls, self._in_play = Config(), {"one": 0, "two": 1}, [{}, {}]
            self._checked = self._news = time.monotonic()

        def _receive(self, ref: str, index: int) -> None:
            received.append(ref)
            self._polls = {}  # as `leave` does

    monkeypatch.setattr(workers_module, "ray", SimpleNamespace(wait=lambda refs, timeout: (refs, [])))
    Two()._collect(1)
    assert received == ["one"]


class Fakes(ElasticRollouts):
    """Two RolloutWorkers and two EnvWorkers that note what they are told."""

    def __init__(self) -> None:
        self.told, how = list[Any](), "how"
        group = [SimpleNamespace(trajectory_id=f"1/0/{n}") for n in range(2)]
        self._in_play = [{each.trajectory_id: (each, how) for each in group}, {}]
        self._workers, self._present, self._deaths = [None, None], [0, 1], [0, 0]
        self._polls, self._starting, self._waiting, self._places = {}, {}, deque(), 8
        call = SimpleNamespace(remote=self.told.append)
        worker = SimpleNamespace(call_many=call, alone=call)
        self.env_workers, self._retired = [worker], [worker]
        self.watch = lambda: None

    def _send(self, index: int, share: list[Any], how: Any) -> None:
        self.told.append((index, [each.trajectory_id for each in share]))


def test_the_envs_of_an_engine_that_goes_away_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_module.ray, "kill", lambda worker: None)
    rollouts = Fakes()
    rollouts.leave(0)
    closes = [("close", "1/0/0"), ("close", "1/0/1")]
    assert rollouts.told == [closes, *closes] * 2 + [(1, ["1/0/0", "1/0/1"])], "shared ones and those that are alone"


def test_a_worker_that_was_left_while_it_was_looked_after_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look finds its engine dead, too: others play its episodes by now."""
    monkeypatch.setattr(elastic_module.ray, "kill", lambda worker: None)
    monkeypatch.setattr(elastic_module, "BESIDE_SECONDS", 0.0)
    rollouts = Fakes()
    rollouts.watch = lambda: rollouts.leave(0) if 0 in rollouts._present else None
    rollouts._play_again(0)
    assert rollouts._deaths == [0, 0] and rollouts.told[-1] == (1, ["1/0/0", "1/0/1"])


def test_an_answer_that_was_lost_with_its_node_is_a_workers_death(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ray.exceptions.ObjectReconstructionFailedError("0" * 56, None, "")

    def get(ref: Any) -> Any:
        raise lost

    rollouts, again = Fakes(), []
    monkeypatch.setattr(workers_module.ray, "get", get)
    monkeypatch.setattr(rollouts, "_play_again", again.append)
    rollouts._receive("ref", 0)
    assert again == [0]

    class Handle:
        alone = call_many = SimpleNamespace(remote=lambda call: fails())

    async def fails() -> None:
        raise lost

    async def ask() -> Any:
        host = Host(Handle())
        host.recovery = asyncio.get_running_loop().create_future()  # under way
        return await host.call(True, "step", "1/0/0", "go")

    assert asyncio.run(ask()).kind == "lost"


def test_others_play_what_an_engine_that_is_away_had_and_it_plays_again_when_it_is_back(
    two_cores: None, tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "env.py").write_text(ENV_FILE)
    generator = {"max_turns": 6, "max_model_len": 512, "max_concurrency": 8, "max_completion_length": 4}
    config = Config.model_validate({"generator": generator, "environment": {"num_workers": 2}})
    engines = [ray.remote(FakeEngine).options(num_cpus=0).remote() for _ in range(2)]
    here = ray.get_runtime_context().get_node_id()
    rollouts = ElasticRollouts(config, engines, str(tmp_path / "tokenizer"), [here] * 2, [here] * 2, 0.0)
    assert rollouts.stop_token_ids
    before = ray.get(
        [
            worker.__ray_call__.remote(lambda worker: os.getpid())
            for worker in [*rollouts._workers, *rollouts.env_workers]
        ]
    )
    groups = start(rollouts, tmp_path, range(4))
    rollouts.leave(0)
    rollouts.settle({here: 2.0})  # nothing changes
    assert not rollouts._in_play[0] and len(rollouts._in_play[1]) == 8
    done = rollouts.finished(groups, wait_for_all=True)
    rollouts.come_back(0, here)
    deadline = time.monotonic() + 60
    while 0 not in rollouts._present and time.monotonic() < deadline:
        rollouts.welcome()
        time.sleep(0.05)
    groups = start(rollouts, tmp_path, range(4, 8))
    assert len(rollouts._in_play[0]) == len(rollouts._in_play[1]) == 4
    rollouts._env_nodes[0] = "dead"
    rollouts.settle({here: 2.0})
    done |= rollouts.finished(groups, wait_for_all=True)
    assert {number: [t.trajectory_id for t in group] for number, group in done.items()} == {
        number: [f"1/{number}/0", f"1/{number}/1"] for number in range(8)
    }
    assert all(len(each.turns) == 4 and not each.stop_reason.failed for group in done.values() for each in group)
    after = ray.get(
        [
            worker.__ray_call__.remote(lambda worker: os.getpid())
            for worker in [*rollouts._workers, *rollouts.env_workers]
        ]
    )
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False, True]
    rollouts.close()
