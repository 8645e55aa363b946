"""What a run would be, before it is one: `--dry-run`.

The settings and who set them, the placement, a memory estimate, the physical limits, and each thing that would stop it.
Nothing is downloaded and no model is loaded. Symbols in the formulas: P parameters, b bytes of one, B episodes in
flight, c tokens that each holds on average, k bytes of the keys and values of one token.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from timeit import repeat
from typing import Any, NamedTuple

from skyrl_trainer.config import Config, Resolved, flatten
from skyrl_trainer.doctor import GIB, Hardware, hardware, require_gym
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.memory import LOGITS_AT_ONCE

PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.04e12, 312e12),
    "L4": (0.3e12, 121e12),
    "4090": (1.008e12, 165e12),
}
"""GPU -> bytes/s of its memory, dense bfloat16 FLOP/s (vendors' data sheets)."""


class ModelShape(NamedTuple):
    parameters: int
    active: int
    """Parameters that a token is multiplied with: all but input embeddings that are not also the head."""
    vocabulary: int
    width: int
    """Bytes of one number."""
    kv_bytes: int
    """Of the keys and values of one token, over all layers."""
    matrices: int
    """Parameters of the linear layers below the head."""
    sides: dict[str, int]
    """Linear layers by the ends of their names: rows plus columns, over all layers."""

    @classmethod
    def of(cls, config: dict[str, Any], dtype: str) -> ModelShape:
        """From a config.json of the dense Llama, Qwen2 and Qwen3 kind (norms and biases left out: below 0.1 %)."""
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        query, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
        embedding, width = config["vocab_size"] * hidden, 4 if dtype == "float32" else 2
        active = layers * hidden * (2 * query + 2 * kv + 3 * config["intermediate_size"]) + embedding
        lookup = 0 if config.get("tie_word_embeddings", True) else embedding
        others = {"q_proj": query, "k_proj": kv, "v_proj": kv, "o_proj": query}
        others |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config["intermediate_size"])
        sides = {name: layers * (hidden + other) for name, other in others.items()}
        kv_bytes, matrices = 2 * layers * kv * width, active - embedding
        return cls(active + lookup, active, config["vocab_size"], width, kv_bytes, matrices, sides)


def model_shape(config: Config) -> ModelShape | None:
    """None where it can't be known here: not downloaded yet, or of another kind. UserError where there is no model."""
    model = config.trainer.policy.model
    if model.path == "tiny":
        from skyrl_trainer.init_policy import DEFAULT_VOCAB_SIZE, TINY_QWEN3

        return ModelShape.of({**TINY_QWEN3, "vocab_size": DEFAULT_VOCAB_SIZE, **model.tiny_kwargs}, model.dtype)
    file = Path(model.path).expanduser() / "config.json"
    if not file.parent.is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model.path):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.path, "config.json")
        if not isinstance(found, str):
            return None
        file = Path(found)
    try:
        return ModelShape.of(json.loads(file.read_text()), model.dtype)
    except KeyError:
        return None
    except (OSError, ValueError):
        what = f"{file} is not a model's config.json" if file.parent.is_dir() else f"there is no folder {file.parent}"
        raise UserError(f"trainer.policy.model.path: {what}.") from None


def devices(config: Config) -> tuple[range, range]:
    """GPUs of the learner and of the engines; none in either where the run is on the CPU."""
    place, generator = config.trainer.placement, config.generator
    learners, tensor = place.policy_num_gpus_per_node, generator.inference_engine_tensor_parallel_size
    first = 0 if place.colocate_all else learners
    return range(learners), range(
        first, first + generator.num_inference_engines * tensor * (learners > 0 or tensor > 1)
    )


def gpus_needed(config: Config) -> int:
    return max(gpus.stop for gpus in devices(config))


def placement(config: Config, machine: Hardware) -> list[tuple[str, str]]:
    """(process, where it runs)."""
    learner, engines = devices(config)
    processor = f"processor ({machine.cores} cores, shared by all)"
    on_learner, on_engines = (f"GPUs {gpus[0]}-{gpus[-1]}" if gpus else processor for gpus in (learner, engines))
    turns = ", taking turns with the learner" if engines and config.trainer.placement.colocate_all else ""
    return [
        ("learner" if config.num_learners == 1 else f"learners ({config.num_learners})", on_learner),
        (f"engines ({config.generator.num_inference_engines} x {config.generator.backend})", on_engines + turns),
        (f"env workers ({config.environment.num_workers})", processor),
    ]


def memory(config: Config, shape: ModelShape) -> list[tuple[str, int]]:
    """(what, bytes), over all devices together."""
    trainer, generator = config.trainer, config.generator
    engines, weights = generator.num_inference_engines, shape.parameters * shape.width
    tokens = generator.max_concurrency * generator.max_model_len * engines
    learners = config.num_learners
    chunk = LOGITS_AT_ONCE["cuda" if trainer.placement.policy_num_gpus_per_node else "cpu"]
    logits = learners * min(chunk, trainer.micro_batch_tokens * shape.vocabulary)
    copied = trainer.algorithm.options.get("beta") and not trainer.policy.model.lora
    return [
        *_learned(config, shape, learners),
        ("learner: logits of a chunk, log-softmax, gradient", 12 * logits),
        ("learner: reference policy", weights if copied else 0),
        ("engines: weights", weights * engines),
        ("engines: KV cache, every episode in flight at max_model_len", tokens * shape.kv_bytes),
    ]


def _learned(config: Config, shape: ModelShape, learners: int) -> list[tuple[str, int]]:
    """Learners share the weights. With LoRA each has all of them, frozen, in NF4 of half a byte; and only the adapters,
    in float32, have gradients and moments."""
    from skyrl_trainer.learner.lora import read_options  # loads torch

    lora = read_options(config)
    if lora is None:
        return [("learner: weights, gradients, AdamW's two moments, in float32", 4 * shape.parameters * 4)]
    wanted = shape.sides if lora.target_modules == "all-linear" else lora.target_modules
    adapter = lora.rank * sum(shape.sides.get(name.rpartition(".")[2], 0) for name in wanted)
    saved = shape.matrices * (2 * shape.width - 1) // 2 if lora.quantization == "nf4" else 0
    return [
        ("learner: frozen weights", learners * (shape.parameters * shape.width - saved)),
        ("learner: adapter, gradients, AdamW's two moments", learners * 4 * adapter * 4),
    ]


def peaks(config: Config, machine: Hardware, shape: ModelShape, working_set: int) -> tuple[float, float, str]:
    """(bytes/s, FLOP/s, where they are from) of all devices that the run uses."""
    count = min(gpus_needed(config), len(machine.gpus))
    for key, (bandwidth, flops) in PEAKS.items() if count else ():
        if re.search(rf"\b{key}\b", name := machine.gpus[0].name):
            flops /= shape.width / 2  # TF32 runs at half of bfloat16's rate
            return bandwidth * count, flops * count, f"data sheet of {count} x {name}"
    # In a process of its own, because a BLAS library chooses its number of threads when it is loaded.
    code = f"from skyrl_trainer.plan import core_rates; print(*core_rates({working_set // machine.cores}))"
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environ = {**os.environ, **single, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, env=environ)
    bandwidth, flops = (float(rate) * machine.cores for rate in done.stdout.split())
    return bandwidth, flops, f"{machine.cores} x the best moment of one core, measured just now"


def core_rates(working_set: int) -> tuple[float, float]:
    """Bytes/s of a copy (read and write), float32 FLOP/s of a matmul: the best of many, others only slow one down."""
    import numpy as np

    source, matrix = np.ones(working_set // 8, np.float32), np.ones((256, 256), np.float32)
    target, product = np.empty_like(source), np.empty_like(matrix)
    copy = min(repeat(lambda: np.copyto(target, source), number=1, repeat=10 + 2**30 // source.nbytes))
    multiply = min(repeat(lambda: np.matmul(matrix, matrix, out=product), number=1, repeat=500))
    return 2 * source.nbytes / copy, 2 * 256**3 / multiply


def limits(config: Config, shape: ModelShape, machine: Hardware) -> list[tuple[str, str]]:
    """(what, figure): no run on this hardware decodes or trains faster."""
    trainer, generator = config.trainer, config.generator
    slots = generator.max_concurrency * generator.num_inference_engines
    flying = min(trainer.train_batch_size * generator.num_generations, slots)
    context = min(generator.max_model_len, generator.max_completion_length * generator.max_turns) / 2
    read = shape.active * shape.width * generator.num_inference_engines + flying * context * shape.kv_bytes
    bandwidth, flops, source = peaks(config, machine, shape, int(min(max(read, 2**22), 2**28)))
    reading, computing = read / bandwidth, 2 * shape.active * flying / flops
    decode, train = flying / max(reading, computing), flops / (6 * shape.active * trainer.num_iterations)
    return [
        ("memory bandwidth, arithmetic", f"{bandwidth / 1e9:,.1f} GB/s, {flops / 1e9:,.0f} GFLOP/s ({source})"),
        (
            "decode, at most",
            f"{decode:,.0f} tokens/s: B / max((P b + B c k) / bandwidth, 2 P B / FLOP/s) with B = {flying}, "
            f"c = {context:.0f}; bound by {'memory' if reading > computing else 'arithmetic'}",
        ),
        ("train, at most", f"{train:,.0f} tokens/s: FLOP/s / 6 P, an epoch"),
    ]


def obstacles(config: Config, machine: Hardware) -> Iterator[str]:
    """Each thing that is sure to stop a run here, as a sentence: what `train` refuses before it starts anything."""
    generator, logger = config.generator, config.trainer.logger
    if (need := gpus_needed(config)) > len(machine.gpus):
        learners = config.trainer.placement.policy_num_gpus_per_node
        yield (
            f"The placement needs {need} GPUs (trainer.placement.policy_num_gpus_per_node={learners}, "
            f"{generator.num_inference_engines} engines); this machine has {len(machine.gpus) or 'none'}."
        )
    if generator.weight_sync_backend == "nccl" and not machine.gpus:
        yield "generator.weight_sync_backend is nccl, which needs GPUs; use auto or shared_memory here."
    if generator.backend != "transformers" and importlib.util.find_spec("vllm") is None:
        backend = f"generator.backend is {generator.backend}, but vLLM is not installed"
        yield f"{backend}: install skyrl-trainer[cpu] or skyrl-trainer[gpu]."
    if logger != "none" and importlib.util.find_spec(logger) is None:
        yield (
            f"trainer.logger is {logger}, which is not installed: run `pip install {logger}`, "
            "or use trainer.logger=tensorboard or none."
        )
    from skyrl_trainer.learner.lora import read_options  # loads torch

    for check in (model_shape, _load_data, read_options):
        try:
            check(config)
        except UserError as error:
            yield str(error)


def _load_data(config: Config) -> None:
    require_gym()
    from skyrl_trainer.data import load_samples
    from skyrl_trainer.rollout.stored import stored_folders

    for name, specs in (("data.train_data", config.data.train_data), ("data.val_data", config.data.val_data)):
        try:
            if name == "data.val_data" or not stored_folders(specs):
                load_samples(specs, config.environment.env_class, env_file=config.environment.env_file)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None


def print_plan(resolved: Resolved) -> None:
    """All of it, as text for people."""
    config, machine = resolved.config, hardware()
    found = list(obstacles(config, machine))
    values = [(name, json.dumps(value, ensure_ascii=False)) for name, value in flatten(config).items()]
    _print("Settings", [(name, f"{text:<28}  {resolved.sources.get(name, 'default')}") for name, text in values])
    _print("\nPlacement", placement(config, machine))
    try:
        shape = model_shape(config)
        rows = memory(config, shape) if shape else []
    except UserError:
        shape = None  # said by obstacles
    if shape:
        gpus = machine.gpus[: gpus_needed(config)]
        need, have = sum(size for _, size in rows), sum(gpu.memory for gpu in gpus) or machine.memory
        if need > have:
            found.append(f"About {need / GIB:.1f} GiB of memory are needed, and there are {have / GIB:.1f} GiB.")
        title = f"Memory, estimated ({shape.parameters / 1e6:,.2f} M parameters of {shape.width} bytes)"
        _print(f"\n{title}", [(what, f"{size / GIB:>9,.3f} GiB") for what, size in [*rows, ("together", need)] if size])
        _print("\nPhysical limits", limits(config, shape, machine))
    else:
        print("\nMemory and limits are not known: the model is not on this machine, or of an unknown kind.")
    _print("\nWould stop a run here", [("-", sentence) for sentence in found or ["nothing found"]])


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(what) for what, _ in rows)
    print(title, *(f"  {what:<{width}}  {text}" for what, text in rows), sep="\n")
