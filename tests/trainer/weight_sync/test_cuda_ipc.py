"""The flat buffer in a GPU's memory, as far as a machine without one goes: CUDA's handle is stood in for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.tiny.start import StartPolicy
from skyrl_trainer.weight_sync import cuda_ipc
from skyrl_trainer.weight_sync.cuda_ipc import GPUBuffer

TENSORS = [("a", torch.randn(3, 5).bfloat16()), ("b", torch.randn(7)), ("c", torch.randint(0, 9, (2,)))]


def filled() -> GPUBuffer:
    buffer = GPUBuffer.create(TENSORS)
    for name, tensor in TENSORS:
        buffer.tensors[name].copy_(tensor)
    return buffer


def test_it_holds_what_was_written_and_any_change_of_a_byte_shows() -> None:
    buffer = filled()
    assert all(torch.equal(buffer.tensors[name], tensor) for name, tensor in TENSORS)
    assert buffer.nbytes == 3 * 5 * 2 + 7 * 4 + 2 * 8
    known = buffer.checksum()
    assert known == filled().checksum()
    for place in range(0, buffer.flat.numel(), 7):
        buffer.flat[place] ^= 1
        assert buffer.checksum() != known
        buffer.flat[place] ^= 1
    assert buffer.checksum() == known


def test_the_engine_maps_the_same_memory_on_its_own_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_trainer.weight_sync.vllm_backend import SharedMemoryBackend, SharedMemoryInitInfo

    buffer = filled()
    handle = (torch.Tensor, buffer.flat.size(), (1,), 0, None, torch.uint8, 3, b"handle")  # of the learner's GPU 3
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda flat: (None, handle))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked: list[Any] = []
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda *given: asked.append(given) or buffer.flat)
    engine: Any = SimpleNamespace()
    SharedMemoryBackend.init_transfer_engine(engine, SharedMemoryInitInfo(buffer.again, buffer.layout))
    assert asked == [(*handle[:6], 0, b"handle")]
    assert engine.buffer.checksum() == buffer.checksum()
    buffer.tensors["b"].fill_(1.0)
    assert engine.buffer.tensors["b"].tolist() == [1.0] * 7


def test_a_full_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(UserError, match=r"0 MiB of the GPU: .*gpu_memory_utilization, .*backend=shared_memory"):
        GPUBuffer.create(TENSORS)


@pytest.mark.parametrize("gpu", [True, False])
def test_cloning_ends_before_an_engine_measures_the_gpu(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses to start where another process gives memory back meanwhile. Without a GPU they go on together."""
    clone = Mock(poll=Mock(return_value=0))
    monkeypatch.setattr("skyrl_trainer.tiny.start.subprocess", Mock(Popen=Mock(return_value=clone)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for made in ("init/random", "checkpoints/step_000001"):
        (tmp_path / made).mkdir(parents=True)
    with StartPolicy(load_config("quickstart", []), tmp_path, []):
        assert clone.poll.called == gpu
