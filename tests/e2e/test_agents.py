"""Many turns on the real stack: whatever is remembered, the learner scores the tokens as the engine sampled them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from skyrl_trainer.engine.vllm_actor import ENGINE_ENV, VLLMEngine
from skyrl_trainer.learner.batch import collate, make_rows
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.settings import Config, TinyConfig
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.types import PromptBatch, Sample, SamplingOptions

SAMPLES = [Sample(f"t{i}", "skyrl/tool_use-v0", i, {"difficulty": 1 + i % 6}) for i in range(4)] + [
    Sample(f"w{i}", "skyrl/webshop_lite-v0", i) for i in range(2)
]
"""Envs whose answers to anything are longer than what a summary keeps of them."""
LENGTH = 2048


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    init_policy(folder, ["Answer the question. go to countertop 1"], TinyConfig(), seed=0)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    made = ray.remote(VLLMEngine).options(runtime_env={"env_vars": ENGINE_ENV}, max_concurrency=64, num_cpus=0)
    actor = made.remote(str(folder), "float32", LENGTH, 16, 0, {})
    ray.get(actor.ready.remote(), timeout=120)
    yield actor, str(folder)
    ray.shutdown()


@pytest.mark.parametrize(
    "agent",
    [{"tools": "template"}, {"memory": "window", "window": 1}, {"memory": "summary", "window": 1}],
    ids=["full", "window", "summary"],
)
def test_engine_and_learner_agree_on_every_sampled_token(engine: tuple[Any, str], agent: dict[str, Any]) -> None:
    actor, policy = engine
    generator = {"max_model_len": LENGTH, "max_concurrency": 16, "max_turns": 5, "agent": agent}
    config = Config.model_validate({"generator": generator, "trainer": {"deterministic": True}})
    rollouts = Rollouts(config, [actor], policy)
    try:
        done = rollouts.run(PromptBatch(1, SAMPLES, 2), sampling=SamplingOptions(max_tokens=24)).trajectories
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
