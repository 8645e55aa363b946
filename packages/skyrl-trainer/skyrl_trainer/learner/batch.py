"""Trajectories -> micro-batches of tensors: sorted by length, cut by a token budget, equal prompts held once.

Order is a function of the input alone. How a model computes such a micro-batch: learner/shared_prefix.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_trainer.errors import UserError
from skyrl_trainer.types import AdvantageBatch, TrainingBatch, Trajectory


@dataclass(slots=True)
class Row:
    """One trajectory; what stands behind its last sampled token is cut off, nobody reads it.

    Example: token_ids [7, 8, 5, 2] with mask [0, 0, 1, 1] has num_sampled 2, and `old_logprobs` of shape [2].
    """

    trajectory_id: str
    token_ids: np.ndarray
    mask: np.ndarray
    """bool, as long as token_ids."""
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    """Zeros until `set_advantages`."""
    old_logprobs: torch.Tensor | None = None
    """Of the sampled tokens only; None until they are known, or where the ratio is 1 by definition."""
    ref_logprobs: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """A critic's, of the sampled tokens."""

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def prompt(self) -> np.ndarray:
        """What stands before the first sampled token."""
        return self.token_ids[: int(self.mask.argmax())]

    @property
    def rest(self) -> np.ndarray:
        """What follows the prompt, without the last token, which predicts nothing."""
        return self.token_ids[int(self.mask.argmax()) : -1]


def make_rows(trajectories: Sequence[Trajectory]) -> list[Row]:
    """A row a trajectory, in order. Raises UserError for a trajectory whose first token would have no predecessor."""
    rows = []
    for trajectory in trajectories:
        mask = np.array(trajectory.loss_mask(), dtype=bool)
        if len(mask) and mask[0]:
            raise UserError(
                f"Trajectory {trajectory.trajectory_id} starts with a sampled token; its prompt needs at least one."
            )
        end = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
        rows.append(
            Row(
                trajectory.trajectory_id,
                np.array(trajectory.token_ids()[:end], dtype=np.int64),
                mask[:end],
                np.array(trajectory.rollout_logprobs()[:end], dtype=np.float64),
                np.zeros(end),
            )
        )
    return rows


def set_advantages(rows: Sequence[Row], batch: AdvantageBatch, values: Sequence[torch.Tensor] | None = None) -> None:
    """Fills in the advantages, and with a critic the returns and its values, [sampled tokens + 1] a trajectory."""
    for i, row in enumerate(rows):
        end = len(row.mask)
        row.advantages = np.array(batch.advantages[i][:end], dtype=np.float64)
        if batch.returns is not None:
            row.returns = torch.tensor(batch.returns[i][:end], dtype=torch.float64)[torch.from_numpy(row.mask)]
        if values is not None:
            row.values = values[i][:-1]


def with_end(row: Row) -> Row:
    """The row with one token more, so that a critic also says what it expects behind the last sampled one."""
    return Row(
        row.trajectory_id,
        np.append(row.token_ids, row.token_ids[-1:]),
        np.append(row.mask, True),
        np.append(row.rollout_logprobs, 0.0),
        np.append(row.advantages, 0.0),
    )


def cut(rows: Sequence[Row], indices: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cuts `indices` of rows into micro-batches of at most `token_budget` padded tokens, longest first.

    Continuations of like length stand together, so there is little padding; the longest first, so that memory peaks
    at once. A row over the budget is a micro-batch by itself; one without a sampled token is in none.
    """
    ordered = sorted((i for i in indices if len(rows[i].token_ids)), key=lambda i: (-len(rows[i].rest), i))
    micro_batches: list[list[int]] = []
    width = 0
    prompts: dict[bytes, int] = {}
    for i in ordered:
        row = rows[i]
        prompts[row.prompt.tobytes()] = len(row.prompt)
        tokens = (len(micro_batches[-1]) + 1) * width + len(prompts) * max(prompts.values()) if micro_batches else 0
        if micro_batches and tokens <= token_budget:
            micro_batches[-1].append(i)
        else:
            micro_batches.append([i])
            width = max(1, len(row.rest))
            prompts = {row.prompt.tobytes(): len(row.prompt)}
    return micro_batches


def collate(rows: Sequence[Row], indices: Sequence[int], device: torch.device, dtype: torch.dtype) -> TrainingBatch:
    """The chosen rows as tensors on `device`; `trajectory_N` holds their indices. dtype: of all floats."""
    chosen = [rows[i] for i in indices]
    numbers: dict[bytes, int] = {}
    prompt_B = [numbers.setdefault(row.prompt.tobytes(), len(numbers)) for row in chosen]
    prompts = [np.frombuffer(ids, dtype=np.int64) for ids in numbers]
    prompt_ids_QS = _padded(prompts)
    rest_ids_BT = _padded([row.rest for row in chosen])
    predictors = []
    for b, (row, q) in enumerate(zip(chosen, prompt_B, strict=True)):
        start = len(row.prompt)
        before = row.mask[start:].nonzero()[0] - 1 + prompt_ids_QS.size + b * rest_ids_BT.shape[1]
        before[0] = q * prompt_ids_QS.shape[1] + start - 1
        predictors.append(before)

    def floats(values: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device, dtype)

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return TrainingBatch(
        prompt_ids_QS=ints(prompt_ids_QS),
        prompt_lengths_Q=ints([len(ids) for ids in prompts]),
        prompt_B=ints(prompt_B),
        rest_ids_BT=ints(rest_ids_BT),
        predictors_N=ints(np.concatenate(predictors)),
        target_ids_N=ints(np.concatenate([row.token_ids[row.mask] for row in chosen])),
        trajectory_N=ints(np.repeat(indices, [row.num_sampled for row in chosen])),
        advantages_N=floats([row.advantages[row.mask] for row in chosen]),
        rollout_logprobs_N=floats([row.rollout_logprobs[row.mask] for row in chosen]),
        old_logprobs_N=_joined([row.old_logprobs for row in chosen], device, dtype),
        ref_logprobs_N=_joined([row.ref_logprobs for row in chosen], device, dtype),
        returns_N=_joined([row.returns for row in chosen], device, dtype),
        values_N=_joined([row.values for row in chosen], device, dtype),
    )


def _padded(sequences: list[np.ndarray]) -> np.ndarray:
    """int64, padded on the right with 0, at least one token wide."""
    padded = np.zeros((len(sequences), max(1, *map(len, sequences))), np.int64)
    for row, ids in zip(padded, sequences, strict=True):
        row[: len(ids)] = ids
    return padded


def _joined(logprobs: list[torch.Tensor | None], device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """One after the other; None when no row has any."""
    known = [values.to(device, dtype) for values in logprobs if values is not None]
    return torch.cat(known) if known else None
