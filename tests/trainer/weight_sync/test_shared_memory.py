"""What a sync holds of the learner's weights when it is made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from skyrl_trainer.weight_sync import shared_memory
from skyrl_trainer.weight_sync.buffer import SHARED_MEMORY, FlatBuffer
from skyrl_trainer.weight_sync.cuda_ipc import GPUBuffer
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "node_of", lambda _: "here")


class MadeAnew:
    """As a learner's whose adapter is merged in, or whose base is dequantised: none of these tensors is a Parameter."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            made = torch.full((3, 5), float(number))
            self.alive.add(made)
            self.most = max(self.most, len(self.alive))
            yield f"w{number}", made


@pytest.mark.parametrize("way", ["shared_memory", "cuda_ipc", "sync", "sync of a GPU's buffer"])
def test_weights_that_are_made_anew_are_not_all_there_at_once(way: str) -> None:
    learner = MadeAnew()
    if way in ("shared_memory", "cuda_ipc"):
        buffer = (FlatBuffer if way == "shared_memory" else GPUBuffer).create(learner())
        buffer.unlink()
        layout = buffer.layout
    else:
        given = GPUBuffer.create(learner()) if way == "sync of a GPU's buffer" else None
        sync = SharedMemorySync([], learner, given)
        sync._fill()
        assert [each[0, 0].item() for each in sync._buffer.tensors.values()] == list(range(20))
        layout = sync._buffer.layout
    assert [(each["name"], each["shape"]) for each in layout] == [(f"w{number}", [3, 5]) for number in range(20)]
    assert learner.most <= 2, "one that is read, and the next one, which is made"


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="nothing is moved into a buffer on a disk")
def test_a_parameter_moves_into_the_buffer_and_stays_itself() -> None:
    parameters = {"a": torch.nn.Parameter(torch.randn(3)), "b": torch.nn.Parameter(torch.randn(2, 2))}
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    sync = SharedMemorySync([], lambda: iter(parameters.items()))
    for name, parameter in parameters.items():
        held = sync._buffer.tensors[name]
        assert torch.equal(held, values[name]) and held.data_ptr() == parameter.data_ptr()
