"""Scores stored tokens with a model and says where their log-probabilities have moved.

In float32, by the learner's own pass and at the run's temperature, from the recorded ids. The tokens of step N were
sampled by the weights after step N - 1.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import collate, cut, make_rows
from skyrl_trainer.learner.model import Scorer, make_learner
from skyrl_trainer.run.checkpoint import DAMAGED, read_checkpoint
from skyrl_trainer.settings import Config, LoRAConfig
from skyrl_trainer.types import Trajectory

WORST = 10
"""Tokens that a report shows."""


def load_scorer(config: Config, model: str) -> tuple[Scorer, Any]:
    """A model's folder or name, or a run's checkpoints/step_..., in float32, and its tokenizer."""
    config = config.model_copy(deep=True)
    policy = config.trainer.policy.model
    policy.dtype = "float32"
    checkpoint = Path(model)
    if not (checkpoint / "learner.safetensors").is_file():
        policy.path, policy.lora = model, LoRAConfig()
        return Scorer(config, model), AutoTokenizer.from_pretrained(model)
    made = checkpoint.parent.parent / "init"
    start = made / ("cloned" if (made / "cloned").exists() else "random")
    learner = make_learner(config, str(start) if policy.path == "tiny" else policy.path, 1)
    try:
        learner.load_state_dict(read_checkpoint(checkpoint).learner)
    except DAMAGED as error:
        raise UserError(f"--recompute {model} is a damaged checkpoint ({error}); take another one.") from error
    return learner, learner.tokenizer


@torch.no_grad()
def score(trajectories: Sequence[Trajectory], scorer: Scorer) -> list[np.ndarray]:
    """The log-probability of every sampled token now, in order: one array [sampled tokens] a trajectory."""
    rows = make_rows(trajectories)
    scored: dict[int, np.ndarray] = {}
    for indices in cut(rows, range(len(rows)), scorer.config.trainer.micro_batch_tokens):
        logprobs_N, _ = scorer.logprobs(collate(rows, indices, scorer.device, scorer.dtype))
        parts = logprobs_N.cpu().numpy()
        ends = np.cumsum([rows[i].num_sampled for i in indices])
        scored |= zip(indices, np.split(parts, ends[:-1]), strict=True)
    return [scored.get(i, np.zeros(0)) for i in range(len(rows))]


def report(trajectories: Sequence[Trajectory], scorer: Scorer, tokenizer: Any) -> Iterator[str]:
    moved: list[tuple[float, str]] = []
    diffs = []
    for trajectory, now in zip(trajectories, score(trajectories, scorer), strict=True):
        before = np.array([x for turn in trajectory.turns for x in turn.logprobs])
        diff = np.abs(now - before)
        diffs.append(diff)
        yield f"  {trajectory.trajectory_id:<16}  {len(diff):>6} tokens  max |diff| {max(diff, default=0.0):.2e}"
        places = [(t, i, token) for t, turn in enumerate(trajectory.turns) for i, token in enumerate(turn.output_ids)]
        for k in np.argsort(-diff, kind="stable")[:WORST]:
            turn, i, token = places[k]
            where = f"{trajectory.trajectory_id}, turn {turn}, token {i}"
            text = f"  {where}: {tokenizer.decode([token])!r} recorded {before[k]:.6f}, now {now[k]:.6f}"
            moved.append((float(diff[k]), text))
    moved.sort(key=lambda pair: -pair[0])
    yield from ["moved most:", *(text for _, text in moved[:WORST])] if moved else []
    every = np.concatenate([*diffs, np.zeros(0)])
    largest, mean = max(every, default=0.0), every.mean() if len(every) else 0.0
    yield f"{len(every)} tokens: max |diff| {largest:.2e}, mean {mean:.2e}"
