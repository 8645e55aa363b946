"""Weight sync to other machines: one actor on each writes the bytes, out of Ray's object store, into a flat buffer of
its own, from which all engines there load. So a node gets the weights once, however many engines it has."""

from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_trainer.errors import EngineLost, SyncError
from skyrl_trainer.rollout.pool import at
from skyrl_trainer.weight_sync.buffer import FlatBuffer, Layout, empty_tensors
from skyrl_trainer.weight_sync.shared_memory import node_of

OPEN_SECONDS = 120.0
"""Limit of starting a process on another machine, with a buffer of its own."""
WRITE_SECONDS = 600.0
"""Limit of sending all weights."""


def machines() -> list[dict[str, Any]]:
    """Ray's nodes as they get learners: the driver's, then by GPUs."""
    here, alive = node_of(None), [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != here, -node["Resources"].get("GPU", 0), node["NodeID"]))


class Receiver:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._buffer: FlatBuffer | None = None

    def path(self) -> str:
        """Opens the buffer, which has no name any more, as long as this process lives."""
        if self._buffer is None:
            self._buffer = FlatBuffer.create(empty_tensors(self._layout, "meta").items())
            self._buffer.unlink()
        return self._buffer.again

    def write(self, data: np.ndarray) -> None:
        assert self._buffer is not None
        np.copyto(self._buffer.flat.numpy(), data)


def open_buffers(receivers: dict[str, Any], nodes: set[str], layout: Layout) -> dict[str, str]:
    """The path of each node's buffer. EngineLost where a node is gone, SyncError where it has no room.
    receivers: by node; those that are missing are started.
    """
    for node in nodes - receivers.keys():
        actor = ray.remote(Receiver).options(num_cpus=0, **at(node, only=True))
        receivers[node] = actor.remote(layout)
    paths = {}
    for node in nodes:
        try:
            paths[node] = ray.get(receivers[node].path.remote(), timeout=OPEN_SECONDS)
        except RayTaskError as error:
            raise SyncError(f"Node {node[:8]} cannot take the weights. {error.cause}") from error
        except RayError as error:  # it died, or there is no room for it, or it is silent
            ray.kill(receivers.pop(node))
            raise EngineLost(f"Node {node[:8]} is gone: {error}") from error
    return paths


def write(receivers: dict[str, Any], nodes: set[str], data: np.ndarray) -> set[str]:
    """Sends the bytes to these nodes, each once; the nodes that are gone."""
    gone = set[str]()
    try:
        shared = ray.put(data)
    except RayError as error:
        size = f"{data.nbytes >> 20:,} MiB of weights"
        raise SyncError(f"Ray's object store has no room for {size}: raise --object-store-memory.") from error
    calls = {node: receivers[node].write.remote(shared) for node in nodes}
    for node, call in calls.items():
        try:
            ray.get(call, timeout=WRITE_SECONDS)
        except RayTaskError as error:
            raise SyncError(f"Node {node[:8]} could not take the weights. {error.cause}") from error
        except RayError:
            ray.kill(receivers.pop(node))
            gone.add(node)
    return gone
