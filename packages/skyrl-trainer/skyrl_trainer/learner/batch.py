"""Trajectories -> micro-batches of tensors: sorted by length, cut by a token budget, padded on the right.

Padding on the right needs no attention mask: under causal attention a token never sees what stands behind it. So the
model is called without one and takes its fast attention path. Order is a function of the input alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_trainer.errors import UserError
from skyrl_trainer.types import AdvantageBatch, TrainingBatch


@dataclass(slots=True)
class Row:
    """One trajectory, ready to be padded; what stands behind its last sampled token is cut off, nobody reads it.

    Example: token_ids [7, 8, 5, 2] with mask [0, 0, 1, 1] has num_sampled 2, and `old_logprobs` of shape [2].
    """

    trajectory_id: str
    token_ids: np.ndarray
    mask: np.ndarray
    """bool, as long as token_ids."""
    advantages: np.ndarray
    rollout_logprobs: np.ndarray
    old_logprobs: torch.Tensor | None = None
    """Of the sampled tokens only; None until they are known, or where the ratio is 1 by definition."""
    ref_logprobs: torch.Tensor | None = None

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())


def make_rows(batch: AdvantageBatch) -> list[Row]:
    """A row a trajectory, in order. Raises UserError for a trajectory whose first token would have no predecessor."""
    rows = []
    for trajectory, advantages in zip(batch.rewards.trajectories, batch.advantages, strict=True):
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
                np.array(advantages[:end], dtype=np.float64),
                np.array(trajectory.rollout_logprobs()[:end], dtype=np.float64),
            )
        )
    return rows


def cut(rows: Sequence[Row], indices: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cuts `indices` of rows into micro-batches of at most `token_budget` padded tokens, longest first.

    Rows of like length stand together, so there is little padding; the longest first, so that memory peaks at once.
    A row longer than the budget is a micro-batch by itself; one without a sampled token is in none.
    """
    ordered = sorted((i for i in indices if len(rows[i].token_ids)), key=lambda i: (-len(rows[i].token_ids), i))
    micro_batches: list[list[int]] = []
    width = 0
    for i in ordered:
        if micro_batches and (len(micro_batches[-1]) + 1) * width <= token_budget:
            micro_batches[-1].append(i)
        else:
            micro_batches.append([i])
            width = len(rows[i].token_ids)
    return micro_batches


def collate(rows: Sequence[Row], indices: Sequence[int], device: torch.device, dtype: torch.dtype) -> TrainingBatch:
    """Pads the chosen rows to [B, T] on `device`; `trajectory_index_B` holds their indices. dtype: of all floats."""
    chosen = [rows[i] for i in indices]
    shape = (len(chosen), max(len(row.token_ids) for row in chosen))
    input_ids, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    advantages, rollout = np.zeros(shape), np.zeros(shape)
    for b, row in enumerate(chosen):
        end = len(row.token_ids)
        input_ids[b, :end], mask[b, :end] = row.token_ids, row.mask
        advantages[b, :end], rollout[b, :end] = row.advantages, row.rollout_logprobs
    mask_BT = torch.from_numpy(mask).to(device)
    return TrainingBatch(
        input_ids_BT=torch.from_numpy(input_ids).to(device),
        mask_BT=mask_BT.to(dtype),
        advantages_BT=torch.from_numpy(advantages).to(device, dtype),
        rollout_logprobs_BT=torch.from_numpy(rollout).to(device, dtype),
        old_logprobs_BT=_scatter([row.old_logprobs for row in chosen], mask_BT, dtype),
        ref_logprobs_BT=_scatter([row.ref_logprobs for row in chosen], mask_BT, dtype),
        trajectory_index_B=torch.tensor(list(indices), device=device),
        lengths_B=torch.tensor([len(row.token_ids) for row in chosen], device=device),
    )


def _scatter(logprobs: list[torch.Tensor | None], mask_BT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Puts each row's sampled tokens where the mask is; None when no row has any."""
    known = [values.to(mask_BT.device, dtype) for values in logprobs if values is not None]
    if not known:
        return None
    padded_BT = torch.zeros(mask_BT.shape, dtype=dtype, device=mask_BT.device)
    padded_BT[mask_BT] = torch.cat(known)
    return padded_BT
