"""What a step of vLLM's engine takes outside the model: in our engine, and in vLLM's own `LLMEngine.step`.

    python benchmarks/engine_step.py [--seqs 256] [--rounds 3]

On a GPU a small model waits for it. A random Qwen2 of two small layers on the CPU; `seqs` requests of 64 tokens and 128
more, each token with its logprob. Counted is the thread's processor time of steps 10 to 110, less that of
`execute_model` and `sample_tokens`. `ahead`: steps are planned before the one before has ended, which vLLM does on a
GPU and here only when it is made to. Both engines in turn, each in a process of its own, the best of `rounds` each; the
last line is one JSON object, in milliseconds a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

SEQS, PROMPT, TOKENS, VOCABULARY = 256, 64, 128, 600
FIRST, LAST = 10, 110


def plan_ahead() -> None:
    """On a CPU vLLM does not ask."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        decide(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[assignment]


class Ours:
    def __init__(self, folder: str, seqs: int) -> None:
        from skyrl_trainer.engine.vllm_actor import VLLMEngine

        self.engine = VLLMEngine(folder, "float32", 256, seqs, 0, {"kv_cache_memory_bytes": 2**28})
        self.engine._load()
        self.core = self.engine._llm.engine_core.engine_core  # type: ignore[attr-defined]

    def add(self, name: str, prompt: list[int]) -> None:
        from skyrl_trainer.types import GenerationRequest, SamplingOptions

        self.engine._queue.append(("client", GenerationRequest(name, prompt, SamplingOptions(TOKENS))))

    def step(self) -> bool:
        self.engine._admit()
        for key, _ in self.engine._step():
            del self.engine._in_flight[key]
        return bool(self.engine._in_flight)


class Bare:
    """vLLM's own classes, started as ours are."""

    def __init__(self, folder: str, seqs: int) -> None:
        from vllm import EngineArgs, LLMEngine

        from skyrl_trainer.engine.vllm_args import vllm_kwargs

        settings = vllm_kwargs(folder, "float32", 256, seqs, 0, {"kv_cache_memory_bytes": 2**28})
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self.core = self.engine.engine_core.engine_core  # type: ignore[attr-defined]

    def add(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = {"max_tokens": TOKENS, "logprobs": 0, "flat_logprobs": True, "detokenize": False, "ignore_eos": True}
        params = SamplingParams(**how, output_kind=RequestOutputKind.FINAL_ONLY)  # type: ignore[arg-type]
        self.engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, params)  # type: ignore[arg-type]

    def step(self) -> bool:
        self.engine.step()
        return self.engine.has_unfinished_requests()


class Watched:
    """Adds up the thread's seconds in two methods of vLLM's executor."""

    def __init__(self, executor: Any) -> None:
        self.seconds = 0.0
        for name in ("execute_model", "sample_tokens"):
            setattr(executor, name, self.timed(getattr(executor, name)))

    def timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return call


def child(kind: str, ahead: bool, folder: str, seqs: int) -> None:
    if ahead:
        plan_ahead()
    engine: Ours | Bare = {"ours": Ours, "vllm": Bare}[kind](folder, seqs)
    model, best = Watched(engine.core.model_executor), float("inf")
    for number in range(3):
        draw = random.Random(number)
        for i in range(seqs):
            engine.add(f"{number}/{i}", [draw.randrange(2, VOCABULARY) for _ in range(PROMPT)])
        start = step = 0.0
        while engine.step():
            step += 1
            if step == FIRST:
                start = time.thread_time() - model.seconds
            if step == LAST:
                best = min(best, time.thread_time() - model.seconds - start)
    print("milliseconds", 1e3 * best / (LAST - FIRST))


def make_model(folder: str) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(folder)


def measure(seqs: int, rounds: int) -> dict[str, float]:
    from skyrl_trainer.engine.vllm_args import engine_env

    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for _ in range(rounds):
            for ahead in (False, True):
                for kind in ("vllm", "ours"):
                    command = [sys.executable, __file__, "--child", kind, str(int(ahead)), folder, str(seqs)]
                    env = os.environ | engine_env()
                    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
                    value = float(done.stdout.split("milliseconds")[1])
                    found.setdefault(f"{kind}_ahead" if ahead else kind, []).append(value)
                    print(kind, "ahead" if ahead else "", round(value, 2), flush=True)
    best = {name: round(min(values), 2) for name, values in found.items()}
    return best | {f"times{end}": round(best[f"vllm{end}"] / best[f"ours{end}"], 2) for end in ("", "_ahead")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, default=SEQS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(measure(args.seqs, args.rounds)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3] == "1", sys.argv[4], int(sys.argv[5]))
    else:
        main()
