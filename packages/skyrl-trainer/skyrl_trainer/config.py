"""Every setting of a run, typed. A YAML recipe with `a.b=c` overrides fills it; at most 90, an algorithm's included.

Names are SkyRL's where it has one, TRL's for hyper-parameters. The description under a field is its manual:
docs/configuration.md and the JSON schema are made from it. A field exists when two users want different values.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from skyrl_trainer.errors import UserError
from skyrl_trainer.recipe import Setting, parse_override, read_recipe, text_of, value_of, walk

OPTIONS, TINY = "trainer.algorithm.options", "trainer.policy.model.tiny"
GONE = {"trainer.resume_mode": "latest"}
"""Settings of earlier versions that run folders still name, with what they do in this one."""
ELSEWHERE = {
    "loss_type": "trainer.algorithm.name",
    "policy_loss_type": "trainer.algorithm.name",
    "n_samples_per_prompt": "generator.num_generations",
    "max_generate_length": "generator.max_completion_length",
    "eps_clip_low": "trainer.algorithm.options.epsilon",
    "eps_clip_high": "trainer.algorithm.options.epsilon_high",
    "kl_loss_coef": "trainer.algorithm.options.beta",
    "ckpt_path": "trainer.run_dir",
    "optimizer_config": "trainer.learning_rate, trainer.max_grad_norm and trainer.optimizer_kwargs",
}
"""Names of TRL and SkyRL that are other words here."""
T = TypeVar("T")
FREE, ROUNDING = "free", "rounding"
Free = Annotated[T, FREE]
"""Says where a run happens or how it is watched, not what it is: a resumed run may have another value."""
Rounding = Annotated[T, ROUNDING]
"""Changes rounding only: free on resume, unless the run promised the same bytes."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class DataConfig(Section):
    train_data: list[str | dict[str, Any]] = ["text_math?split=train"]
    """Env ids with options (`text_math?split=train&difficulty=2`), or jsonl and parquet files in SkyRL's row format."""
    val_data: Free[list[str | dict[str, Any]]] = ["text_math?split=val"]
    """The same, for held-out evaluation; and benchmarks, `skyrl_eval:gsm8k?data=gsm8k.jsonl&n=50`."""
    val_size: Free[int | None] = Field(default=None, gt=0)
    """Held-out tasks per evaluation, the first distinct ones; by default every row of files, and 500 tasks of envs."""


class TinyConfig(Section):
    """The model that `path: tiny` makes."""

    induction: bool = False
    """Whether its weights copy from the beginning, which is what an agent does all the time."""
    spaces: Literal["before", "after"] = "before"
    """Where a token has its word's space: after it, `color: navy` and `click[navy]` hold the same one."""
    config_kwargs: dict[str, Any] = {}
    """Its Qwen3 configuration: hidden_size, num_hidden_layers, vocab_size (which the tokenizer gets) ..."""


class LoRAConfig(Section):
    """Adapters to train in place of the weights. There is no dropout: it would put noise in every ratio."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights. Where only other entries are given, 32."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Adapters count alpha/rank times: the best learning rate then hardly depends on the rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The ends of the names of layers that get one, as peft has them: `[q_proj, v_proj]`."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: the learner's frozen layers in 4 bits."""
    sync: Literal["auto", "merged", "adapter"] = "auto"
    """What the engines get at each step; auto: the adapter with nf4, else weights with the adapter merged in."""

    @model_validator(mode="before")
    @classmethod
    def _with_rank(cls, given: Any) -> Any:
        return {"rank": 32, **given} if isinstance(given, dict) and given else given

    @property
    def hot_load(self) -> bool:
        """Whether the engines hold the base and load an adapter at each step, instead of merged weights."""
        sync = "adapter" if self.sync == "auto" and self.quantization == "nf4" else self.sync
        return self.rank > 0 and sync == "adapter"


class Warmstart(Section):
    """How the tiny policy first clones experts of the training data."""

    num_demonstrations: int = Field(default=4000, ge=0)
    """Expert episodes to clone; 0 for none."""
    target_loss: float = Field(default=0.3, ge=0)
    """Nats per token of the expert, at which cloning stops; 0 goes through all epochs."""
    epochs: float = Field(default=8.0, gt=0)
    """Passes over the demonstrations, at most."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW's."""
    batch_size: int = Field(default=32, gt=0)
    """Demonstrations per optimizer step."""


class ModelConfig(Section):
    path: str = "tiny"
    """A Hugging Face folder or name; `tiny` makes a small Qwen3 and clones the env's expert, without a download."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights, in the learner and in the engine."""
    tiny: TinyConfig = TinyConfig()
    lora: LoRAConfig = LoRAConfig()
    warmstart: Warmstart = Warmstart()


class PolicyConfig(Section):
    model: ModelConfig = ModelConfig()


class PlacementConfig(Section):
    colocate_all: Rounding[bool] = True
    """The learner and the engines take turns on the same devices."""
    policy_num_gpus_per_node: Rounding[int] = Field(default=0, ge=0, le=8)
    """GPUs for the learner; 0 trains on the CPU."""
    policy_num_nodes: Rounding[int] = Field(default=1, gt=0)
    """Machines that learn; on the CPU, processes that do."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """A registered trainer class: ppo, grpo, sapo, gspo, gspo_token, dapo, dr_grpo, cispo, dual_clip, or yours."""
    advantage_estimator: str = "grpo"
    """A registered estimator: grpo, rloo, reinforce++, maxrl, gae (ppo always has it), or yours."""
    reward_funcs: dict[str, float] = {}
    """Weights of the env's own reward (`env`, 1), of a task solved (`success`, 0) and of functions of `plugin_file`."""
    plugin_file: Free[str | None] = None
    """A Python file of yours that registers algorithms, engines, samplers, rewards and so on."""
    options: dict[str, Any] = {}
    """Hyper-parameters by TRL's names, where the algorithm has a use for them."""


class TrainerConfig(Section):
    run_dir: Free[str] = "runs/{run_name}"
    """Everything that the run writes; a second start in the same folder resumes it."""
    run_name: Free[str] = "run"
    """Names the run folder, and the run at a tracker."""
    project_name: Free[str] = "skyrl"
    """The project at a tracker."""
    logger: Free[Literal["tensorboard", "wandb", "trackio", "none"]] = "tensorboard"
    """A tracker; metrics.jsonl and report.html are always written."""
    seed: int = 0
    """Of tasks, sampling and the tiny policy."""
    deterministic: bool = False
    """The same bytes in every run: seeded requests in a fixed order, all of the loss computed by the learner."""
    strategy: Rounding[Literal["fsdp2"]] = "fsdp2"
    """How several learners share the weights."""
    policy: PolicyConfig = PolicyConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    max_steps: int = Field(default=50, ge=0)
    """Rollout steps in the whole run (a resumed run counts on)."""
    train_batch_size: int = Field(default=32, gt=0)
    """Prompts per step; each is tried `generator.num_generations` times."""
    num_iterations: int = Field(default=1, gt=0)
    """Epochs over one rollout (TRL's mu)."""
    num_mini_batches: int = Field(default=1, gt=0)
    """Optimizer steps in one epoch over a rollout."""
    micro_batch_tokens: Rounding[int] = Field(default=16384, gt=0)
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
    eval_batch_size: Free[int] = Field(default=1024, gt=0)
    """Held-out tasks that are tried at a time, each once."""
    eval_before_train: Free[bool] = True
    """Step 0 is a held-out evaluation."""
    eval_interval: Free[int] = Field(default=10, ge=0)
    """Steps between evaluations; 0 for none but the first and the last."""
    ckpt_interval: Free[int] = Field(default=10, ge=0)
    """Steps between checkpoints; 0 for the last only."""
    max_ckpts_to_keep: Free[int] = Field(default=2, gt=0)
    """Older checkpoints are deleted."""
    sync_tolerance: Free[float] = Field(default=5e-4, gt=0)
    """Largest difference between the engine's and the learner's logprobs after a weight sync."""


class AgentConfig(Section):
    """How the policy acts over many turns: docs/agents."""

    memory: Literal["full", "window", "summary", "no_thinking"] = "full"
    """What of the episode stands before the next output."""
    window: int = Field(default=4, gt=0)
    """Turns that `window` keeps, and whose observations `summary` leaves whole."""
    max_episode_tokens: int | None = Field(default=None, gt=0)
    """Sampled tokens of an episode, over all its turns."""
    tools: Literal["env", "template"] = "env"
    """Who tells the policy of its tools: the env's instructions, or the model's chat template from their schemas."""


class GeneratorConfig(Section):
    backend: str = "vllm"
    """The inference engine: vllm (within its actor), openai_server (vLLM's, in a process of its own), or yours."""
    num_inference_engines: int = Field(default=1, gt=0)
    """Each is a process with a copy of the policy."""
    inference_engine_tensor_parallel_size: Rounding[int] = Field(default=1, gt=0)
    """GPUs of one engine."""
    weight_sync_backend: Rounding[Literal["auto", "shared_memory", "nccl"]] = "auto"
    """How new weights reach the engines; auto chooses by the hardware."""
    num_generations: int = Field(default=8, gt=0)
    """Tries per prompt: the size of a GRPO group."""
    max_completion_length: int = Field(default=64, gt=0)
    """Tokens per turn."""
    max_model_len: int = Field(default=1024, gt=0)
    """Tokens per episode, prompts and observations included."""
    max_turns: int = Field(default=1, gt=0)
    """Answers of the policy in one episode."""
    max_concurrency: Rounding[int] = Field(default=256, gt=0)
    """Episodes in flight per engine."""
    temperature: float = Field(default=1.0, ge=0)
    """Of the rollouts; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in rollouts; 1 for none."""
    eval_temperature: Free[float] = Field(default=0.0, ge=0)
    """Of held-out evaluation."""
    episode_timeout: Free[float] = Field(default=300.0, gt=0)
    """Wall-clock seconds of a whole episode, its reset and all its turns included."""
    agent: AgentConfig = AgentConfig()
    engine_kwargs: Rounding[dict[str, Any]] = {}
    """Passed to vLLM as they are; `urls` (with openai_server) names servers that run already, one per engine."""


class EnvironmentConfig(Section):
    env_class: str = "text_math"
    """A gymnasium id, a short name for `skyrl/<name>-v0`, or one that `env_file` registers; a row may name its own."""
    env_file: Free[str | None] = None
    """A Python file of yours, loaded in every EnvWorker, that registers environments."""
    num_workers: Free[int] = Field(default=1, gt=0)
    """EnvWorker processes."""
    step_timeout: Free[float] = Field(default=30.0, gt=0)
    """Wall-clock seconds of one env call."""


class RayConfig(Section):
    address: Free[str | None] = None
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
        """One per GPU of each machine; on the CPU one per "machine"."""
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
    sections = _sections()
    settings = list(read_recipe(recipe, sections)) if recipe else []
    for setting in map(parse_override, overrides):
        if setting.name in sections and isinstance(setting.node, yaml.MappingNode):  # it is set as a whole
            section = setting.name.removesuffix("_kwargs") + "."  # tiny_kwargs is tiny
            settings = [each for each in settings if not _today(each.name).startswith(section)]
            settings += walk(setting.node, f"{setting.name}.", sections, setting.source)
        else:
            settings.append(setting)
    return _resolved(settings)


def saved_config(saved: dict[str, Any]) -> Config:
    """Of a checkpoint, this version's or an earlier one's. Raises UserError where it says what there is no more."""
    return _resolved(walk(yaml.compose(yaml.safe_dump(saved)), "", _sections(), "checkpoint")).config


def _sections() -> set[str]:
    """Names of settings whose entries are settings."""
    names = {name[:dot] for name in leaf_fields() for dot in range(len(name)) if name[dot] == "."}
    return names | {OPTIONS, f"{TINY}_kwargs"}


def _today(name: str) -> str:
    """`tiny_kwargs`, of recipes and run folders from when it was one dictionary, is `tiny` now."""
    _, old, entry = name.partition(f"{TINY}_kwargs.")
    if not old:
        return name
    return f"{TINY}.{entry}" if entry in TinyConfig.model_fields else f"{TINY}.config_kwargs.{entry}"


def _resolved(settings: Iterable[Setting]) -> Resolved:
    fields = leaf_fields()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in settings:
        name = _today(setting.name)
        if name in GONE and GONE[name] == value_of(setting):
            continue
        leaf = next((leaf for leaf in fields if f"{name}.".startswith(f"{leaf}.")), None)
        if leaf is None:
            raise _unknown(setting, list(fields))
        if name == leaf:
            is_text = fields[leaf].annotation is str and isinstance(setting.node, yaml.ScalarNode)
            values[leaf] = text_of(setting.node) if is_text else value_of(setting)
        else:  # one entry of a dictionary
            entry, entries = name[len(leaf) + 1 :], values.get(leaf, fields[leaf].default)
            if not isinstance(entries, dict) or "." in entry:
                raise _unknown(setting, list(fields))
            values[leaf] = entries | {entry: value_of(setting)}
        sources[leaf] = sources[name] = setting.source
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
        raise wrong_value(error, values, sources) from None


def wrong_value(
    error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str] = {}, prefix: str = ""
) -> UserError:
    """One sentence on the first of the values that is wrong; prefix: of the setting, before a value's name."""
    places = [(".".join(map(str, item["loc"])) + ".", item["msg"]) for item in error.errors()]
    name = next(name for name in values if places[0][0].startswith(f"{name}."))
    wanted = " or ".join(text.removeprefix("Input should be ") for at, text in places if at.startswith(f"{name}."))
    value = json.dumps(values[name], ensure_ascii=False, default=str)
    source = f" ({sources[name]})" if name in sources else ""
    return UserError(f"{prefix}{name} is {value}{source}, but should be {wanted}.")


def _check(config: Config) -> None:
    """What no single field can say."""
    generator, trainer = config.generator, config.trainer
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
    if trainer.deterministic and trainer.algorithm.options.get("correction") == "bypass":
        raise UserError(
            "trainer.algorithm.options.correction is bypass, but with trainer.deterministic=true it must be another: "
            "the engine's logprobs differ by rounding from run to run."
        )


def _unknown(setting: Setting, names: list[str]) -> UserError:
    """With the nearest setting: by its last part, wherever that lies, else by the whole name."""
    where = f"{setting.name} ({setting.source})"
    if section := [name for name in names if name.startswith(f"{setting.name}.")]:
        return UserError(f"{where} is a section: set one of {', '.join(section)}.")
    last = setting.name.rpartition(".")[2]
    if last in ELSEWHERE:
        return UserError(f"{where} is not a setting; here it is {ELSEWHERE[last]}.")
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
