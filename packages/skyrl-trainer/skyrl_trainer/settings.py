"""Every setting of a run, typed. A YAML recipe with `a.b=c` overrides fills it; at most 90, an algorithm's included.

Names are SkyRL's where it has one, TRL's for hyper-parameters. The description under a field is its manual:
docs/configuration.md and the JSON schema are made from it. A field exists when two users want different values.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, field_validator, model_validator
from pydantic.fields import FieldInfo

from skyrl_trainer.files import local_folder

OPTIONS = "trainer.algorithm.options"
T = TypeVar("T")
FREE, ROUNDING = "free", "rounding"
Free = Annotated[T, FREE]
"""Says where a run happens or how it is watched, not what it is: a resumed run may have another value."""
Turns = Annotated[str, Field(pattern="^(window|summary):[1-9][0-9]*$")]
Rounding = Annotated[T, ROUNDING]
"""Changes rounding only: free on resume, unless the run promised the same bytes."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class DataConfig(Section):
    train_data: list[str | dict[str, Any]] = ["text_math?split=train"]
    """Env ids with options (`text_math?split=train&difficulty=2`), or jsonl and parquet files in SkyRL's row format, on
    disk or of a data set on Hugging Face (`owner/name?split=train`)."""
    val_data: Free[list[str | dict[str, Any]]] = ["text_math?split=val"]
    """For held-out evaluation, with `tries` of a task (`a.jsonl?tries=8`); and benchmarks, `skyrl_eval:gsm8k?n=50`."""
    val_size: Free[int | None] = Field(None, gt=0)
    """Held-out tasks per evaluation: first rows, and distinct tasks of envs; by default all rows, and 500 of envs."""

    @field_validator("train_data", "val_data", mode="before", json_schema_input_type=str | dict | list[str | dict])
    @classmethod
    def _one_needs_no_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value


class TinyConfig(Section):
    """The model that `path: tiny` makes."""

    induction: bool = False
    """Whether its weights copy from the beginning, as agents do all the time."""
    spaces: Literal["before", "after"] = "before"
    """Where a token has its word's space: after it, `color: navy` and `click[navy]` hold the same one."""
    config_kwargs: dict[str, Any] = {}
    """Its Qwen3 configuration: hidden_size, num_hidden_layers, vocab_size (which the tokenizer gets) ..."""


class LoRAConfig(Section):
    """Adapters to train in place of the weights. There is no dropout: it would put noise in every ratio."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights. Where only other entries are given, 32."""
    alpha: float = Field(32.0, gt=0)
    """Adapters count alpha/rank times: the best learning rate then hardly depends on the rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The ends of the names of layers that get one, as peft has them: `[q_proj, v_proj]`."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: the learner's frozen layers in 4 bits."""

    @model_validator(mode="before")
    @classmethod
    def _with_rank(cls, given: Any) -> Any:
        return {"rank": 32, **given} if isinstance(given, dict) and given else given


class Warmstart(Section):
    """How the tiny policy first clones experts of the training data."""

    num_demonstrations: int = Field(4000, ge=0)
    """Expert episodes to clone, or all that there are; 0 for none."""
    target_exact_match: float = Field(0.2, ge=0, le=1)
    """Share of the expert's episodes that greedy decoding would surely repeat, above which cloning stops."""
    epochs: float = Field(8.0, gt=0)
    """Passes over the demonstrations, at most."""
    optimizer: dict[Literal["adamw", "muon"], PositiveFloat] = Field({"adamw": 1e-3}, min_length=1, max_length=1)
    """Its name and learning rate; `muon` is for long episodes."""
    batch_size: int = Field(32, gt=0)
    """Demonstrations per optimizer step."""


class ModelConfig(Section):
    path: str = "tiny"
    """A Hugging Face folder or name; `tiny` makes a small Qwen3 and clones the env's expert, without a download."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine, and of the learner's passes; weights that learn are float32."""
    tiny: TinyConfig = TinyConfig()
    lora: LoRAConfig = LoRAConfig()
    warmstart: Warmstart = Warmstart()


class PolicyConfig(Section):
    model: ModelConfig = ModelConfig()


class PlacementConfig(Section):
    colocate_all: Rounding[bool] = True
    """The learner and the engines take turns on the same devices."""
    policy_num_gpus_per_node: Rounding[int] = Field(0, ge=0, le=8)
    """GPUs for the learner; 0 trains on the CPU."""
    policy_num_nodes: Rounding[int] = Field(1, gt=0)
    """Machines that learn; on the CPU, processes that do."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """A registered trainer class: ppo, grpo, sapo, gspo, gspo_token, dapo, dr_grpo, cispo, dual_clip, or yours."""
    advantage_estimator: str = "grpo"
    """A registered estimator: grpo, rloo, reinforce++, maxrl, gae (ppo always has it), or yours."""
    reward_funcs: dict[str, float] = {}
    """Weights: of the env's reward (`env`, 1), a task solved (`success`, 0), overlength (`overlong`, 0), functions."""
    plugin_file: Free[str | None] = None
    """A Python file of yours that registers algorithms, engines, samplers, rewards and so on."""
    options: dict[str, Any] = {}
    """Hyper-parameters by TRL's names, where the algorithm has a use for them."""


class TrainerConfig(Section):
    run_dir: Free[str] = Field("runs/{run_name}", min_length=1)
    """Everything that the run writes; a second start in the same folder resumes it. On a disk, or `s3://bucket/...`."""
    run_name: Free[str] = Field("run", min_length=1)
    """Names the run folder, and the run at a tracker."""
    project_name: Free[str] = "skyrl"
    """The project at a tracker."""
    logger: Free[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "prometheus", "none"]] = "tensorboard"
    """A tracker; metrics.jsonl and report.html are always written."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of tasks, sampling and the tiny policy."""
    deterministic: bool = False
    """The same bytes in every run on CPUs: seeded requests in a fixed order."""
    policy: PolicyConfig = PolicyConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    max_steps: int = Field(50, ge=0)
    """Rollout steps in the whole run (a resumed run counts on)."""
    max_staleness: int = Field(0, ge=0)
    """Steps that a token may be old when it is learned from; 0: rollouts and learning take turns."""
    train_batch_size: int = Field(32, gt=0)
    """Prompts per step; each is tried `generator.num_generations` times."""
    num_iterations: int = Field(1, gt=0)
    """Epochs over one rollout (TRL's mu)."""
    num_mini_batches: int = Field(1, gt=0)
    """Optimizer steps in one epoch over a rollout."""
    micro_batch_tokens: Rounding[int] = Field(16384, gt=0)
    """Tokens in one forward and backward pass; gradients accumulate over a mini-batch."""
    gradient_checkpointing: bool = False
    """Computes each layer's activations again in the backward pass instead of keeping them."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's, when warmed up."""
    lr_scheduler_type: str = "constant_with_warmup"
    """A schedule of transformers, with what it needs: `cosine_with_min_lr?min_lr_rate=0.1`."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps until the learning rate is full; the first has its share of it, not 0."""
    optimizer_kwargs: dict[str, Any] = {"betas": [0.9, 0.99], "weight_decay": 0.0}
    """Passed to torch.optim.AdamW as they are. The usual beta2, 0.999, averages over more steps than a run has."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """The gradient of a mini-batch is clipped to this norm."""
    eval_batch_size: Free[int] = Field(1024, gt=0)
    """Held-out tasks that are tried at a time, each once."""
    eval_before_train: Free[bool] = True
    """Step 0 is a held-out evaluation."""
    eval_interval: Free[int] = Field(10, ge=0)
    """Steps between evaluations; 0 for none but the first and the last."""
    ckpt_interval: Free[int] = Field(10, ge=0)
    """Steps between checkpoints; 0 for the last only."""
    max_ckpts_to_keep: Free[int] = Field(2, gt=0)
    """Older checkpoints are deleted."""


class AgentConfig(Section):
    """How the policy acts over many turns: docs/agents."""

    run: str | list[str] | None = None
    """An agent of yours; it asks the policy as an OpenAI endpoint: a function, `my.py:agent`, or a command, a list."""
    memory: Literal["full", "no_thinking", "window", "summary"] | Turns = "full"
    """What stands before the next output: `full`, `no_thinking`, the last turns (`window:4`), or a `summary:4`."""
    max_episode_tokens: int | None = Field(None, gt=0)
    """Sampled tokens of an episode, over all its turns."""
    tools: str = "env"
    """Who tells of tools: the `env`, or the model's chat `template`; or vLLM's parser of calls (and of thoughts) for an
    agent of yours and `serve`: `hermes`, `hermes+qwen3`, `+qwen3`."""


class GeneratorConfig(Section):
    backend: Rounding[str] = "vllm"
    """The inference engine: vllm (within its actor), openai_server (vLLM's, in a process of its own), or yours."""
    num_inference_engines: Rounding[int] = Field(1, gt=0)
    """Each is a process with a copy of the policy."""
    inference_engine_tensor_parallel_size: Rounding[int] = Field(1, gt=0)
    """GPUs of one engine."""
    weight_sync_backend: Rounding[Literal["auto", "shared_memory", "nccl", "adapter"]] = "auto"
    """How new weights reach the engines, an adapter merged in or (adapter) alone; auto: as fits placement and model."""
    num_generations: int = Field(8, gt=0)
    """Tries per prompt: the size of a GRPO group."""
    max_completion_length: int = Field(64, gt=0)
    """Tokens per turn."""
    max_model_len: int = Field(1024, gt=5)
    """Tokens of a context, prompts and observations included."""
    max_turns: int = Field(1, gt=0)
    """Answers of the policy in one episode."""
    max_concurrency: Rounding[int] = Field(256, gt=0)
    """Sequences at a time in an engine; more episodes are begun."""
    temperature: float = Field(1.0, ge=0)
    """Of the rollouts; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling in rollouts; 1 for none."""
    eval_temperature: Free[float] = Field(0.0, ge=0)
    """Of held-out evaluation."""
    episode_timeout: Free[float] = Field(300.0, gt=0)
    """Wall-clock seconds of a whole episode, its reset and all its turns included."""
    agent: AgentConfig = AgentConfig()
    engine_kwargs: Rounding[dict[str, Any]] = {}
    """Passed to vLLM as they are; `urls` (with openai_server) names servers that run already, one per engine."""

    @property
    def chat_template_kwargs(self) -> Any:
        """Of the model's chat template, by vLLM's name: prompts are made here."""
        return self.engine_kwargs.get("default_chat_template_kwargs") or {}


class EnvironmentConfig(Section):
    env_class: str = "text_math"
    """A gymnasium id, a short name for `skyrl/<name>-v0`, or one that `env_file` registers; a row may name its own."""
    env_file: Free[str | None] = None
    """A Python file of yours, loaded in every EnvWorker, that registers environments."""
    num_workers: Free[int] = Field(1, gt=0)
    """EnvWorker processes."""
    step_timeout: Free[float] = Field(30.0, gt=0)
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
    def run_address(self) -> str:
        """The run folder as it is named, `{run_name}` filled in."""
        return self.trainer.run_dir.replace("{run_name}", self.trainer.run_name)

    @property
    def run_path(self) -> Path:
        """Where the run works: its folder, or the local one that stands in for an address."""
        return local_folder(self.run_address)

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
