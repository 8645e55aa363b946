"""vLLM as an engine actor: an `LLMEngine` that a thread of the actor's own process steps, from token ids to token ids.

Seeds on a CPU: a request with a seed must never be prefilled in parts, for vLLM rewinds its generator then, which CPU
generators cannot do. So a seeded request enters when the KV cache has room for every request in flight to its last
token (so none is preempted), and `max_num_batched_tokens` covers the whole cache.
"""

import asyncio
import gc
import os
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from skyrl_trainer.engine.stepped import SteppedEngine
from skyrl_trainer.engine.stops import StopCheck
from skyrl_trainer.engine.vllm_args import PREFILL_TOKENS, engine_env, vllm_kwargs
from skyrl_trainer.errors import SyncError
from skyrl_trainer.registry import load
from skyrl_trainer.types import GenerationOutput, GenerationRequest

SCHEDULER = "skyrl_trainer.engine.vllm_scheduler.scheduler"
STALE_CACHE = "vLLM could not reset its prefix cache after a weight update: it would mix two policies."


class VLLMEngine(SteppedEngine):
    """See protocols.InferenceEngine. `engine_kwargs` go to vLLM's EngineArgs and win over our choices."""

    env_vars = staticmethod(engine_env)

    def _load(self) -> None:
        from vllm import EngineArgs, LLMEngine, __version__

        gc.freeze()  # it collects six times on its way
        # It knows the inside of this vLLM alone.
        short = {"scheduler_cls": SCHEDULER} if __version__.startswith("0.32.") else {}
        self._llm = LLMEngine.from_engine_args(EngineArgs(**short | vllm_kwargs(*self.settings)))
        # A worker's death is this process's, which Ray starts again; vLLM would only fail from then on.
        self._llm.engine_core.engine_core.model_executor.register_failure_callback(lambda: os._exit(1))
        cache = self._llm.vllm_config.cache_config
        self._block_size = cache.block_size
        self._free_blocks = (cache.num_gpu_blocks or 0) - 1  # vLLM keeps a null block
        self._llm.set_weight_version("0")
        self._admitted_tokens = 0
        self._reserved: dict[str, int] = {}  # blocks of the KV cache that each request may come to need
        self._adapter: Any = None  # the LoRARequest that every request carries, once there is an adapter
        self._answers: dict[str, GenerationOutput] = {}  # as far as they have come
        self._written: dict[str, list[int]] = {}  # the tokens so far of requests that stream

    def _fits(self, request: GenerationRequest) -> bool:
        if not self._in_flight:
            return True
        if self._admitted_tokens + len(request.prompt_ids) > PREFILL_TOKENS:
            return False
        # A single token (the canary's) is never computed again, so it waits for nobody to end.
        needed = sum(self._reserved.values()) + blocks_of(request, self._block_size, self.max_model_len)
        return request.seed is None or request.options.max_tokens == 1 or needed <= self._free_blocks

    def _add(self, key: str, request: GenerationRequest) -> None:
        # Past vLLM's own processing of outputs, which took a third of the time outside the model.
        top = request.options.top_logprobs
        params = load("vllm:SamplingParams")(**sampling_params(request, self._room(request)), logprobs=top)
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids}
        tasks, process = self._llm.get_supported_tasks(), self._llm.input_processor.process_inputs
        checked = process(key, prompt, params, tasks, lora_request=self._adapter, priority=-request.first)
        self._llm.engine_core.add_request(checked)
        usage = {"cached_tokens": 0}
        self._answers[key] = GenerationOutput(request.request_id, [], [], [], "", None, [] if top else None, usage)
        if request.streams:
            self._written[request.request_id] = self._answers[key].output_ids
        self._reserved[key] = blocks_of(request, self._block_size, self.max_model_len)
        self._admitted_tokens += len(request.prompt_ids)

    def _step(self) -> list[tuple[str, GenerationOutput]]:
        step = self._llm.engine_core.get_output()
        self._admitted_tokens = 0
        for output in step.outputs:
            answer, stops = self._answers[output.request_id], self._in_flight[output.request_id][1].options.stops
            self._extend(answer, output, int(step.weight_version))
            if stops and output.finish_reason is None and self._completes(answer.output_ids, stops):
                self._llm.engine_core.abort_requests([output.request_id])
                output.finish_reason = "stop"
        return [(output.request_id, self._end(output)) for output in step.outputs if output.finish_reason is not None]

    def _extend(self, answer: GenerationOutput, output: Any, version: int) -> None:
        answer.output_ids.extend(output.new_token_ids)
        answer.weight_versions.extend([version] * len(output.new_token_ids))
        if isinstance(output.new_logprobs, float):  # our scheduler's short way
            answer.logprobs.append(output.new_logprobs)
        elif output.new_logprobs is not None:
            # The sampled token's, then the likeliest, of as many as any request wants.
            answer.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            if answer.top_logprobs is not None:
                end = self._in_flight[output.request_id][1].options.top_logprobs + 1
                ids, logprobs = (part[:, :end].tolist() for part in output.new_logprobs[:2])
                answer.top_logprobs.extend(dict(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True))
        if output.prefill_stats is not None:
            answer.usage["cached_tokens"] = output.prefill_stats.num_cached_tokens

    @cached_property
    def _completes(self) -> StopCheck:
        decode = load("transformers:AutoTokenizer").from_pretrained(self.model_path).decode
        return StopCheck(partial(decode, clean_up_tokenization_spaces=False))

    async def written(self, request_id: str, known: int) -> list[int]:
        """The tokens so far of a request that streams: more than `known`, unless a second passes without another."""
        for _ in range(50):
            if len(self._written.get(request_id, ())) > known:
                break
            await asyncio.sleep(0.02)
        return list(self._written.get(request_id, ()))

    def _end(self, output: Any) -> GenerationOutput:
        del self._reserved[output.request_id]
        answer = self._answers.pop(output.request_id)
        self._written.pop(answer.request_id, None)
        finish = str(output.finish_reason)
        if finish in ("stop", "length"):
            return replace(answer, finish_reason=finish)
        return replace(answer, finish_reason="error", error=f"vLLM ended the request: {finish}.")

    def _update(self, phase: str, argument: Any) -> Any:
        if phase == "init":
            self._adapter = None
            self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": argument})
        elif phase == "start":
            self._llm.collective_rpc("start_weight_update")
        elif phase == "update" and "adapter" in argument:
            self._load_adapter(argument["adapter"])
        elif phase == "update":
            self._llm.collective_rpc("update_weights", kwargs={"update_info": argument})
        else:
            if self._adapter is None:
                self._llm.collective_rpc("finish_weight_update")
            # Nothing computed with the old weights stays: requests in flight are prefilled again, tokens kept.
            if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._in_flight)):
                raise SyncError(STALE_CACHE)
            self._llm.set_weight_version(str(argument))
            return joint_checksum(self._llm.collective_rpc("loaded_checksum"))

    def _rest(self, level: int, tags: list[str]) -> None:
        if level:
            self._llm.sleep(level, mode="keep")
        else:
            self._llm.wake_up(tags)

    # Requests in flight go on with it. The folder's name, always a new one, is in vLLM's prefix cache's keys.
    def _load_adapter(self, folder: str) -> None:
        request = partial(load("vllm.lora.request:LoRARequest"), "policy", 1, folder)
        self._llm.add_lora(request(load_inplace=True))
        self._llm.collective_rpc("adapter_loaded")
        self._adapter = request()


def sampling_params(request: GenerationRequest, room: int) -> dict[str, Any]:
    """What vLLM's SamplingParams are in process and in a server alike, all but the logprobs."""
    options = request.options
    return {
        "max_tokens": min(options.max_tokens, room),
        "min_tokens": options.min_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop_token_ids": list(options.stop_token_ids),
        "ignore_eos": True,  # only the request says where to stop
        "seed": request.seed,
        "detokenize": False,
    }


def blocks_of(request: GenerationRequest, block_size: int, max_model_len: int) -> int:
    """Blocks of the KV cache that a request fills when it comes to its last token."""
    tokens = min(len(request.prompt_ids) + request.options.max_tokens, max_model_len)
    return -(-tokens // block_size) + 1


def joint_checksum(loaded: list[Any]) -> str:
    """Of all workers: one that is not the learner's, should any of them have loaded something else."""
    return " and ".join(sorted({str(checksum) for checksum in loaded}))
