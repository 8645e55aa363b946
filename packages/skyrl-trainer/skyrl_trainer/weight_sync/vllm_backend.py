"""vLLM's side of the weight sync: "skyrl_shared_memory" and "skyrl_nccl". Loaded inside vLLM's workers only.

On a CPU vLLM packs the output layer's weights into a copy, which the reload of a tied embedding does not touch:
`finish_weight_update` packs it again. The wrappers of a LoRA engine's layers step aside during an update of the base.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from skyrl_trainer.weight_sync.buffer import FlatBuffer, checksum
from skyrl_trainer.weight_sync.cpu_load import DirectLoad
from skyrl_trainer.weight_sync.cuda_ipc import GPUBuffer
from skyrl_trainer.weight_sync.digest import Digest

BACKEND = "skyrl_shared_memory"
NCCL_BACKEND = "skyrl_nccl"
ADAPTER = 1
"""vLLM's number of the one adapter that an engine has."""


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    path: Any
    """A file's, or the handle of a GPU's memory."""
    layout: list[dict[str, Any]]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Nothing to say: an update is always the whole buffer."""


class SharedMemoryBackend(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    buffer: FlatBuffer | None = None
    checksum: str = ""
    """Of the bytes that the last update loaded; empty when it loaded none."""
    direct: DirectLoad | None = None
    tried = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        opened = FlatBuffer if isinstance(init_info.path, str) else GPUBuffer.opened
        self.buffer = opened(init_info.path, init_info.layout)
        self.direct, self.tried = None, False

    def start_weight_update(self) -> None:
        self.checksum = ""
        self.wrappers = {path: m for path, m in self.model.named_modules() if isinstance(m, BaseLayerWithLoRA)}
        for path, wrapper in self.wrappers.items():
            self.model.set_submodule(path, wrapper.base_layer)
        if self.direct is None:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        if self.buffer is None:
            raise RuntimeError("update_weights was called before init_weight_transfer.")
        with ThreadPoolExecutor(1) as pool:
            checksum = pool.submit(self.buffer.checksum)
            if self.direct is None:
                self.model.load_weights(iter(self.buffer.tensors.items()))
            else:
                self.direct.load()
            self.checksum = checksum.result()

    def finish_weight_update(self) -> None:
        if self.direct is None:
            finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            if self.model_config.hf_text_config.tie_word_embeddings:
                self.repack_tied_head()
            if self.buffer and not (self.wrappers or self.tried):  # under adapters the base is loaded once
                self.direct = DirectLoad.proven(self.model, self.buffer)
                self.tried = True
        for path, wrapper in self.wrappers.items():
            self.model.set_submodule(path, wrapper)

    def repack_tied_head(self) -> None:
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embedding = next(layer for layer in layers if not isinstance(layer, ParallelLMHead))
        for head in layers:
            if isinstance(head, ParallelLMHead):
                head.weight = embedding.weight
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self.buffer = None


class NCCLBackend(NCCLWeightTransferEngine):
    """vLLM's own, with a checksum of the tensors that came and were loaded. Its model never has adapters."""

    checksum: str = ""

    def start_weight_update(self) -> None:
        self.checksum = ""
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        digest = Digest()
        columns = update_info.names, update_info.dtype_names, update_info.shapes

        def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in pairs:
                digest.add(name, tensor)
            self.model.load_weights(pairs)

        packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in zip(*columns, strict=True)),
            group=self.model_update_group,
            src=0,
            post_unpack_func=load,
            buffer_size_bytes=self.packed_buffer_size_bytes,
            num_buffers=self.packed_num_buffers,
            device=self.device,
        )
        self.checksum = digest.hexdigest()


class WorkerExtension:
    """Mixed into vLLM's worker."""

    weight_transfer_engine: SharedMemoryBackend | NCCLBackend
    model_runner: Any

    def loaded_checksum(self) -> str:
        return self.weight_transfer_engine.checksum

    def load_adapter(self, folder: str) -> None:
        """In the place of the one before, for a server: in process, vLLM's own `add_lora` does it."""
        self.model_runner.add_lora(LoRARequest("policy", ADAPTER, folder, load_inplace=True))

    def adapter_loaded(self) -> None:
        """Takes the checksum of the adapter as the layers hold it, and lets go of the base's buffer."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter, slot = manager.get_adapter(ADAPTER), manager.lora_index_to_id.index(ADAPTER)
        held = {}
        for path, weights in adapter.loras.items():
            layer, parts = manager.modules[path], manager.packed_modules.get(path)
            given = weights.lora_a if parts else [weights.lora_a]
            for i, (part, a) in enumerate(zip(parts or [path], given, strict=True)):
                if a is not None:
                    stacked = layer.lora_a_stacked[i][slot, 0], layer.lora_b_stacked[i][slot, 0]
                    held[part] = [stacked[0][: len(a)], stacked[1][:, : len(a)]]
        self.weight_transfer_engine.checksum = checksum(tensor for part in sorted(held) for tensor in held[part])
        self.weight_transfer_engine.shutdown()


for backend, engine_class in ((BACKEND, SharedMemoryBackend), (NCCL_BACKEND, NCCLBackend)):
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, engine_class)
