"""Adapters on their way to the engines; tests/e2e/test_lora.py has a real one."""

from contextlib import nullcontext

import pytest
import torch

from skyrl_trainer.errors import SyncError
from skyrl_trainer.weight_sync import lora, shared_memory
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync, SyncReport

BASE = 2**50  # bytes, more than any machine here has


def test_an_adapter_asks_for_its_own_room_even_in_the_sync_that_brought_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "node_of", lambda _: "here")  # or Ray would start
    pair = {f"base_model.model.a.q_proj.lora_{side}.weight": torch.zeros(8, 8) for side in "AB"}
    base = SyncReport(0.0, BASE, "same", ())
    monkeypatch.setattr(SharedMemorySync, "_load", lambda self, version: base)
    sync = lora.AdapterSync([], {"w": torch.zeros(1)}.items, pair.items)
    assert [sync._load(version).bytes for version in range(2)] == [BASE + 512, 512]


def test_an_engine_that_has_loaded_other_base_weights_gets_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers would be another policy's. One that has died meanwhile says nothing of its weights."""
    monkeypatch.setattr(shared_memory, "node_of", lambda _: "here")
    pair = {f"base_model.model.a.q_proj.lora_{side}.weight": torch.zeros(8, 8) for side in "AB"}
    for loaded, refused in ((("same", None), False), (("same", "other"), True)):
        monkeypatch.setattr(
            SharedMemorySync, "_load", lambda self, version, told=loaded: SyncReport(0.0, 4, "same", told)
        )
        sync = lora.AdapterSync([], {"w": torch.zeros(1)}.items, pair.items)
        with pytest.raises(SyncError, match="other base weights than the learner") if refused else nullcontext():
            sync._load(0)
