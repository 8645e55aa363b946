"""Weights with which a tiny model can copy from its first step on: an induction circuit, built by hand.

A pretrained model continues what it has read before: "... B681 ... B6" goes on with "81" (Olsson et al. 2022,
"In-context Learning and Induction Heads"). Here the first two layers begin with the circuit; the rest is random.

With x_t the embedding at place t, R a random rotation and P a projection onto head_dim dimensions:

    layer 0   head o looks o places back, whatever is there, and adds R^o P'P x_{t-o}; so the residual holds
              h_t = x_t + R x_{t-1} + R^2 x_{t-2} + ...            (the last few tokens, told apart by R)
    layer 1   query A h_t and key A R^-1 h_j, the same where x_{j-1} x_{j-2} ... equal x_t x_{t-1} ...: each head finds
              the place after the longest repetition of the last tokens, and adds x_j, which the tied head reads out
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

DISTANCE = 600
"""Tokens over which a repetition is found."""
CONSTANT = 0.25
"""Embedding dimension 0 of every token: what layer 0 queries with, for it looks for places."""
PAST, COPY = 0.7, 3.0
"""Size of what layers 0 and 1 add, in units of an embedding's."""
SHARPNESS = 8.0, 6.0
"""Of the two layers' attention: with queries and keys normalized, logits reach this times sqrt(head_dim)."""
DECAY = 0.6
"""Of the squared amplitude from one rotary frequency to the next in layer 0."""
NOISE = 0.1
"""By which the layers' random outputs are scaled, so that the circuit is heard."""


def add_induction(model: "Qwen3ForCausalLM") -> None:
    """Builds the circuit into a model of two layers or more, in place; it draws from torch's global generator."""
    config, layers = model.config, model.model.layers
    if len(layers) < 2:
        return
    hidden, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    half = dim // 2
    frequencies_F = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    # Dimension 0 is the constant's: no part of the circuit that reads tokens sees it.
    rotation_HH = torch.eye(hidden)
    rotation_HH[1:, 1:] = _orthogonal(hidden - 1, hidden - 1)
    with torch.no_grad():
        embeddings_VH = model.model.embed_tokens.weight
        embeddings_VH[:, 0] = CONSTANT
        size = embeddings_VH.square().mean(-1).sqrt().mean()
        for layer in layers:
            layer.mlp.down_proj.weight.mul_(NOISE)
            layer.self_attn.o_proj.weight.mul_(NOISE)

        attention = layers[0].self_attn
        _sharpen(attention, SHARPNESS[0])
        projection_DH = _reads_tokens(dim, hidden)
        squares_F = DECAY ** torch.arange(half)
        amplitudes_F = (squares_F / squares_F.sum()).sqrt()
        for k in _blocks(config.num_key_value_heads, dim):
            attention.k_proj.weight[k] = _reads_constant(amplitudes_F, torch.zeros(half), hidden)
            attention.v_proj.weight[k] = projection_DH
        for back, q in enumerate(_blocks(heads, dim), start=1):
            attention.q_proj.weight[q] = _reads_constant(amplitudes_F, -back * frequencies_F, hidden)
            turned_HH = torch.linalg.matrix_power(rotation_HH, back)
            attention.o_proj.weight[:, q] = PAST * size * (hidden / dim) ** 0.5 * turned_HH @ projection_DH.T

        attention = layers[1].self_attn
        _sharpen(attention, SHARPNESS[1])
        slow_F = frequencies_F * DISTANCE < 1.5
        groups = heads // config.num_key_value_heads
        for i, k in enumerate(_blocks(config.num_key_value_heads, dim)):
            match_DH = _reads_tokens(dim, hidden) * slow_F.repeat(2)[:, None]
            value_DH = _reads_tokens(dim, hidden)
            attention.k_proj.weight[k] = match_DH @ rotation_HH.T
            attention.v_proj.weight[k] = value_DH
            for q in _blocks(heads, dim)[i * groups : (i + 1) * groups]:
                attention.q_proj.weight[q] = match_DH
                attention.o_proj.weight[:, q] = COPY * size * value_DH.T


def _blocks(heads: int, dim: int) -> list[slice]:
    return [slice(i * dim, (i + 1) * dim) for i in range(heads)]


def _sharpen(attention: "Qwen3Attention", sharpness: float) -> None:
    attention.q_norm.weight.fill_(sharpness**0.5)
    attention.k_norm.weight.fill_(sharpness**0.5)


def _orthogonal(rows: int, columns: int) -> Tensor:
    n = max(rows, columns)
    return torch.linalg.qr(torch.randn(n, n))[0][:rows, :columns]


def _reads_tokens(dim: int, hidden: int) -> Tensor:
    return torch.cat([torch.zeros(dim, 1), _orthogonal(dim, hidden - 1)], dim=1)


# A projection [D, H] that makes one vector of every token: its pair (i, i + D/2) has amplitude and phase i.
def _reads_constant(amplitudes_F: Tensor, phases_F: Tensor, hidden: int) -> Tensor:
    weight_DH = torch.zeros(2 * len(amplitudes_F), hidden)
    weight_DH[:, 0] = torch.cat([amplitudes_F * phases_F.cos(), amplitudes_F * phases_F.sin()])
    return weight_DH
