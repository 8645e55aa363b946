"""Behaviour cloning of an env's expert, so that reinforcement learning has a start: `skyrl-trainer warmstart`.

Cloning stops when the loss has fallen to `target_loss`: at a number of steps one seed's clone knows half of its task
and another's all of it.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch

from skyrl_trainer.agent.prompt import load_chat_prompt
from skyrl_trainer.chats import Chat
from skyrl_trainer.data import Conversation, demonstrations, tasks
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.learner.sft import SFTTrainer, fit, make_rows
from skyrl_trainer.settings import Config, Warmstart
from skyrl_trainer.tiny.init_policy import refuse_used

LOSS_WINDOW = 10
"""Optimizer steps in one reading of the loss."""
WARMUP_STEPS = 20
MICRO_BATCH_TOKENS = 4096
"""Larger tensors cost more time in the C library."""


def warmstart(config: Config, out: Path, seconds: float = math.inf) -> str:
    """Clones experts of `data.train_data` into the policy `trainer.policy.model.path`; a sentence about it."""
    started, seed, model = time.monotonic(), config.trainer.seed, config.trainer.policy.model
    if model.path == "tiny":
        raise UserError("trainer.policy.model.path: name the policy to clone into; `init-policy` makes a tiny one.")
    source = tasks(config, config.data.train_data)
    conversations = list(demonstrations(source, model.warmstart.num_demonstrations, seed))
    losses = clone(model.path, out, conversations, model.warmstart, seed, seconds)
    return (
        f"Cloned {len(conversations)} expert episodes in {time.monotonic() - started:.0f} s: "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}. The policy is in {out}."
    )


def clone(
    policy: str, out: Path, conversations: Sequence[Conversation], options: Warmstart, seed: int, seconds: float
) -> list[float]:
    """Writes the clone into `out`, a new folder; returns the mean loss of every LOSS_WINDOW steps."""
    if not conversations:
        raise UserError("There are no demonstrations to clone: set warmstart.num_demonstrations to 1 or more.")
    refuse_used(out)
    deadline = time.monotonic() + seconds
    if not torch.cuda.is_available():
        # Batches of a tiny model gain little from more threads, lose much on a busy machine, and change bytes by them.
        torch.set_num_threads(1)
    steps = max(1, round(options.epochs * len(conversations) / options.batch_size))
    settings = {
        "learning_rate": options.learning_rate,
        "warmup_steps": min(WARMUP_STEPS, steps // 10),
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        "placement": {"policy_num_gpus_per_node": int(torch.cuda.is_available())},
    }
    config = Config.model_validate({"trainer": settings})
    rows = make_rows(load_chat_prompt(policy), [Chat(f"episode {i}", talk) for i, talk in enumerate(conversations)])
    learner = Learner(config, policy, steps)
    trainer = SFTTrainer(config).start(learner)
    losses, window = list[float](), list[float]()
    for metrics in fit(trainer.update, rows, options.batch_size, steps, seed):
        window.append(metrics["loss"])
        if len(window) == min(LOSS_WINDOW, steps):
            losses.append(mean(window))
            window = []
            if losses[-1] <= options.target_loss or time.monotonic() > deadline:
                break
    learner.save_pretrained(out)
    return losses
