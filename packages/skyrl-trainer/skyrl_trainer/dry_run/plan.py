"""`--dry-run`: what a run would be, without a download or a model; known GPUs stand for those that are not here."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from skyrl_trainer.algorithms.options import algorithm_name
from skyrl_trainer.config import Resolved, flatten
from skyrl_trainer.dry_run import limits as bounds
from skyrl_trainer.dry_run.doctor import GIB, Hardware, hardware
from skyrl_trainer.dry_run.limits import PASSING, card, devices, gpus_needed
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.run.model_shape import KNOWN, ModelShape, config_file, described, model_shape
from skyrl_trainer.settings import OPTIONS, Config
from skyrl_trainer.user_file import load_plugin


def placement(config: Config, machine: Hardware) -> list[tuple[str, str]]:
    """(process, where it runs)."""
    learner, engines = devices(config)
    processor = f"processor ({machine.cores} cores, shared by all)"
    on_learner, on_engines = (_gpus(gpus) or processor for gpus in (learner, engines))
    turns = ", taking turns with the learner" if learner and engines and config.trainer.placement.colocate_all else ""
    asked, backend = config.generator.weight_sync_backend, bounds.likely_sync_backend(config)
    yields = asked == "nccl" and backend in ("shared_memory", "cuda_ipc")
    why = ": learner and engines share their GPUs" if yields else ""
    return [
        ("learner" if config.num_learners == 1 else f"learners ({config.num_learners})", on_learner),
        (f"engines ({config.generator.num_inference_engines} x {config.generator.backend})", on_engines + turns),
        (f"env workers ({config.environment.num_workers})", processor),
        ("weights to the engines", backend + why),
        *((f"GPU {gpu}", who) for gpu, who in sorted(tenants(config).items())),
    ]


def _gpus(gpus: range) -> str:
    return f"GPUs {gpus[0]}-{gpus[-1]}" if len(gpus) > 1 else f"GPU {gpus[0]}" if gpus else ""


def tenants(config: Config) -> dict[int, str]:
    """GPU -> the processes on it."""
    learner, engines = devices(config)
    split, found = config.generator.inference_engine_tensor_parallel_size, dict[int, list[str]]()
    for number, gpu in enumerate(learner):
        found.setdefault(gpu, []).append(f"learner {number}")
    for number, gpu in enumerate(engines):
        part = f" (part {number % split + 1} of {split})" if split > 1 else ""
        found.setdefault(gpu, []).append(f"engine {number // split}{part}")
    return {gpu: " and ".join(names) for gpu, names in found.items()}


def obstacles(config: Config, machine: Hardware) -> Iterator[str]:
    """Each thing that is sure to stop a run here, as a sentence."""
    generator, logger = config.generator, config.trainer.logger
    learners = config.trainer.placement.policy_num_gpus_per_node
    need = learners if config.ray.address else gpus_needed(config)
    if need > len(machine.gpus):
        yield (
            f"The placement needs {need} GPU{'s' * (need > 1)} (trainer.placement.policy_num_gpus_per_node={learners}, "
            f"{generator.num_inference_engines} engines); this machine has {len(machine.gpus) or 'none'}."
        )
    if generator.backend in ("vllm", "openai_server") and importlib.util.find_spec("vllm") is None:
        backend = f"generator.backend is {generator.backend}, but vLLM is not installed"
        yield f"{backend}: install skyrl-trainer[cpu] or skyrl-trainer[gpu]."
    wheel, module = ("'ray[default]'", "aiohttp_cors") if logger == "prometheus" else (logger, logger)
    if logger != "none" and importlib.util.find_spec(module) is None:
        yield f"trainer.logger={logger} is not installed: run `pip install {wheel}`, or use tensorboard or none."
    from skyrl_trainer.agent.agent_env import check_agent
    from skyrl_trainer.engine.actor import engine_class
    from skyrl_trainer.run.cluster import check_here
    from skyrl_trainer.weight_sync.colocation import sync_backend

    checks = (algorithm_options, model_shape, _load_data, check_agent, _check_lora, engine_class, sync_backend)
    for check in (*checks, check_here):
        try:
            check(config)
        except UserError as error:
            yield str(error)


def _check_lora(config: Config) -> None:
    made, options, model = described(config), load("skyrl_trainer.learner.lora:checked")(config), None
    how = {"trust_remote_code": False, "attn_implementation": "eager"}
    with suppress(Exception), load("torch:device")("meta"):  # others say it
        kind = load("transformers:AutoConfig").for_model(**made)
        model = options and load("transformers:AutoModelForCausalLM").from_config(kind, **how)
    if model:
        load("skyrl_trainer.learner.lora:lora_targets")(model, options.target_modules)


def algorithm_options(config: Config) -> dict[str, Any]:
    """All that the chosen algorithm has. UserError where it, its rewards, sampler or optimizer cannot be made."""
    import torch

    from skyrl_trainer.algorithms.rewards import Rewards
    from skyrl_trainer.algorithms.samplers import sampler_class
    from skyrl_trainer.learner.compose import algorithm_class
    from skyrl_trainer.learner.model import Optimized

    load_plugin(config)
    algorithm, learner = algorithm_class(algorithm_name(config))(config), Optimized()
    learner.config = config
    learner.make_optimizer([[torch.nn.Parameter(torch.zeros(1))]], 1.0, 1)
    Rewards(config, algorithm.options.overlong_filter)
    sampler_class(algorithm.options.sampler)
    return dict(algorithm.options.model_dump(mode="json", exclude=algorithm.ignores))


def settings(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """(name, its value and who set it), those of the algorithm included."""
    values = flatten(resolved.config)
    options = values.pop(OPTIONS)
    with suppress(UserError):  # said by obstacles
        options = algorithm_options(resolved.config)
    values |= {f"{OPTIONS}.{option}": chosen for option, chosen in options.items()}
    for name, value in values.items():
        yield name, f"{json.dumps(value, ensure_ascii=False):<28}  {resolved.sources.get(name, 'default')}"


def _load_data(config: Config) -> None:
    name = "data.train_data"
    try:
        made = load("skyrl_trainer.learner.compose:algorithm_class")
        stored = load("skyrl_trainer.rollout.stored:stored_rollouts")
        if not stored(config, lambda: made(algorithm_name(config))(config)):
            samples = load("skyrl_trainer.data:tasks")(config, config.data.train_data)
            if "sampler" not in config.trainer.algorithm.options:  # yours may take more
                load("skyrl_trainer.algorithms.samplers:UniformSampler")(samples, config.trainer.seed)
        name = "data.val_data"
        load("skyrl_trainer.run.held_out:HeldOut")(config, None)
    except UserError as error:
        raise UserError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None


def print_plan(resolved: Resolved) -> None:
    """All of it, as text for people."""
    config, machine = resolved.config, hardware()
    found = list(obstacles(config, machine))
    _print("Settings", list(settings(resolved)))
    _print("\nPlacement", placement(config, machine))
    shape = None
    with suppress(UserError):  # said by obstacles
        shape = model_shape(config)
    if shape:
        table = config.trainer.policy.model.path in KNOWN and config_file(config) is None
        note = "; not on this machine: its shape is from a table" if table else ""
        model = f"{shape.parameters / 1e6:,.2f} M parameters of {shape.width} bytes{note}"
        found += _print_memory(config, shape, machine, model)
        _print("\nPhysical limits", bounds.limits(config, shape, machine))
    else:
        print("\nMemory and limits are not known: the model is not on this machine, or unknown, or as said below.")
    _print("\nWould stop a new run here", [("-", sentence) for sentence in dict.fromkeys(found) or ["nothing found"]])


def _print_memory(config: Config, shape: ModelShape, machine: Hardware, model: str) -> Iterator[str]:
    title, gpu = f"estimated ({model})", card(config, machine)
    learner, engines = devices(config)
    if not learner:
        rows = bounds.memory(config, shape)
        need, have = sum(size for _, size in rows), machine.memory
        _print(f"\nMemory, {title}", _sizes([*rows, ("together", need)]))
        if need > have:
            yield f"About {need / GIB:.1f} GiB of memory are needed, and there are {have / GIB:.1f} GiB."
    if gpu is None:
        return
    of_learner, of_engine = bounds.gpu_memory(config, shape, gpu[0])
    passing, have = sum(size for what, size in of_learner if what in PASSING), int(gpu[0].memory)
    kinds = {(n in learner, n in engines): n for n in reversed(range(gpus_needed(config)))}
    for (learns, generates), number in reversed(kinds.items()):
        rows = of_learner * learns + of_engine * generates
        learning = sum(size for _, size in of_learner) * learns
        generating = (sum(size for _, size in rows) - passing * learns) * generates
        who = " and ".join(["learner"] * learns + ["engine"] * generates)
        sums = [("together, while it learns", learning), ("together, while it generates", generating), ("has", have)]
        _print(f"\nMemory of each GPU with {who} (as GPU {number}), {title}", _sizes([*rows, *sums]))
        if (need := max(learning, generating)) > have:
            yield f"A GPU with {who} needs about {need / GIB:.1f} GiB of memory, and has {have / GIB:.1f} GiB."


def _sizes(rows: bounds.Rows) -> list[tuple[str, str]]:
    return [(what, f"{size / GIB:>9,.3f} GiB") for what, size in rows if size]


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(what) for what, _ in rows)
    print(title, *(f"  {what:<{width}}  {text}" for what, text in rows), sep="\n")
