"""A layer and its adapter as one matrix: y = W' x, W' = W + s B A, s = alpha/rank (LoRA, arXiv 2106.09685).

peft's W x + s B A x passes over x and y again, a third of the products' time on a GPU; W' costs rank/tokens of one. It
is rounded as the engines' weights are: smaller updates show once they have added up, as in full fine-tuning.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor

from skyrl_trainer.learner.cpu_linear import linear


class _Merged(torch.autograd.Function):
    """y = x W'^T, dx = dy W', dA = (dy B)^T x, dB = dy^T (x A^T), for frozen W and bias and a B that s is part of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        return linear(x, torch.addmm(weight, b, a), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, a, b), dy = ctx.saved_tensors, grads[0]
        # W' again, as all layers' would fill gigabytes; transposed, or torch.compile would see that and keep it.
        dx = linear(dy, torch.addmm(weight.t(), a.t(), b.t()))
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        return dx, None, None, linear(linear(dy, b.t()).t(), x.t()), linear(dy.t(), linear(x, a).t())


class MergedLinear(Linear):
    """peft's, for at most one active adapter without dropout. The frozen weight's precision is the products'."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters:
            return self.base_layer(x)
        (name,), weight, bias = self.active_adapters, self.base_layer.weight, self.base_layer.bias
        a, b = self.lora_A[name].weight, self.lora_B[name].weight * self.scaling[name]
        return _Merged.apply(x.to(weight.dtype), weight, bias, a.to(weight.dtype), b.to(weight.dtype))
