"""What vLLM is started with, in an actor or in a server of its own."""

import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skyrl_trainer.engine.actor import FIRST_SEQS
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load

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
_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
PREFILL_TOKENS = 16384
"""Prompt tokens admitted before one step: bounds a prefill's memory."""
CPU_BLOCK = 32
"""Tokens of a KV cache's block, on a CPU."""
CPU_KV_CACHE_BYTES = 2**30
"""Largest KV cache on a CPU, where `engine_kwargs.kv_cache_memory_bytes` is not given."""


def has_gpu() -> bool:
    """torch is imported here, for a RolloutWorker has none."""
    return bool(load("torch").cuda.is_available())


def engine_env() -> dict[str, str]:
    """Environment variables that have to be set before `import vllm`."""
    # Attention in float32 is Triton's there, which would round to TF32: four times the canary's limit, simulated.
    return _ENV | ({"TRITON_F32_DEFAULT": "ieee"} if has_gpu() else _CPU_ENV)


def vllm_kwargs(
    model_path: str, dtype: str, max_model_len: int, max_num_seqs: int, seed: int, engine_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's EngineArgs for an engine in process or in a server; `engine_kwargs` win."""
    kwargs = {
        "model": model_path,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs + FIRST_SEQS,
        "seed": seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        # Those that go `first` pass the others, too, which wait in vLLM for room in the KV cache.
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "skyrl_shared_memory"},
        # Imported in every worker process: registers the backend above, adds `loaded_checksum`.
        "worker_extension_cls": "skyrl_trainer.weight_sync.vllm_backend.WorkerExtension",
    }
    if has_gpu():
        # By itself vLLM takes 2,048 here, and 16,384 for an `LLM`.
        return kwargs | {"max_num_batched_tokens": PREFILL_TOKENS} | engine_kwargs
    # A KV cache for every sequence at full length, but at most CPU_KV_CACHE_BYTES; whole prefills.
    block, one = CPU_BLOCK, kv_token_bytes(model_path, dtype)
    blocks_of_one = -(-max_model_len // block) + 1
    wanted = ((max_num_seqs + FIRST_SEQS) * blocks_of_one + 1) * block * one
    floor = 2 * blocks_of_one * block * one
    size = engine_kwargs.get("kv_cache_memory_bytes") or max(floor, min(wanted, CPU_KV_CACHE_BYTES))
    kwargs |= {"enforce_eager": True, "distributed_executor_backend": "uni", "block_size": block}
    kwargs |= {"kv_cache_memory_bytes": size, "max_num_batched_tokens": max(size // one, max_model_len, PREFILL_TOKENS)}
    return kwargs | engine_kwargs


def check_names(engine_kwargs: dict[str, Any]) -> None:
    """UserError for one that vLLM's source lacks: its import takes ten seconds."""
    spec = find_spec("vllm") if engine_kwargs else None
    source = Path(str(spec and spec.origin)).with_name("engine") / "arg_utils.py"
    body = source.read_text("utf-8").partition("class EngineArgs")[2] if source.is_file() else ""
    known = re.findall(r"^    (\w+): ", body.partition("    def ")[0], re.MULTILINE)
    for name in engine_kwargs.keys() - {*known, "urls", "default_chat_template_kwargs"} if known else ():
        hint = "".join(f" Did you mean {near}?" for near in get_close_matches(name, known, n=1))
        raise UserError(f"generator.engine_kwargs.{name} is no argument of vLLM's EngineArgs: leave it out.{hint}")


def kv_token_bytes(model_path: str, dtype: str) -> int:
    """Bytes that one token takes in the KV cache."""
    config = load("transformers:AutoConfig").from_pretrained(model_path).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * int(load(f"torch:{dtype}").itemsize)
