"""trl.GRPOConfig and peft.LoraConfig as settings of ours (trl_arguments.yaml), without TRL; the rest is refused."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import partial
from typing import Any
from urllib.parse import urlencode

from skyrl_gym.data import beside
from skyrl_trainer.algorithms.options import options_class
from skyrl_trainer.config import saved_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.settings import OPTIONS, Config, LoRAConfig

table = partial(beside, __file__, "trl_arguments.yaml")


def is_trls(args: Any) -> bool:
    return any(base.__name__ == "GRPOConfig" for base in type(args).__mro__)


def loss_name(args: Any) -> str:
    """The algorithm that TRL's arguments ask for."""
    losses, asked = table()["losses"], f"{args.loss_type} {args.importance_sampling_level}"
    asked += " delta" * (args.delta is not None)
    if asked not in losses:
        what = f"GRPOConfig asks for loss_type and importance_sampling_level {asked}"
        raise UserError(f"{what}; there are {'; '.join(losses)}.")
    return str(losses[asked])


def translated(args: Any, algorithm: Any, by_loss: bool, rows: int | None, tools: bool) -> Config:
    """The settings that these arguments stand for. UserError names a field that cannot be honoured.
    by_loss: whether loss_type chose the algorithm; else the algorithm keeps its defaults where the arguments have
    TRL's. rows: of the training data, None where nobody knows. tools: whether there are any.
    """
    default = type(args)(args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16)
    same, loggers = table()["same"], args.report_to or ["none"]
    known = {*same, *table()["options"], *table()["translated"], *table()["either"]}
    losses, asked = table()["losses"], f"{args.loss_type} {args.importance_sampling_level}"
    if not by_loss and algorithm.recipe_name not in (losses.get(asked), losses.get(f"{asked} delta")):
        known -= {"loss_type", "importance_sampling_level"}
    own = {"importance_sampling_level": ["sequence"]} if algorithm.recipe_name == "gspo" else {}
    refuse_others(args, default, known, table()["values"] | own)
    values = {setting: getattr(args, name) for name, setting in same.items()}
    values |= _steps(args, rows)
    values |= _generation(args, default, tools)
    values[OPTIONS] = _options(args, default, algorithm, by_loss)
    values[OPTIONS] |= _correction(args, default)
    values["trainer.optimizer_kwargs"] = {
        "betas": [args.adam_beta1, args.adam_beta2],
        "weight_decay": args.weight_decay,
        "eps": args.adam_epsilon,
    }
    gpus = 0 if args.device.type == "cpu" else args.world_size
    schedule = urlencode(args.lr_scheduler_kwargs or {})
    values |= {
        "trainer.lr_scheduler_type": "?".join(filter(None, (plain(args.lr_scheduler_type), schedule))),
        "trainer.policy.model.dtype": "bfloat16" if args.bf16 else "float32",
        "trainer.placement.policy_num_gpus_per_node": gpus,
        "trainer.max_ckpts_to_keep": args.save_total_limit or 10**6,
        "trainer.logger": loggers[0] if len(loggers) == 1 else loggers,
        "trainer.run_name": args.run_name or "run",
    }
    return saved_config(values, type(args).__name__)


def plain(value: Any) -> Any:
    """What an enum member stands for."""
    return getattr(value, "value", value)


def refuse_others(given: Any, default: Any, known: Collection[str], values: Mapping[str, Any] = {}) -> None:
    """UserError for a field of a dataclass that is neither known, nor as by default, nor one of `values`."""
    for name in [field.name for field in fields(given) if field.name not in known]:
        value, usual = plain(getattr(given, name)), plain(getattr(default, name))
        if value != usual and value not in values.get(name, ()):
            what = f"{type(given).__name__}.{name} is {value!r:.80}"
            raise UserError(
                f"{what}, which these trainers cannot do: leave it at {usual!r:.80}{table()['instead'].get(name, '')}."
            )


def _steps(args: Any, rows: int | None) -> dict[str, Any]:
    update = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    rollout = args.generation_batch_size
    size = max(update, rollout)
    if size % update or size % rollout or size % args.num_generations:
        raise UserError(
            f"GRPOConfig.generation_batch_size is {rollout}, and an optimizer step has {update} completions: "
            "the larger must be a multiple of the other, and of num_generations."
        )
    prompts, updates = size // args.num_generations, size // update * args.num_iterations
    epoch = (rows or 0) // prompts
    wanted = args.max_steps / updates if args.max_steps > 0 else args.num_train_epochs * epoch
    if not wanted:
        length = "is not known" if rows is None else f"is {rows}, and a step has {prompts} prompts"
        raise UserError(f"GRPOConfig.max_steps is needed: the length of the training data {length}.")
    steps = math.ceil(wanted)

    def every(name: str, count: float) -> int:
        there = {"no": 0.0, "steps": count / updates if count >= 1 else count * steps}
        there |= {"epoch": epoch} if epoch else {}
        strategy = plain(getattr(args, name))
        if strategy not in there:
            raise UserError(f"GRPOConfig.{name} is {strategy!r}; here it can be {' or '.join(there)}.")
        return math.ceil(there[strategy])

    return {
        "trainer.train_batch_size": prompts,
        "trainer.num_mini_batches": size // update,
        "trainer.max_steps": steps,
        "trainer.warmup_steps": math.ceil(args.warmup_steps * (1 if args.warmup_steps >= 1 else steps * updates)),
        "trainer.eval_interval": every("eval_strategy", args.eval_steps or 0),
        "trainer.ckpt_interval": every("save_strategy", args.save_steps),
    }


def _generation(args: Any, default: Any, tools: bool) -> dict[str, Any]:
    longest, rounds = args.max_completion_length, args.max_tool_calling_iterations
    context, memory = args.vllm_max_model_length, args.vllm_gpu_memory_utilization
    values: dict[str, Any] = {
        "generator.max_completion_length": longest,
        "generator.max_model_len": context or max(1024, 2 * (longest or 0)),
        "generator.eval_temperature": args.temperature,
    }
    if tools:  # a call takes more than eight tokens
        turns = (longest or 8) // 8 if rounds is None else rounds + 1
        values["generator.max_turns"] = max(1, turns)
        values["generator.agent.max_episode_tokens"] = longest
        values["generator.agent.tools"] = "template"
    engine = {} if memory == default.vllm_gpu_memory_utilization else {"gpu_memory_utilization": memory}
    engine |= {"default_chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
    return values | {"generator.engine_kwargs": engine}


def _options(args: Any, default: Any, algorithm: type[GRPO], by_loss: bool) -> dict[str, Any]:
    has = options_class(algorithm).model_fields.keys() - algorithm.ignores
    options: dict[str, Any] = {"sampler": "uniform"} if by_loss else {}
    for name in table()["options"]:
        value = getattr(args, name)
        changed = value != getattr(default, name)
        if name in has and (changed or by_loss):
            options[name] = value
        elif changed:
            what = f"GRPOConfig.{name} is {value!r}"
            raise UserError(f"{what}, which {algorithm.__name__} has no use for: leave it out.")
    if "epsilon_high" in options and args.epsilon_high is None:
        options["epsilon_high"] = args.epsilon
    if by_loss or args.mask_truncated_completions:
        options["overlong_filter"] = args.mask_truncated_completions
    if args.beta:
        options["kl_estimator"] = "k3_ratio" if args.use_bias_correction_kl else "k3"
    return options


def _correction(args: Any, default: Any) -> dict[str, Any]:
    name, known = "vllm_importance_sampling_mode", table()["corrections"]
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    mode, usual = getattr(args, name), getattr(default, name)
    if not args.vllm_importance_sampling_correction:
        return {"correction": "none"}
    if mode in known:
        return {"correction": known[mode], "correction_range": [low or 0.0, 1e9 if high is None else high]}
    if (mode, low, high) != (usual, None, default.vllm_importance_sampling_clip_max):
        what = f"GRPOConfig.{name} is {mode!r} with a range of its own"
        raise UserError(f"{what}; those that can have one are {', '.join(known)}.")
    return {}


def lora(given: Any, quantization: str) -> LoRAConfig:
    """Of a peft.LoraConfig; without target_modules, the ones that peft has for Qwen."""
    kind, names = type(given), table()["lora"]
    if kind.__name__ != "LoraConfig":
        raise UserError(f"peft_config is a {kind.__name__}; these trainers take a peft.LoraConfig.")
    refuse_others(given, kind(), {*names, *table()["lora_either"]})
    values = {ours: getattr(given, theirs) for theirs, ours in names.items()} | {"quantization": quantization}
    modules = values["target_modules"] or ["q_proj", "v_proj"]
    values["target_modules"] = modules if isinstance(modules, str) else sorted(modules)
    settings = {f"trainer.policy.model.lora.{name}": value for name, value in values.items()}
    return saved_config(settings, kind.__name__).trainer.policy.model.lora
