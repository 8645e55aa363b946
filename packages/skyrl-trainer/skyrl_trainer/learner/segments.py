"""Attention over a micro-batch of segments, one after the other without padding.

A segment's tokens see the segment that it continues (a prompt that several trajectories share) and those before them.
On a GPU, in half precision, that is one call of torch's variable-length attention. Elsewhere segments of like length
form blocks, padded a little: a call per segment would cost more than it computes.
"""

import inspect
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_trainer.errors import UserError

NAME = "segments"  # the model's `attn_implementation`
_TOLD = inspect.signature(varlen_attn).parameters.keys() & {"enable_gqa"}  # torch 2.11 sees by itself
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0), **dict.fromkeys(_TOLD, True)}
# A block may compute this share more (query, key) pairs than are read, and so many that a call of its own costs.
_PADDING, _CALL = 0.05, 2**12


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU without waiting for what it computes at present."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Segments:
    """How the P tokens of a micro-batch divide into S segments.
    Example: the prompt [1, 2] and its continuations [3, 4] and [5] are lengths_S [2, 2, 1] and prefix_S [-1, 0, 0]; the
    last token sees [1, 2, 5]. Prefix -1: the segment sees itself alone.
    """

    def __init__(self, lengths_S: Sequence[int], prefix_S: Sequence[int], device: torch.device) -> None:
        self._tensor = partial(sent, device=device)
        self.lengths_S = np.array(lengths_S, dtype=np.int64)
        numbers_S = np.array(prefix_S, dtype=np.int64)
        self.starts_S = self.lengths_S.cumsum() - self.lengths_S
        self.before_S = np.where(numbers_S < 0, 0, self.lengths_S[numbers_S])  # as long as what it continues
        self.before_starts_S = self.starts_S[numbers_S]
        self.longest = int((self.lengths_S + self.before_S).max())

    def ragged_attention(self, heads_PHD: list[Tensor], scaling: float | None) -> Tensor:
        """[P, H, D] of query, key, value to [P, H, D]; half precision on a GPU. Queries stand at their keys' end."""
        query, key, value = heads_PHD
        keys, sizes = self._ragged
        # The gradient of an embedding sums in float32, in a fixed order; an index's does not
        if keys is not None:
            key, value = (embedding(keys, x.flatten(1)).unflatten(1, x.shape[1:]) for x in (key, value))
        out_PHD = varlen_attn(query, key, value, **sizes, scale=scaling, **_CAUSAL)
        assert isinstance(out_PHD, Tensor)  # a tuple is for those who ask for more
        return out_PHD

    @cached_property
    def _ragged(self) -> tuple[Tensor | None, dict[str, Any]]:
        counts = self.lengths_S, self.lengths_S + self.before_S
        q, k = (self._tensor(np.append(0, count_S.cumsum())).int() for count_S in counts)
        sizes = {"cu_seq_q": q, "cu_seq_k": k, "max_q": int(self.lengths_S.max()), "max_k": self.longest}
        spans = zip(self.before_starts_S, self.before_S, self.starts_S, self.lengths_S, strict=True)
        keys = np.concatenate([np.r_[first : first + n, start : start + own] for first, n, start, own in spans])
        return self._tensor(keys) if self.before_S.any() else None, sizes

    def padded_attention(self, heads_PHD: list[Tensor], scaling: float | None) -> Tensor:
        """The same, block by block."""
        visible, tokens, places_P = self._padded
        grouped = heads_PHD[0].device.type == "cpu"  # GPUs group no float32
        if not grouped:
            heads_PHD = [x.repeat_interleave(heads_PHD[0].shape[1] // x.shape[1], 1) for x in heads_PHD]
        blocks = []
        for x_PHD, which in zip(heads_PHD, (0, 1, 1), strict=True):  # one gather for all blocks: one sum of gradients
            rows = x_PHD.index_select(0, torch.cat([block[which].flatten() for block in tokens]))
            parts = rows.split([block[which].numel() for block in tokens])
            pairs = zip(parts, tokens, strict=True)
            blocks.append([part.unflatten(0, block[which].shape).transpose(1, 2) for part, block in pairs])
        attend = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=grouped)
        outs_BHTD = [attend(q, k, v, m, is_causal=m is None) for q, k, v, m in zip(*blocks, visible, strict=True)]
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs_BHTD]).index_select(0, places_P)

    # A block: which key a query sees (bool [B, 1, T, K]; None: those before it), and which tokens are its queries
    # [B, T] and keys [B, K], padded with any. Last, where among all blocks' queries each token stands, [P].
    @cached_property
    def _padded(self) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]], Tensor]:
        visible = []
        tokens, places_P, end = [], np.empty(self.lengths_S.sum(), np.int64), 0
        for chosen_B in self._alike():
            own_B, before_B = self.lengths_S[chosen_B, None], self.before_S[chosen_B, None]
            t_T, r_R = np.arange(own_B.max()), np.arange(before_B.max())
            own_BT = self.starts_S[chosen_B, None] + np.minimum(t_T, own_B - 1)
            before_BR = self.before_starts_S[chosen_B, None] + np.minimum(r_R, before_B - 1)
            places_P[own_BT[t_T < own_B]] = end + (t_T < own_B).ravel().nonzero()[0]
            end += own_BT.size
            tokens.append((self._tensor(own_BT), self._tensor(np.concatenate([before_BR, own_BT], axis=1))))
            key_K = np.append(r_R - len(r_R), t_T)
            seen_BTK = np.where(key_K < 0, key_K + len(r_R) < before_B[:, None], key_K <= t_T[:, None])
            visible.append(self._tensor(seen_BTK)[:, None] if len(r_R) else None)
        return visible, tokens, self._tensor(places_P)

    def _alike(self) -> list[np.ndarray]:
        order = np.lexsort((-self.before_S, -self.lengths_S, self.before_S > 0))
        cuts, read, before = [0], 0, 0
        for i, (own, n) in enumerate(zip(self.lengths_S[order], self.before_S[order], strict=True)):
            longest = self.lengths_S[order[cuts[-1]]]
            read = read + own * (own + n)
            computed = (i + 1 - cuts[-1]) * longest * (longest + max(before, n))
            other_kind = i > 0 and (n > 0) != (self.before_S[order[i - 1]] > 0)
            if other_kind or computed > read * (1 + _PADDING) + _CALL:
                cuts, read, before = [*cuts, i], own * (own + n), 0
            before = max(before, n)
        return np.split(order, cuts[1:])


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: heads [1, H, P, D] in, [1, P, H, D] out; plain without `segments`."""
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if (window := kwargs.get("sliding_window")) is not None and segments.longest > window:
        raise UserError(
            f"A trajectory of up to {segments.longest} tokens is longer than the model's sliding window of {window}, "
            f"which this learner does not compute: lower generator.max_model_len to {window}."
        )
    device, width = query.device.type, query.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    heads_PHD = [heads[0].transpose(0, 1).to(dtype) for heads in (query, key, value)]
    ragged = device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0
    return (segments.ragged_attention if ragged else segments.padded_attention)(heads_PHD, scaling)[None], None


AttentionInterface.register(NAME, attention)
