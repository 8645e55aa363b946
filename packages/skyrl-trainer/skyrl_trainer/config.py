"""Every setting of a run, typed. A YAML recipe with `a.b=c` overrides fills it; at most 60 leaf fields.

Names are SkyRL's where it has one, TRL's for hyper-parameters. The description under a field is its manual:
`--dry-run` and docs/configuration.md are made from it. A field exists when two users want different values.
"""

from __future__ import annotations

import difflib
import json
import sys
from dataclasses import asdict, dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from skyrl_trainer.errors import UserError
from skyrl_trainer.recipe import Setting, parse_override, read_recipe, text_of, value_of


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class DataConfig(Section):
    train_data: list[str | dict[str, Any]] = ["text_math?split=train"]
    """Env ids with options (`text_math?split=train&difficulty=2`), or jsonl and parquet files in SkyRL's row format."""
    val_data: list[str | dict[str, Any]] = ["text_math?split=val"]
    """The same, for held-out evaluation; and benchmarks, `skyrl_eval:gsm8k?data=gsm8k.jsonl&n=50`."""

    @field_validator("train_data", "val_data", mode="before")
    @classmethod
    def _one_needs_no_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value


class Warmstart(Section):
    """The entries of `trainer.policy.model.warmstart`."""

    num_demonstrations: int = Field(default=4000, ge=0)
    """Expert episodes of the training data to clone; 0 for none."""
    target_loss: float = Field(default=0.3, ge=0)
    """Nats a token of the expert, at which cloning stops; 0 goes through all epochs."""
    epochs: float = Field(default=8.0, gt=0)
    """Passes over the demonstrations, at most."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW's."""
    batch_size: int = Field(default=32, gt=0)
    """Demonstrations an optimizer step."""


class ModelConfig(Section):
    path: str = "tiny"
    """A Hugging Face folder or name; `tiny` makes a small Qwen3 and clones the env's expert, without a download."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights, in the learner and in the engine."""
    tiny_kwargs: dict[str, Any] = {}
    """Of the tiny policy's Qwen3 configuration: hidden_size, num_hidden_layers, vocab_size (the tokenizer's) ...;
    `induction` true gives it weights that copy from the beginning (what an agent does all the time), `spaces` "after"
    makes them part of the word before them instead of the one behind."""
    lora: dict[str, Any] = {}
    """Trains adapters instead of the weights: `rank`, `alpha`, `target_modules`, `quantization` (nf4), `sync`."""
    warmstart: dict[str, Any] = {}
    """How the tiny policy first clones experts of the training data: `num_demonstrations` (4000; 0 for none), until
    `target_loss` (0.3 nats a token) or `epochs` (8) are reached, `learning_rate` (0.001), `batch_size` (32)."""

    @property
    def cloning(self) -> Warmstart:
        """`warmstart`, with its defaults. Raises UserError with the setting's name."""
        known = sorted(Warmstart.model_fields)
        try:
            return Warmstart.model_validate(self.warmstart, strict=True)
        except ValidationError as error:
            name, problem = str(error.errors()[0]["loc"][0]), error.errors()[0]["msg"].removeprefix("Input should be ")
            is_wrong = f"is {self.warmstart[name]!r}, but should be {problem}" if name in known else "is not a setting"
            raise UserError(
                f"trainer.policy.model.warmstart.{name} {is_wrong}; there are {', '.join(known)}."
            ) from None


class PolicyConfig(Section):
    model: ModelConfig = ModelConfig()


class PlacementConfig(Section):
    colocate_all: bool = True
    """The learner and the engines take turns on the same devices."""
    policy_num_gpus_per_node: int = Field(default=0, ge=0, le=8)
    """GPUs for the learner; 0 trains on the CPU."""
    policy_num_nodes: int = Field(default=1, gt=0)
    """Machines that learn; on the CPU, processes that do."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """A registered trainer class: ppo, grpo, sapo, gspo, gspo_token, dapo, dr_grpo, cispo, dual_clip, or yours."""
    advantage_estimator: str = "grpo"
    """A registered estimator: grpo, rloo, reinforce++, maxrl, gae (ppo always has it), or yours."""
    reward_funcs: dict[str, float] = {}
    """Weights of the env's own reward (`env`, 1), of a task solved (`success`, 0) and of functions of `plugin_file`."""
    plugin_file: str | None = None
    """A Python file of yours that registers trainers, estimators, samplers and reward functions."""
    options: dict[str, Any] = {}
    """Hyper-parameters by TRL's names (`beta`, `epsilon_high`, `sapo_temperature_neg`): see docs/algorithms."""


class TrainerConfig(Section):
    run_dir: str = "runs/{run_name}"
    """Everything that the run writes; a second start in the same folder resumes it."""
    run_name: str = "run"
    """Names the run folder, and the run at a tracker."""
    project_name: str = "skyrl"
    """The project at a tracker."""
    logger: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """A tracker; metrics.jsonl and report.html are always written."""
    seed: int = 0
    """Of tasks, sampling and the tiny policy."""
    deterministic: bool = False
    """The same bytes in every run: seeded requests in a fixed order, all of the loss computed by the learner."""
    strategy: Literal["fsdp2"] = "fsdp2"
    """How several learners share the weights."""
    policy: PolicyConfig = PolicyConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    max_steps: int = Field(default=50, ge=0)
    """Rollout steps in the whole run (a resumed run counts on)."""
    train_batch_size: int = Field(default=32, gt=0)
    """Prompts a step; each is tried `generator.num_generations` times."""
    num_iterations: int = Field(default=1, gt=0)
    """Epochs over one rollout (TRL's mu)."""
    num_mini_batches: int = Field(default=1, gt=0)
    """Optimizer steps in one epoch over a rollout."""
    micro_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens in one forward and backward pass; gradients accumulate over a mini-batch."""
    gradient_checkpointing: bool = False
    """Computes each layer's activations again in the backward pass instead of keeping them."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """AdamW's, when warmed up."""
    lr_scheduler_type: str = "constant_with_warmup"
    """A schedule of transformers, by its name."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps until the learning rate is full."""
    optimizer_kwargs: dict[str, Any] = {"betas": [0.9, 0.99], "weight_decay": 0.0}
    """Passed to torch.optim.AdamW as they are."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of a mini-batch is clipped to this norm."""
    eval_batch_size: int = Field(default=500, gt=0)
    """Held-out tasks an evaluation (the first ones of `data.val_data`), each tried once."""
    eval_before_train: bool = True
    """Step 0 is a held-out evaluation."""
    eval_interval: int = Field(default=10, ge=0)
    """Steps between evaluations; 0 for none but the first and the last."""
    ckpt_interval: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 for the last only."""
    max_ckpts_to_keep: int = Field(default=2, gt=0)
    """Older checkpoints are deleted."""
    resume_mode: Literal["latest", "none"] = "latest"
    """`latest` goes on from the newest checkpoint of the run folder, if there is one."""
    sync_tolerance: float = Field(default=5e-4, gt=0)
    """Largest difference between the engine's and the learner's logprobs after a weight sync."""


class GeneratorConfig(Section):
    backend: Literal["vllm", "openai_server", "transformers"] = "vllm"
    """The inference engine: vLLM within its actor or as a server process; transformers is slow, for tests."""
    num_inference_engines: int = Field(default=1, gt=0)
    """Each is a process with a copy of the policy."""
    inference_engine_tensor_parallel_size: int = Field(default=1, gt=0)
    """GPUs of one engine."""
    weight_sync_backend: Literal["auto", "shared_memory", "nccl"] = "auto"
    """How new weights reach the engines; auto chooses by the hardware."""
    num_generations: int = Field(default=8, gt=0)
    """Tries a prompt: the size of a GRPO group."""
    max_completion_length: int = Field(default=64, gt=0)
    """Tokens a turn."""
    max_model_len: int = Field(default=1024, gt=0)
    """Tokens an episode, prompts and observations included."""
    max_turns: int = Field(default=1, gt=0)
    """Answers of the policy in one episode."""
    max_concurrency: int = Field(default=256, gt=0)
    """Episodes in flight an engine."""
    temperature: float = Field(default=1.0, ge=0)
    """Of the rollouts; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in rollouts; 1 for none."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Of held-out evaluation."""
    episode_timeout: float = Field(default=300.0, gt=0)
    """Wall-clock seconds of a whole episode, its reset and all its turns included."""
    agent: dict[str, Any] = {}
    """How the policy acts over many turns: `memory`, `window`, `max_episode_tokens`, `tools`; see docs/agents."""
    engine_kwargs: dict[str, Any] = {}
    """Passed to vLLM as they are; `urls` (with openai_server) names servers that run already, one an engine."""


class EnvironmentConfig(Section):
    env_class: str = "text_math"
    """A gymnasium id, a short name for `skyrl/<name>-v0`, or one that `env_file` registers; a row may name its own."""
    env_file: str | None = None
    """A Python file of yours, loaded in every EnvWorker, that registers environments."""
    num_workers: int = Field(default=1, gt=0)
    """EnvWorker processes."""
    step_timeout: float = Field(default=30.0, gt=0)
    """Wall-clock seconds of one env call."""


class RayConfig(Section):
    address: str | None = None
    """A running cluster to join; by default a local one is started and stopped."""


class Config(Section):
    data: DataConfig = DataConfig()
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    ray: RayConfig = RayConfig()

    @property
    def run_path(self) -> Path:
        """The run folder, `{run_name}` filled in."""
        return Path(self.trainer.run_dir.replace("{run_name}", self.trainer.run_name))

    @property
    def num_learners(self) -> int:
        """One a GPU of each machine; on the CPU one a "machine"."""
        place = self.trainer.placement
        return place.policy_num_nodes * max(1, place.policy_num_gpus_per_node)


def leaf_fields(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting by its full name, in the order of this file."""
    leaves: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            leaves |= leaf_fields(field.annotation, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = field
    return leaves


def flatten(config: Config) -> dict[str, Any]:
    """Full name -> value, as JSON knows it."""
    plain = config.model_dump(mode="json")
    return {name: reduce(getitem, name.split("."), plain) for name in leaf_fields()}


@dataclass(frozen=True)
class Resolved:
    config: Config
    sources: dict[str, str]
    """Who set a setting ("quickstart.yaml, line 7"; "command line"); defaults are not in it."""


def load_config(recipe: str | None, overrides: list[str]) -> Config:
    """A recipe's name or path (None: defaults only), then `a.b=c` in order; raises UserError with one sentence."""
    return resolve(recipe, overrides).config


def resolve(recipe: str | None, overrides: list[str]) -> Resolved:
    """As `load_config`, and remembers where each value came from."""
    fields = leaf_fields()
    sections = {name[:dot] for name in fields for dot in range(len(name)) if name[dot] == "."}
    settings = [*(read_recipe(recipe, sections) if recipe else ()), *map(parse_override, overrides)]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in settings:
        leaf = next((name for name in fields if f"{setting.name}.".startswith(f"{name}.")), None)
        if leaf is None:
            raise _unknown(setting, list(fields))
        if setting.name == leaf:
            is_text = fields[leaf].annotation is str and isinstance(setting.node, yaml.ScalarNode)
            values[leaf] = text_of(setting.node) if is_text else value_of(setting)
        else:  # one entry of a pass-through dictionary
            entry, entries = setting.name[len(leaf) + 1 :], values.get(leaf, fields[leaf].default)
            if not isinstance(entries, dict) or "." in entry:
                raise _unknown(setting, list(fields))
            values[leaf] = entries | {entry: value_of(setting)}
        sources[leaf] = setting.source
    config = _validate(values, sources)
    _check(config)
    return Resolved(config, sources)


def _validate(values: dict[str, Any], sources: dict[str, str]) -> Config:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), path, nested)[last] = value
    try:
        return Config.model_validate(nested, strict=True)
    except ValidationError as error:
        places = [(".".join(map(str, item["loc"])) + ".", item["msg"]) for item in error.errors()]
        leaf = next(name for name in values if places[0][0].startswith(f"{name}."))
        wanted = " or ".join(text.removeprefix("Input should be ") for at, text in places if at.startswith(f"{leaf}."))
        value = json.dumps(values[leaf], ensure_ascii=False, default=str)
        raise UserError(f"{leaf} is {value} ({sources[leaf]}), but should be {wanted}.") from None


def _check(config: Config) -> None:
    """What no single field can say."""
    generator, trainer = config.generator, config.trainer
    _ = trainer.policy.model.cloning
    episodes = trainer.train_batch_size * generator.num_generations
    if generator.max_completion_length >= generator.max_model_len:
        raise UserError(
            f"generator.max_completion_length is {generator.max_completion_length} and generator.max_model_len is "
            f"{generator.max_model_len}, but an episode must hold a prompt and a whole answer: raise max_model_len."
        )
    if trainer.num_mini_batches > episodes:
        raise UserError(
            f"trainer.num_mini_batches is {trainer.num_mini_batches}, but a step has only {episodes} episodes "
            "(trainer.train_batch_size times generator.num_generations)."
        )
    if trainer.deterministic and trainer.algorithm.options.get("old_logprobs") == "rollout":
        raise UserError(
            "trainer.algorithm.options.old_logprobs is rollout, but with trainer.deterministic=true it must be "
            "recompute: the engine's logprobs differ by rounding from run to run."
        )


def _unknown(setting: Setting, names: list[str]) -> UserError:
    """With the nearest setting: by its last part, wherever that lies, else by the whole name."""
    where = f"{setting.name} ({setting.source})"
    if section := [name for name in names if name.startswith(f"{setting.name}.")]:
        return UserError(f"{where} is a section: set one of {', '.join(section)}.")
    ends = {name.rpartition(".")[2]: name for name in names}
    near = [ends[end] for end in difflib.get_close_matches(setting.name.rpartition(".")[2], ends, 1, 0.6)]
    near = near or difflib.get_close_matches(setting.name, names, 1, 0.5)
    return UserError(
        f"{where} is not a setting; "
        + (f"did you mean {near[0]}?" if near else "docs/configuration.md lists them all.")
    )


def to_yaml(config: Config) -> str:
    """The whole configuration as a recipe: what a run folder's config.yaml holds."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def configuration_markdown() -> str:
    """docs/configuration.md: `python -m skyrl_trainer.config > docs/configuration.md`."""
    lines = ["# Configuration", "", (__doc__ or "").strip(), "", "Written by `python -m skyrl_trainer.config`."]
    signs = {"gt": "above", "ge": "at least", "le": "at most"}
    sections: dict[str, list[str]] = {}
    for name, field in leaf_fields().items():
        section, _, last = name.rpartition(".")
        kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
        bounds = [f" {signs[key]} {value:g}" for item in field.metadata for key, value in asdict(item).items()]
        kind = f"`{kind}`".replace("typing.", "").replace("|", "\\|") + ",".join(bounds)
        told = " ".join((field.description or "").split())
        row = f"| `{last}` | `{json.dumps(field.default, ensure_ascii=False)}` | {kind} | {told} |"
        sections.setdefault(section, []).append(row)
    for section, rows in sections.items():
        lines += ["", f"## {section}", "", "| setting | default | type | what it is |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
