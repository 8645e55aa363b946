"""Rollouts on the real stack: vLLM, Ray, a turn and many; the learner scores the tokens as the engine sampled them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.engine.client import EngineClient
from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.errors import EngineDied
from skyrl_trainer.learner.batch import collate, make_rows
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.metrics import rollout_metrics
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.processes import ENGINE_START_SECONDS
from skyrl_trainer.settings import Config, TinyConfig
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.types import GenerationOutput, GenerationRequest, PromptBatch, Sample, SamplingOptions

SAMPLES = [Sample(f"s{i}", "skyrl/text_math-v0", i, {"split": "train", "difficulty": 1 + i % 4}) for i in range(8)]
LONG = [Sample(f"t{i}", "skyrl/tool_use-v0", i, {"difficulty": 1 + i % 6}) for i in range(4)] + [
    Sample(f"w{i}", "skyrl/webshop_lite-v0", i) for i in range(2)
]
"""Envs whose answers to anything are longer than what a summary keeps of them."""
LENGTH = 2048


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    init_policy(folder, ["Answer the question. go to countertop 1"], TinyConfig(), seed=0)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    made = ray.remote(VLLMEngine).options(runtime_env={"env_vars": engine_env()}, max_concurrency=64, num_cpus=0)
    actor = made.remote(str(folder), "float32", LENGTH, 16, 0, {})
    ray.get(actor.ready.remote(), timeout=ENGINE_START_SECONDS)
    yield actor, str(folder)
    ray.shutdown()


@pytest.fixture(scope="module")
def rollouts(engine: tuple[Any, str]) -> Iterator[Rollouts]:
    config = Config(
        trainer={"deterministic": True}, generator={"max_model_len": 256, "max_concurrency": 16, "max_turns": 2}
    )
    made = Rollouts(config, [engine[0]], engine[1])
    yield made
    made.close()


def test_deterministic_rollouts_have_the_same_tokens_and_are_read_back_as_they_were(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    batch = PromptBatch(3, SAMPLES, 4)
    first, second = rollouts.run(batch), rollouts.run(batch)
    assert [t.token_ids() for t in first.trajectories] == [t.token_ids() for t in second.trajectories]
    tries = {tuple(trajectory.token_ids()) for trajectory in first.groups[0]}
    assert len(tries) == 4, "the tries of a sample differ"
    assert [t.trajectory_id for t in first.groups[2]] == ["3/2/0", "3/2/1", "3/2/2", "3/2/3"]
    for trajectory in first.trajectories:
        for turn in trajectory.turns:
            assert len(turn.output_ids) == len(turn.logprobs) == len(turn.weight_versions)
            assert all(logprob < 0 for logprob in turn.logprobs) and set(turn.weight_versions) == {0}
    metrics = rollout_metrics(first)
    assert metrics["failed"] == 0 and metrics["tokens"] > 0
    assert metrics["reward/mean"] == pytest.approx(metrics["reward/correct"] + metrics["reward/format"])
    store = JsonlTrajectoryStore(tmp_path)
    store.write(first)
    assert store.read(3) == first


def test_a_rollout_worker_that_has_played_with_vllm_has_not_loaded_torch(rollouts: Rollouts) -> None:
    rollouts.run(PromptBatch(3, SAMPLES[:1], 1))
    loaded = rollouts._workers[0].__ray_call__.remote(lambda worker: "torch" in __import__("sys").modules)
    assert not ray.get(loaded, timeout=60)


def test_evaluation_is_greedy(rollouts: Rollouts) -> None:
    done = rollouts.run(PromptBatch(3, SAMPLES[:2], 2), eval=True)
    for group in done.groups:
        assert group[0].token_ids() == group[1].token_ids()


def test_an_engine_samples_no_further_than_the_first_stop(engine: tuple[Any, str]) -> None:
    """The same tokens as without stops, up to the one that completes a stop, beside requests that go on."""
    actor, policy = engine
    prompt = load_chat_prompt(policy)
    ids = prompt.first("", "Answer the question.")
    free = SamplingOptions(max_tokens=80, stop_token_ids=prompt.stop_token_ids)
    ending = replace(free, stops=("e", "qu", "\u20ac"))

    async def ask(name: str, options: SamplingOptions) -> list[GenerationOutput]:
        client = EngineClient(actor, f"test-{name}")
        requests = [GenerationRequest(f"{name}{k}", ids, options, seed=k) for k in range(12)]
        return list(await asyncio.gather(*map(client.generate, requests)))

    async def both() -> list[list[GenerationOutput]]:
        return list(await asyncio.gather(ask("free", free), ask("ending", ending)))

    whole, cut = asyncio.run(both())
    stopped = 0
    for full, short in zip(whole, cut, strict=True):
        most = len(full.output_ids)
        text = [prompt.decode(full.output_ids[:n]) for n in range(most + 1)]
        size = next((n for n in range(most) if any(stop in text[n] for stop in ending.stops)), most)
        assert short.output_ids == full.output_ids[:size] and short.logprobs == pytest.approx(full.logprobs[:size])
        assert len(short.weight_versions) == size
        assert short.finish_reason == ("stop" if size < most else full.finish_reason)
        stopped += size < most
    assert stopped >= 3
    assert [each.output_ids for each in asyncio.run(ask("again", free))] == [each.output_ids for each in whole]


@pytest.mark.parametrize(
    "agent",
    [{"tools": "template"}, pytest.param({"memory": "window:1"}, marks=pytest.mark.full), {"memory": "summary:1"}],
    ids=["full", "window", "summary"],
)
def test_engine_and_learner_agree_on_every_sampled_token(engine: tuple[Any, str], agent: dict[str, Any]) -> None:
    actor, policy = engine
    generator = {"max_model_len": LENGTH, "max_concurrency": 16, "max_turns": 5, "agent": agent}
    config = Config.model_validate({"generator": generator, "trainer": {"deterministic": True}})
    rollouts = Rollouts(config, [actor], policy)
    try:
        done = rollouts.run(PromptBatch(1, LONG, 2), sampling=SamplingOptions(max_tokens=24)).trajectories
    finally:
        rollouts.close()
    assert all(len(t.turns) > 1 and not t.stop_reason.failed for t in done)
    assert all((len(t.segments()) > 1) == ("memory" in agent) for t in done if len(t.turns) > 3)
    learner, rows = Learner(config, policy, 1), make_rows(done)
    batch = collate(rows, range(len(rows)), learner.device, learner.dtype)
    with torch.no_grad():
        logprobs_N, _ = learner.logprobs(batch)
    assert (logprobs_N - batch.rollout_logprobs_N).abs().max() < 5e-4
    tools = [t for t in done if t.sample.env_id == "skyrl/tool_use-v0"]
    system = tools[0].prompt[0]["content"]
    assert ("calculator" in system) == ("tools" not in agent)
    learner_text = learner.tokenizer.decode(tools[0].turns[0].prompt_ids)
    assert '"calculator"' in learner_text and Path(policy).is_dir()


def test_death_of_the_engine_is_one_sentence(rollouts: Rollouts, engine: tuple[Any, str]) -> None:
    """Last: the engine does not survive it."""
    os.kill(ray.get(engine[0].ready.remote())["pid"], signal.SIGKILL)
    with pytest.raises(EngineDied, match="engine's process died"):
        rollouts.run(PromptBatch(4, SAMPLES, 4))
