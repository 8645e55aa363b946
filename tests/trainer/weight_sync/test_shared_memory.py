"""What a sync holds of the learner's weights when it is made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from skyrl_trainer.errors import SyncError
from skyrl_trainer.weight_sync import shared_memory
from skyrl_trainer.weight_sync.buffer import SHARED_MEMORY, FlatBuffer
from skyrl_trainer.weight_sync.cuda_ipc import GPUBuffer
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync, SyncReport


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


def test_tensors_of_several_widths_lie_where_each_can_be_read() -> None:
    given = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.ones(1, dtype=torch.uint8)}
    buffer = FlatBuffer.create([*given.items(), ("d", torch.ones(2, dtype=torch.float64))])
    buffer.unlink()
    for number, tensor in enumerate(buffer.tensors.values()):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in buffer.tensors.values()] == [[0], [1], [2], [3]]


def test_a_tensor_of_another_shape_than_at_the_first_sync_is_refused() -> None:
    """Also one that could be spread over the place of the other."""
    tensors = {"a": torch.ones(2, 3)}
    sync = SharedMemorySync([], lambda: iter(tensors.items()))
    tensors["a"] = torch.ones(1, 3)
    with pytest.raises(SyncError, match=r"tensor a \[1, 3\] was not there at the first sync"):
        sync._fill()


def test_an_engine_that_was_restored_reports_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemorySync, "_open", lambda self: None)
    monkeypatch.setattr(SharedMemorySync, "_everywhere", lambda self, method: [])
    sync = SharedMemorySync(["one", "two"], {"a": torch.ones(2)}.items)
    sync.version, sync.report = 3, SyncReport(0.0, 8, "new", ("new", None))
    monkeypatch.setattr(sync, "_load", lambda version: SyncReport(0.0, 8, "new", (None, "new")))
    assert sync.restore(1).engine_checksums == sync.report.engine_checksums == ("new", "new")
