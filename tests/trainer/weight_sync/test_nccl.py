"""What of the sync between GPUs can be tested without one: checksum, group, choice, and who is waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_trainer.errors import EngineLost, LearnersWait, SyncError, UserError
from skyrl_trainer.settings import Config
from skyrl_trainer.weight_sync import digest as digest_module
from skyrl_trainer.weight_sync.colocation import sync_backend
from skyrl_trainer.weight_sync.digest import Digest
from skyrl_trainer.weight_sync.nccl import BUCKET_BYTES, NCCLSync, init_infos


def digest_of(*tensors: torch.Tensor, name: str = "w") -> str:
    digest = Digest()
    for number, tensor in enumerate(tensors):
        digest.add(f"{name}{number}", tensor)
    return digest.hexdigest()


def test_a_checksum_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "WORDS_AT_ONCE", 2)
    digest = Digest()
    digest.add("w", torch.tensor([3, 5, 7], dtype=torch.int32))
    # Blocks [3, 5] and [7]: (1 * 3 + 3 * 5) * multiplier + 1 * 7, modulo 2**64.
    wanted = (18 * 6364136223846793005 + 7) % 2**64
    assert int(digest._sums[0]) % 2**64 == wanted and digest.nbytes == 12


@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.integers(1, 40))
def test_any_changed_word_changes_the_checksum(data: st.DataObject, dtype: torch.dtype, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    tensor = torch.randint(-100, 100, (length,), generator=generator).to(dtype)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, length - 1))] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_module, "WORDS_AT_ONCE", data.draw(st.integers(1, 7)))
        assert digest_of(tensor) == digest_of(tensor.clone()) != digest_of(changed)


def test_names_shapes_dtypes_and_order_count_but_strides_do_not() -> None:
    a, b = torch.arange(6.0), torch.ones(6)
    assert digest_of(a, b) != digest_of(b, a)
    assert digest_of(a) != digest_of(a.view(2, 3)) and digest_of(a) != digest_of(a, name="v")
    assert digest_of(a) != digest_of(a.view(torch.int32))
    assert digest_of(a.view(2, 3).T) == digest_of(a.view(2, 3).T.contiguous())


def test_every_worker_has_a_place_of_its_own_in_the_group() -> None:
    infos = init_infos(engines=3, tensor_parallel=2, address="10.0.0.1", port=5)
    places = [info["rank_offset"] + worker for info in infos for worker in range(2)]
    assert places == [1, 2, 3, 4, 5, 6] and {info["world_size"] for info in infos} == {7}
    common = {"master_address": "10.0.0.1", "master_port": 5, "packed": True, "packed_buffer_size_bytes": BUCKET_BYTES}
    assert all(info.items() >= common.items() for info in infos)


def test_vllm_takes_what_it_is_told() -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    assert NCCLWeightTransferInitInfo(**init_infos(1, 1, "localhost", 5)[0]).world_size == 2
    NCCLWeightTransferUpdateInfo(names=["w"], dtype_names=["bfloat16"], shapes=[[2, 3]])


APART = {"policy_num_gpus_per_node": 4, "colocate_all": False}
TOGETHER = {"policy_num_gpus_per_node": 1, "colocate_all": True}


@pytest.mark.parametrize(
    ("placement", "generator", "lora", "chosen"),
    [
        ({}, {}, {}, "shared_memory"),
        (APART, {}, {}, "nccl"),
        (APART, {}, {"rank": 8}, "nccl"),
        (APART, {"weight_sync_backend": "nccl"}, {}, "nccl"),
        (APART, {"weight_sync_backend": "shared_memory"}, {}, "shared_memory"),
        (APART, {"backend": "transformers"}, {}, "shared_memory"),
        (APART | {"policy_num_gpus_per_node": 1}, {"weight_sync_backend": "adapter"}, {"rank": 8}, "adapter"),
        (APART | {"policy_num_gpus_per_node": 1}, {}, {"quantization": "nf4"}, "adapter"),
        ({}, {"weight_sync_backend": "shared_memory"}, {"quantization": "nf4"}, "shared_memory"),
        (APART | {"colocate_all": True}, {}, {}, "shared_memory"),
        (TOGETHER, {}, {}, "cuda_ipc"),
        (TOGETHER, {"weight_sync_backend": "nccl"}, {"rank": 8}, "cuda_ipc"),
        (TOGETHER, {"weight_sync_backend": "shared_memory"}, {}, "shared_memory"),
        (TOGETHER, {"backend": "openai_server"}, {}, "shared_memory"),
        (TOGETHER, {"num_inference_engines": 2}, {}, "shared_memory"),
        (TOGETHER, {"inference_engine_tensor_parallel_size": 2}, {}, "shared_memory"),
        (TOGETHER | {"policy_num_nodes": 2}, {}, {}, "shared_memory"),
        (TOGETHER, {}, {"quantization": "nf4"}, "adapter"),
        ({"policy_num_nodes": 2}, {}, {"quantization": "nf4"}, "shared_memory"),
        ({}, {"weight_sync_backend": "nccl"}, {}, "policy_num_gpus_per_node=0"),
        (APART | {"colocate_all": True}, {"weight_sync_backend": "nccl"}, {}, "shared_memory"),
        (APART, {"weight_sync_backend": "nccl", "backend": "transformers"}, {}, "generator.backend is transformers"),
    ],
)
def test_the_backend_follows_the_placement(placement: Any, generator: Any, lora: Any, chosen: str) -> None:
    trainer = {"placement": placement, "policy": {"model": {"lora": lora, "dtype": "bfloat16"}}}
    config = Config.model_validate({"trainer": trainer, "generator": generator})
    if chosen in ("nccl", "shared_memory", "cuda_ipc", "adapter"):
        assert sync_backend(config) == chosen
    else:
        with pytest.raises(UserError, match=r"generator.weight_sync_backend is nccl, but .*set it to auto") as caught:
            sync_backend(config)
        assert chosen in str(caught.value)


class Alone(NCCLSync):
    """Without engines, so that nobody else has to come."""

    def __init__(self, learners: Any) -> None:
        self._engines, self._learners = [], learners


def test_what_the_learner_answers_and_why_it_fails_come_through() -> None:
    assert Alone(lambda method, *rest: (method, rest))._both("update_weights", [], "send", 1) == ("send", (1,))

    def fails(method: str) -> None:
        raise ValueError("out of memory")

    with pytest.raises(SyncError, match="in update_weights: the learner did not send weights: out of memory"):
        Alone(fails)._both("update_weights", [], "send")


def test_engines_that_wait_for_a_learner_that_has_failed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_trainer.weight_sync.nccl.CALL_SECONDS", 5.0)
    monkeypatch.setattr("ray.wait", lambda calls, timeout: ([], calls))

    def fails(method: str) -> None:
        raise ValueError("out of memory")

    with pytest.raises(SyncError, match="the learner did not send weights: out of memory"):
        Alone(fails)._both("update_weights", ["call"], "send")


def test_learners_that_wait_for_a_dead_engine_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that wait no checkpoint can be had."""
    sync = Alone(lambda method: time.sleep(3))
    monkeypatch.setattr("ray.wait", lambda calls, timeout: (calls, []))

    def dies(phase: str, calls: list[Any]) -> None:
        raise EngineLost("engine 1 died")

    monkeypatch.setattr(sync, "_wait", dies)
    with pytest.raises(LearnersWait, match="engine 1 died"):
        sync._both("update_weights", ["call"], "send")


def test_an_engine_that_died_before_is_found_before_the_learners_send(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    sync = Alone(lambda method: asked.append(method))
    sync._living = [None]
    monkeypatch.setattr(sync, "_everywhere", lambda *call: None)
    with pytest.raises(SyncError, match="an engine died") as caught:
        sync.sync(3)
    assert type(caught.value) is SyncError and not asked


def test_a_broadcast_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_trainer.weight_sync.nccl.CALL_SECONDS", 0.3)
    with pytest.raises(LearnersWait, match="no end of update_weights within 0 s"):
        Alone(lambda method: time.sleep(3))._both("update_weights", [], "send")


def test_an_engine_that_came_back_is_in_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Alone(lambda *_: None)
    sync._engines, sync._living, sync.version, sync.report = ["one", "two"], ["one", None], None, None
    opened = []
    monkeypatch.setattr(sync, "_open", lambda: opened.append(list(sync._living)))
    sync.restore(1)
    assert opened == [["one", "two"]]
    sync._check_living()
