"""Our short way through vLLM's scheduler against vLLM's own, on the same requests, interrupted at the same steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env, kv_token_bytes
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions

VOCAB = 300
LENGTHS, LIMITS = (3, 31, 32, 33, 64, 96, 180), (1, 2, 31, 32, 33, 60, 100, 300)


class FakeGPURunner:
    """In the place of the model and of vLLM's model runner for GPUs, which a CPU cannot have: a token follows from its
    request and place. It knows of a request what the scheduler's plans have said."""

    def __init__(self) -> None:
        self.length: dict[str, int] = {}
        self.computed: dict[str, int] = {}

    def execute_model(self, plan: Any, non_block: bool) -> Future[Any]:
        for new in plan.scheduled_new_reqs:  # those that were put out, too, with all their tokens
            self.length[new.req_id] = len(new.prefill_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        assert not cached.resumed_req_ids and not cached.all_token_ids
        for key, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            assert computed == self.computed[key]
        rows = sorted(plan.num_scheduled_tokens, key=lambda key: (plan.num_scheduled_tokens[key], -int(key)))
        tokens = []
        for key in rows:
            self.computed[key] += plan.num_scheduled_tokens[key]
            whole = self.computed[key] >= self.length[key]
            tokens.append([2 + (int(key) * 31 + self.length[key] * 17) % (VOCAB - 2)] if whole else [])
            self.length[key] += whole
        ids = np.arange(len(tokens) * 4).reshape(-1, 4)
        logprobs = LogprobsLists(ids, -ids / 7, ids[:, 0])
        index = {key: row for row, key in enumerate(rows)}
        self.output = ModelRunnerOutput(rows, index, tokens, logprobs=logprobs if tokens else None)
        return self.done(None if tokens else self.output)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self.done(self.output) if non_block else self.output

    def done(self, output: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(output)
        return future


class SteppedByHand(VLLMEngine):
    """What happens in it depends on nothing but its requests."""

    def load(self, ahead: bool, gpu_runner: bool) -> str:
        if ahead:  # as on a GPU; on a CPU vLLM does not ask
            from vllm.platforms.cpu import CpuPlatform

            decide = CpuPlatform.check_and_update_config

            def check_and_update_config(config: Any) -> None:
                decide(config)
                config.scheduler_config.async_scheduling = True

            CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[assignment]
        self._load()
        self.__dict__["_completes"] = lambda ids, stops: str(ids[-1]).endswith(stops[0])  # in the place of texts
        core = self._llm.engine_core.engine_core
        self.plans: list[Any] = []
        schedule = core.scheduler.schedule

        def noted(*arguments: Any) -> Any:
            plan = schedule(*arguments)
            self.plans.append((list(plan.num_scheduled_tokens), copy.deepcopy(plan)))
            return plan

        core.scheduler.schedule = noted
        if gpu_runner:
            core.scheduler.use_v2_model_runner, model = True, FakeGPURunner()
            core.model_executor.execute_model = model.execute_model
            core.model_executor.sample_tokens = model.sample_tokens
        return type(core.scheduler).__name__

    def answers(self, requests: list[GenerationRequest]) -> tuple[list[tuple[int, GenerationOutput]], list[Any], int]:
        """Every answer with its step, what streamed in every step, and the blocks that are free at last."""
        waiting, done, streamed, step = list(requests), list[tuple[int, GenerationOutput]](), list[Any](), 0
        core = self._llm.engine_core.engine_core
        while waiting or self._queue or self._in_flight:
            if step % 6 == 0:
                self._enqueue("test", waiting[:10])
                del waiting[:10]
            if step in (33, 70):  # as a weight update does
                assert self._llm.reset_prefix_cache(reset_running_requests=bool(self._in_flight))
                self._llm.set_weight_version(str(step))
            if step == 50:
                self._rest(1, [])
                self._rest(0, ["weights", "kv_cache"])
            if step == 60:
                key = list(self._in_flight)[len(self._in_flight) // 2]
                core.abort_requests([key])
                del self._in_flight[key]
            assert not self._admit()
            for key, output in self._step() if self._in_flight else []:
                del self._in_flight[key]
                done.append((step, output))
            streamed.append({request: list(ids) for request, ids in self._written.items()})
            step += 1
        done.sort(key=lambda pair: (pair[0], pair[1].request_id))  # of a step those that end at a text come last here
        return done, streamed, core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class Both:
    """vLLM's own scheduler, then ours, in one process: its start is most of the time."""

    def answers(
        self, folder: str, cache: dict[str, Any], ahead: bool, gpu_runner: bool, requests: list[GenerationRequest]
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """And where their plans differ."""
        found, plans = [], []
        for choice in ({"scheduler_cls": None}, {}):
            engine = SteppedByHand(folder, "float32", 256, 64, 0, cache | choice)
            found.append((engine.load(ahead, gpu_runner), engine.answers(requests)))
            plans.append(engine.plans)
        return found, [pair for pair in zip(*plans, strict=True) if pair[0] != pair[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=VOCAB, num_attention_heads=2, num_key_value_heads=1, **sizes)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    yield str(path)
    ray.shutdown()


def mixed_requests(seeded: bool) -> list[GenerationRequest]:
    """Every length next to a block's end, stops (tokens and texts), greedy and cut sampling, alternatives, streams."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(2, VOCAB, (200,), generator=generator).tolist()
    requests = []
    for i in range(150):
        length = LENGTHS[i % len(LENGTHS)]
        start = common[: 2 * length // 3] if i % 3 == 0 else []
        rest = torch.randint(2, VOCAB, (length - len(start),), generator=generator).tolist()
        limit = LIMITS[i * 5 % len(LIMITS)]
        stops = tuple(range(2 + i % 7, VOCAB, 20)) if i % 4 == 1 else ()
        how = (1.0, 0.7, 0.0)[i % 3], (1.0, 0.9)[i % 2], stops, min(limit, i % 5), (0, 0, 3, 1)[i % 4]
        sampling = SamplingOptions(limit, *how, stops=("77",) * (i % 11 == 3) or ("8",) * (i % 11 == 7))
        seed = i if seeded and i % 2 else None
        requests.append(GenerationRequest(f"r{i}", start + rest, sampling, seed, i % 50 == 49, i % 7 == 0))
    return requests


def compared(
    folder: str, requests: list[GenerationRequest], blocks: int, ahead: bool, gpu_runner: bool, **kwargs: Any
) -> list[tuple[str, Any]]:
    """Each scheduler's name and answers, of a cache of so many blocks; their plans are the same."""
    cache = {"kv_cache_memory_bytes": kv_token_bytes(folder, "float32") * 32 * blocks} | kwargs
    both: Any = ray.remote(Both).options(runtime_env={"env_vars": engine_env()}).remote()
    answers, differing = ray.get(both.answers.remote(folder, cache, ahead, gpu_runner, requests), timeout=300)
    ray.kill(both)
    assert not differing
    return answers


@pytest.mark.parametrize("gpu_runner", [False, True])
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("crowded", [True, pytest.param(False, marks=pytest.mark.full)])
def test_answers_are_those_of_vllms_own_scheduler(folder: str, crowded: bool, ahead: bool, gpu_runner: bool) -> None:
    """With every token, logprob, version, step and plan; in a crowded cache requests are put out and prefilled again.
    `gpu_runner`: as the model runner for GPUs is served, which a CPU has not. Without it `engine_kwargs` let fewer
    requests run at once than are ready to."""
    requests = mixed_requests(seeded=not crowded)
    seats = {} if gpu_runner else {"max_num_seqs": 12}
    (own, expected), (ours, found) = compared(folder, requests, 60 if crowded else 600, ahead, gpu_runner, **seats)
    assert [own, ours] == (["AsyncScheduler", "ShortAsyncScheduler"] if ahead else ["Scheduler", "ShortScheduler"])
    assert len(expected[0]) == len(requests) - 1 and found == expected
    assert {output.finish_reason for _, output in found[0]} == {"stop", "length"}
    texts = {request.request_id: request.options.stops for request in requests if request.options.stops}
    ends = [(output, texts[output.request_id][0]) for _, output in found[0] if output.request_id in texts]
    at_text = [str(output.output_ids[-1]).endswith(text) for output, text in ends]
    assert any(at_text) and not any(str(i).endswith(text) for output, text in ends for i in output.output_ids[:-1])
    assert any(len(set(output.weight_versions)) > 1 for _, output in found[0])
    assert any(output.usage["cached_tokens"] for _, output in found[0]) and any(found[1])
    # Of 50 and more that wait for room in a crowded cache, the one that goes first is next.
    ended = {output.request_id: step for step, output in found[0]}
    assert ended["r149"] < 120, "it comes in step 84"


@pytest.mark.full
def test_a_watermark_keeps_blocks_free_as_in_vllms_own_scheduler(folder: str) -> None:
    (_, expected), (_, found) = compared(folder, mixed_requests(seeded=False), 60, True, True, watermark=0.3)
    assert found == expected
