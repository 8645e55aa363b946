"""One learner among several: which rows it computes, and what all of them must do together.

All learners run the same program on the same whole rollout: the same rows, advantages, mini-batches and token weights.
Each computes its share of a mini-batch's micro-batches; gradients are summed, and what is measured is put together, so
that every one ends with the same metrics. `Ranks()` is the only learner, to whom all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from skyrl_trainer.learner.batch import Row, cut

COLLECTIVE_SECONDS = 600.0
"""How long learners wait for one that does not come: longer than any micro-batch takes."""

T = TypeVar("T")


class Ranks:
    """The only learner."""

    rank = 0
    size = 1

    def passes(self, rows: Sequence[Row], indices: Sequence[int], token_budget: int) -> list[tuple[list[int], bool]]:
        """This learner's micro-batches of these rows, (indices, True) each.

        All learners get equally many, because sharded weights are gathered by all at once: who has fewer repeats one
        as (indices, False), which must count nowhere.
        """
        cuts = [cut(rows, share, token_budget) for share in shares(rows, indices, self.size)]
        mine = cuts[self.rank]
        spare = (mine or next(filter(None, cuts), []))[-1:]  # the one with the fewest tokens
        return [(part, True) for part in mine] + [(spare[0], False)] * (max(map(len, cuts)) - len(mine))

    def gather(self, value: T) -> list[T]:
        """Everybody's, by rank."""
        return [value]

    def exchange(self, known: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What each learner computed for its own rows, as one dictionary for all."""
        return known

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over all learners."""
        return value

    def shard(self, model: PreTrainedModel) -> None:
        """Leaves each learner a part of every weight; a layer's are gathered while it computes."""

    def scatter(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The first learner's `value`, sharded as the parameter `like` is if it has its shape."""
        return value


class DistributedRanks(Ranks):
    """One of `size` learners that met at `store`; over gloo, with tensors on a GPU over NCCL."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        self.mesh = init_device_mesh(device.type, (size,))

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def exchange(self, known: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        parts = self.gather({i: values.cpu() for i, values in known.items()})
        return {i: values for part in parts for i, values in part.items()}

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def shard(self, model: PreTrainedModel) -> None:
        names = model._no_split_modules or ()
        layers = [module for module in model.modules() if type(module).__name__ in names]
        for part in (*layers, model):
            module = fully_shard(part, mesh=self.mesh)
            module.set_gradient_divide_factor(1.0)  # the sum over learners: token weights span the whole mini-batch
            module.set_force_sum_reduction_for_comms(True)
        # Losses call the layers and the head, never the whole model: what no layer owns is gathered with the first.
        model.base_model.register_forward_pre_hook(lambda *_: model.unshard())
        with torch.no_grad():  # the model that is first called is the root of all others
            model(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        model.reshard()

    def scatter(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        value = value.to(self.device)
        if isinstance(like, DTensor) and value.shape == like.shape:
            return distribute_tensor(value, self.mesh, like.placements)
        dist.broadcast(value, 0)
        return value


def shares(rows: Sequence[Row], indices: Sequence[int], size: int) -> list[list[int]]:
    """Deals rows to `size` learners, about equally many tokens each; a function of the rows alone.

    Rows with the same prompt stay together, because they share its computation, unless they are more than one
    learner's part.
    """
    if size == 1:
        return [list(indices)]
    groups: dict[bytes, list[int]] = {}
    for i in indices:
        groups.setdefault(rows[i].prompt.tobytes(), []).append(i)

    def tokens(part: Sequence[int]) -> int:
        return len(rows[part[0]].prompt) + sum(1 + len(rows[i].rest) for i in part)

    fair = sum(map(tokens, groups.values())) / size
    pieces = []
    for group in groups.values():
        number = min(len(group), -int(-tokens(group) // fair))
        ordered = sorted(group, key=lambda i: -len(rows[i].rest))
        pieces += [ordered[k::number] for k in range(number)]
    dealt: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for piece in sorted(pieces, key=lambda piece: (-tokens(piece), piece[0])):
        least = loads.index(min(loads))
        dealt[least] += piece
        loads[least] += tokens(piece)
    return dealt


def reshard(model: torch.nn.Module) -> None:
    """Drops gathered weights, which an optimizer step or a load makes stale."""
    if isinstance(model, FSDPModule):
        model.reshard()


def sharded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that the optimizer knows, tied ones once, in a fixed order."""
    reshard(model)
    return model.named_parameters()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together, on the CPU (all learners must ask); any other as it is."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
