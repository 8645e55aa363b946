"""The merged form of LoRA's layers against peft's own."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import Linear
from torch import Tensor

from skyrl_trainer.learner import lora
from skyrl_trainer.learner.lora_linear import MergedLinear, _Merged
from skyrl_trainer.settings import LoRAConfig


class Plain(torch.nn.Sequential):
    def get_output_embeddings(self) -> None:
        return None


def adapted(dtype: torch.dtype, bias: bool = True) -> tuple[Plain, MergedLinear]:
    """One layer, 24 to 20, with the roles policy and critic, whose B are not 0."""
    torch.manual_seed(0)
    model = Plain(torch.nn.Linear(24, 20, bias=bias, dtype=dtype))
    for seed, name in enumerate(("policy", "critic")):
        parameters = lora.add_role(model, name, LoRAConfig(rank=4, alpha=6.0), seed)
        assert all(parameter.dtype == torch.promote_types(dtype, torch.float32) for parameter in parameters)
        with torch.no_grad():
            parameters[1].normal_()
    layer = model[0]
    assert isinstance(layer, MergedLinear)
    return model, layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["policy", "critic", None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients_are_those_of_peft(bias: bool, name: str | None, dtype: torch.dtype) -> None:
    model, layer = adapted(dtype, bias)
    bound = {torch.float64: 1e-13, torch.float32: 1e-5}[dtype]
    x, dy = torch.randn(2, 5, 24, dtype=dtype, requires_grad=True), torch.randn(2, 5, 20, dtype=dtype)

    def results(y: Tensor) -> dict[str, Tensor]:
        y.backward(dy)
        named = {"x": x} | dict(layer.named_parameters())
        grads = {path: each.grad.clone() for path, each in named.items() if each.grad is not None}
        x.grad = None
        layer.zero_grad()
        return {"y": y.detach()} | grads

    with lora.role(model, name):
        ours, theirs = results(layer(x)), results(Linear.forward(layer, x))
    learned = {f"lora_{matrix}.{name}.weight" for matrix in "AB"} if name else set()
    assert ours.keys() == theirs.keys() == {"x", "y"} | learned
    for path in ours:
        assert (ours[path] - theirs[path]).abs().max() <= bound * theirs[path].abs().max(), path


def test_gradients_are_those_of_finite_differences() -> None:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    x, a, b = (draw(*shape).requires_grad_() for shape in ((2, 3, 6), (2, 6), (5, 2)))
    assert torch.autograd.gradcheck(_Merged.apply, (x, draw(5, 6), draw(5), a, b))
    assert torch.autograd.gradcheck(_Merged.apply, (x.detach(), draw(5, 6), None, a, b))


def test_a_compiled_layer_is_one_graph_and_keeps_no_merged_weight() -> None:
    _, layer = adapted(torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition")
    kept: list[Tensor] = []
    x = torch.randn(2, 5, 24, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
            y = compiled(x)
        assert y.dtype == torch.bfloat16
        assert (y - Linear.forward(layer, x)).abs().max() < 0.02 * y.abs().max()
    y.sum().backward()
    assert layer.lora_B["policy"].weight.grad.dtype == torch.float32
    assert {tensor.data_ptr() for tensor in kept if set(tensor.shape) == {24, 20}} == {
        layer.base_layer.weight.data_ptr()
    }
