"""Our short way through vLLM's scheduler against vLLM's own, on the same requests, interrupted at the same steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env, kv_token_bytes
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions

VOCAB = 300
LENGTHS, LIMITS = (3, 31, 32, 33, 64, 96, 180), (1, 2, 31, 32, 33, 60, 100, 300)


class SteppedByHand(VLLMEngine):
    """What happens in it depends on nothing but its requests."""

    def load(self, ahead: bool) -> str:
        if ahead:  # as on a GPU; on a CPU vLLM does not ask
            from vllm.platforms.cpu import CpuPlatform

            decide = CpuPlatform.check_and_update_config

            def check_and_update_config(config: Any) -> None:
                decide(config)
                config.scheduler_config.async_scheduling = True

            CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[assignment]
        self._load()
        return type(self._llm.engine_core.engine_core.scheduler).__name__

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
        return done, streamed, core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class Both:
    """vLLM's own scheduler, then ours, in one process: its start is most of the time."""

    def answers(self, folder: str, cache: dict[str, Any], ahead: bool, requests: list[GenerationRequest]) -> list[Any]:
        found = []
        for choice in ({"scheduler_cls": None}, {}):
            engine = SteppedByHand(folder, "float32", 256, 64, 0, cache | choice)
            found.append((engine.load(ahead), engine.answers(requests)))
        return found


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
    """Every length next to a block's end, stop tokens, greedy and truncated sampling, alternatives, streams."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(2, VOCAB, (200,), generator=generator).tolist()
    requests = []
    for i in range(150):
        length = LENGTHS[i % len(LENGTHS)]
        start = common[: 2 * length // 3] if i % 3 == 0 else []
        rest = torch.randint(2, VOCAB, (length - len(start),), generator=generator).tolist()
        limit = LIMITS[i * 5 % len(LIMITS)]
        stops = tuple(range(2 + i % 7, VOCAB, 20)) if i % 4 == 1 else ()
        sampling = SamplingOptions(
            limit, (1.0, 0.7, 0.0)[i % 3], (1.0, 0.9)[i % 2], stops, min(limit, i % 5), (0, 0, 3, 1)[i % 4]
        )
        seed = i if seeded and i % 2 else None
        requests.append(GenerationRequest(f"r{i}", start + rest, sampling, seed, i % 50 == 49, i % 7 == 0))
    return requests


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("crowded", [True, pytest.param(False, marks=pytest.mark.full)])
def test_answers_are_those_of_vllms_own_scheduler(folder: str, ahead: bool, crowded: bool) -> None:
    """With every token, logprob, version and step; in a crowded cache requests are put out and prefilled again."""
    blocks = 60 if crowded else 600
    cache = {"kv_cache_memory_bytes": kv_token_bytes(folder, "float32") * 32 * blocks}
    requests = mixed_requests(seeded=not crowded)
    both: Any = ray.remote(Both).options(runtime_env={"env_vars": engine_env()}).remote()
    (own, expected), (ours, found) = ray.get(both.answers.remote(folder, cache, ahead, requests), timeout=300)
    assert [own, ours] == (["AsyncScheduler", "ShortAsyncScheduler"] if ahead else ["Scheduler", "ShortScheduler"])
    assert len(expected[0]) == len(requests) - 1 and found == expected
    assert {output.finish_reason for _, output in found[0]} == {"stop", "length"}
    assert any(len(set(output.weight_versions)) > 1 for _, output in found[0])
    assert any(output.usage["cached_tokens"] for _, output in found[0]) and any(found[1])
    ray.kill(both)
