"""The engine actors on real vLLM and real transformers through Ray, weight sync into them, and what breaks it.

An engine is started once for the whole file: each start costs seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.transformers_engine import TransformersEngine
from skyrl_trainer.engine.client import EngineClient
from skyrl_trainer.engine.openai_server import OpenAIServerEngine
from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.errors import EngineDied, SyncError
from skyrl_trainer.run.engine_watch import EngineWatch
from skyrl_trainer.run.processes import ENGINE_START_SECONDS
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions
from skyrl_trainer.weight_sync.canary import Canary
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

TOLERANCE = 5e-4
VOCAB = 300
BRIEF = GenerationRequest("brief", [5] * 8, SamplingOptions(max_tokens=4))
"""When it is answered, what was asked before it is under way."""
CANARY_IDS = [2 + (i * 37) % (VOCAB - 2) for i in range(100)]


class FaultyVLLM(VLLMEngine):
    """VLLMEngine in which a test can leave out a part of the weight update."""

    def break_sync(self, fault: str) -> None:
        self._call(lambda: self._break(fault))

    def break_step(self) -> None:
        def step() -> None:
            raise RuntimeError("the test's own fault")

        self._call(lambda: setattr(self, "_step", step))

    def _break(self, fault: str) -> None:
        backend = self._llm.collective_rpc(_backend_of)[0]
        vars(backend).pop("receive_weights", None)
        vars(backend).pop("repack_tied_head", None)
        vars(self._llm).pop("reset_prefix_cache", None)
        if fault == "load":
            backend.receive_weights = lambda info: None
        elif fault == "load, with a forged checksum":
            backend.receive_weights = lambda info: setattr(backend, "checksum", backend.buffer.checksum())
        elif fault == "re-pack":
            backend.repack_tied_head = lambda: None
        elif fault == "cache reset":
            self._llm.reset_prefix_cache = lambda **_: True


def _backend_of(worker: Any) -> Any:
    return worker.weight_transfer_engine


@dataclass
class Stack:
    """An engine actor, the learner whose weights it gets, and what runs between them."""

    actor: Any
    learner: Qwen3ForCausalLM
    sync: SharedMemorySync
    name: str
    version: int = 0

    def push(self) -> Any:
        self.version += 1
        return self.sync.sync(self.version)

    def canary(self) -> Canary:
        return Canary([self.actor], CANARY_IDS, TOLERANCE)

    @torch.no_grad()
    def learner_logprobs(self, ids: list[int]) -> torch.Tensor:
        return self.learner(torch.tensor([ids])).logits[0].log_softmax(-1)

    @torch.no_grad()
    def perturb(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(self.version)
        for parameter in self.learner.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)

    def generate(self, requests: list[GenerationRequest], batch: int | None = None) -> list[GenerationOutput]:
        async def run() -> list[GenerationOutput]:
            client = EngineClient(self.actor, f"test-{time.monotonic_ns()}")
            outputs: list[GenerationOutput] = []
            size = batch or len(requests)
            for start in range(0, len(requests), size):
                outputs += await asyncio.wait_for(client.generate_round(requests[start : start + size]), 120)
            return outputs

        return asyncio.run(run())


def make_model(folder: Path, tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than at initialisation: errors show
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


ENGINES: dict[str, tuple[type, bool]] = {  # with whether head and embeddings are one, which decides how vLLM loads
    "vllm": (FaultyVLLM, True),
    "server": (OpenAIServerEngine, False),
    "transformers": (TransformersEngine, True),
    "vllm-untied": (VLLMEngine, False),
    "server-tied": (OpenAIServerEngine, True),
}


class Stacks(dict[str, Stack]):
    """An engine is started when a test first asks for it: all at once took a slow machine over five minutes."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder

    def __missing__(self, name: str) -> Stack:
        engine_class, tied = ENGINES[name]
        folder = self._make_folder(name)
        learner = make_model(folder, tied)
        options = {"max_concurrency": 64, "max_restarts": 1, "runtime_env": {"env_vars": engine_env()}}
        actor: Any = ray.remote(engine_class).options(**options)
        actor = actor.remote(str(folder), "float32", 512, 64, 0, {})
        ray.get(actor.ready.remote(), timeout=ENGINE_START_SECONDS)
        self[name] = Stack(actor, learner, SharedMemorySync([actor], learner.named_parameters), name)
        return self[name]


@pytest.fixture(scope="module")
def stacks(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    started = Stacks(tmp_path_factory.mktemp)
    yield started
    for stack in started.values():
        stack.sync.close()


PAIRED = [pytest.param(name, marks=pytest.mark.full) for name in ("vllm-untied", "server-tied")]


@pytest.fixture(params=["vllm", "server", "transformers", *PAIRED])
def stack(request: pytest.FixtureRequest, stacks: Stacks) -> Stack:
    return stacks[request.param]


@pytest.fixture
def tied(stacks: Stacks) -> Iterator[Stack]:
    """The engine that can be broken, healthy again afterwards."""
    yield stacks["vllm"]
    ray.get(stacks["vllm"].actor.break_sync.remote(""))


def requests_of(count: int, max_tokens: int, seeded: bool = True, **options: Any) -> list[GenerationRequest]:
    """Prompts of 5 to 120 tokens, some with a common beginning."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for i in range(count):
        length = 5 + (i * 29) % 116
        start = CANARY_IDS[: length // 2] if i % 3 == 0 else []
        rest = torch.randint(2, VOCAB, (length - len(start),), generator=generator).tolist()
        sampling = SamplingOptions(max_tokens, **options)
        requests.append(GenerationRequest(f"r{i}", start + rest, sampling, seed=100 + i if seeded else None))
    return requests


def learner_scores(stack: Stack, prompt: list[int], output: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = stack.learner(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]


def test_a_request_that_streams_is_read_while_it_is_sampled(stacks: Stacks) -> None:
    stack = stacks["vllm"]
    (plain,) = requests_of(1, 200)
    request, seen = replace(plain, streams=True), list[list[int]]()

    async def run() -> GenerationOutput:
        client = EngineClient(stack.actor, "streams")
        answering = asyncio.ensure_future(client.generate(request))
        while not answering.done():
            seen.append(await stack.actor.written.remote(request.request_id, len(seen[-1]) if seen else 0))
        return await asyncio.wait_for(answering, 120)

    output = asyncio.run(run())
    assert len({len(ids) for ids in seen}) > 2, "in several pieces"
    assert all(ids == output.output_ids[: len(ids)] for ids in seen)
    assert (output.output_ids, output.logprobs) == next((o.output_ids, o.logprobs) for o in stack.generate([plain]))
    assert ray.get(stack.actor.written.remote(request.request_id, -1)) == [], "nothing of it is kept"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_transformers_forward_pass(stack: Stack, temperature: float) -> None:
    stack.push()
    requests = requests_of(16, 24, temperature=temperature)
    for request, output in zip(requests, stack.generate(requests), strict=True):
        assert output.request_id == request.request_id and output.finish_reason == "length"
        assert len(output.output_ids) == len(output.logprobs) == len(output.weight_versions) == 24
        assert set(output.weight_versions) == {stack.version}
        expected = learner_scores(stack, request.prompt_ids, output.output_ids, temperature)
        assert (expected - torch.tensor(output.logprobs)).abs().max() < TOLERANCE


def test_seeded_requests_do_not_depend_on_their_neighbours(stack: Stack) -> None:
    requests = requests_of(32, 24)
    together = {output.request_id: output.output_ids for output in stack.generate(requests)}
    reverse = {output.request_id: output.output_ids for output in stack.generate(requests[::-1])}
    sevens = {output.request_id: output.output_ids for output in stack.generate(requests, batch=7)}
    assert together == reverse == sevens


@pytest.mark.parametrize("name", ["vllm", "server"])
def test_more_seeded_prompts_than_a_step_may_prefill(stacks: Stacks, name: str) -> None:
    """A prefill in parts would crash vLLM's CPU generators: admission has to prevent it."""
    requests = [
        GenerationRequest(f"r{i}", [2 + (i + j) % 250 for j in range(400)], SamplingOptions(max_tokens=100), seed=i)
        for i in range(150)
    ]
    outputs = stacks[name].generate(requests)
    assert [len(output.output_ids) for output in outputs] == [100] * len(requests)


def test_sampling_ends_at_a_stop_token_and_includes_it(stack: Stack) -> None:
    stops = tuple(range(2, VOCAB, 10))
    for output in stack.generate(requests_of(16, 64, min_tokens=3, stop_token_ids=stops)):
        assert len(output.output_ids) >= 3
        assert (output.finish_reason == "stop") == (output.output_ids[-1] in stops)
        assert not set(output.output_ids[:-1]) & set(stops)


def test_a_prompt_without_room_for_an_answer_is_an_error_of_that_request_only(stack: Stack) -> None:
    long = GenerationRequest("long", [5] * 512, SamplingOptions(max_tokens=4))
    good = GenerationRequest("good", [5] * 8, SamplingOptions(max_tokens=4))
    empty = GenerationRequest("empty", [], SamplingOptions(max_tokens=4))  # vLLM itself refuses it, by no ValueError
    nothing, refused, answered = stack.generate([empty, long, good])
    assert nothing.error or nothing.output_ids  # transformers answers
    assert refused.finish_reason == "error" and refused.error is not None and "max_model_len=512" in refused.error
    assert len(answered.output_ids) == 4


def test_top_logprobs_are_the_likeliest_tokens(stack: Stack) -> None:
    (output,) = stack.generate([GenerationRequest("r", CANARY_IDS, SamplingOptions(1, top_logprobs=5), seed=3)])
    assert output.top_logprobs is not None
    expected = stack.learner_logprobs(CANARY_IDS)[-1].topk(5)
    for token, logprob in zip(expected.indices.tolist(), expected.values.tolist(), strict=True):
        assert output.top_logprobs[0][token] == pytest.approx(logprob, abs=TOLERANCE)


def test_a_request_that_goes_first_does_not_wait_for_the_queue(stack: Stack) -> None:
    """In its order it would enter when 97 of the 160 before it have left the engine's 64 seats."""

    async def run() -> int:
        client = EngineClient(stack.actor, f"queue-{time.monotonic_ns()}")
        crowd = [asyncio.ensure_future(client.generate(request)) for request in requests_of(160, 60)]
        await asyncio.sleep(0.15)
        urgent = GenerationRequest("urgent", [5] * 8, SamplingOptions(max_tokens=4), first=True)
        await asyncio.wait_for(client.generate(urgent), 120)
        left = sum(task.done() for task in crowd)
        await asyncio.wait_for(asyncio.gather(*crowd), 120)
        return left

    assert asyncio.run(run()) < 97


def test_an_engine_says_when_it_worked(stack: Stack) -> None:
    ray.get(stack.actor.worked.remote())
    began = time.time()
    stack.generate(requests_of(8, 20))
    spans, ended = ray.get(stack.actor.worked.remote()), time.time()
    assert spans and spans == sorted(spans) and all(began <= start < end <= ended for start, end in spans)
    assert ray.get(stack.actor.worked.remote()) == []


def test_a_sync_in_the_middle_of_generation_keeps_requests_and_marks_every_token(stack: Stack) -> None:
    requests = requests_of(24, 200)

    async def run() -> list[GenerationOutput]:
        client = EngineClient(stack.actor, f"middle-{time.monotonic_ns()}")
        generation = asyncio.ensure_future(client.generate_round(requests))
        await asyncio.wait_for(client.generate(BRIEF), 120)
        stack.perturb(0.05)
        await asyncio.to_thread(stack.push)
        return await asyncio.wait_for(generation, 120)

    first = stack.version
    outputs = asyncio.run(run())
    assert any(len(set(output.weight_versions)) == 2 for output in outputs)
    for request, output in zip(requests, outputs, strict=True):
        assert len(output.output_ids) == len(output.weight_versions) == 200
        assert output.weight_versions == sorted(output.weight_versions)
        assert set(output.weight_versions) <= {first, first + 1}
        # Tokens of the new version come from the new weights all the way, keys and values of the prompt included.
        new = [i for i, version in enumerate(output.weight_versions) if version == first + 1]
        expected = learner_scores(stack, request.prompt_ids, output.output_ids, 1.0)[new]
        assert (expected - torch.tensor(output.logprobs)[new]).abs().max() < TOLERANCE


def test_an_engine_that_sleeps_around_a_sync_keeps_its_requests_and_generates_nothing_meanwhile(stack: Stack) -> None:
    requests = requests_of(24, 200)

    async def run() -> list[GenerationOutput]:
        client = EngineClient(stack.actor, f"asleep-{time.monotonic_ns()}")
        generation = asyncio.ensure_future(client.generate_round(requests))
        await asyncio.wait_for(client.generate(BRIEF), 120)
        await stack.actor.sleep.remote(2)
        await asyncio.to_thread(stack.perturb, 0.05)
        await stack.actor.wake_up.remote(["weights"])
        await asyncio.to_thread(stack.push)  # ends with resume, but there is no cache yet
        assert not (await asyncio.wait([generation], timeout=2.0))[0]
        await stack.actor.wake_up.remote(["kv_cache"])
        return await asyncio.wait_for(generation, 120)

    first = stack.version
    outputs = asyncio.run(run())
    assert any(first + 1 in output.weight_versions for output in outputs)
    for request, output in zip(requests, outputs, strict=True):
        assert len(output.output_ids) == len(output.weight_versions) == 200
        new = [i for i, version in enumerate(output.weight_versions) if version == first + 1]
        expected = learner_scores(stack, request.prompt_ids, output.output_ids, 1.0)[new]
        assert not new or (expected - torch.tensor(output.logprobs)[new]).abs().max() < TOLERANCE


@pytest.mark.parametrize("scale", [0.05, 1e-3, 1e-6])
def test_the_canary_passes_after_a_sync_of_any_size(stack: Stack, scale: float) -> None:
    canary = stack.canary()
    for _ in range(3):
        report = stack.push()
        metrics = canary.check(stack.version, stack.learner_logprobs, report)
        assert metrics["sync/max_logprob_diff"] < 1e-4
        stack.perturb(scale)
    assert metrics["sync/canary_change"] > 0


@pytest.mark.parametrize("scale", [0.05, 3e-3])
@pytest.mark.parametrize("fault", ["load", "load, with a forged checksum", "re-pack", "cache reset"])
def test_the_canary_stops_training_when_a_sync_leaves_something_out(tied: Stack, fault: str, scale: float) -> None:
    canary = tied.canary()
    report = tied.push()
    canary.check(tied.version, tied.learner_logprobs, report)
    ray.get(tied.actor.break_sync.remote(fault))
    tied.perturb(scale)
    report = tied.push()
    with pytest.raises(SyncError, match="Weight sync failed"):
        canary.check(tied.version, tied.learner_logprobs, report)


def test_the_checksum_decides_when_an_update_is_smaller_than_the_noise(tied: Stack) -> None:
    canary = tied.canary()
    report = tied.push()
    canary.check(tied.version, tied.learner_logprobs, report)
    ray.get(tied.actor.break_sync.remote("load"))
    tied.perturb(1e-8)
    report = tied.push()
    with pytest.raises(SyncError, match="checksum"):
        canary.check(tied.version, tied.learner_logprobs, report)


def test_the_learner_trains_in_the_shared_buffer(stacks: Stacks) -> None:
    stack = stacks["server"]
    before = [parameter.data_ptr() for parameter in stack.learner.parameters()]
    optimizer = torch.optim.AdamW(stack.learner.parameters(), lr=1e-3)
    stack.learner(torch.tensor([CANARY_IDS])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    assert before == [parameter.data_ptr() for parameter in stack.learner.parameters()]
    canary = stack.canary()
    report = stack.push()
    canary.check(stack.version, stack.learner_logprobs, report)


@pytest.mark.full  # test_resume.py kills one in a run, which has the same bytes after it
@pytest.mark.parametrize("name", ["vllm", "server"])
def test_a_killed_engine_comes_back_with_its_weights_and_answers_what_it_was_asked(stacks: Stacks, name: str) -> None:
    stack = stacks[name]
    stack.perturb(0.01)  # so that its folder holds other weights than it is asked with
    report = stack.push()
    canary = stack.canary()
    canary.check(stack.version, stack.learner_logprobs, report)
    requests = requests_of(24, 300, min_tokens=300)
    undisturbed = stack.generate(requests)
    watch = EngineWatch([stack.actor])
    watch.restore = lambda index: canary.check(
        stack.version, stack.learner_logprobs, stack.sync.restore(index), only=index
    )  # type: ignore[assignment, return-value]
    running = ray.get(stack.actor.ready.remote())
    assert not watch.check()

    async def run() -> list[GenerationOutput]:
        client = EngineClient(stack.actor, f"killed-{time.monotonic_ns()}")
        generation = asyncio.ensure_future(client.generate_round(requests))
        await asyncio.sleep(0.1)
        assert not generation.done()
        os.kill(running.get("server_pid", running["pid"]), signal.SIGKILL)
        assert await asyncio.to_thread(watch.check, 20.0)
        return await asyncio.wait_for(generation, 60)

    outputs = asyncio.run(run())
    assert [output.output_ids for output in outputs] == [output.output_ids for output in undisturbed]
    assert all({*output.weight_versions} == {stack.version} for output in outputs)
    assert watch.new_step() == 1 and not watch.check()
    stack.perturb(1e-3)
    canary.check(stack.version + 1, stack.learner_logprobs, stack.push())


def dies(stack: Stack, kill: Callable[[], None]) -> str:
    async def run() -> str:
        client = EngineClient(stack.actor, f"dies-{time.monotonic_ns()}")
        generation = asyncio.ensure_future(client.generate_round(requests_of(4, 400, min_tokens=400)))
        await asyncio.sleep(0.1)
        kill()
        start = time.monotonic()
        with pytest.raises(EngineDied) as caught:
            await asyncio.wait_for(generation, 30)
        assert time.monotonic() - start < 10
        with pytest.raises(EngineDied):
            await client.generate(requests_of(1, 4)[0])
        return str(caught.value)

    return asyncio.run(run())


def test_our_server_leaves_idle_connections_open(stacks: Stacks) -> None:
    """A request on one that it closes at that moment would be lost: on a busy machine an engine died of it."""
    process = psutil.Process(ray.get(stacks["server"].actor.ready.remote())["server_pid"])
    (path,) = (flag.removeprefix("--uds=") for flag in process.cmdline() if flag.startswith("--uds="))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(path)
        for pause in (6, 0):  # vLLM's own limit is 5 seconds
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
            assert b"200 OK" in connection.recv(1 << 16)
            time.sleep(pause)


def test_an_exception_in_the_step_thread_reaches_every_caller(stacks: Stacks) -> None:
    """Last but one: the engine does not survive it."""
    stack = stacks["vllm"]
    sentence = dies(stack, lambda: ray.get(stack.actor.break_step.remote()))
    assert "stopped" in sentence and "the test's own fault" in sentence


def test_a_killed_engine_is_an_error_with_a_sentence_within_seconds(stacks: Stacks) -> None:
    """Last: the engine does not survive it."""
    stack = stacks["transformers"]
    assert "process died" in dies(stack, lambda: ray.kill(stack.actor))
