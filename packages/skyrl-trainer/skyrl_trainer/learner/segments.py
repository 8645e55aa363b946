"""Attention over a micro-batch of segments that stand one after the other without padding.

All layers but attention work token by token and need not know. A segment's tokens see the segment that it continues
(a prompt that several trajectories share, computed once) and what stands before them in it: exactly what each
trajectory alone would have seen. On a GPU, in half precision, that is one call of torch's variable-length attention.
Elsewhere segments of like length form blocks, padded only a little and inside attention only: one call a segment would
cost more than it computes, and a mask over all tokens would compute what nobody sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_trainer.errors import UserError

NAME = "segments"
"""`attn_implementation` of a model that is to be called with `segments`; without them it is plain causal attention."""

_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 takes fewer key heads without being told
    _CAUSAL["enable_gqa"] = True

_PADDING, _CALL = 0.25, 2**14
"""A block may compute this share more (query, key) pairs than are read, and so many that a call of its own costs."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Segments of like length in blocks of B, T queries and K keys each; padding repeats a token, and is not read."""

    shapes: list[tuple[int, int, int]]
    """[B, T, K] of each block."""
    visible: list[torch.Tensor | None]
    """Which keys a query sees, bool [B, 1, T, K]; None: causal, and the padding stands behind all that is read."""
    queries: torch.Tensor
    """Which token each is, block after block."""
    keys: torch.Tensor
    places_P: torch.Tensor
    """Where among the queries each token stands."""


class Segments:
    """How the P tokens of a micro-batch divide into S segments.

    Example: the prompt [7, 8] and its continuations [5, 2] and [6] are lengths_S [2, 2, 1] and prefix_S [-1, 0, 0]; the
    last token sees [7, 8, 6]. A segment with prefix -1 sees itself alone.
    """

    def __init__(self, lengths_S: Sequence[int], prefix_S: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.lengths_S = np.array(lengths_S, dtype=np.int64)
        self.starts_S = self.lengths_S.cumsum() - self.lengths_S
        prefix_S = np.array(prefix_S, dtype=np.int64)
        self.before_S = np.where(prefix_S < 0, 0, self.lengths_S[prefix_S])
        self.before_starts_S = self.starts_S[prefix_S]
        self.longest = int((self.lengths_S + self.before_S).max())

    @cached_property
    def ragged(self) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Which token is which key (None: each its own), all segments' one after the other; how those divide."""
        keys_S = self.lengths_S + self.before_S
        ends = [self._tensor(np.append(0, sizes.cumsum())).int() for sizes in (self.lengths_S, keys_S)]
        sizes = {"cu_seq_q": ends[0], "cu_seq_k": ends[1], "max_q": int(self.lengths_S.max()), "max_k": self.longest}
        if not self.before_S.any():
            return None, sizes
        spans = zip(self.before_starts_S, self.before_S, self.starts_S, self.lengths_S, strict=True)
        keys = [np.r_[first : first + before, start : start + own] for first, before, start, own in spans]
        return self._tensor(np.concatenate(keys)), sizes

    @cached_property
    def padded(self) -> Padded:
        shapes, visible, queries, keys = [], [], [], []
        places_P, end = np.empty(self.lengths_S.sum(), np.int64), 0
        for chosen_B in self._alike():
            own_B, before_B = self.lengths_S[chosen_B], self.before_S[chosen_B]
            own_BT = _spans(self.starts_S[chosen_B], own_B)
            before_BR = _spans(self.before_starts_S[chosen_B], before_B)
            t_T, r_R = np.arange(own_BT.shape[1]), np.arange(before_BR.shape[1])
            real_BT = t_T < own_B[:, None]
            places_P[own_BT[real_BT]] = end + real_BT.ravel().nonzero()[0]
            end += own_BT.size
            seen = None
            if len(r_R):
                seen_BTR = np.broadcast_to((r_R < before_B[:, None])[:, None], (*own_BT.shape, len(r_R)))
                seen_BTT = np.broadcast_to(t_T <= t_T[:, None], (*own_BT.shape, len(t_T)))
                seen = self._tensor(np.concatenate([seen_BTR, seen_BTT], axis=2))[:, None]
            queries.append(own_BT.ravel())
            keys.append(np.concatenate([before_BR, own_BT], axis=1).ravel())
            shapes.append((*own_BT.shape, len(r_R) + len(t_T)))
            visible.append(seen)
        return Padded(shapes, visible, *map(self._tensor, (np.concatenate(queries), np.concatenate(keys), places_P)))

    def _alike(self) -> list[np.ndarray]:
        """The segments' numbers by length, cut where padding would cost more than another call."""
        order = np.lexsort((-self.before_S, -self.lengths_S, self.before_S > 0))
        pairs_S = self.lengths_S * (self.lengths_S + self.before_S)
        cuts, read, before = [0], 0, 0
        for i, s in enumerate(order):
            first = order[cuts[-1]]
            read, before = read + pairs_S[s], max(before, self.before_S[s])
            computed = (i + 1 - cuts[-1]) * self.lengths_S[first] * (self.lengths_S[first] + before)
            if (self.before_S[s] > 0) != (self.before_S[first] > 0) or computed > read * (1 + _PADDING) + _CALL:
                cuts.append(i)
                read, before = pairs_S[s], self.before_S[s]
        return np.split(order, cuts[1:])

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _spans(starts_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """The tokens of each span, padded with its last: [B, longest]."""
    return starts_B[:, None] + np.minimum(np.arange(lengths_B.max()), lengths_B[:, None] - 1)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segments: Segments | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: heads [1, H, P, D] in, [1, P, H, D] out."""
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window = kwargs.get("sliding_window")
    if window is not None and segments.longest > window:
        raise UserError(
            f"A trajectory of up to {segments.longest} tokens is longer than the model's sliding window of {window}, "
            f"which this learner does not compute: lower generator.max_model_len to {window}."
        )
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    heads_PHD = [heads[0].transpose(0, 1).to(dtype) for heads in (query, key, value)]
    half = dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    attend = _ragged if device == "cuda" and half else _padded
    return attend(segments, *heads_PHD, scaling)[None], None


def _ragged(
    segments: Segments, q_PHD: torch.Tensor, k_PHD: torch.Tensor, v_PHD: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    keys_K, sizes = segments.ragged
    if (
        keys_K is not None
    ):  # the gradient of an embedding sums in float32 and in a fixed order, that of an index does not
        k_PHD, v_PHD = (embedding(keys_K, x.flatten(1)).unflatten(1, x.shape[1:]) for x in (k_PHD, v_PHD))
    return varlen_attn(q_PHD, k_PHD, v_PHD, **sizes, scale=scaling, **_CAUSAL)


def _padded(
    segments: Segments, q_PHD: torch.Tensor, k_PHD: torch.Tensor, v_PHD: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    padded = segments.padded
    q, k, v = (
        x_PHD.index_select(0, tokens).split([b * (t if x_PHD is q_PHD else n) for b, t, n in padded.shapes])
        for x_PHD, tokens in ((q_PHD, padded.queries), (k_PHD, padded.keys), (v_PHD, padded.keys))
    )
    outs = []
    for i, seen in enumerate(padded.visible):
        q_BHTD, k_BHKD, v_BHKD = (x[i].unflatten(0, (padded.shapes[i][0], -1)).transpose(1, 2) for x in (q, k, v))
        out_BHTD = scaled_dot_product_attention(
            q_BHTD, k_BHKD, v_BHKD, seen, is_causal=seen is None, scale=scaling, enable_gqa=True
        )
        outs.append(out_BHTD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, padded.places_P)


AttentionInterface.register(NAME, attention)
