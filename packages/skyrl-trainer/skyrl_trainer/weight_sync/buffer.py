"""The flat buffer in which weights travel between processes of one machine: a mapped file, best in memory.

Once all have opened it, it can be unlinked: the mapping lives on, and nothing is left behind by a kill.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from skyrl_trainer.errors import UserError

_ALIGNMENT = 64
SHARED_MEMORY = Path("/dev/shm")
Layout = list[dict[str, Any]]
"""A {"name", "dtype", "shape", "offset"} per tensor."""


class FlatBuffer:
    """`tensors`: views into the mapped file by name, writable and shared."""

    def __init__(self, path: str, layout: Layout) -> None:
        """Maps an existing file."""
        self.path = path
        self.layout = layout
        self._file = open(path, "r+b")  # noqa: SIM115, stays open for `again`
        self.flat = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
        """Every byte of the file, gaps included."""
        self.tensors = views(self.flat, layout)

    @classmethod
    def create(cls, named_tensors: Iterable[tuple[str, Tensor]]) -> Self:
        """A new file with room for these tensors; their values are not copied. UserError when nothing has room."""
        layout, end = layout_of(named_tensors)
        folder = folder_with_room(end)
        handle, path = tempfile.mkstemp(prefix=f"{Path(tempfile.gettempdir()).name}-weights-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, end)  # a full disk is an error here, not a SIGBUS later
        except OSError as error:
            os.unlink(path)
            raise UserError(f"The weights need {end / 2**20:.0f} MiB in {folder}: {error.strerror}.") from error
        finally:
            os.close(handle)
        return cls(path, layout)

    @property
    def again(self) -> str:
        """A path that opens the file also when it has no name any more, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def checksum(self) -> str:
        """Of all tensors, in their order."""
        return checksum(self.tensors.values())

    def unlink(self) -> None:
        """Removes the file's name; every mapping of it stays valid."""
        Path(self.path).unlink(missing_ok=True)


def layout_of(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[Layout, int]:
    """A buffer's layout, and its bytes."""
    layout, end = [], 0
    for name, tensor in named_tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": end})
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, end


def views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors that lie in `flat`, by name."""
    tensors = {}
    for entry in layout:
        start, dtype = entry["offset"], getattr(torch, entry["dtype"])
        part = flat[start : start + math.prod(entry["shape"]) * dtype.itemsize]
        tensors[entry["name"]] = part.view(dtype).view(entry["shape"])
    return tensors


def empty_tensors(layout: Layout, device: str = "cpu") -> dict[str, Tensor]:
    """Of a buffer's names, shapes and dtypes."""
    return {e["name"]: torch.empty(e["shape"], dtype=getattr(torch, e["dtype"]), device=device) for e in layout}


def checksum(tensors: Iterable[Tensor]) -> str:
    """xxh3 over the bytes, in the given order."""
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def folder_with_room(nbytes: int) -> str:
    """/dev/shm, whose 64 MiB in many containers are soon full; then the temporary folder."""
    folders = [str(SHARED_MEMORY), tempfile.gettempdir()]
    for folder in folders:
        if os.path.isdir(folder) and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > nbytes * 1.05:
            return folder
    raise UserError(
        f"The weights need {nbytes / 2**20:.0f} MiB in a shared file, and neither of {', '.join(folders)} has that: "
        "free some space, enlarge /dev/shm (docker run --shm-size), or set TMPDIR to a folder with room."
    )
