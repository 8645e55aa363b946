"""Every setting of a run, typed. A YAML recipe with `a.b=c` overrides fills it; at most 60 leaf fields.

Names are SkyRL's where it has one, TRL's for hyper-parameters. The description under a field is its manual:
`--dry-run` and docs/configuration.md are made from it. A field exists when two users want different values.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class DataConfig(Section):
    train_data: list[str | dict[str, Any]] = ["text_math?split=train"]
    """Env ids with options (`text_math?split=train&difficulty=2`), or jsonl and parquet files in SkyRL's row format."""
    val_data: list[str | dict[str, Any]] = ["text_math?split=val"]
    """The same, for held-out evaluation."""


class ModelConfig(Section):
    path: str = "tiny"
    """A Hugging Face folder or name; `tiny` makes a small Qwen3 and clones the env's expert, without a download."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights, in the learner and in the engine."""
    tiny_kwargs: dict[str, Any] = {}
    """Of the tiny policy's Qwen3 configuration: hidden_size, num_hidden_layers and the like."""
    num_demonstrations: int = Field(4000, ge=0)
    """Expert episodes of the training data that the tiny policy clones before it learns by itself; 0 for none."""


class PolicyConfig(Section):
    model: ModelConfig = ModelConfig()


class PlacementConfig(Section):
    colocate_all: bool = True
    """The learner and the engines take turns on the same devices."""
    policy_num_gpus_per_node: int = Field(0, ge=0, le=8)
    """GPUs for the learner; 0 trains on the CPU."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """A registered trainer class."""
    advantage_estimator: str = "grpo"
    epsilon: float = Field(0.2, ge=0)
    """PPO's clip range, below 1 and (unless `epsilon_high` is given) above it."""
    epsilon_high: float | None = Field(None, ge=0)
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy in the loss; 0 loads no reference."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """`rollout` takes the engine's logprobs for the old policy and saves a forward pass."""


class TrainerConfig(Section):
    run_dir: str = "runs/{run_name}"
    run_name: str = "run"
    project_name: str = "skyrl"
    logger: str = "tensorboard"
    """A tracker of accelerate (tensorboard, wandb, trackio) or none; metrics.jsonl and report.html are always written."""
    seed: int = 0
    deterministic: bool = False
    """The same bytes in every run: seeded requests in a fixed order, all of the loss computed by the learner."""
    strategy: Literal["fsdp2"] = "fsdp2"
    """How several learners share the weights."""
    policy: PolicyConfig = PolicyConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    max_steps: int = Field(50, ge=0)
    """Rollout steps in the whole run (a resumed run counts on)."""
    train_batch_size: int = Field(32, gt=0)
    """Prompts a step; each is tried `generator.num_generations` times."""
    num_iterations: int = Field(1, gt=0)
    """Epochs over one rollout (TRL's mu)."""
    num_mini_batches: int = Field(1, gt=0)
    """Optimizer steps in one epoch over a rollout."""
    micro_batch_tokens: int = Field(16384, gt=0)
    """Padded tokens in one forward and backward pass; gradients accumulate over a mini-batch."""
    learning_rate: float = Field(1e-6, gt=0)
    lr_scheduler_type: str = "constant_with_warmup"
    """A schedule of transformers, by its name."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps until the learning rate is full."""
    optimizer_kwargs: dict[str, Any] = {"betas": [0.9, 0.99], "weight_decay": 0.0}
    """Passed to torch.optim.AdamW as they are."""
    max_grad_norm: float = Field(1.0, gt=0)
    eval_batch_size: int = Field(500, gt=0)
    """Held-out tasks an evaluation (the first ones of `data.val_data`), each tried once."""
    eval_before_train: bool = True
    eval_interval: int = Field(10, ge=0)
    """Steps between evaluations; 0 for none but the first and the last."""
    ckpt_interval: int = Field(10, ge=0)
    """Steps between checkpoints; 0 for the last only."""
    max_ckpts_to_keep: int = Field(2, gt=0)
    resume_mode: Literal["latest", "none"] = "latest"
    """`latest` goes on from the newest checkpoint of the run folder, if there is one."""
    sync_tolerance: float = Field(5e-4, gt=0)
    """Largest difference between the engine's and the learner's logprobs after a weight sync."""


class GeneratorConfig(Section):
    backend: Literal["vllm", "transformers"] = "vllm"
    num_inference_engines: int = Field(1, gt=0)
    inference_engine_tensor_parallel_size: int = Field(1, gt=0)
    weight_sync_backend: Literal["auto", "shared_memory", "nccl"] = "auto"
    num_generations: int = Field(8, gt=0)
    """Tries a prompt: the size of a GRPO group."""
    max_completion_length: int = Field(64, gt=0)
    """Tokens a turn."""
    max_model_len: int = Field(1024, gt=0)
    """Tokens an episode, prompts and observations included."""
    max_turns: int = Field(1, gt=0)
    max_concurrency: int = Field(256, gt=0)
    """Episodes in flight an engine."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    eval_temperature: float = Field(0.0, ge=0)
    episode_timeout: float = Field(300.0, gt=0)
    """Wall-clock seconds of a whole episode, its reset and all its turns included."""
    engine_kwargs: dict[str, Any] = {}
    """Passed to vLLM as they are."""


class EnvironmentConfig(Section):
    env_class: str = "text_math"
    """A gymnasium id, a short name for `skyrl/<name>-v0`, or one that `env_file` registers; a row may name its own."""
    env_file: str | None = None
    """A Python file of yours, loaded in every EnvWorker, that registers environments."""
    num_workers: int = Field(1, gt=0)
    """EnvWorker processes."""
    step_timeout: float = Field(30.0, gt=0)
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
