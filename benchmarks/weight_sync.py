"""How long a weight sync into a running vLLM engine takes, against a plain copy of the same bytes.

    python benchmarks/weight_sync.py

Through the real Ray actor, on randomly initialised Qwen3 models in float32. The last line is one JSON object with the
medians: {"milliseconds": {size: ...}, "copy_milliseconds": {size: ...}}. The copy is from and into memory that has
been touched before, with one thread, interleaved with the syncs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

ROUNDS = 11
SIZES: dict[str, dict[str, int]] = {
    "0.8M": {"vocab_size": 400, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32},
    "50M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 15, "head_dim": 64},
}


def measure(size: str, shape: dict[str, int]) -> tuple[float, float]:
    """Median milliseconds of a sync and of a copy."""
    heads = shape["hidden_size"] // shape["head_dim"]
    config = Qwen3Config(**shape, num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=True)
    torch.manual_seed(0)
    learner = Qwen3ForCausalLM(config).float()
    with tempfile.TemporaryDirectory() as folder:
        learner.save_pretrained(Path(folder))
        actor: Any = ray.remote(VLLMEngine).options(max_concurrency=64, runtime_env={"env_vars": engine_env()})
        engine = actor.remote(folder, "float32", 256, 64, 0, {})
        ray.get(engine.ready.remote(), timeout=600)
    sync = SharedMemorySync([engine], learner.named_parameters)
    source = torch.cat([parameter.detach().reshape(-1) for parameter in learner.parameters()])
    target = torch.zeros_like(source)
    syncs, copies = [], []
    for version in range(1, ROUNDS + 3):
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.add_(1e-4)
        report = sync.sync(version)
        assert report.engine_checksums == (report.checksum,)
        start = time.perf_counter()
        target.copy_(source)
        copy = time.perf_counter() - start
        if version > 2:  # two to warm up
            syncs.append(1e3 * report.seconds)
            copies.append(1e3 * copy)
            print(f"{size}: sync {syncs[-1]:.1f} ms, copy of {report.bytes / 2**20:.1f} MiB {copies[-1]:.1f} ms")
    sync.close()
    ray.kill(engine)
    return statistics.median(syncs), statistics.median(copies)


def main() -> None:
    torch.set_num_threads(1)
    ray.init("local", include_dashboard=False, num_cpus=2, logging_level="ERROR", log_to_driver=False)
    result: dict[str, dict[str, float]] = {"milliseconds": {}, "copy_milliseconds": {}}
    for size, shape in SIZES.items():
        sync, copy = measure(size, shape)
        result["milliseconds"][size] = round(sync, 2)
        result["copy_milliseconds"][size] = round(copy, 2)
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
