"""Weight sync between GPUs: NCCL broadcasts from the learner's GPU to every worker of every vLLM engine.

The learner (of several, number 0) is rank 0 of a group of its own; the workers of engine i follow at
1 + i * tensor_parallel. The checksum (digest.py) is of what the learner sends, and of what each worker received. NCCL
waits for ever, so both sides are watched for a first failure.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from operator import itemgetter
from typing import Any

import ray
import torch
from torch.distributed.tensor import DTensor

from skyrl_gym.openenv import in_thread
from skyrl_trainer.errors import EngineLost, LearnersWait, SyncError
from skyrl_trainer.protocols import NamedTensors
from skyrl_trainer.weight_sync.digest import Digest
from skyrl_trainer.weight_sync.shared_memory import CALL_SECONDS, EngineCalls, SyncReport

BUCKET_BYTES = 2**29
"""Holds the largest tensor of models up to 4 B parameters; a larger one gets a bucket of its own."""
NUM_BUCKETS = 2


class WeightSender:
    """The learner's side, in each of its processes; methods must be called on all of them."""

    def __init__(self, named_tensors: NamedTensors, rank: int) -> None:
        """rank: of this learner among several; number 0 sends, the others only help to gather."""
        self.named_tensors, self.rank, self.group = named_tensors, rank, None
        self.gpu = torch.cuda.current_device() if torch.cuda.is_available() else -1  # each thread has its own

    def call(self, method: str, *arguments: Any) -> Any:
        with torch.cuda.device(self.gpu):
            return getattr(self, method)(*arguments)

    def metadata(self) -> dict[str, list[Any]]:
        """vLLM's NCCLWeightTransferUpdateInfo; nothing is gathered for it."""
        found = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in self.named_tensors()]
        names, dtypes, shapes = (list(column) for column in zip(*found, strict=True))
        return {"names": names, "dtype_names": [str(d).removeprefix("torch.") for d in dtypes], "shapes": shapes}

    def open(self, address: str, port: int, size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        if self.rank == 0:
            self.group = trainer_init({"master_address": address, "master_port": port, "world_size": size})

    @torch.no_grad()
    def send(self) -> tuple[int, str]:
        """Bytes and checksum of what was sent."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        digest = Digest()
        torch.cuda.synchronize()  # buckets are packed on streams of their own
        pairs = self._full(digest)
        if self.group is None:
            deque(pairs, maxlen=0)
        else:
            packed_nccl_broadcast_producer(pairs, self.group, 0, itemgetter(1), BUCKET_BYTES, NUM_BUCKETS)
        return digest.nbytes, digest.hexdigest()

    def _full(self, digest: Digest) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.named_tensors():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            digest.add(name, full)
            yield name, full


class NCCLSync(EngineCalls):
    """`learners(method, ...)`: WeightSender's methods on all learners; what number 0 answers."""

    def __init__(self, engines: list[Any], learners: Callable[..., Any], tensor_parallel: int) -> None:
        super().__init__(engines)
        self.version: int | None = None
        self.report = SyncReport(0.0, 0, "", ())
        self._learners = learners
        self._tensor_parallel = tensor_parallel
        self._update_info = learners("metadata")
        self._open()

    def sync(self, version: int) -> SyncReport:
        """As SharedMemorySync's."""
        self.version, start = version, time.perf_counter()
        self._everywhere("pause")
        self._everywhere("start_weight_update")
        self._check_living()  # before the learners wait for engines that died
        calls = [engine.update_weights.remote(self._update_info) for engine in self._engines]
        size, checksum = self._both("update_weights", calls, "send")
        loaded = self._everywhere("finish_weight_update", version)
        self._everywhere("resume")
        self._check_living()
        self.report = SyncReport(time.perf_counter() - start, size, checksum, tuple(loaded))
        return self.report

    def _check_living(self) -> None:
        if None in self._living:
            raise SyncError("Weight sync failed: an engine died before or in it, and a group cannot go on without.")

    def restore(self, index: int) -> SyncReport:
        """A restarted engine needs a new group, with everybody in it; all get the newest version once more."""
        self._living = list(self._engines)
        self._open()
        return self.report if self.version is None else self.sync(self.version)

    def close(self) -> None:
        """The group ends with its processes."""

    def _open(self) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = (ray.util.get_node_ip_address(), int(probe.getsockname()[1]))
        infos = init_infos(len(self._engines), self._tensor_parallel, *place)
        calls = [e.init_weight_transfer.remote(info) for e, info in zip(self._engines, infos, strict=True)]
        self._both("init_weight_transfer", calls, "open", *place, infos[0]["world_size"])

    def _both(self, phase: str, calls: list[Any], method: str, *arguments: Any) -> Any:
        answer = in_thread(partial(self._learners, method, *arguments))  # left there if it waits for ever
        deadline = time.monotonic() + CALL_SECONDS
        try:
            while calls or not answer.done():
                if time.monotonic() > deadline:
                    raise SyncError(f"Weight sync failed: no end of {phase} within {CALL_SECONDS:.0f} s.")
                if answer.done() and answer.exception():
                    break
                if calls:
                    done, calls = ray.wait(calls, timeout=0.1)
                    self._wait(phase, done)
                else:
                    wait([answer], 0.1)
        except (EngineLost, SyncError) as failed:
            raise (SyncError if answer.done() else LearnersWait)(str(failed)) from failed
        if error := answer.exception():
            raise SyncError(f"Weight sync failed in {phase}: the learner did not {method} weights: {error}") from error
        return answer.result()


def init_infos(engines: int, tensor_parallel: int, address: str, port: int) -> list[dict[str, Any]]:
    """vLLM's NCCLWeightTransferInitInfo for each engine."""
    common = {"master_address": address, "master_port": port, "world_size": 1 + engines * tensor_parallel}
    common |= {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES, "packed_num_buffers": NUM_BUCKETS}
    return [{**common, "rank_offset": 1 + engine * tensor_parallel} for engine in range(engines)]
