"""vLLM as our engine starts it, but for the weight sync and our scheduler: tokens/s of `LLM.generate`.

`engine_gpu.py` starts this in a process of its own, with MODEL, dtype, length, seqs, prompt, tokens and kwargs as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

START_SECONDS = 900.0


def prompts_of(seqs: int, length: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(20, 500, (seqs, length), generator=draw).tolist()


def bare_rate(way: str, *given: Any) -> float:
    """Median tokens/s of `measure(*given)` with vLLM `in_process` or in its usual two `processes`."""
    from skyrl_trainer.engine.vllm_args import engine_env

    # Spawned: who calls this has asked for the GPU before vLLM is imported, and a fork of it could not use CUDA.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(way == "processes")), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    env = os.environ | engine_env() | own
    command = [sys.executable, __file__, json.dumps(given)]
    child = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=START_SECONDS, check=True)
    figures = [line.split()[1] for line in child.stdout.splitlines() if line.startswith("tokens/s ")]
    return statistics.median(map(float, figures))


def measure(model: str, dtype: str, length: int, seqs: int, prompt: int, tokens: int, kwargs: dict[str, Any]) -> None:
    """Prints three rates."""
    from vllm import LLM, SamplingParams

    from skyrl_trainer.engine.vllm_args import vllm_kwargs

    settings = vllm_kwargs(model, dtype, length, seqs, 0, kwargs)
    llm = LLM(**{key: settings[key] for key in settings.keys() - {"weight_transfer_config", "worker_extension_cls"}})
    params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True)
    for seed in range(4):
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts_of(seqs, prompt, seed)]
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), "lengths are forced"
        if seed:  # the first is to warm up
            print(f"tokens/s {seqs * tokens / seconds}", flush=True)


if __name__ == "__main__":
    measure(*json.loads(sys.argv[1]))
