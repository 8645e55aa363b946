"""Attention over a micro-batch in which trajectories that begin with the same prompt share its computation.

The model sees one flat sequence, [1, Q*S + B*T]: Q distinct prompts padded to S tokens, then B continuations padded to
T. All layers but attention work token by token and need not know. In attention a prompt's tokens see the prompt, and
a continuation's see the prompt that it continues and what stands before them in it: exactly what each trajectory alone
would have seen. With groups of 8 and short answers this is a third of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_trainer.errors import UserError

NAME = "shared_prefix"
"""`attn_implementation` of a model that is to be called with `blocks`; without them it is plain causal attention."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the flat sequence divides.

    Example: prompt [7, 8] with the continuations [5, 2] and [6, pad] is num_prompts 1, prompt_width 2, width 2,
    prompt_B [0, 0]; a continuation's query t sees the keys [prompt, prompt, 0 .. t].
    """

    num_prompts: int
    prompt_width: int
    width: int
    prompt_B: torch.Tensor
    """int64: the prompt that each continuation continues."""
    visible_BTK: torch.Tensor
    """bool [B, 1, T, S + T]: which keys a query sees."""

    @classmethod
    def of(cls, prompt_lengths_Q: torch.Tensor, prompt_B: torch.Tensor, width: int) -> Blocks:
        prompt_width = int(prompt_lengths_Q.max())
        place_S = torch.arange(prompt_width, device=prompt_B.device)
        in_prompt_BTS = (place_S < prompt_lengths_Q[prompt_B, None])[:, None, :].expand(-1, width, -1)
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=prompt_B.device).tril()
        visible_BTK = torch.cat([in_prompt_BTS, causal_TT.expand(len(prompt_B), -1, -1)], dim=2)
        return cls(len(prompt_lengths_Q), prompt_width, width, prompt_B, visible_BTK[:, None])

    def split(self, flat_1HPD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, H, Q*S + B*T, D] -> prompts [Q, H, S, D] and continuations [B, H, T, D]."""
        end = self.num_prompts * self.prompt_width
        prompts = flat_1HPD[0, :, :end].unflatten(1, (self.num_prompts, self.prompt_width))
        rests = flat_1HPD[0, :, end:].unflatten(1, (len(self.prompt_B), self.width))
        return prompts.transpose(0, 1), rests.transpose(0, 1)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    blocks: Blocks | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: heads [1, H, P, D] in, [1, P, H, D] out."""
    if blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window = kwargs.get("sliding_window")
    if window is not None and blocks.prompt_width + blocks.width > window:
        raise UserError(
            f"A trajectory of up to {blocks.prompt_width + blocks.width} tokens is longer than the model's sliding "
            f"window of {window}, which this learner does not compute: lower generator.max_model_len to {window}."
        )
    (q_QHSD, q_BHTD), (k_QHSD, k_BHTD), (v_QHSD, v_BHTD) = map(blocks.split, (query, key, value))
    out_QHSD = scaled_dot_product_attention(q_QHSD, k_QHSD, v_QHSD, is_causal=True, scale=scaling, enable_gqa=True)
    keys_BHKD = torch.cat([k_QHSD.index_select(0, blocks.prompt_B), k_BHTD], dim=2)
    values_BHKD = torch.cat([v_QHSD.index_select(0, blocks.prompt_B), v_BHTD], dim=2)
    out_BHTD = scaled_dot_product_attention(
        q_BHTD, keys_BHKD, values_BHKD, attn_mask=blocks.visible_BTK, scale=scaling, enable_gqa=True
    )
    return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in (out_QHSD, out_BHTD)])[None], None


AttentionInterface.register(NAME, attention)
