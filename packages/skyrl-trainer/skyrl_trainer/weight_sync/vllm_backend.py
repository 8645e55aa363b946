"""vLLM's side of the shared-memory weight sync: the backend "skyrl_shared_memory". Loaded inside vLLM's workers only.

Weights go through vLLM's layerwise reload, which handles fused, sharded and packed layers as the first load did. A CPU
engine needs one thing more: vLLM packs the output layer's weights into a copy of their own, which the reload of a tied
embedding does not touch; `finish_weight_update` packs it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from skyrl_trainer.engine.weights import Checksum, FlatBuffer

BACKEND = "skyrl_shared_memory"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    path: str
    layout: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Nothing to say: an update is always the whole buffer."""


class SharedMemoryBackend(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    buffer: FlatBuffer | None = None
    checksum: str = ""
    """Of the bytes that the last update loaded; empty when it loaded none."""

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self.buffer = FlatBuffer(init_info.path, init_info.layout)

    def start_weight_update(self) -> None:
        self.checksum = ""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        if self.buffer is None:
            raise RuntimeError("update_weights was called before init_weight_transfer.")
        checksum = Checksum()
        self.model.load_weights(checksum.hashed(self.buffer.tensors.items()))
        self.checksum = checksum.hexdigest()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and self.model_config.hf_text_config.tie_word_embeddings:
            self.repack_tied_head()

    def repack_tied_head(self) -> None:
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embedding = next(layer for layer in layers if not isinstance(layer, ParallelLMHead))
        for head in layers:
            if isinstance(head, ParallelLMHead):
                head.weight = embedding.weight
                head.quant_method.process_weights_after_loading(head)  # type: ignore[operator]

    def shutdown(self) -> None:
        self.buffer = None


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def loaded_checksum(self) -> str:
        return self.weight_transfer_engine.checksum  # type: ignore[attr-defined]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryBackend)
