"""Loads a flat buffer into a CPU engine of vLLM twice as fast as the layerwise reload, or faster.

The reload allocates every layer anew, fills it, and then packs a blocked copy; here a layer is packed straight from the
shared buffer, on all cores, where that is proven to give the same outputs.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from skyrl_trainer.weight_sync.buffer import FlatBuffer

Source = Callable[[], Tensor]
"""Gives what the buffer holds at the moment."""


class DirectLoad:
    """`DirectLoad.proven(model, buffer)`, then `load()` at every update."""

    def __init__(self, model: torch.nn.Module, buffer: FlatBuffer) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._packs: list[tuple[Any, Source]] = []
        self._copies: list[tuple[Tensor, Source]] = []
        self._heads: list[Any] = []
        unused, fused = set(buffer.tensors), getattr(model, "packed_modules_mapping", {})
        for path, parameter in model.named_parameters():  # a tied head is not in it: it is the embedding's own
            where, _, name = path.rpartition(".")
            parent, dot, leaf = where.rpartition(".")
            parts = [f"{parent}{dot}{part}.{name}" for part in fused.get(leaf, [leaf])]
            source = joined([buffer.tensors[part] for part in parts])
            unused -= set(parts)
            layer: Any = model.get_submodule(where)
            if name == "weight" and isinstance(layer, LinearBase) and parameter.numel() == 0:
                expected = (sum(layer.output_partition_sizes), layer.input_size_per_partition)
                if type(layer.quant_method) is not UnquantizedLinearMethod or source().shape != expected:
                    raise ValueError("not a plain linear layer")
                self._packs.append((layer, source))
                continue
            is_vocabulary = isinstance(layer, VocabParallelEmbedding)
            self._copies.append((parameter.data[: len(source())] if is_vocabulary else parameter.data, source))
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                self._heads.append(layer)
        if unused:
            raise ValueError(f"no place for {sorted(unused)}")

    @classmethod
    @torch.no_grad()
    def proven(cls, model: torch.nn.Module, buffer: FlatBuffer) -> Self | None:
        """None where the buffer, which `model` has just loaded, does not give the same layers."""
        try:
            direct = cls(model, buffer)
        except (KeyError, ValueError, TypeError, AttributeError):
            return None
        if not all(torch.equal(target, source().to(target.dtype)) for target, source in direct._copies):
            return None
        generator = torch.Generator().manual_seed(0)
        for layer, source in direct._packs:
            probe = torch.randn(8, layer.input_size_per_partition, generator=generator).to(layer.weight.dtype)
            before, was = layer.cpu_linear, layer.cpu_linear(probe, layer.weight, None)
            _pack(layer, source)
            if not torch.allclose(layer.cpu_linear(probe, layer.weight, None), was, rtol=1e-5, atol=1e-6):
                layer.cpu_linear = before
                return None
        return direct

    @torch.no_grad()
    def load(self) -> None:
        work = [self._pool.submit(_pack, layer, source) for layer, source in self._packs]
        for target, source in self._copies:
            target.copy_(source())
        work += [self._pool.submit(head.quant_method.process_weights_after_loading, head) for head in self._heads]
        for job in work:
            job.result()


def joined(tensors: list[Tensor]) -> Source:
    """These stacked along the first dimension: without a copy where they are alike and neighbours."""
    first = tensors[0]
    alike = all((each.dtype, each.shape[1:]) == (first.dtype, first.shape[1:]) for each in tensors)
    if not alike or any(a.data_ptr() + a.nbytes != b.data_ptr() for a, b in pairwise(tensors)):
        return lambda: torch.cat(tensors)
    view = first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return lambda: view


def _pack(layer: Any, source: Source) -> None:
    kept = layer.weight
    layer.weight = torch.nn.Parameter(source().to(kept.dtype), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    layer.weight = kept
