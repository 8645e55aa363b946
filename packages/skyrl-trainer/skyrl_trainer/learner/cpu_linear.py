"""Linear layers on a CPU through oneDNN instead of the BLAS that torch was built with.

torch's float32 `F.linear` goes to MKL, which keeps to AVX2 on CPUs of other makers; oneDNN, which torch ships too, uses
whatever the CPU has: 2.4 times the speed on an AVX-512 machine (`benchmarks/learner.py`).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _OneDNNLinear(torch.autograd.Function):
    """y = x W^T; x: [..., in], W: [out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        learned = ctx.needs_input_grad[1]  # not below LoRA's adapters
        return _matmul(grad, weight.t()), _matmul(grad.flatten(0, -2).t(), x.flatten(0, -2).t()) if learned else None


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def use_onednn(model: nn.Module) -> None:
    """Reroutes every Linear without a bias; only float32 on a CPU then takes another way."""
    # On a GPU each layer's partial would be compiled by itself.
    if next(model.parameters()).is_cuda or not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.forward = partial(_forward, module)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    plain = x.dtype == module.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain and x.device.type == "cpu":
        return _OneDNNLinear.apply(x, module.weight)
    return nn.functional.linear(x, module.weight)
