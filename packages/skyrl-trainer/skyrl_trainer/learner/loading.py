"""A model as the learner needs it: its attention, checkpointed layers, and the threads."""

import os
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import segments as attention
from skyrl_trainer.settings import Config


def load_model(path: str, dtype: torch.dtype, **how: Any) -> PreTrainedModel:
    """A causal language model with the learner's attention; UserError where there is none. how: for transformers."""
    how |= {"attn_implementation": attention.NAME, "output_loading_info": True}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **how)
        if missing := found["missing_keys"]:  # they are random
            raise ValueError(f"its files lack {min(missing)}")
    except Exception as error:  # safetensors and torch raise their own
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"trainer.policy.model.path={path!r} could not be loaded as a causal language model ({reason}); give a "
            "Hugging Face folder or name."
        ) from error
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # could not be saved
        model.generation_config.do_sample = True
    for module in model.modules():  # a 4-bit layer on some CPUs would turn to bfloat16 at its first pass
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
    return model


def compile_layers(model: PreTrainedModel) -> None:
    """Few kernels in the place of many; one compilation serves all layers."""
    for layer in [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def checkpoint_layers(model: PreTrainedModel, path: str) -> None:
    """By hand: transformers' own way does nothing outside train(), where dropout would be on."""
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{path} ({type(model).__name__}) has no layers for trainer.gradient_checkpointing: set false.")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def use_threads(config: Config, learners: int) -> None:
    """Leaves a core to each engine that goes on beside them: waiting threads hold up all others."""
    engines = config.generator.num_inference_engines if config.trainer.max_staleness else 0
    torch.set_num_threads(min(torch.get_num_threads(), max(1, ((os.cpu_count() or 1) - engines) // learners)))
