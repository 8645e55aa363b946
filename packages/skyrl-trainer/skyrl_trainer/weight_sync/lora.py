"""Weight sync of adapters: the engines get the full base once, and a small adapter at every step.

An engine serves no NF4, so its base is the dequantised one: learner and engine then compute the same policy. The
adapter travels as a peft folder in shared memory, which exists only while the engines load it.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from skyrl_trainer.engine.weights import folder_with_room
from skyrl_trainer.errors import SyncError
from skyrl_trainer.protocols import NamedTensors
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync, SyncReport


class AdapterSync(SharedMemorySync):
    """`base()` yields the full weights, `adapter()` pairs of A and B by peft's names, B already times alpha/rank.

    The first sync carries both and proves the base by its checksum; the reports are about the adapter.
    """

    def __init__(self, engines: list[Any], base: NamedTensors, adapter: NamedTensors) -> None:
        super().__init__(engines, base)
        self._adapter = adapter
        self._base_bytes = self._buffer.nbytes

    def sync(self, version: int) -> SyncReport:
        start = time.perf_counter()
        carried = 0
        if self._base_bytes:
            report = super().sync(version)
            if {*report.engine_checksums} != {report.checksum}:
                raise SyncError(
                    f"Weight sync failed: the engines loaded other base weights (checksums {report.engine_checksums}) "
                    f"than the learner holds ({report.checksum})."
                )
            carried, self._base_bytes = self._base_bytes, 0
            del self._buffer  # its memory is free once the engines have let go of it, too
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._adapter()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="skyrl-adapter-", dir=folder_with_room(size)) as folder:
            _write(Path(folder), tensors)
            self._everywhere("pause")
            self._everywhere("update_weights", {"adapter": folder})
            loaded = self._everywhere("finish_weight_update", version)
            self._everywhere("resume")
        return SyncReport(time.perf_counter() - start, carried + size, checksum(tensors.values()), tuple(loaded))

    def close(self) -> None:
        """Nothing is left to remove: the base's file lost its name at the start, an adapter's folder is gone."""


def checksum(tensors: Any) -> str:
    """xxh3 over the bytes, in the given order: A and B of each layer, the layers by name."""
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    rank = next(iter(tensors.values())).shape[0]
    layers = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
