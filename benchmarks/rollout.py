"""What the agent and env loop costs: tokens/s through it over tokens/s of the same engine without it.

    python benchmarks/rollout.py [--trajectories 512] [--concurrency 64] [--tokens 64] [--repeats 5]

Three ways to the same requests (the prompts of text_math, lengths forced, temperature 1, logprobs on), one after the
other in one run, median over the repeats:
  loop     Rollouts.run: RolloutWorker, EnvWorker with the real text_math, engine actor
  bare     the same engine actor, all prompts submitted in one call, results awaited
  fastest  vLLM in a process of its own without Ray: `LLM.generate` on all requests at once, on 1 or 2 threads

The last line printed is one JSON object: `efficiency` is loop over bare, `of_fastest` loop over the best of the rest.
The policy is a Qwen3 of 0.8 M parameters with random weights in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from skyrl_trainer.config import Config
from skyrl_trainer.engine.vllm_actor import ENGINE_ENV, VLLMEngine
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.types import GenerationRequest, PromptBatch, Sample, SamplingOptions

DIFFICULTIES = (1, 2, 3, 4)
MAX_MODEL_LEN = 256


def make_policy(folder: Path) -> Path:
    """Random weights suffice: every output has a forced length."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        ["user assistant What is 12 + 34? \\boxed{46}"],
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_loop(rollouts: Rollouts, step: int, number: int, sampling: SamplingOptions) -> tuple[float, list[list[int]]]:
    """Tokens/s through everything, and the prompts that the engine got."""
    samples = [
        Sample(f"{step}:{i}", "skyrl/text_math-v0", i, {"split": "train", "difficulty": DIFFICULTIES[i % 4]})
        for i in range(number)
    ]
    start = time.perf_counter()
    done = rollouts.run(PromptBatch(step, samples, 1), sampling=sampling)
    seconds = time.perf_counter() - start
    trajectories = done.trajectories
    assert not any(trajectory.stop_reason.failed for trajectory in trajectories), trajectories[0].error
    tokens = sum(trajectory.num_output_tokens for trajectory in trajectories)
    assert tokens == number * sampling.max_tokens, "output lengths are forced"
    return tokens / seconds, [trajectory.turns[0].prompt_ids for trajectory in trajectories]


def run_bare(engine: Any, step: int, prompts: list[list[int]], sampling: SamplingOptions) -> float:
    client = f"bare-{step}"
    start = time.perf_counter()
    requests = [GenerationRequest(f"bare/{step}/{i}", ids, sampling) for i, ids in enumerate(prompts)]
    call = engine.submit.remote(client, requests)
    tokens = left = 0
    left = len(requests)
    while left:
        outputs = ray.get(engine.collect.remote(client, 60.0))
        left -= len(outputs)
        tokens += sum(len(output.output_ids) for output in outputs)
    ray.get(call)
    return tokens / (time.perf_counter() - start)


class Fastest:
    """vLLM's own `LLM` in a child process that waits for a line before every measurement."""

    def __init__(self, model: Path, prompts: Path, threads: int, concurrency: int, tokens: int) -> None:
        env = os.environ | ENGINE_ENV | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--child", str(model), str(prompts), str(concurrency), str(tokens)]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def measure(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("tokens/s "):
                return float(line.split()[1])
        raise SystemExit("The process of plain vLLM ended without a figure.")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def child(model: str, prompts: str, concurrency: int, tokens: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=concurrency,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=128 * 2**20,
        disable_log_stats=True,
    )
    params = SamplingParams(
        max_tokens=tokens, min_tokens=tokens, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True
    )
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"tokens/s {count / (time.perf_counter() - start)}", flush=True)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = make_policy(folder / "policy")
    sampling = SamplingOptions(max_tokens=args.tokens, min_tokens=args.tokens)
    config = Config(
        generator={"max_concurrency": args.concurrency, "max_model_len": MAX_MODEL_LEN},
        trainer={"deterministic": args.deterministic},
    )
    engine_class = ray.remote(VLLMEngine).options(runtime_env={"env_vars": ENGINE_ENV}, max_concurrency=64, num_cpus=0)
    engine = engine_class.remote(str(model), "float32", MAX_MODEL_LEN, args.concurrency, 0, {})
    rollouts = Rollouts(config, [engine], str(model))
    ray.get(engine.ready.remote())
    figures: dict[str, list[float]] = {"loop": [], "bare": []}
    _, prompts = run_loop(rollouts, 0, args.trajectories, sampling)  # warms up, and gives the prompts
    run_bare(engine, 0, prompts, sampling)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    others = {} if args.no_fastest else {
        f"fastest_{threads}_threads": Fastest(
            model, folder / "prompts.json", threads, args.concurrency, args.tokens
        ) for threads in (1, 2)
    }  # fmt: skip
    for other in others.values():
        other.measure()
    for step in range(1, args.repeats + 1):
        figures["loop"].append(run_loop(rollouts, step, args.trajectories, sampling)[0])
        figures["bare"].append(run_bare(engine, step, prompts, sampling))
        for name, other in others.items():
            figures.setdefault(name, []).append(other.measure())
        print({name: round(values[-1]) for name, values in figures.items()}, flush=True)
    for other in others.values():
        other.close()
    rollouts.close()
    median = {name: statistics.median(values) for name, values in figures.items()}
    best = max(value for name, value in median.items() if name != "loop")
    return {
        "efficiency": round(median["loop"] / median["bare"], 3),
        "of_fastest": round(median["loop"] / best, 3),
        "tokens_per_second": {name: round(value) for name, value in median.items()},
        "trajectories": args.trajectories,
        "concurrency": args.concurrency,
        "new_tokens": args.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of every trajectory")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true", help="seeded requests in rounds (bare is not seeded)")
    parser.add_argument("--no-fastest", action="store_true", help="leave out plain vLLM")
    args = parser.parse_args()
    ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(args, Path(folder))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
