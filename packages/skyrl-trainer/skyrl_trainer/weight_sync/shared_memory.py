"""Weight sync within a machine: the weights lie in a shared buffer, and every engine loads from it."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from skyrl_trainer.errors import EngineLost, SyncError, UserError
from skyrl_trainer.protocols import NamedTensors
from skyrl_trainer.registry import load
from skyrl_trainer.weight_sync.buffer import SHARED_MEMORY, FlatBuffer

CALL_SECONDS = 600.0
"""Longest wait for one phase of a sync on all engines."""
GONE_SECONDS = 5.0
"""Between the first and the last sign that another machine is gone."""


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    bytes: int
    checksum: str
    """Of the learner's weights."""
    engine_checksums: tuple[str | None, ...]
    """Of what each engine loaded; None from one that died meanwhile."""


class EngineCalls:
    """One method of all engines at once. An engine that dies is left out from then on; SyncError when one fails."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines
        self._living = list(engines)  # None in the place of those that are left out
        self.away: set[int] = set()
        """Engines that are not asked: they come back by themselves (run/cluster.py)."""

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return self._each(method, [each and getattr(each, method).remote(*arguments) for each in self._living])

    def _each(self, method: str, calls: list[Any]) -> list[Any]:
        answers = []
        for index, call in enumerate(calls):
            try:
                answers.append(call and self._wait(method, [call])[0])
            except EngineLost:
                self._living[index] = None
                answers.append(None)
        return answers

    def _wait(self, method: str, calls: list[Any]) -> list[Any]:
        try:
            return ray.get(calls, timeout=CALL_SECONDS)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineLost):
                raise EngineLost(str(cause)) from error
            reason = str(cause) if isinstance(cause, UserError) else f"{type(cause).__name__}: {cause}"
            raise SyncError(f"Weight sync failed in {method}: {reason}") from error
        except ray.exceptions.RayActorError as error:
            raise EngineLost(f"An engine died in a weight sync, in {method}: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise SyncError(f"Weight sync failed in {method}: no answer within {CALL_SECONDS:.0f} s.") from error


class SharedMemorySync(EngineCalls):
    """`named_tensors()` yields the same names, shapes and dtypes every time.
    A `torch.nn.Parameter` in it that lies on the CPU is moved into a buffer in /dev/shm once (its identity stays);
    the rest is copied at every sync. buffer: one that other processes fill: `named_tensors()` waits till they have.
    """

    def __init__(self, engines: list[Any], named_tensors: NamedTensors, buffer: FlatBuffer | None = None) -> None:
        super().__init__(engines)
        self._nodes = [""] * len(engines)
        self.version: int | None = None
        """The newest that was given to the engines."""
        self.report = SyncReport(0.0, 0, "", ())
        self._named_tensors = named_tensors
        self._buffer = buffer or FlatBuffer.create(named_tensors())  # one by one: some are made anew
        self._receivers: dict[str, Any] = {}
        """By node; none of the driver's."""
        try:
            self._open()
        finally:
            self._buffer.unlink()
        if self._buffer.path.startswith(str(SHARED_MEMORY)):
            for name, tensor in named_tensors():
                if type(tensor) is torch.nn.Parameter and tensor.device.type == "cpu":
                    self._buffer.tensors[name].copy_(tensor.data)
                    tensor.data = self._buffer.tensors[name]

    def sync(self, version: int) -> SyncReport:
        """Send, pause, start, update, finish, resume on every engine. SyncError if one fails; it stays paused then."""
        self.version = version
        self._living = [None if index in self.away else engine for index, engine in enumerate(self._engines)]
        self.report = self._load(version)
        self._everywhere("resume")
        return self.report

    def restore(self, index: int) -> SyncReport:
        """Brings a restarted engine to the newest version, alone, and resumes it. EngineLost if it dies again."""
        self._living = [engine if number == index else None for number, engine in enumerate(self._engines)]
        self._open()
        if self.version is None:  # the first sync is still to come
            return self.report
        report = self._load(self.version)
        self._everywhere("resume")
        if self._living[index] is None:
            raise EngineLost(f"Engine {index} died again while it got its weights.")
        loaded = list(self.report.engine_checksums)
        loaded[index] = report.engine_checksums[index]
        self.report = replace(self.report, engine_checksums=tuple(loaded))
        return self.report

    def _open(self) -> None:
        nodes = self._everywhere("__ray_call__", node_of)
        layout = self._buffer.layout
        self._nodes = [new or old for new, old in zip(nodes, self._nodes, strict=True)]
        paths = {node_of(None): self._buffer.again, None: ""}
        if others := {*nodes} - paths.keys():
            paths |= load("skyrl_trainer.weight_sync.machines:open_buffers")(self._receivers, others, layout)
        infos = [{"path": paths[node], "layout": layout} for node in nodes]
        pairs = zip(self._living, infos, strict=True)
        self._each("init_weight_transfer", [each and each.init_weight_transfer.remote(info) for each, info in pairs])

    def _others(self, nodes: Collection[str]) -> set[str]:
        return {node for engine, node in zip(self._living, self._nodes, strict=True) if engine and node in nodes}

    def _load(self, version: int) -> SyncReport:
        start, gone = time.perf_counter(), set[str]()
        self._fill()  # the engines go on meanwhile
        if others := self._others(self._receivers):
            write = load("skyrl_trainer.weight_sync.machines:write")
            gone = write(self._receivers, others, self._buffer.flat.numpy())
        self._everywhere("pause")
        deadline = time.monotonic() + GONE_SECONDS
        while self._others(gone):  # a node's processes do not end at the same moment
            if time.monotonic() > deadline:
                raise SyncError("Weight sync failed in write: a machine's buffer is gone, and its engines are not.")
            time.sleep(0.2)
            self._everywhere("pause")
        self._everywhere("start_weight_update")
        updates = [each and each.update_weights.remote({}) for each in self._living]
        checksum = self._buffer.checksum()  # while the engines load
        self._each("update_weights", updates)
        loaded = self._everywhere("finish_weight_update", version)
        return SyncReport(time.perf_counter() - start, self._buffer.nbytes, checksum, tuple(loaded))

    def close(self) -> None:
        for actor in self._receivers.values():
            ray.kill(actor)

    @torch.no_grad()
    def _fill(self) -> None:
        for name, tensor in self._named_tensors():
            target = self._buffer.tensors.get(name)
            if target is None or target.shape != tensor.shape:
                raise SyncError(f"The learner's tensor {name} {list(tensor.shape)} was not there at the first sync.")
            if tensor.data_ptr() != target.data_ptr():
                target.copy_(tensor)
        if self._buffer.flat.is_cuda:  # the engine's process reads it next
            torch.cuda.synchronize()


def node_of(_: Any) -> str:
    return ray.get_runtime_context().get_node_id()
