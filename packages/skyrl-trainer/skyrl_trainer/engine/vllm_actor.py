"""vLLM as an engine actor: an `LLMEngine` that a thread of the actor's own process steps, from token ids to token ids.

Seeds on a CPU: a request with a seed must never be prefilled in parts, for vLLM rewinds its generator then, which CPU
generators cannot do. So a seeded request enters when the KV cache has room for every request in flight to its last
token (so none is preempted), and `max_num_batched_tokens` covers the whole cache.
"""

from typing import Any

import torch

from skyrl_trainer.engine.actor import FIRST_SEQS
from skyrl_trainer.engine.stepped import SteppedEngine
from skyrl_trainer.errors import SyncError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

_CPU_ENV = {
    # The sampler's compilation would stall the first request for many seconds, for no gain on a CPU.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A second OpenMP thread spins: it halves the throughput, or worse, beside any other busy process.
    "OMP_NUM_THREADS": "1",
    # Every number of running sequences is a shape of its own; kernels of 64 shapes are as fast as of 1,024.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # Each sync packs every layer into new memory: with huge pages the kernel clears it in fewer, larger pieces.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
ENGINE_ENV: dict[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    **({} if torch.cuda.is_available() else _CPU_ENV),
}
"""Environment variables that have to be set before `import vllm`."""

PREFILL_TOKENS = 16384
"""Prompt tokens admitted before one step: bounds the memory of a prefill."""
STALE_CACHE = "vLLM could not reset its prefix cache after a weight update: it would mix two policies."
CPU_BLOCK = 32
"""Tokens in a block of the KV cache on a CPU."""
CPU_KV_CACHE_BYTES = 2**30
"""Largest KV cache that is chosen by default on a CPU; `engine_kwargs.kv_cache_memory_bytes` chooses another."""


class VLLMEngine(SteppedEngine):
    """See protocols.InferenceEngine. `engine_kwargs` go to vLLM's EngineArgs and win over our choices."""

    env_vars = ENGINE_ENV

    def _load(self) -> None:
        from vllm import EngineArgs, LLMEngine

        self._llm = LLMEngine.from_engine_args(EngineArgs(**vllm_kwargs(*self.settings)))
        cache = self._llm.vllm_config.cache_config
        self._block_size = cache.block_size
        self._free_blocks = (cache.num_gpu_blocks or 0) - 1  # vLLM keeps a null block
        self._llm.set_weight_version("0")
        self._admitted_tokens = 0
        self._reserved: dict[str, int] = {}  # blocks of the KV cache that each request may come to need
        self._adapter: Any = None  # the LoRARequest that every request carries, once there is an adapter

    def _fits(self, request: GenerationRequest) -> bool:
        if not self._in_flight:
            return True
        if self._admitted_tokens + len(request.prompt_ids) > PREFILL_TOKENS:
            return False
        needed = blocks_of(request, self._block_size, self.max_model_len)
        return request.seed is None or sum(self._reserved.values()) + needed <= self._free_blocks

    def _add(self, key: str, request: GenerationRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **sampling_params(request, self._room(request)),
            logprobs=request.options.top_logprobs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids}
        self._llm.add_request(key, prompt, params, lora_request=self._adapter)
        self._reserved[key] = blocks_of(request, self._block_size, self.max_model_len)
        self._admitted_tokens += len(request.prompt_ids)

    def _step(self) -> list[tuple[str, GenerationOutput]]:
        finished = self._llm.step()
        self._admitted_tokens = 0
        return [(output.request_id, self._output(output)) for output in finished if output.finished]

    def _output(self, output: Any) -> GenerationOutput:
        """vLLM's RequestOutput as ours."""
        del self._reserved[output.request_id]
        _, request = self._in_flight[output.request_id]
        completion = output.outputs[0]
        flat = completion.logprobs
        top = None
        if request.options.top_logprobs:
            spans = map(slice, flat.start_indices, flat.end_indices)
            top = [dict(zip(flat.token_ids[span], flat.logprobs[span], strict=True)) for span in spans]
        finish, usage = completion.finish_reason, {"cached_tokens": output.num_cached_tokens or 0}
        return GenerationOutput(
            request.request_id,
            list(completion.token_ids),
            [flat.logprobs[start] for start in flat.start_indices],
            [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)],
            finish if finish in ("stop", "length") else "error",
            None if finish in ("stop", "length") else f"vLLM ended the request: {finish}.",
            top,
            usage,
        )

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

    def _load_adapter(self, folder: str) -> None:
        """Requests in flight go on with it. The folder is read only here; its name, new every time, is a part of the
        keys of vLLM's prefix cache."""
        from vllm.lora.request import LoRARequest

        self._llm.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._llm.collective_rpc("adapter_loaded")
        self._adapter = LoRARequest("policy", 1, folder)


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


def vllm_kwargs(
    model_path: str, dtype: str, max_model_len: int, max_num_seqs: int, seed: int, engine_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's EngineArgs for an engine in process or in a server; `engine_kwargs` win."""
    kwargs: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs + FIRST_SEQS,
        "seed": seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "skyrl_shared_memory"},
        # Imported in every worker process: registers the backend above, adds `loaded_checksum`.
        "worker_extension_cls": "skyrl_trainer.weight_sync.vllm_backend.WorkerExtension",
    }
    if torch.cuda.is_available():
        return kwargs | engine_kwargs
    # A KV cache for every sequence at full length, but at most CPU_KV_CACHE_BYTES; whole prefills.
    block, one = CPU_BLOCK, kv_token_bytes(model_path, dtype)
    blocks_of_one = -(-max_model_len // block) + 1
    wanted = ((max_num_seqs + FIRST_SEQS) * blocks_of_one + 1) * block * one
    floor = 2 * blocks_of_one * block * one
    size = engine_kwargs.get("kv_cache_memory_bytes") or max(floor, min(wanted, CPU_KV_CACHE_BYTES))
    kwargs |= {"enforce_eager": True, "distributed_executor_backend": "uni", "block_size": block}
    kwargs |= {"kv_cache_memory_bytes": size, "max_num_batched_tokens": max(size // one, max_model_len, PREFILL_TOKENS)}
    return kwargs | engine_kwargs


def kv_token_bytes(model_path: str, dtype: str) -> int:
    """Bytes that one token takes in the KV cache."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * getattr(torch, dtype).itemsize
