"""Weight sync of adapters: the engines get the full base once, dequantised, and a small adapter at every step."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl_trainer.errors import SyncError, UserError
from skyrl_trainer.protocols import NamedTensors
from skyrl_trainer.settings import Config
from skyrl_trainer.weight_sync.buffer import FlatBuffer, checksum, folder_with_room
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync, SyncReport

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for: the next larger one is chosen."""


def check_adapter(config: Config) -> None:
    """UserError where the engines cannot get an adapter alone."""
    generator, model = config.generator, config.trainer.policy.model
    # vLLM has no float32 kernels for adapters there.
    on_gpus = config.trainer.placement.policy_num_gpus_per_node > 0 or torch.cuda.is_available()
    limits = (
        (model.lora.rank == 0, "needs an adapter: set trainer.policy.model.lora.rank"),
        (config.num_learners > 1, "needs a single learner"),
        (generator.backend not in ("vllm", "openai_server"), "needs generator.backend=vllm or openai_server"),
        (generator.inference_engine_tensor_parallel_size > 1, "needs one GPU per engine"),
        (model.lora.rank > ENGINE_RANKS[-1], f"goes up to rank {ENGINE_RANKS[-1]}"),
        (on_gpus and model.dtype == "float32", "needs trainer.policy.model.dtype=bfloat16 on a GPU"),
    )
    for wrong, reason in limits:
        if wrong:
            raise UserError(f"generator.weight_sync_backend: adapter {reason}; or set it to shared_memory.")


def adapter_kwargs(config: Config) -> dict[str, Any]:
    """What an engine must be started with to load adapters."""
    rank = next(rank for rank in ENGINE_RANKS if rank >= config.trainer.policy.model.lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


class AdapterSync(SharedMemorySync):
    """The first sync carries both, and proves the base by its checksum; the reports are about the adapter."""

    def __init__(self, engines: list[Any], base_tensors: NamedTensors, adapter_tensors: NamedTensors) -> None:
        super().__init__(engines, base_tensors)
        if self._receivers:
            raise UserError(
                "generator.weight_sync_backend: adapter needs every engine on the driver's machine; or set it to "
                "shared_memory."
            )
        self._adapter = adapter_tensors
        self._has_base = False

    def restore(self, index: int) -> SyncReport:
        self._buffer = FlatBuffer.create(self._named_tensors())
        self._has_base = False
        self._buffer.unlink()
        return super().restore(index)

    def _load(self, version: int) -> SyncReport:
        start, base = time.perf_counter(), 0
        if not self._has_base:
            report = super()._load(version)
            if {*report.engine_checksums} - {report.checksum, None}:
                raise SyncError("Weight sync failed: an engine loaded other base weights than the learner holds.")
            self._has_base, base = True, report.bytes
            del self._buffer  # its memory is free once the engines have let go of it, too
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._adapter()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        run = Path(tempfile.gettempdir()).name
        with tempfile.TemporaryDirectory(prefix=f"{run}-adapter-", dir=folder_with_room(size)) as folder:
            rank = next(iter(tensors.values())).shape[0]
            layers = sorted({name.split(".")[-3] for name in tensors})
            settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            self._everywhere("pause")
            self._everywhere("update_weights", {"adapter": folder})
            loaded = self._everywhere("finish_weight_update", version)
        return SyncReport(time.perf_counter() - start, base + size, checksum(tensors.values()), tuple(loaded))
