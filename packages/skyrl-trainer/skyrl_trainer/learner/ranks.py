"""One learner among several: which micro-batches it computes, and what all of them must do together."""

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from skyrl_trainer.learner.batch import Row, by_prompt, cut

LAUNCHERS = {"LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}
"""Variables of torchrun, MPI and the like: accelerate would wait for the other processes that they speak of."""
COLLECTIVE_SECONDS = 600.0
"""How long learners wait for one that does not come: longer than any micro-batch takes."""
T = TypeVar("T")


class Ranks:
    """The only learner; or number `rank` of `size` that meet at `store`, over gloo and, between GPUs, over NCCL."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        for name in [name for name in os.environ if name in LAUNCHERS or name.startswith("ACCELERATE_USE_")]:
            del os.environ[name]
        if size > 1:
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            limit = timedelta(seconds=COLLECTIVE_SECONDS)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            self.mesh = init_device_mesh(device, (size,))

    def passes(self, rows: Sequence[Row], indices: Sequence[int], token_budget: int) -> list[tuple[list[int], bool]]:
        """This learner's micro-batches of these rows, (indices, True) each. As learners gather sharded weights at once,
        who has fewer than another repeats one as (indices, False), which must count nowhere."""
        cuts = [cut(rows, share, token_budget) for share in shares(rows, indices, self.size)]
        mine = cuts[self.rank]
        again = [(part, False) for part in (mine or max(cuts, key=len))[-1:]]
        return [(part, True) for part in mine] + again * (max(map(len, cuts)) - len(mine))

    def gather(self, value: T) -> list[T]:
        """Everybody's, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def exchange(self, known: dict[int, Tensor]) -> dict[int, Tensor]:
        """For all what each computed for its own rows. Copied: a view is sent with all that it is of."""
        return {i: v for part in self.gather({i: v.clone() for i, v in known.items()}) for i, v in part.items()}

    def sum(self, value: Tensor) -> Tensor:
        """Over all learners, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def shard(self, model: PreTrainedModel) -> None:
        """Leaves each learner, on its GPU, a part of every weight; a layer's are gathered while it computes."""
        if self.size == 1:
            return
        names = model._no_split_modules or ()
        for part in (*[each for each in model.modules() if type(each).__name__ in names], model):
            sharded = fully_shard(part, mesh=self.mesh)
            sharded.set_gradient_divide_factor(1.0)  # token weights span the whole mini-batch
            sharded.set_force_sum_reduction_for_comms(True)
        # Losses call the layers and the head, not the whole model: what no layer owns is gathered before the first.
        model.base_model.register_forward_pre_hook(lambda *_: model.unshard())
        with torch.no_grad():  # what is called first becomes the root of all others
            model(torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False)
        model.reshard()

    def scatter(self, value: Tensor, like: Tensor) -> Tensor:
        """The first learner's `value`, sharded as the parameter `like` is if it has its shape."""
        if self.size == 1:
            return value
        value = value.to(self.device)
        if isinstance(like, DTensor) and value.shape == like.shape:
            return distribute_tensor(value, self.mesh, like.placements)
        dist.broadcast(value, 0)
        return value


def shares(rows: Sequence[Row], indices: Sequence[int], size: int) -> list[list[int]]:
    """Deals rows to `size` learners, about equally many tokens each, by the rows alone. Those with one prompt stay
    together unless they are more than one learner's part."""
    groups = by_prompt(rows, indices)

    def tokens(part: Sequence[int]) -> int:
        return len(rows[part[0]].prompt) + sum(1 + len(rows[i].rest) for i in part)

    part_of_one = sum(map(tokens, groups)) / size
    pieces = []
    for group in groups:
        number = min(len(group), math.ceil(tokens(group) / part_of_one))
        pieces += [group[k::number] for k in range(number)]
    dealt: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for piece in sorted(pieces, key=lambda piece: (-tokens(piece), piece)):
        least = loads.index(min(loads))
        dealt[least] += piece
        loads[least] += tokens(piece)
    return dealt


def reshard(model: PreTrainedModel) -> PreTrainedModel:
    """Drops gathered weights."""
    if isinstance(model, FSDPModule):
        model.reshard()
    return model


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, on the CPU (all learners must ask); any other as it is."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
