"""LoRA and QLoRA in the whole loop: merged weights, adapters loaded by the running engine, a base in four bits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from skyrl_trainer.engine.openai_server import OpenAIServerEngine
from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.errors import SyncError
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.run.engine_watch import EngineWatch
from skyrl_trainer.run.processes import ENGINE_START_SECONDS
from skyrl_trainer.settings import Config, TinyConfig
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions
from skyrl_trainer.weight_sync.canary import Canary
from skyrl_trainer.weight_sync.lora import AdapterSync, adapter_kwargs
from tests.e2e.runs import Run, assert_nothing_left, metrics

TOLERANCE = 5e-4
CANARY_IDS = [2 + (i * 37) % 50 for i in range(100)]


FULL = pytest.mark.full
"""What follows the loop goes its way, too, which has nf4 and an adapter; test_engine.py has the canary's faults."""
LOOPS = [
    pytest.param("{rank: 8}", "auto", marks=FULL),
    ("{rank: 8, quantization: nf4}", "auto"),
    pytest.param("{rank: 8, target_modules: [q_proj, up_proj]}", "adapter", marks=FULL),
]


@pytest.mark.parametrize(("options", "sync"), LOOPS)
def test_the_loop_learns_with_adapters_and_the_canary_passes(
    clone: Path, tmp_path: Path, options: str, sync: str
) -> None:
    settings = {"trainer__policy__model__path": clone, "trainer__policy__model__lora": options}
    settings["generator__weight_sync_backend"] = sync
    run = Run(tmp_path / "run", **settings, trainer__max_steps=2, trainer__eval_interval=0, trainer__learning_rate=5e-3)
    code, output = run.finish()
    assert code == 0, output
    assert_nothing_left(run.folder)
    rows = metrics(run.folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/max_logprob_diff"] < TOLERANCE for row in rows)
    assert rows[-1]["sync/canary_change"] > 2 * TOLERANCE  # large enough for the canary to see
    AutoModelForCausalLM.from_pretrained(run.folder / "model" / "last")
    assert (run.folder / "model" / "last" / "adapter" / "adapter_model.safetensors").exists()


class FaultyVLLM(VLLMEngine):
    """VLLMEngine in which a test can leave out the load of an adapter, wholly or behind the actor's back."""

    def skip(self, method: str) -> None:
        for owner in (self, self._llm):
            vars(owner).pop("_load_adapter", None)
            vars(owner).pop("add_lora", None)
            if hasattr(owner, method):
                setattr(owner, method, lambda argument: True)


class Stack:
    """An engine for adapters, the learner whose adapter it gets, and what runs between them."""

    def __init__(self, folder: Path, engine_class: type) -> None:
        settings = {"rank": 5, "quantization": "nf4", "target_modules": ["q_proj", "down_proj"]}
        config = Config.model_validate({"trainer": {"policy": {"model": {"lora": settings}}}})
        init_policy(folder, ["17 + 25 = 42"], TinyConfig(config_kwargs={"hidden_size": 64, "num_hidden_layers": 2}), 0)
        self.learner = make_learner(config, str(folder), 1)
        options = {"max_concurrency": 64, "max_restarts": 1, "runtime_env": {"env_vars": engine_env()}}
        actor: Any = ray.remote(engine_class).options(**options)
        self.actor = actor.remote(str(folder), "float32", 256, 16, 0, adapter_kwargs(config))
        ray.get(self.actor.ready.remote(), timeout=ENGINE_START_SECONDS)
        self.sync = AdapterSync([self.actor], self.learner.base_tensors, self.learner.adapter_tensors)
        self.canary = Canary([self.actor], CANARY_IDS, TOLERANCE)
        self.version = 0

    @torch.no_grad()
    def move(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(self.version)
        for parameter in self.learner.parameters:
            parameter += scale * torch.randn(parameter.shape, generator=generator)

    def publish(self) -> dict[str, float]:
        self.version += 1
        return self.canary.check(self.version, self.learner.token_logprobs, self.sync.sync(self.version))


ENGINES = {"vllm": FaultyVLLM, "server": OpenAIServerEngine}


@pytest.fixture(scope="module")
def stacks() -> Iterator[dict[str, Stack]]:
    """Those started so far."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield {}
    ray.shutdown()


@pytest.fixture(params=["vllm", "server"])
def stack(request: pytest.FixtureRequest, stacks: dict[str, Stack], tmp_path_factory: pytest.TempPathFactory) -> Stack:
    if request.param not in stacks:
        stacks[request.param] = Stack(tmp_path_factory.mktemp("policy") / "model", ENGINES[request.param])
    return stacks[request.param]


@FULL
def test_adapters_of_any_size_arrive_and_leave_no_file(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("skyrl_trainer.weight_sync.lora.folder_with_room", lambda size: str(tmp_path))
    for scale in (0.0, 0.3, 1e-6, 0.1):
        stack.move(scale)
        assert stack.publish()["sync/max_logprob_diff"] < 1e-4
        assert not list(tmp_path.iterdir())


@FULL
@pytest.mark.parametrize(("fault", "scale"), [("_load_adapter", 1e-7), ("add_lora", 1e-7), ("add_lora", 0.3)])
@pytest.mark.parametrize("stack", ["vllm"], indirect=True)
def test_a_load_that_leaves_something_out_is_caught(stack: Stack, fault: str, scale: float) -> None:
    stack.publish()
    stack.move(scale)
    ray.get(stack.actor.skip.remote(fault))
    with pytest.raises(SyncError, match="other bytes"):
        stack.publish()
    ray.get(stack.actor.skip.remote("nothing"))
    stack.publish()


@FULL
def test_requests_in_flight_go_on_with_the_new_adapter(stack: Stack) -> None:
    stack.publish()
    requests = [GenerationRequest(str(i), CANARY_IDS[i:], SamplingOptions(max_tokens=120), seed=i) for i in range(8)]
    ray.get(stack.actor.submit.remote("test", requests))
    stack.move(0.2)
    stack.publish()
    outputs: list[GenerationOutput] = []
    while len(outputs) < len(requests):
        outputs += ray.get(stack.actor.collect.remote("test", 60), timeout=90)
    for output in outputs:
        prompt = CANARY_IDS[int(output.request_id) :]
        now_TV = stack.learner.token_logprobs(prompt + output.output_ids)[len(prompt) - 1 : -1]
        ours_T = now_TV.gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        new_T = torch.tensor(output.weight_versions) == stack.version
        assert new_T[-1] and (ours_T - torch.tensor(output.logprobs))[new_T].abs().max() < TOLERANCE


@FULL  # test_resume.py kills an engine
def test_a_killed_engine_gets_the_base_again_and_then_the_adapter(stack: Stack) -> None:
    stack.move(0.2)
    stack.publish()
    watch = EngineWatch([stack.actor])
    checked: list[dict[str, float]] = []

    def restore(index: int) -> None:
        report = stack.sync.restore(index)
        checked.append(stack.canary.check(stack.version, stack.learner.token_logprobs, report, only=index))

    watch.restore = restore
    os.kill(ray.get(stack.actor.ready.remote())["pid"], signal.SIGKILL)
    assert watch.check(wait=20)
    assert checked[0]["sync/max_logprob_diff"] < TOLERANCE
    stack.move(0.1)
    stack.publish()
