"""Engine, weight sync and taking turns on one NVIDIA GPU: Qwen2.5's shapes with random weights, through the project's
own engine actor, learner and sync.

    python benchmarks/engine_gpu.py SIZE [--seqs 256] [--tokens 512] [--prompt 512] [--memory 0.3] [--eager]
    python benchmarks/engine_gpu.py SIZE --only make      # needs torch, transformers and tokenizers alone

SIZE is 0.5B, 1.5B, 3B or 7B, or tiny, which tries this script on a CPU. The learner is the project's, with float32
masters; for 7B it is a bare bfloat16 model. The parts, in this order; `--only` chooses some:
- `make`: the model's folder, DIR/SIZE, where it lacks. `trainer.policy.model.path` takes it too; its random policy
  hardly ever ends an answer
- `ceilings`: bytes/s that a copy within the GPU reads and writes; TFLOP/s of a bfloat16 product of 8192^3
- `start`: seconds until the engine has loaded, GiB of the GPU that all processes then hold, and how many tokens the KV
  cache holds; where it has no room for all requests (`needed_tokens`), they wait for each other
- `rollout`: tokens/s of `seqs` requests of `prompt` + `tokens`, prefill included, median of 3. `of_...` is the part
  of a limit: each step reads the weights and the mean KV cache once, at the copy's rate (needs `ceilings`) or the data
  sheet's. `decode_only_of_copy_rate`: without the time that the same requests take for one token each
- `kernels`: milliseconds that the GPU computes for a step of decoding, and for the prompts with two steps; null without
  a GPU
- `gap`: |engine's logprob - learner's| of the same sampled tokens; what whole sequences' ratios would be instead of 1
- `sync`: milliseconds of a whole weight sync by each `way`, median of `rounds`, a first one not counted; `equal`: all
  checksums agree. The first way that works stays for the other parts
- `turns`: a step's sleep, release of the learner's cache, wake of the weights, sync and wake of the KV cache: seconds,
  and the GiB that sleep and release gave back; at level 1, and twice at level 2. Null without a GPU: nothing sleeps
- `after`: rollout and gap again; the weights that came by sync are the same, so both should be
- `bare`: tokens/s of like requests by vLLM's `LLM.generate` without our actor, in one process and in vLLM's usual two;
  `of_bare`: rollout's over the better one's. Everything else has gone from the GPU by then

Each part prints a JSON line when it is done. One that fails reports its error there, and the others still run. The
last line is one JSON object of all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bare_vllm import START_SECONDS, bare_rate, prompts_of
from benchmarks.random_qwen import (
    DEVICE,
    DTYPE,
    GPU,
    SHAPES,
    BareModel,
    config_of,
    learner_logprobs,
    make_learner,
    make_model,
)  # fmt: skip

if TYPE_CHECKING:  # `make` runs where these packages are not
    from skyrl_trainer.types import GenerationOutput
    from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

PARTS = ("make", "ceilings", "start", "rollout", "kernels", "gap", "sync", "turns", "after", "bare")
OF_ENGINE = {"rollout", "kernels", "gap", "sync", "turns", "after"}
DATA_SHEET = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s of the memory."""
PLAY_SECONDS = 240.0
GONE_SECONDS = 60.0


def free() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def used() -> float:
    """GiB of the GPU, by all processes."""
    if not GPU:
        return 0.0
    left, total = torch.cuda.mem_get_info()
    return round((total - left) / 2**30, 2)


def fastest(work: Callable[[], Any], times: int = 5) -> float:
    """Seconds of the quickest of some calls on the GPU, after two to warm up."""
    seconds = []
    for _ in range(times + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])


def copy_rate(nbytes: int) -> float:
    """Bytes read and written per second."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * nbytes / fastest(lambda: target.copy_(source))


def product_rate(size: int) -> float:
    """FLOP per second, on random numbers: on zeros the GPU would need less power and be faster."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / fastest(lambda: torch.mm(a, b, out=out))


def make_sync(engine: Any, learner: Any, way: str) -> SharedMemorySync:
    from skyrl_trainer.weight_sync.cuda_ipc import GPUBuffer
    from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

    buffer = GPUBuffer.create(learner.named_tensors()) if way == "cuda_ipc" else learner.share_weights()
    return SharedMemorySync([engine], learner.named_tensors, buffer)


def reason(error: Exception) -> str:
    """Of an error in an actor, what was raised there."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"[:400]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(args.folder) / args.size
        self.length = args.prompt + args.tokens + 16
        self.engine: Any = None
        self.results: dict[str, Any] = {}
        self.version = self.seed = 0
        self.way = args.way[0]
        self.idle = 0.0
        """GiB of the GPU before the engine came."""
        self.kwargs: dict[str, Any] = {"gpu_memory_utilization": args.memory} if GPU else {}
        self.kwargs |= ({"enforce_eager": True} if args.eager else {}) | json.loads(args.engine_kwargs)

    def make(self) -> dict[str, Any]:
        start, known = time.perf_counter(), (self.folder / "tokenizer.json").exists()
        if not known:
            make_model(self.args.size, self.folder)
            free()
        nbytes = sum(path.stat().st_size for path in self.folder.iterdir())
        seconds = round(time.perf_counter() - start, 1)
        return {"folder": str(self.folder), "bytes": nbytes, "reused": known, "seconds": seconds}

    def ceilings(self) -> dict[str, float] | None:
        if not GPU:
            return None
        copy, product = copy_rate(4 * 10**9), product_rate(8192)
        free()
        return {"copy_bytes_per_second": copy, "matmul_TFLOP_per_second": round(product / 1e12, 1)}

    def start(self) -> dict[str, Any]:
        import ray

        from skyrl_trainer.engine.vllm_actor import VLLMEngine
        from skyrl_trainer.engine.vllm_args import engine_env

        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as a run has both
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init("local", num_gpus=int(GPU), include_dashboard=False, log_to_driver=True, logging_level="ERROR")
        self.idle, start = used(), time.perf_counter()
        kwargs = self.kwargs | ({"enable_sleep_mode": True} if GPU else {})
        actor: Any = ray.remote(VLLMEngine).options(
            num_cpus=1, num_gpus=int(GPU), max_concurrency=64, runtime_env={"env_vars": engine_env()}
        )
        self.engine = actor.remote(str(self.folder), DTYPE, self.length, self.args.seqs, 0, kwargs)
        try:
            ray.get(self.engine.ready.remote(), timeout=START_SECONDS)
        except Exception:
            self.stop()
            raise
        taken, memory = time.perf_counter() - start, used()
        cache = ray.get(self.engine.__ray_call__.remote(lambda actor: actor._free_blocks * actor._block_size))
        batched = ray.get(self.engine.__ray_call__.remote(batched_tokens))
        return {
            "seconds": round(taken, 1),
            "GiB": memory,
            "GiB_before": self.idle,
            "cache_tokens": cache,
            "needed_tokens": self.args.seqs * (self.args.prompt + self.args.tokens),
            "max_num_batched_tokens": batched,
        }

    @cached_property
    def learner(self) -> Any:
        return make_learner(self.args.size, self.folder)

    @cached_property
    def weight_sync(self) -> Any:
        return make_sync(self.engine, self.learner, self.way)

    def play(self, seqs: int, tokens: int) -> tuple[float, list[tuple[list[int], GenerationOutput]]]:
        """Seconds, and each prompt with its output. Prompts are new in every call: nothing of them is cached."""
        import ray

        from skyrl_trainer.types import GenerationRequest, SamplingOptions

        if self.engine is None:
            raise RuntimeError("The engine did not start.")
        self.seed += 1
        client, prompts = f"play-{self.seed}", prompts_of(seqs, self.args.prompt, self.seed)
        options = SamplingOptions(max_tokens=tokens)  # no token ends an answer
        requests = [GenerationRequest(f"{client}/{i}", prompt, options) for i, prompt in enumerate(prompts)]
        done: list[GenerationOutput] = []
        start = time.perf_counter()
        ray.get(self.engine.submit.remote(client, requests))
        while len(done) < seqs:
            if time.perf_counter() - start > PLAY_SECONDS:
                raise TimeoutError(f"{seqs - len(done)} of {seqs} requests took longer than {PLAY_SECONDS:.0f} s.")
            done += ray.get(self.engine.collect.remote(client, 10.0))
        seconds = time.perf_counter() - start
        short = [output.error for output in done if len(output.output_ids) != tokens]
        if short:
            raise RuntimeError(f"{len(short)} answers are too short: {short[0]}")
        return seconds, [(prompts[int(output.request_id.split("/")[1])], output) for output in done]

    def limit(self, rate: float) -> float:
        """Tokens/s where each step reads the weights and the mean KV cache once, at `rate` bytes/s."""
        args, (hidden, layers, heads, kv, *_, tied, vocabulary) = self.args, SHAPES[self.args.size]
        with torch.device("meta"):
            parameters = sum(p.numel() for p in Qwen2ForCausalLM(config_of(args.size)).parameters())
        parameters -= 0 if tied else vocabulary * hidden  # of an embedding only few rows are read
        cache = args.seqs * (args.prompt + args.tokens / 2) * 2 * layers * kv * (hidden // heads)
        return args.seqs * rate / ((parameters + cache) * getattr(torch, DTYPE).itemsize)

    def rollout(self) -> dict[str, Any]:
        args = self.args
        self.play(args.seqs, args.tokens)  # warm
        seconds = [self.play(args.seqs, args.tokens)[0] for _ in range(3)]
        first = statistics.median(self.play(args.seqs, 1)[0] for _ in range(3))
        median = statistics.median(seconds)
        rate, decode = args.seqs * args.tokens / median, args.seqs * (args.tokens - 1) / max(1e-9, median - first)
        name = torch.cuda.get_device_name() if GPU else ""
        sheet = next((value for key, value in DATA_SHEET.items() if key in name), None)
        copy = (self.results.get("ceilings") or {}).get("copy_bytes_per_second")
        return {
            "tokens_per_second": round(rate),
            "decode_tokens_per_second": round(decode),
            "of_copy_rate": copy and round(rate / self.limit(copy), 3),
            "of_data_sheet": sheet and round(rate / self.limit(sheet), 3),
            "decode_only_of_copy_rate": copy and round(decode / self.limit(copy), 3),
            "seconds": [round(each, 3) for each in seconds],
            "one_token_seconds": round(first, 3),
        }

    def kernels(self) -> dict[str, float] | None:
        """Where prompts are long, steps wait for the GPU, and where models are small, for Python."""
        if not GPU:
            return None
        long, short = self.busy(130), self.busy(2)
        return {"step": round((long - short) / 128, 2), "prompts": round(short, 1)}

    def busy(self, tokens: int) -> float:
        """Milliseconds in which a kernel or a copy runs."""
        import ray

        ray.get(self.engine.__ray_call__.remote(start_profile))
        self.play(self.args.seqs, tokens)
        spans = sorted(ray.get(self.engine.__ray_call__.remote(stop_profile)))
        last, total = 0.0, 0.0
        for start, end in spans:
            total += max(0.0, end - max(start, last))
            last = max(last, end)
        return total / 1e3

    @torch.no_grad()
    def gap(self) -> dict[str, Any]:
        """By the path that trains: packed rows, the learner's own logprobs."""
        played = self.play(8, self.args.tokens)[1]
        ours_N = torch.tensor([value for _, output in played for value in output.logprobs])
        if isinstance(self.learner, BareModel):
            parts = [self.learner.sampled_logprobs(prompt, output.output_ids) for prompt, output in played]
            theirs_N = torch.cat(parts).cpu()
        else:
            theirs_N = learner_logprobs(self.learner, played)
        free()
        gap_N = (theirs_N - ours_N).abs()
        ratios = (theirs_N - ours_N).view(len(played), -1).sum(-1).exp()
        return {
            "mean": float(gap_N.mean()),
            "p99": float(gap_N.quantile(0.99)),
            "max": float(gap_N.max()),
            "sequence_ratios": [round(float(ratio), 3) for ratio in ratios],
        }

    def next_sync(self) -> Any:
        if self.engine is None:
            raise RuntimeError("The engine did not start.")
        self.version += 1
        return self.weight_sync.sync(self.version)

    def sync(self) -> dict[str, Any]:
        """Every way in turn; the first that works stays for the other parts."""
        results, kept = {}, None
        for way in self.args.way:
            self.__dict__.pop("weight_sync", None)
            free()
            self.way = way
            try:
                results[way] = self.sync_of_a_way()
                kept = kept or way
            except Exception as error:
                traceback.print_exc()
                results[way] = {"error": reason(error)}
        self.__dict__.pop("weight_sync", None)
        self.way = kept or "shared_memory"
        return results

    def sync_of_a_way(self) -> dict[str, Any]:
        reports = [self.next_sync() for _ in range(self.args.rounds + 1)]
        free()
        milliseconds = [1e3 * report.seconds for report in reports[1:]]
        median = statistics.median(milliseconds)
        return {
            "milliseconds": round(median, 1),
            "all": [round(each, 1) for each in milliseconds],
            "bytes": reports[-1].bytes,
            "GB_per_second": round(reports[-1].bytes / median / 1e6, 2),
            "equal": all(report.engine_checksums == (report.checksum,) for report in reports),
        }

    def turns(self) -> dict[str, Any] | None:
        self.next_sync()  # so that nothing is made in the first turn
        turns = [self.turn(level) for level in (1, 2, 2)]
        return dict(zip(("level_1", "level_2", "level_2_again"), turns, strict=True)) if GPU else None

    def turn(self, level: int) -> dict[str, float]:
        """As a step has it (Run.publish)."""
        from skyrl_trainer.weight_sync.colocation import Colocation

        free()
        colocation = Colocation([self.engine], level, GPU, free, lambda asleep: None)
        stamps, gib = [time.perf_counter()], [used()]

        def stamp() -> None:
            stamps.append(time.perf_counter())
            gib.append(used())

        colocation.sleep()
        stamp()
        free()
        stamp()
        with colocation.publishing():
            stamp()
            report = self.next_sync()
            stamp()
        stamp()
        if report.engine_checksums != (report.checksum,):
            raise RuntimeError(f"Checksums differ: {report}")
        names = ("sleep", "release", "wake_weights", "sync", "wake_kv_cache")
        steps = {name: round(stamps[i + 1] - stamps[i], 3) for i, name in enumerate(names)}
        steps |= {"GiB_before": gib[0], "GiB_freed": round(gib[0] - gib[1], 2)}
        return steps | {"GiB_released": round(gib[1] - gib[2], 2), "GiB_weights_awake": gib[3], "GiB_after": gib[-1]}

    def after(self) -> dict[str, Any]:
        return {"rollout": self.rollout(), "gap": self.gap()}

    def bare(self) -> dict[str, Any]:
        self.stop()
        rates: dict[str, Any] = {}
        args = self.args
        given = [str(self.folder), DTYPE, self.length, args.seqs, args.prompt, args.tokens, self.kwargs]
        for way in ("in_process", "processes") if args.bare == "both" else (args.bare,):
            try:
                rates[way] = round(bare_rate(way, *given))
            except Exception as error:
                traceback.print_exc()
                rates[way] = {"error": reason(error)}
        known = [rate for rate in rates.values() if isinstance(rate, int)]
        ours = self.results.get("rollout", {}).get("tokens_per_second")
        return {"tokens_per_second": rates, "of_bare": round(ours / max(known), 3) if ours and known else None}

    def stop(self) -> None:
        """Ends the engine and drops the learner; TimeoutError when the GPU's memory does not come back."""
        import ray

        if self.engine is None:
            return
        for name in ("weight_sync", "learner"):
            self.__dict__.pop(name, None)
        ray.kill(self.engine)
        self.engine = None
        deadline = time.monotonic() + GONE_SECONDS
        free()
        while used() - (torch.cuda.memory_reserved() / 2**30 if GPU else 0.0) > self.idle + 1:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{used()} GiB of the GPU are in use {GONE_SECONDS:.0f} s after the engine's end.")
            time.sleep(0.5)


def batched_tokens(actor: Any) -> int:
    """vLLM's own choice depends on who asks for it: 2,048 of an engine, 16,384 of an `LLM`."""
    return actor._llm.vllm_config.scheduler_config.max_num_batched_tokens


def start_profile(actor: Any) -> None:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    actor._call(profile.start)
    actor.profile = profile


def stop_profile(actor: Any) -> list[tuple[float, float]]:
    """Beginning and end of every kernel and copy, in microseconds."""
    actor._call(torch.cuda.synchronize)
    actor._call(actor.profile.stop)
    return [(event.time_range.start, event.time_range.end) for event in actor.profile.events()]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    wanted = {"make", *args.only} if args.only else set(PARTS)
    wanted |= {"start"} if wanted & OF_ENGINE else set()
    bench = Bench(args)
    try:
        for part in (part for part in PARTS if part in wanted):
            start = time.perf_counter()
            try:
                result = getattr(bench, part)()
            except Exception as error:
                traceback.print_exc()
                result = {"error": reason(error)}
            bench.results[part] = result
            took = round(time.perf_counter() - start, 1)
            print(json.dumps({"size": args.size, part: result, "took": took}), flush=True)
    finally:
        if wanted & {"start"}:
            import ray

            ray.shutdown()
    return bench.results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SHAPES))
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.3, help="gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--engine-kwargs", default="{}", help="more for vLLM's EngineArgs, as JSON; bare gets it too")
    parser.add_argument("--rounds", type=int, default=5, help="syncs that are measured")
    ways = ("cuda_ipc", "shared_memory") if GPU else ("shared_memory",)
    parser.add_argument("--way", nargs="+", choices=ways, default=ways, help="how weights are sent")
    parser.add_argument("--bare", choices=("in_process", "processes", "both"), default="both")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts, and what they need")
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/models", help="where models are kept")
    args = parser.parse_args()
    results = measure(args)
    settings = {key: value for key, value in vars(args).items() if key not in ("size", "only", "folder")}
    device = torch.cuda.get_device_name() if GPU else "cpu"
    print(json.dumps({"size": args.size, "device": device, "torch": torch.__version__, "settings": settings} | results))


if __name__ == "__main__":
    main()
