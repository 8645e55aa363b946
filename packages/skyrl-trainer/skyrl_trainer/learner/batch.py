"""Trajectories -> micro-batches of tensors: cut by a token budget, equal prompts held once, nothing padded."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.segments import sent
from skyrl_trainer.types import AdvantageBatch, TrainingBatch, Trajectory


@dataclass(slots=True)
class Row:
    """One trajectory, without what stands behind a segment's last sampled token.
    Example: token_ids [7, 8, 5, 2] with mask [0, 0, 1, 1] has num_sampled 2, and `old_logprobs` of shape [2].
    """

    trajectory_id: str
    token_ids: np.ndarray
    mask: np.ndarray
    """bool, as long as token_ids."""
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    old_logprobs: Tensor | None = None
    """Of the sampled tokens only, as the next three; None: not known, or the ratio is 1 by definition."""
    ref_logprobs: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    shared: int | None = None
    """How many first tokens are computed once for all rows that have them; None: what stands before the answer."""
    later: tuple[int, ...] = ()
    """Where in token_ids the second segment begins, and the third...: each is a context of its own."""
    turns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64: in which turn each of the sampled tokens was sampled; empty: all in turn 0."""
    group: int = 0
    """Which sample the trajectory is a try of."""
    fresh: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """bool: which of the sampled tokens the newest weights have sampled; empty: all."""

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def prompt(self) -> np.ndarray:
        """What stands before the first sampled token, or `shared` tokens of it."""
        return self.token_ids[: int(self.mask.argmax()) if self.shared is None else self.shared]

    @property
    def rest(self) -> np.ndarray:
        """What follows the prompt, without the last token, which predicts nothing."""
        return self.token_ids[len(self.prompt) : -1]


def kept(trajectory: Trajectory) -> tuple[np.ndarray, tuple[int, ...]]:
    """Which of `token_ids()` a row holds (int64), and where among them the second and later segments begin."""
    places, starts, start = list[np.ndarray](), list[int](), 0
    for segment in trajectory.segments():
        if segment[0].output_ids and not segment[0].prompt_ids:
            raise UserError(f"Trajectory {trajectory.trajectory_id} starts with a sampled token: it needs a prompt.")
        lengths = [n for turn in segment for n in (len(turn.prompt_ids), len(turn.output_ids))]
        while lengths and not lengths[-1]:  # a turn without a token, and the prompt before it
            del lengths[-2:]
        if lengths:
            starts.append(sum(map(len, places)))
            places.append(np.arange(start, start + sum(lengths)))
        start += sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in segment)
    return np.concatenate([np.arange(0), *places]), tuple(starts[1:])


def make_rows(
    trajectories: Sequence[Trajectory], groups: Sequence[int] | None = None, newest: int | None = None
) -> list[Row]:
    """A row per trajectory, in order. groups: whose tries they are. newest: fresh weights' version; None: all are."""
    rows = []
    for trajectory, group in zip(trajectories, groups or [0] * len(trajectories), strict=True):
        places, later = kept(trajectory)
        sampled = [len(turn.output_ids) for turn in trajectory.turns]
        versions = [version for turn in trajectory.turns for version in turn.weight_versions]
        rows.append(
            Row(
                trajectory.trajectory_id,
                np.array(trajectory.token_ids(), dtype=np.int64)[places],
                np.array(trajectory.loss_mask(), dtype=bool)[places],
                np.array(trajectory.rollout_logprobs(), dtype=np.float64)[places],
                np.zeros(len(places)),
                later=later,
                turns=np.repeat(np.arange(len(sampled)), sampled),
                group=group,
                fresh=np.array([] if newest is None else versions) == newest,
            )
        )
    return rows


def set_advantages(rows: Sequence[Row], batch: AdvantageBatch, values: Sequence[Tensor] | None = None) -> None:
    """Fills in the advantages, and with a critic the returns and its values, per sampled token."""
    for i, row in enumerate(rows):
        row.advantages[row.mask] = batch.advantages[i]
        if batch.returns is not None:
            row.returns = torch.tensor(batch.returns[i], dtype=torch.float64)
        if values is not None:
            row.values = values[i]


def record_advantages(batch: AdvantageBatch) -> None:
    """Into each turn of the record, for people."""
    for trajectory, advantages in zip(batch.rewards.trajectories, batch.advantages, strict=True):
        sampled = iter(advantages)
        for turn in trajectory.turns:
            turn.advantages[:] = islice(sampled, len(turn.output_ids))  # a role's turns share it with the episode's


def by_prompt(rows: Sequence[Row], indices: Sequence[int]) -> list[list[int]]:
    """The rows that have a sampled token, in groups of one prompt; the longest first, in and among the groups."""
    groups: dict[bytes, list[int]] = {}
    for i in sorted((i for i in indices if len(rows[i].token_ids)), key=lambda i: (-len(rows[i].token_ids), i)):
        groups.setdefault(rows[i].prompt.tobytes(), []).append(i)
    return list(groups.values())


def cut(rows: Sequence[Row], indices: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cuts `indices` of rows into as few micro-batches of at most `token_budget` tokens as their order allows, equally
    full, a shared prompt counted once; the longest first, so that memory peaks at once. A longer row is one by itself.
    """
    groups = by_prompt(rows, indices)
    sizes = [(i, len(rows[i].prompt), len(rows[i].rest), i == group[0]) for group in groups for i in group]

    def filled(budget: int) -> list[list[int]]:
        micro_batches, used = list[list[int]](), 0
        for i, prompt, rest, first in sizes:
            used += prompt * first + rest
            if used > budget or not micro_batches:
                micro_batches.append([])
                used = prompt + rest
            micro_batches[-1].append(i)
        return micro_batches

    fewest = len(filled(token_budget))
    return filled(bisect_left(range(token_budget), True, key=lambda budget: len(filled(budget)) == fewest))


def collate(rows: Sequence[Row], indices: Sequence[int], device: torch.device, dtype: torch.dtype) -> TrainingBatch:
    """The chosen rows as tensors on `device`; `trajectory_N` holds their indices. dtype: of all floats."""
    chosen = [rows[i] for i in indices]
    segments, places_P, predictors = _segments(chosen)
    counts = [row.num_sampled for row in chosen]
    fresh = [row.fresh if len(row.fresh) else np.ones(row.num_sampled, bool) for row in chosen]

    def joined(values: list[np.ndarray], dtype: torch.dtype | None = None) -> Tensor:
        return sent(np.concatenate(values), device).to(device, dtype)

    return TrainingBatch(
        ids_P=joined([ids for ids, _ in segments]),
        places_P=joined(places_P),
        lengths_S=[len(ids) for ids, _ in segments],
        prefix_S=[prefix for _, prefix in segments],
        predictors_N=joined(predictors),
        target_ids_N=joined([row.token_ids[row.mask] for row in chosen]),
        trajectory_N=joined([np.repeat(np.array(indices, np.int64), counts)]),
        turn_N=joined([row.turns if len(row.turns) else np.zeros(row.num_sampled, np.int64) for row in chosen]),
        fresh_F=joined([np.concatenate(fresh).nonzero()[0]]),
        group_N=joined([np.repeat(np.array([row.group for row in chosen], np.int64), counts)]),
        advantages_N=joined([row.advantages[row.mask] for row in chosen], dtype),
        rollout_logprobs_N=joined([row.rollout_logprobs[row.mask] for row in chosen], dtype),
        old_logprobs_N=_joined([row.old_logprobs for row in chosen], device, dtype),
        ref_logprobs_N=_joined([row.ref_logprobs for row in chosen], device, dtype),
        returns_N=_joined([row.returns for row in chosen], device, dtype),
        values_N=_joined([row.values for row in chosen], device, dtype),
    )


# Segments as (ids, the segment that it continues or -1), their tokens' places, where a row's tokens are predicted.
def _segments(rows: list[Row]) -> tuple[list[tuple[np.ndarray, int]], list[np.ndarray], list[np.ndarray]]:
    times = Counter(row.prompt.tobytes() for row in rows)
    prompts: dict[bytes, tuple[int, int]] = {}  # its number and its first token
    segments: list[tuple[np.ndarray, int]] = []
    places_P, predictors, end = [], [], 0

    def add(ids: np.ndarray, prefix: int = -1, place: int = 0) -> int:
        nonlocal end
        segments.append((ids, prefix))
        places_P.append(np.arange(place, place + len(ids)))
        end += len(ids)
        return end - len(ids)

    for row in rows:
        key = row.prompt.tobytes()
        for start, stop in pairwise((0, *row.later, len(row.token_ids))):
            ids = row.token_ids[start:stop]
            sampled = row.mask[start:stop].nonzero()[0] - 1  # a token is predicted one place before it
            if start or times[key] == 1:
                predictors.append(add(ids[:-1]) + sampled)
                continue
            length = len(row.prompt)
            if key not in prompts:
                prompts[key] = len(segments), add(row.prompt)
            number, first = prompts[key]
            rest = add(ids[length:-1], number, length) if len(ids) > length + 1 else end
            predictors.append(np.where(sampled < length, first + sampled, rest + sampled - length))
    return segments, places_P, predictors


def _joined(logprobs: list[Tensor | None], device: torch.device, dtype: torch.dtype) -> Tensor | None:
    known = [each.to(device, dtype) for each in logprobs if each is not None]
    return torch.cat(known) if known else None
