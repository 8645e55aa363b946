"""What a run would be, before it is one: `--dry-run`.

The settings and who set them, the placement, a memory estimate, the physical limits, and each thing that would stop it.
Nothing is downloaded and no model is loaded. Symbols in the formulas: P parameters, b bytes of one, L layers,
B sequences in flight, c tokens of context, k bytes of keys and values a token, h query heads times their size.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_trainer.config import Config, Resolved, flatten
from skyrl_trainer.doctor import GIB, Hardware, foreign_gym, hardware, probe
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.trackers import LOGGERS

PEAKS = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.04e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
    "4090": (1.008e12, 165e12),
}
"""GPU -> bytes/s of its memory, dense bfloat16 FLOP/s (vendors' data sheets)."""


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    layers: int
    query_width: int
    """Heads times head size."""
    kv_width: int
    vocabulary: int
    lookup_parameters: int
    """Input embeddings that take no matmul (0 when tied to the head)."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModelShape:
        """From a config.json of the Llama, Qwen2 and Qwen3 kind (norms and biases left out: below 0.1 %)."""
        hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        query, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
        layer = hidden * (2 * query + 2 * kv) + 3 * hidden * config["intermediate_size"]
        tied = config.get("tie_word_embeddings", True)
        embeddings = vocabulary * hidden * (1 if tied else 2)
        lookup = 0 if tied else vocabulary * hidden
        return cls(layers * layer + embeddings, layers, query, kv, vocabulary, lookup)

    def kv_bytes(self, width: int) -> int:
        """k = 2 L (kv heads x head size) b, for one token."""
        return 2 * self.layers * self.kv_width * width


def find_model(config: Config) -> tuple[ModelShape | None, str]:
    """The model's shape, or None and a sentence that says why it is not known here."""
    model = config.trainer.policy.model
    if model.path == "tiny":
        from skyrl_trainer.init_policy import DEFAULT_VOCAB_SIZE, TINY_QWEN3

        return ModelShape.of({**TINY_QWEN3, "vocab_size": DEFAULT_VOCAB_SIZE, **model.tiny_kwargs}), ""
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            return None, f"trainer.policy.model.path: {folder} holds no config.json, so it is not a model folder."
        file: Any = folder / "config.json"
    elif not _is_hub_name(model.path):
        return None, f"trainer.policy.model.path: there is no folder {folder}."
    else:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model.path, "config.json")
        if not isinstance(file, str):
            return None, (
                f"trainer.policy.model.path: {model.path} is neither a folder nor in the local Hugging Face cache; "
                "a run would download it, and its memory is not known before."
            )
    try:
        return ModelShape.of(json.loads(Path(file).read_text())), ""
    except (KeyError, ValueError, OSError) as error:
        return None, f"trainer.policy.model.path: {file} does not tell the model's shape ({error})."


def _is_hub_name(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None and not Path(path).is_dir()


def placement(config: Config, machine: Hardware) -> list[tuple[str, str]]:
    """(process, where it runs)."""
    place, generator = config.trainer.placement, config.generator
    wanted, tensor = place.policy_num_gpus_per_node, generator.inference_engine_tensor_parallel_size
    engines = f"{generator.num_inference_engines} x {generator.backend}"
    workers = f"{config.environment.num_workers} processes"
    if wanted == 0:
        learner = engine = f"processor ({machine.cores} cores, shared by all)"
    else:
        first = 0 if place.colocate_all else wanted
        last = first + generator.num_inference_engines * tensor - 1
        learner = f"GPUs 0-{wanted - 1}, {config.trainer.strategy}" if wanted > 1 else "GPU 0"
        engine = f"GPUs {first}-{last}, {tensor} each" if last > first else f"GPU {first}"
        engine += ", taking turns with the learner" if place.colocate_all else ""
    return [("learner", learner), (f"engines ({engines})", engine), (f"env workers ({workers})", "processor")]


def memory(config: Config, shape: ModelShape) -> list[tuple[str, int]]:
    """(what, bytes), over all devices together."""
    trainer, generator = config.trainer, config.generator
    width = _width(config)
    weights = shape.parameters * width
    tokens = generator.max_concurrency * generator.num_inference_engines * generator.max_model_len
    rows = [
        ("learner: weights", weights),
        ("learner: gradients", weights),
        ("learner: AdamW's two moments", 2 * weights),
        (
            "learner: logits of a micro-batch, their log-softmax and gradient",
            12 * trainer.micro_batch_tokens * shape.vocabulary,
        ),
        ("engines: weights", weights * generator.num_inference_engines),
    ]
    if trainer.algorithm.beta > 0:
        rows.append(("learner: reference policy", weights))
    given = generator.engine_kwargs.get("kv_cache_memory_bytes")
    if given:
        rows.append(("engines: KV cache (kv_cache_memory_bytes)", int(given) * generator.num_inference_engines))
    else:
        rows.append(("engines: KV cache, every episode in flight at max_model_len", tokens * shape.kv_bytes(width)))
    return rows


def _width(config: Config) -> int:
    return 4 if config.trainer.policy.model.dtype == "float32" else 2


def peaks(config: Config, machine: Hardware, working_set: int) -> tuple[float, float, str]:
    """(bytes/s, FLOP/s, where they are from) of all devices that the run uses."""
    wanted = config.trainer.placement.policy_num_gpus_per_node
    if wanted and machine.gpus:
        name = machine.gpus[0].name
        count = min(wanted, len(machine.gpus))
        found = next((peak for key, peak in PEAKS.items() if re.search(rf"\b{key}\b", name)), None)
        if found:
            # TF32 runs at half of bfloat16's rate.
            flops = found[1] / (2 if _width(config) == 4 else 1)
            return found[0] * count, flops * count, f"data sheet of {count} x {name}"
    bandwidth, flops = measure_cpu(working_set, machine.cores)
    return bandwidth, flops, f"measured here just now: best copy of {working_set / 2**20:.0f} MiB, best matmul"


def measure_cpu(working_set: int, cores: int) -> tuple[float, float]:
    """Memory bytes/s (a copy: read and write) and float32 FLOP/s: one core's best moment, times the cores.

    In a process of its own, because a BLAS library chooses its number of threads when it is loaded.
    """
    code = f"from skyrl_trainer.plan import core_rates; print(*core_rates({working_set // cores}))"
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    worked, text = probe(code, 60.0, {**single, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    if not worked:
        raise UserError(f"The speed of this processor cannot be measured: {text}.")
    bandwidth, flops = map(float, text.split())
    return bandwidth * cores, flops * cores


def core_rates(working_set: int) -> tuple[float, float]:
    """The best of many tries each: other processes only ever slow one down."""
    import numpy as np

    def best_seconds(work: Callable[[], Any], budget: float = 0.2) -> float:
        best, end = math.inf, time.perf_counter() + budget
        while (start := time.perf_counter()) < end:
            work()
            best = min(best, time.perf_counter() - start)
        return best

    source, matrix = np.ones(max(working_set // 8, 1024), np.float32), np.ones((256, 256), np.float32)
    target, product = np.empty_like(source), np.empty_like(matrix)
    copy = best_seconds(lambda: np.copyto(target, source))
    multiply = best_seconds(lambda: np.matmul(matrix, matrix, out=product))
    return 2 * source.nbytes / copy, 2 * 256**3 / multiply


def limits(config: Config, shape: ModelShape, machine: Hardware) -> list[tuple[str, str]]:
    """(what, figure): no run on this hardware decodes or trains faster."""
    trainer, generator, width = config.trainer, config.generator, _width(config)
    episodes = trainer.train_batch_size * generator.num_generations
    in_flight = min(episodes, generator.max_concurrency * generator.num_inference_engines)
    context = min(generator.max_model_len, generator.max_completion_length * generator.max_turns) / 2
    cache = in_flight * context * shape.kv_bytes(width)
    read = shape.parameters * width * generator.num_inference_engines + cache
    bandwidth, flops, source = peaks(config, machine, int(min(max(read, 2**22), 2**28)))
    work = 2 * shape.parameters * in_flight + 4 * shape.layers * shape.query_width * context * in_flight
    seconds = max(read / bandwidth, work / flops)
    bound = "memory" if read / bandwidth > work / flops else "arithmetic"
    matmul = shape.parameters - shape.lookup_parameters
    recompute = trainer.algorithm.old_logprobs == "recompute" and trainer.num_iterations * trainer.num_mini_batches > 1
    forwards = 2 * matmul * (int(recompute) + int(trainer.algorithm.beta > 0))
    attention = 12 * shape.layers * shape.query_width * context
    train = (6 * matmul + attention) * trainer.num_iterations + forwards
    return [
        ("memory bandwidth, arithmetic", f"{bandwidth / 1e9:,.1f} GB/s, {flops / 1e9:,.0f} GFLOP/s ({source})"),
        (
            "decode, at most",
            f"{in_flight / seconds:,.0f} tokens/s: B / max((P b + B c k) / bandwidth, (2 P B + 4 L h c B) / FLOP/s) "
            f"with B = {in_flight}, c = {context:.0f}; bound by {bound}",
        ),
        (
            "train, at most",
            f"{flops / train:,.0f} tokens/s: FLOP/s / (6 P + 12 L h c an epoch, 2 P a further forward pass)",
        ),
        ("weight sync, at least", f"{2 * shape.parameters * width / bandwidth * 1e3:,.2f} ms: 2 P b / bandwidth"),
    ]


def missing_model(config: Config) -> Iterator[str]:
    """A folder that is not there, or holds no model. (A name on the Hub is looked up by the run itself.)"""
    shape, sentence = find_model(config)
    if shape is None and not _is_hub_name(config.trainer.policy.model.path):
        yield sentence


def obstacles(config: Config, machine: Hardware) -> Iterator[str]:
    """Each thing that is sure to stop a run here, as a sentence: what `train` refuses before it starts anything."""
    yield from missing_model(config)
    yield from _device_problems(config, machine)
    yield from _data_problems(config)
    if config.generator.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        yield "generator.backend is vllm, but vLLM is not installed: install skyrl-trainer[cpu] or skyrl-trainer[gpu]."
    logger = config.trainer.logger
    if logger not in LOGGERS:
        yield f"trainer.logger is {logger!r}, but must be one of {', '.join(LOGGERS)}."
    elif logger != "none" and importlib.util.find_spec(logger) is None:
        yield (
            f"trainer.logger is {logger}, which is not installed: run `pip install {logger}`, "
            "or use trainer.logger=tensorboard or none."
        )
    run = config.run_path.absolute()
    parent = next(path for path in (run, *run.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"trainer.run_dir is {run}, but {parent} is not a folder that can be written."


def warnings(config: Config, machine: Hardware) -> Iterator[str]:
    """What may stop it."""
    shape, sentence = find_model(config)
    if shape is None and _is_hub_name(config.trainer.policy.model.path):
        yield sentence
    if shape:
        need = sum(size for _, size in memory(config, shape))
        on_gpus = config.trainer.placement.policy_num_gpus_per_node > 0 and machine.gpus
        have = sum(gpu.memory for gpu in machine.gpus) if on_gpus else machine.memory
        if need > have:
            yield f"About {need / GIB:.1f} GiB of memory would be needed; this machine has {have / GIB:.1f} GiB for it."


def _device_problems(config: Config, machine: Hardware) -> Iterator[str]:
    place, generator = config.trainer.placement, config.generator
    engines = generator.num_inference_engines * generator.inference_engine_tensor_parallel_size
    learners = place.policy_num_gpus_per_node
    have = len(machine.gpus) or "none"
    if learners:
        need = max(learners, engines) if place.colocate_all else learners + engines
        if need > len(machine.gpus):
            yield (
                f"The placement needs {need} GPUs (trainer.placement.policy_num_gpus_per_node={learners}, "
                f"{generator.num_inference_engines} engines); this machine has {have}."
            )
    elif generator.inference_engine_tensor_parallel_size > 1:
        yield "generator.inference_engine_tensor_parallel_size > 1 needs trainer.placement.policy_num_gpus_per_node."
    if generator.weight_sync_backend == "nccl" and not machine.gpus:
        yield "generator.weight_sync_backend is nccl, which needs GPUs; use auto or shared_memory here."


def _data_problems(config: Config) -> Iterator[str]:
    data = {"data.train_data": config.data.train_data, "data.val_data": config.data.val_data}
    used = {config.environment.env_class: "environment.env_class"}
    for name, specs in data.items():
        for spec in specs:
            source = str(spec.get("env", "") if isinstance(spec, dict) else spec.partition("?")[0])
            if not source.endswith((".jsonl", ".parquet")):
                used.setdefault(source, name)
            elif not Path(source).is_file():
                yield f"{name}: there is no file {source}."
    foreign, env_file = foreign_gym(), config.environment.env_file
    if foreign:
        yield foreign
    elif env_file is None:
        resolve = importlib.import_module("skyrl_gym").resolve_env_id
        for env, name in used.items():
            try:
                resolve(env)
            except ValueError as error:
                yield f"{name}: {error}"
    elif not Path(env_file).is_file():
        yield f"environment.env_file: there is no file {env_file}."


def print_plan(resolved: Resolved, write: Any = print) -> None:
    """All of it, as text for people."""
    config, machine = resolved.config, hardware()
    shape, _ = find_model(config)
    width = max(map(len, flatten(config)))
    write("Settings")
    for name, value in flatten(config).items():
        text = json.dumps(value, ensure_ascii=False)
        write(f"  {name:<{width}}  {text:<28}  {resolved.sources.get(name, 'default')}")
    write("\nPlacement")
    for what, where in placement(config, machine):
        write(f"  {what:<32}  {where}")
    if shape:
        write(
            f"\nMemory, estimated ({shape.parameters / 1e6:,.2f} M parameters in {config.trainer.policy.model.dtype})"
        )
        rows = memory(config, shape)
        for what, size in [*rows, ("together", sum(size for _, size in rows))]:
            write(f"  {what:<68}  {size / GIB:>9,.3f} GiB")
        write("\nPhysical limits")
        for what, figure in limits(config, shape, machine):
            write(f"  {what:<32}  {figure}")
    found = [*obstacles(config, machine), *warnings(config, machine)]
    write("\nWould stop a run here" if found else "\nNothing found that would stop a run here.")
    for sentence in found:
        write(f"  - {sentence}")
