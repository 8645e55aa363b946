"""What a CPU engine loads straight from the shared buffer, against the buffer."""

from __future__ import annotations

import pytest
import torch

from skyrl_trainer.weight_sync.buffer import FlatBuffer

NAMES = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


class Attention(torch.nn.Module):
    """A fused layer's bias as vLLM has it: its parts are not neighbours in the buffer, where weights lie between."""

    packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = torch.nn.Module()
        self.qk_proj.weight = torch.nn.Parameter(torch.zeros(4, 2))
        self.qk_proj.bias = torch.nn.Parameter(torch.zeros(4))


@torch.no_grad()
def test_a_fused_bias_follows_every_update_of_the_buffer() -> None:
    pytest.importorskip("vllm")
    from skyrl_trainer.weight_sync.cpu_load import DirectLoad

    tensors = {name: torch.zeros(2, 2) if name.endswith("weight") else torch.zeros(2) for name in NAMES}
    buffer, model = FlatBuffer.create(tensors.items()), Attention()
    buffer.unlink()
    direct = DirectLoad.proven(model, buffer)
    assert direct is not None
    for version in (1.0, 2.0):
        for number, tensor in enumerate(buffer.tensors.values()):
            tensor.fill_(version + number / 10)
        direct.load()
        for name in ("weight", "bias"):
            parts = [buffer.tensors[f"{part}.{name}"] for part in ("q_proj", "k_proj")]
            assert torch.equal(getattr(model.qk_proj, name), torch.cat(parts))
