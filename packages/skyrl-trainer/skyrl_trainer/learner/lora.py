"""LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314): small trained matrices beside frozen weights.

A target layer computes y = W x + alpha/rank B A x; a role (the policy, a critic) is a set of A and B under its name.
"""

import copy
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.cpu_linear import use_onednn
from skyrl_trainer.learner.model import Learner, Scorer
from skyrl_trainer.registry import load
from skyrl_trainer.settings import Config, LoRAConfig
from skyrl_trainer.types import TrainingBatch

POLICY = "policy"  # the role that every learner has
MATRICES = ("lora_A", "lora_B")


def checked(config: Config) -> LoRAConfig | None:
    """None for full fine-tuning. UserError where it cannot be what is asked for."""
    options = config.trainer.policy.model.lora
    if options.quantization == "nf4" and options.rank == 0:
        raise UserError("trainer.policy.model.lora.rank is 0, which trains all weights without adapters: give a rank.")
    if options.quantization == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("trainer.policy.model.lora.quantization: nf4 needs bitsandbytes (pip install bitsandbytes).")
    return options if options.rank else None


class LoRALearner(Learner):
    """A Learner whose adapter learns. A state is the adapter's alone."""

    def loading(self) -> tuple[torch.dtype, dict[str, Any]]:
        """nf4: linear layers in NF4 with double quantisation, all but the head."""
        self.lora, dtype = checked(self.config), self.published_dtype  # frozen weights need no masters
        if self.lora.quantization == "none":
            return dtype, {}
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        return dtype, {"quantization_config": nf4, "device_map": {"": self.device}}

    def divide(self) -> None:
        # So small that every learner has all of it.
        add_role(self.model.to(self.device), POLICY, self.lora, self.config.trainer.seed)

    def trainable(self) -> dict[str, nn.Parameter]:
        return parameters_of(self.model, POLICY)

    def scoring(self, chunked: bool, entropy_gradient: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        head: Any = self.model.get_output_embeddings()
        if entropy_gradient or head.bias is not None or not torch.is_grad_enabled():
            return super().scoring(chunked, entropy_gradient)
        return partial(FrozenHead.apply, head.weight, self.inverse_temperature)

    def full_tensors(self, name: str | None = POLICY) -> Iterator[tuple[str, Tensor]]:
        """The weights under the names that they had without adapters, dequantised, the role's adapter merged in."""
        for path, parameter in self.model.named_parameters():
            if any(f".{matrix}." in path for matrix in MATRICES):
                continue
            weight: Any = parameter
            if getattr(weight, "quant_state", None) is not None:
                weight = load("bitsandbytes.functional:dequantize_4bit")(weight.data, weight.quant_state)
            before, wrapped, last = path.rpartition(".base_layer.")
            if wrapped and last == "weight" and name is not None:
                layer: Any = self.model.get_submodule(before)
                weight = weight.detach() + layer.get_delta_weight(name).detach()
            yield (f"{before}.{last}" if wrapped else path), weight

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The frozen weights, for engines that load the adapter."""
        return ((name, tensor.detach().to(self.published_dtype)) for name, tensor in self.full_tensors(None))

    def adapter_tensors(self, scaled: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Under peft's names, sorted: as engines get it, B times alpha/rank, or else as files have it, in float32."""
        dtype = self.published_dtype if scaled else torch.float32
        for path, layer in sorted(_layers(self.model)):
            for matrix, factor in zip(MATRICES, (1.0, layer.scaling[POLICY] if scaled else 1.0), strict=True):
                weight = getattr(layer, matrix)[POLICY].weight.detach()
                yield f"base_model.model.{path}.{matrix}.weight", (weight * factor).to(dtype)

    def reference(self) -> Scorer:
        return Reference(self)

    def write(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """As a model without adapters and quantisation, the policy's adapter beside it."""
        model: Any = self.model
        config, settings = copy.deepcopy(model.config), model.peft_config[POLICY]
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            plain = type(model)(config)
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder, state_dict=tensors)
        settings.base_model_name_or_path, settings.task_type = self.model_path, "CAUSAL_LM"
        settings.target_modules = sorted(settings.target_modules)  # of a set
        settings.save_pretrained(folder / "adapter")
        adapter = {name: tensor.cpu().contiguous() for name, tensor in self.adapter_tensors(scaled=False)}
        save_file(adapter, folder / "adapter" / "adapter_model.safetensors")


class FrozenHead(torch.autograd.Function):
    """A loss scales all of d logprob / d hidden by one number: with it known, no logits are made again."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, scale: float, hidden_NH: Tensor, targets_N: Tensor) -> Any:
        score = torch.compile(_score, dynamic=True) if hidden_NH.is_cuda else _score
        logprobs_N, entropies_N, slopes_NH = score(hidden_NH, weight_VH, targets_N, scale)
        ctx.save_for_backward(slopes_NH)
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slopes_NH,) = ctx.saved_tensors
        hidden_grad_NH = grads[0][:, None] * slopes_NH
        return None, None, hidden_grad_NH.to(slopes_NH.dtype), None


def _score(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies, and d logprob / d hidden [N, H]."""
    logits_NV = nn.functional.linear(hidden_NH, weight_VH)
    logits_NV = (logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()) * scale
    sums_N = logits_NV.logsumexp(-1)
    p_NV = (logits_NV - sums_N[:, None]).exp()
    entropies_N = sums_N - (p_NV * logits_NV).sum(-1)
    sampled_NV = torch.arange(len(weight_VH), device=targets_N.device) == targets_N[:, None]
    slopes_NH = ((sampled_NV.to(p_NV.dtype) - p_NV) * scale).to(hidden_NH.dtype) @ weight_VH
    return logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - sums_N, entropies_N, slopes_NH


class Reference(Scorer):
    """The policy that the run started from: the learner's own model, computing without the adapter."""

    def __init__(self, learner: Learner) -> None:
        vars(self).update(vars(learner))

    def hidden(self, batch: TrainingBatch) -> Tensor:
        with role(self.model, None):
            return super().hidden(batch)


def add_role(model: nn.Module, name: str, options: LoRAConfig, seed: int) -> dict[str, nn.Parameter]:
    """Freezes the base and adds an adapter, whose B starts at 0; returns its parameters. The first role stays the one
    that computes outside of `role`. UserError when target_modules does not fit the model."""
    active = _active(model) or name
    targets = lora_targets(model, options.target_modules)
    settings = load("peft:LoraConfig")(r=options.rank, lora_alpha=options.alpha, target_modules=targets)
    settings._register_custom_module({nn.Linear: load("skyrl_trainer.learner.adapted:Adapted")})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft draws from the global generator
        warnings.simplefilter("ignore")  # that there are several adapters
        load("peft:inject_adapter_in_model")(settings, model, name)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in _layers(model):
        for matrix in MATRICES:
            weight = getattr(layer, matrix)[name].weight
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))  # what learns has masters
        a = layer.lora_A[name].weight.data
        a.copy_(nn.init.kaiming_uniform_(torch.empty(a.shape), a=math.sqrt(5), generator=generator))
    use_onednn(model)
    _activate(model, active)
    return parameters_of(model, name)


@contextmanager
def role(model: nn.Module, name: str | None) -> Iterator[None]:
    """With this role's adapter, or none, inside. Backward passes may follow outside, unless layers are checkpointed."""
    before = _active(model)
    _activate(model, name)
    try:
        yield
    finally:
        _activate(model, before)


def parameters_of(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The adapter's, by their names in the model."""
    ends = tuple(f".{matrix}.{name}.weight" for matrix in MATRICES)
    return {path: parameter for path, parameter in model.named_parameters() if path.endswith(ends)}


# The ends of the names of linear layers that get an adapter; never the head, nor embeddings.
def lora_targets(model: Any, wanted: Literal["all-linear"] | list[str]) -> list[str]:
    head = model.get_output_embeddings()
    linear = {
        path.replace(".base_layer", "")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
        if not any(f".{matrix}" in path for matrix in MATRICES)
    }
    ends = sorted({path.rpartition(".")[2] for path in linear})
    chosen = ends if wanted == "all-linear" else wanted
    for target in chosen or [wanted]:
        if not any(f".{path}".endswith(f".{target}") for path in linear):
            raise UserError(
                f"trainer.policy.model.lora.target_modules: {target} is no torch.nn.Linear of {type(model).__name__}, "
                f"which has {', '.join(ends) or 'none'}: choose from these, or all-linear (not the output layer)."
            )
    return chosen


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kind = load("peft.tuners.lora:LoraLayer")
    return ((path, module) for path, module in model.named_modules() if isinstance(module, kind))


def _active(model: nn.Module) -> str | None:
    layer = next((layer for _, layer in _layers(model)), None)
    return None if layer is None or layer.disable_adapters else layer.active_adapters[0]


def _activate(model: nn.Module, name: str | None) -> None:
    for _, layer in _layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)
        # peft freezes whatever is not active; but then nobody could hold an optimizer over it.
        for matrix in MATRICES:
            getattr(layer, matrix).requires_grad_(True)
