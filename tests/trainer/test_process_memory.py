"""What the learner holds at once: with checkpointed layers, and of the logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyrl_trainer.learner import model as learner_module
from skyrl_trainer.learner.batch import collate, make_rows
from skyrl_trainer.learner.model import Learner
from tests.trainer.learner.tiny_models import make_batch, make_config, save_model


class PeakBytes(TorchDispatchMode):
    """Bytes of all tensors that operations made and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self._known:
                self._known.add(id(storage))
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def peak(work: Callable[[], None]) -> int:
    with PeakBytes() as mode:
        work()
    return mode.peak


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind, double, tolerance", [("qwen3", False, 1e-6), ("gpt2", True, 1e-12)])
def test_checkpointed_layers_give_the_same_gradient_in_less_memory(
    tmp_path: Path, kind: str, double: bool, tolerance: float
) -> None:
    """gpt2 has dropout in its configuration: it stays off in either pass."""
    path = save_model(tmp_path, kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 6})
    gradients, peaks = [], []
    for checkpointing in (False, True):
        learner = Learner(make_config(trainer={"gradient_checkpointing": checkpointing}), path, 1)
        learner.model.to(torch.float64 if double else torch.float32)
        rollouts = make_batch(turns=2)
        rows = make_rows(rollouts.trajectories)
        batch = collate(rows, range(len(rows)), learner.device, learner.dtype)
        peaks.append(peak(lambda learner=learner, batch=batch: learner.logprobs(batch)[0].sum().backward()))
        gradients.append(torch.cat([p.grad.flatten() for p in learner.parameters]))
    assert (gradients[1] - gradients[0]).norm() <= tolerance * gradients[0].norm()
    assert peaks[1] < 0.6 * peaks[0]


def test_memory_of_the_logits_grows_with_the_chunk_and_not_with_the_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary of Qwen2.5, forward and backward."""
    learner = Learner(make_config(), save_model(tmp_path, vocab_size=151_936, hidden_size=8), 1)

    def measure(tokens: int, elements: int) -> int:
        monkeypatch.setattr(learner_module, "LOGITS_AT_ONCE", {"cpu": elements})
        hidden_NH = torch.ones(tokens, 8, requires_grad=True)
        batch: Any = SimpleNamespace(target_ids_N=torch.arange(tokens))
        return peak(lambda: learner.logprobs(batch, hidden_NH)[0].sum().backward())

    short, long, larger = measure(64, 2**21), measure(256, 2**21), measure(256, 2**23)
    assert long < 1.05 * short
    assert long < 8 * 4 * 2**21 < 256 * 151_936 * 4 / 2  # a few copies of a chunk; never half the logits
    assert 2 * long < larger < 4.5 * long
