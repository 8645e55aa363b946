"""Adapters on their way to the engines; tests/e2e/test_lora.py has a real one."""

import pytest
import torch

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
