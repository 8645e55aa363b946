"""Weight sync on one GPU: the flat buffer lies in its memory, which the engine maps by CUDA IPC."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from skyrl_trainer.errors import UserError
from skyrl_trainer.weight_sync.buffer import FlatBuffer, Layout, layout_of, views
from skyrl_trainer.weight_sync.digest import Digest

DEVICE = 6
"""Where a handle has the GPU's number, which each process counts anew."""


class GPUBuffer(FlatBuffer):
    """Without a file. Its maker has to outlive those that open it."""

    path = ""

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        self.flat, self.layout, self.tensors = flat, layout, views(flat, layout)

    @classmethod
    def create(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> Self:
        """On the GPU where the tensors lie. UserError when that has no room."""
        layout, size = layout_of((name, last := tensor) for name, tensor in named_tensors)
        try:
            return cls(torch.zeros(size, dtype=torch.uint8, device=last.device), layout)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"Weight sync needs {size / 2**20:.0f} MiB of the GPU: lower generator.engine_kwargs."
                "gpu_memory_utilization, or set generator.weight_sync_backend=shared_memory."
            ) from error

    @classmethod
    def opened(cls, handle: tuple[Any, ...], layout: Layout) -> Self:
        """Another process's, by its `again`."""
        here = (*handle[:DEVICE], torch.cuda.current_device(), *handle[DEVICE + 1 :])
        return cls(rebuild_cuda_tensor(*here), layout)

    @property
    def again(self) -> Any:
        """A handle for one more process."""
        return reduce_tensor(self.flat)[1]

    def checksum(self) -> str:
        """Of every byte, computed on the GPU."""
        digest = Digest()
        digest.add("weights", self.flat.view(torch.int32))
        return digest.hexdigest()

    def unlink(self) -> None:
        """There is no name to remove."""
