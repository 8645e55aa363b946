"""Scores stored tokens with a model, in float32: where have their log-probabilities moved?"""

import heapq
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_trainer.agent.tokenizer import load_tokenizer
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import collate, cut, make_rows
from skyrl_trainer.learner.model import Scorer, make_learner
from skyrl_trainer.run.checkpoint import DAMAGED, read_checkpoint
from skyrl_trainer.settings import Config
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
        return Scorer(config, model), load_tokenizer(model)
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
    """The log-probability of every sampled token now, in order: an array per trajectory."""
    rows = make_rows(trajectories)
    scored: dict[int, np.ndarray] = {}
    for indices in cut(rows, range(len(rows)), scorer.config.trainer.micro_batch_tokens):
        logprobs_N, _ = scorer.logprobs(collate(rows, indices, scorer.device, scorer.dtype))
        ends = np.cumsum([rows[i].num_sampled for i in indices])
        scored |= zip(indices, np.split(logprobs_N.cpu().numpy(), ends[:-1]), strict=True)
    return [scored.get(i, np.zeros(0)) for i in range(len(rows))]


def report(trajectories: Sequence[Trajectory], scorer: Scorer, tokenizer: Any) -> Iterator[str]:
    tokens: list[tuple[float, str, int, float, float]] = []  # |diff|, where, the token, recorded, now
    for trajectory, now in zip(trajectories, score(trajectories, scorer), strict=True):
        name, first = trajectory.trajectory_id, len(tokens)
        scores = iter(now.tolist())
        order = trajectory.by_time()
        for t, turn in enumerate(trajectory.turns):
            for i, (token, before) in enumerate(zip(turn.output_ids, turn.logprobs, strict=True)):
                after = next(scores)
                tokens.append((abs(after - before), f"{name}, turn {order.index(t)}, token {i}", token, before, after))
        largest = max((moved[0] for moved in tokens[first:]), default=0.0)
        yield f"  {name:<16}  {len(tokens) - first:>6} tokens  max |diff| {largest:.2e}"
    if tokens:
        yield "moved most:"
    for _, where, token, before, after in heapq.nlargest(WORST, tokens, key=itemgetter(0)):
        yield f"  {where}: {tokenizer.decode([token])!r} recorded {before:.6f}, now {after:.6f}"
    diffs = np.array([moved[0] for moved in tokens] or [0.0])
    yield f"{len(tokens)} tokens: max |diff| {diffs.max():.2e}, mean {diffs.mean():.2e}"
