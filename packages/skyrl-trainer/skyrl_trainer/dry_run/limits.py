"""What a model takes and what the hardware can give: shapes, memory, data sheets, the physical limits of a run.

Symbols: P parameters, b bytes of one, B episodes in flight, c tokens that each holds on average, k bytes of KV of one.
"""

import re
from functools import cache
from timeit import repeat
from typing import NamedTuple

from skyrl_gym.data import beside
from skyrl_trainer.algorithms.options import algorithm_name
from skyrl_trainer.dry_run.doctor import Hardware
from skyrl_trainer.errors import UserError
from skyrl_trainer.process_memory import LOGITS_AT_ONCE
from skyrl_trainer.registry import load
from skyrl_trainer.run.model_shape import ModelShape
from skyrl_trainer.settings import Config


class Card(NamedTuple):
    """A GPU by its vendor's data sheet: cards.yaml, which has the units."""

    memory: float
    bandwidth: float
    flops: float
    link: float
    host: float


CARDS = {name: Card(**has) for name, has in beside(__file__, "cards.yaml").items()}
ASSUMED = "H100"
"""Where the run wants GPUs and this machine has none, or an unknown one: SXM, 80 GB or what it has."""
VLLM_SHARE = 0.92
"""Of a GPU's memory, that vLLM takes if engine_kwargs.gpu_memory_utilization does not say."""
FIRST_PROCESSES, OTHER_PROCESS = 6 * 2**28, 3 * 2**28
"""As measured: of a driver that learns, Ray and envs; of an engine with its RolloutWorker, or another learner."""
Rows = list[tuple[str, int]]
"""(what, bytes)."""
PASSING = ("learner: activations of a micro-batch", "learner: logits of a chunk, and what follows them")
"""What a learner holds only while it computes."""


def devices(config: Config) -> tuple[range, range]:
    """GPUs of the learner and of the engines; none of those that are on the processor."""
    # Where they share none the first are those of whoever starts first: a single learner, or else the engines.
    has_gpu = load("skyrl_trainer.engine.vllm_args:has_gpu")  # loads Ray
    place, generator = config.trainer.placement, config.generator
    learners = place.policy_num_gpus_per_node
    tensor = generator.inference_engine_tensor_parallel_size
    engines = generator.num_inference_engines * tensor * (learners > 0 or tensor > 1 or has_gpu())
    if place.colocate_all:
        return range(learners), range(engines)
    if config.num_learners == 1:
        return range(learners), range(learners, learners + engines)
    return range(engines, engines + learners), range(engines)


def gpus_needed(config: Config) -> int:
    return max(gpus.stop for gpus in devices(config))


def card(config: Config, machine: Hardware) -> tuple[Card, str] | None:
    """The GPU that the run is on and where its figures are from; None on the processor."""
    if not (need := gpus_needed(config)):
        return None
    name, memory = machine.gpus[0] if machine.gpus else ("", CARDS[ASSUMED].memory)
    key = next((key for key in CARDS if re.search(rf"\b{key}\b", name)), None)
    source = name if key else f"{ASSUMED}, assumed: the machine's own are not known"
    return CARDS[key or ASSUMED]._replace(memory=memory), f"data sheet of {need} x {source}"


def adapter_size(config: Config, shape: ModelShape) -> int:
    """Parameters of LoRA's matrices; 0 for full fine-tuning."""
    lora = config.trainer.policy.model.lora
    wanted = shape.sides if lora.target_modules == "all-linear" else lora.target_modules
    return lora.rank * sum(shape.sides.get(name.rpartition(".")[2], 0) for name in wanted)


def learner_memory(config: Config, shape: ModelShape) -> Rows:
    """Of one learner, its critic included. Learners share the weights; with LoRA each has all, frozen."""
    trainer, lora = config.trainer, config.trainer.policy.model.lora
    # There compiled layers keep less, as measured; with LoRA the residual stream is in half precision, too.
    on_gpu = trainer.placement.policy_num_gpus_per_node > 0
    models = 1 + (algorithm_name(config).endswith("ppo") and trainer.algorithm.options.get("critic") != "backbone")
    tokens = max(trainer.micro_batch_tokens, config.generator.max_model_len)
    logits = min(LOGITS_AT_ONCE["cuda" if on_gpu else "cpu"], tokens * shape.vocabulary)
    checkpoints = shape.layers * shape.hidden * (shape.width if lora.rank else 4)
    layer = shape.kept * shape.width * ((9 if lora.rank else 10) if on_gpu else 12) // 12
    kept = checkpoints + layer if trainer.gradient_checkpointing else shape.layers * layer
    # Compiled layers keep weights in half precision for the backward pass, other learners' parts of them, too.
    copied = on_gpu and config.num_learners > 1 and not (lora.rank or trainer.gradient_checkpointing)
    activations = (tokens * kept + 2 * shape.parameters * (copied and shape.width == 2)) * models
    if lora.rank == 0:
        whole = 4 * shape.parameters // config.num_learners
        rows = [
            ("learner: weights, gradients, AdamW's two moments, in float32", 4 * whole * models),
            ("learner: reference policy", whole if trainer.algorithm.options.get("beta") else 0),
        ]
    else:
        saved = shape.matrices * (2 * shape.width - 1) // 2 if lora.quantization == "nf4" else 0
        rows = [
            ("learner: frozen weights", shape.parameters * shape.width - saved),
            ("learner: adapter, gradients, AdamW's two moments", 16 * adapter_size(config, shape) * models),
        ]
    return rows + list(zip(PASSING, (activations, (4 + shape.width if on_gpu else 12) * logits), strict=True))


def memory(config: Config, shape: ModelShape) -> Rows:
    """Over all processes together: of those on the processor."""
    generator = config.generator
    engines = 0 if devices(config)[1] else generator.num_inference_engines
    tokens = generator.max_concurrency * generator.max_model_len * engines
    more = generator.num_inference_engines + config.num_learners - 1
    return [
        ("processes themselves, about", FIRST_PROCESSES + more * OTHER_PROCESS),
        *((what, size * config.num_learners) for what, size in learner_memory(config, shape)),
        ("engines: weights", shape.parameters * shape.width * engines),
        ("engines: KV cache, every episode in flight at max_model_len", tokens * shape.kv_bytes),
    ]


def gpu_memory(config: Config, shape: ModelShape, gpu: Card) -> tuple[Rows, Rows]:
    """Of a learner, and of an engine, on one GPU."""
    generator = config.generator
    split, given = generator.inference_engine_tensor_parallel_size, generator.engine_kwargs
    weights = shape.parameters * shape.width // split
    share = int(given.get("gpu_memory_utilization", VLLM_SHARE) * gpu.memory)
    cache = given.get("kv_cache_memory_bytes") or max(0, share - weights)
    held = int(cache * split // shape.kv_bytes)
    copy = weights if likely_sync_backend(config) == "cuda_ipc" else 0
    left = f"engine: KV cache and vLLM's own 1 to 3 GiB (of {held:,} tokens at most)"
    learner = [*learner_memory(config, shape), ("weight sync: a copy", copy)]
    return learner, [("engine: weights", weights), (left, cache)]


@cache
def peaks(found: tuple[Card, str] | None, machine: Hardware, working_set: int) -> tuple[float, float, str]:
    """(bytes/s, FLOP/s, where they are from): of one GPU, or of the whole processor, as measured."""
    if found:
        return found[0].bandwidth, found[0].flops, found[1]
    import numpy as np  # which copies faster
    import torch

    threads, cores = torch.get_num_threads(), machine.cores
    torch.set_num_threads(1)
    source, target = np.ones((2, working_set // cores // 2), np.uint8)
    matrix, product = torch.ones(2, 256, 256)
    copy = min(repeat(lambda: np.copyto(target, source), number=1, repeat=10 + 2**30 // len(source)))
    multiply = min(repeat(lambda: torch.mm(matrix, matrix, out=product), number=1, repeat=500))
    torch.set_num_threads(threads)
    bandwidth, flops = cores * 2 * len(source) / copy, cores * 2 * 256**3 / multiply
    return bandwidth, flops, f"{cores} x the best moment of one core, measured just now"


def limits(config: Config, shape: ModelShape, machine: Hardware) -> list[tuple[str, str]]:
    """(what, figure): no run on this hardware decodes, trains or syncs faster."""
    trainer, generator = config.trainer, config.generator
    episodes = trainer.train_batch_size * generator.num_generations
    flying = min(episodes, generator.max_concurrency * generator.num_inference_engines)
    longest = min(generator.max_model_len, generator.max_completion_length * generator.max_turns)
    context = longest / 2
    read = shape.active * shape.width * generator.num_inference_engines + flying * context * shape.kv_bytes
    found, size = card(config, machine), int(min(max(read, 2**22), 2**28))
    bandwidth, flops, source = peaks(found, machine, size)
    used, engines = max(1, gpus_needed(config)), max(1, len(devices(config)[1]))
    flops /= shape.width / 2 if found else 1  # TF32 runs at half of bfloat16's rate
    reading = read / (bandwidth * engines)
    computing = 2 * shape.active * flying / (flops * engines)
    adapter = adapter_size(config, shape)
    work = (4 if adapter else 6) * shape.active + 6 * adapter
    formula = "4 P + 6 P_lora" if adapter else "6 P"
    rate = flops * config.num_learners if devices(config)[0] else peaks(None, machine, size)[1]
    decode = flying / max(reading, computing)
    train = rate / (work * trainer.num_iterations)
    way, sync = _sync_limit(config, found and found[0], shape, bandwidth)
    generating = episodes * longest / decode
    learning = episodes * generator.max_model_len / train
    rates = f"{bandwidth * used / 1e9:,.1f} GB/s, {flops * used / 1e9:,.0f} GFLOP/s"
    bound = f"B = {flying}, c = {context:.0f}; bound by {'memory' if reading > computing else 'arithmetic'}"
    law = f"B / max((P b + B c k) / bandwidth, 2 P B / FLOP/s) with {bound}"
    return [
        ("memory bandwidth, arithmetic", f"{rates} ({source})"),
        ("decode, at most", f"{decode:,.0f} tokens/s: {law}"),
        ("train, at most", f"{train:,.0f} tokens/s: {rate / 1e9:,.0f} GFLOP/s / ({formula}), an epoch"),
        ("weight sync, at least", f"{sync:.4f} s: {way}"),
        ("a step at full length, at least", f"{generating:.1f} s decode + {learning:.1f} s train + {sync:.2f} s sync"),
    ]


def likely_sync_backend(config: Config) -> str:
    """ "-" where it cannot be what was asked for, which plan.obstacles says."""
    try:
        return str(load("skyrl_trainer.weight_sync.colocation:sync_backend")(config))  # torch, too
    except UserError:
        return "-"


def _sync_limit(config: Config, gpu: Card | None, shape: ModelShape, bandwidth: float) -> tuple[str, float]:
    backend = likely_sync_backend(config)
    name, sent = ("P_lora", adapter_size(config, shape)) if backend == "adapter" else ("P", shape.parameters)
    sent *= shape.width
    if gpu is None:
        return f"2 {name} b / bandwidth, read and written", 2 * sent / bandwidth
    if backend == "cuda_ipc":
        return "4 P b / bandwidth, to a copy and back", 4 * sent / bandwidth
    if backend == "nccl":
        return f"P b / {gpu.link / 1e9:.0f} GB/s between GPUs (NCCL)", sent / gpu.link
    ways = 1 + bool(devices(config)[0])
    return f"{ways} {name} b / {gpu.host / 1e9:.0f} GB/s, by the shared buffer", ways * sent / gpu.host
