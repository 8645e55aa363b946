"""Behaviour cloning of an env's expert, so that RL has a start: `skyrl-trainer warmstart`."""

import math
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean

import torch

from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.chats import Chat
from skyrl_trainer.data import tasks
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.learner.sft import SFTTrainer, fit, make_rows
from skyrl_trainer.settings import Config, Warmstart
from skyrl_trainer.tiny.demonstrations import Conversation, demonstrations
from skyrl_trainer.tiny.init_policy import refuse_used
from skyrl_trainer.types import StepMetrics

STEPS_PER_LOOK = 10
"""Optimizer steps whose demonstrations say how much the clone knows."""
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
    print(f"cloning {len(conversations)} expert episodes", flush=True)
    steps, loss, match = clone(model.path, out, conversations, model.warmstart, seed, seconds)
    return (
        f"Cloned {len(conversations)} expert episodes in {time.monotonic() - started:.0f} s and {steps} steps: "
        f"loss {loss:.3f}, {match:.2f} of episodes word for word. The policy is in {out}."
    )


def clone(
    policy: str, out: Path, conversations: Sequence[Conversation], options: Warmstart, seed: int, seconds: float
) -> tuple[int, float, float]:
    """Writes the clone into `out`, a new folder. Returns the steps made, and at the end the loss in nats per token and
    the share of episodes that greedy decoding would surely repeat."""
    if not conversations:
        raise UserError("There are no demonstrations to clone: set warmstart.num_demonstrations to 1 or more.")
    refuse_used(out)
    deadline = time.monotonic() + seconds
    if not torch.cuda.is_available():
        # Batches of a tiny model gain little from more threads, lose much on a busy machine, and change bytes by them.
        torch.set_num_threads(1)
    steps = max(1, round(options.epochs * len(conversations) / options.batch_size))
    ((optimizer, rate),) = options.optimizer.items()
    settings = {
        "learning_rate": rate,
        "warmup_steps": min(WARMUP_STEPS, steps // 10),
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        "placement": {"policy_num_gpus_per_node": int(torch.cuda.is_available())},
    }
    config = Config.model_validate({"trainer": settings})
    # In the second pass a drill's first turn is not learned: the clone would begin as the longest talks do.
    short, known = (drills(conversations, weight) if optimizer == "muon" else [] for weight in (1, 0))
    chats = [Chat(f"episode {i}", talk) for i, talk in enumerate([*short, *known, *conversations])]
    rows = make_rows(load_chat_prompt(policy), chats)
    learner = {"adamw": Learner, "muon": MuonLearner}[optimizer](config, policy, steps)
    trainer = SFTTrainer(config).start(learner)
    latest = deque[StepMetrics](maxlen=STEPS_PER_LOOK)
    first = min(steps, len(short) // options.batch_size)
    passes = ((rows[: len(short)], first), (rows[len(short) :], steps - first))
    lessons = (fit(trainer.update, part, options.batch_size, number, seed) for part, number in passes)
    for metrics in chain(*lessons):
        latest.append(metrics)
        done, match = learner.optimizer_steps, mean(one["exact_match"] for one in latest)
        knows = match > options.target_exact_match and done > first
        if done % max(STEPS_PER_LOOK, steps // 10) == 0:
            print(f"cloning, step {done} of {steps}: {match:.2f} of episodes word for word", flush=True)
        if (knows or time.monotonic() > deadline) and done % STEPS_PER_LOOK == 0:
            break
    learner.save_pretrained(out)
    return learner.optimizer_steps, mean(one["loss"] for one in latest), match


def drills(talks: Sequence[Conversation], weight: int) -> list[Conversation]:
    """A talk's first turn, of that weight, then a later one of the same first word (`think`) with its neighbours."""
    found = list[Conversation]()
    for talk in talks:
        ends = [i for i, each in enumerate(talk, start=1) if each["role"] == "assistant"]
        words = [talk[end - 1]["content"].partition("[")[0] for end in ends]
        again = [n for n in range(2, len(ends)) if words[n] == words[0]]
        *asked, answer = talk[: ends[0]]
        first = [*asked, answer | {"weight": weight}]
        found += [first + talk[ends[n - 2] : ends[: n + 2][-1]] for n in again]
    return found


class MuonLearner(Learner):
    """The layers' matrices learn by Muon (Jordan et al. 2024), scaled to AdamW's updates (Liu et al. 2025, section 2.2)
    and at twice its rate, all else by AdamW. The rates fall to 0 in the last third of the steps."""

    def make_optimizer(self, parts: list[list[torch.nn.Parameter]], learning_rate: float, total_steps: int) -> None:
        mine = [p for p in self.model.base_model.layers.parameters() if p.ndim == 2]
        self.muon = torch.optim.Muon(mine, learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        others = [[p for p in part if p not in {*mine}] for part in parts]
        super().make_optimizer(others, learning_rate, total_steps)
        self.parts = parts
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0, 3.0 - 3.0 * step / total_steps)
        )

    def step(self) -> float:
        self.muon.param_groups[0]["lr"] = 2.0 * self.scheduler.get_last_lr()[0]
        self.muon.step()
        self.muon.zero_grad()
        return super().step()
