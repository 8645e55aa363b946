"""A Ray cluster as a place to run (`ray.address`): what its nodes have, and what goes where; more: docs/clusters.md."""

import logging
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
import torch
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from skyrl_trainer.errors import EngineDied, EngineLost, UserError
from skyrl_trainer.rollout.elastic import ElasticRollouts, spread
from skyrl_trainer.rollout.pool import at
from skyrl_trainer.run.engine_watch import RESTART_SECONDS, EngineWatch
from skyrl_trainer.run.model_shape import model_shape
from skyrl_trainer.run.processes import OBJECT_STORE_BYTES
from skyrl_trainer.settings import Config
from skyrl_trainer.weight_sync.buffer import SHARED_MEMORY
from skyrl_trainer.weight_sync.colocation import shares_gpus, sync_backend
from skyrl_trainer.weight_sync.machines import machines
from skyrl_trainer.weight_sync.shared_memory import node_of

CONNECT_SECONDS = 10.0
"""Limit of reaching `ray.address`."""
PLACE_SECONDS = 20.0
"""How long processes of an earlier run may take to give their places back."""
LOOK_SECONDS = 120.0
"""Limit of a node's answer to what it has: a process starts there."""
PACKAGES = ("ray", "torch", "transformers", "vllm", "peft", "gymnasium", "skyrl-trainer", "skyrl-gym")
ROOM = 1.05  # of its size, what a flat buffer asks for (weight_sync/buffer.py)
GRPC_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


class Node(NamedTuple):
    """A machine of the cluster and what is free on it."""

    node_id: str
    cpus: float
    gpus: float
    cores: float = 0.0
    """All that it has, used or not."""
    name: str = ""
    store: float = 0.0  # bytes of its object store
    all_gpus: float = 0.0


def prepare(address: str) -> None:
    """Before ray.init, which would try for minutes. OSError at once if Ray does not listen there."""
    host, _, port = address.rpartition(":")
    if "://" in host:
        raise ValueError("a Ray client cannot place engines: give HOST:PORT of the head, on one of its machines")
    if port.isdigit():
        with socket.create_connection((host, int(port)), CONNECT_SECONDS) as head:
            head.sendall(GRPC_GREETING)
            if "RAY_USE_TLS" not in os.environ and head.recv(9)[3:4] != b"\4":  # a frame of settings
                raise OSError("another program has that port")
    # Ray looks for its token by itself for the address "auto" only; a cluster without tokens ignores ours.
    logging.getLogger("ray").setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def living() -> list[Node]:
    """The cluster's `machines`."""
    free, found = available_resources_per_node(), []
    for node in machines():
        key, has = node["NodeID"], node["Resources"]
        left, name = free.get(key, has), f"{node['NodeName']} ({key[:8]})"
        now = left.get("CPU", 0), left.get("GPU", 0)
        found.append(Node(key, *now, has.get("CPU", 0), name, has.get("object_store_memory", 0), has.get("GPU", 0)))
    return found


def place_engines(config: Config, nodes: list[Node], on_gpus: bool, learns: bool = False) -> list[str]:
    """The node of each engine; UserError where there is no room. learns: learners need some, too."""
    # An engine takes a core, or as many GPUs as it is split over; the learners' are theirs, unless they take turns.
    generator, place = config.generator, config.trainer.placement
    wanted = generator.num_inference_engines
    rooms: dict[str, float] = {}
    for number, node in enumerate(nodes):
        learners = learns * place.policy_num_gpus_per_node * (number < place.policy_num_nodes)
        # Learners that take turns count GPUs from 0, and Ray gives engines any that are free.
        need = max(learners, node.all_gpus) if learners and place.colocate_all else learners
        if node.gpus < need:
            turns = "; with colocate_all it must be theirs alone" * (need > learners)
            raise UserError(
                f"Node {node.name} has {node.gpus:g} free GPUs, and its learners need {need:g} (trainer.placement."
                f"policy_num_gpus_per_node{turns}): lower that, free some, or start on a node with more."
            )
        gpus = node.gpus - learners * (not place.colocate_all)
        room = min(node.cpus, gpus // generator.inference_engine_tensor_parallel_size) if on_gpus else node.cpus
        rooms[node.node_id] = max(0, room // 1)
    placed = [node for node, room in rooms.items() for _ in range(int(room))]
    if len(placed) < wanted:
        what = "GPUs left by the learners, and cores," if on_gpus else "cores"
        each = ", ".join(f"{rooms[node.node_id]:.0f} on {node.name}" for node in nodes)
        raise UserError(
            f"There is room for {len(placed)} of {wanted} engines: the free {what} of {len(nodes)} machines are too "
            f"few ({each}). Lower generator.num_inference_engines, or join more."
        )
    # A GPU is as fast on any node, and adapters stay on the driver's; cores of a node share its memory: spread.
    if on_gpus or (learns and sync_backend(config) == "adapter"):
        return placed[:wanted]
    return sorted(spread([""] * wanted, rooms), key=list(rooms).index)


def find_places(config: Config, learns: bool) -> list[str]:
    """`place_engines` in this cluster."""
    deadline = time.monotonic() + PLACE_SECONDS
    while True:
        try:
            return place_engines(config, living(), torch.cuda.is_available(), learns)
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def cores_each(nodes: list[Node], engines: int, env_workers: int) -> float:
    """What an EnvWorker reserves: a core, or less where there would not be as much once the largest node has died."""
    # `nodes`: before the engines, which take a core each. 0 on a single machine.
    left = sum(node.cpus for node in nodes) - max(node.cpus for node in nodes) - engines
    return min(1.0, max(0, int(10 * left / env_workers)) / 10)


class Places:
    def __init__(self, config: Config, model_path: str, engines: int, learns: bool) -> None:
        self._config = config
        self._learns = learns
        self._nodes = find_places(config, learns) if engines else []
        files = [Path(model_path) / "config.json"]
        if learns and "://" not in config.run_address:  # of an address each node has a folder of its own
            files.append(config.run_path / "config.yaml")
        if wrong := [each for _, _, found in examine(config, self._nodes, files, learns) for each in found]:
            raise UserError(f"This cluster cannot take the run: {'; '.join(wrong)}.")
        nodes, workers = living(), config.environment.num_workers
        self._env_nodes = spread([""] * workers, {node.node_id: node.cores for node in nodes})
        self._cores = cores_each(nodes, engines, workers)
        self.engines = [at(node) for node in self._nodes]
        """Ray's options for each."""

    def watch(self, engines: list[Any]) -> "ClusterWatch":
        shared = self._learns and (shares_gpus(self._config) or sync_backend(self._config) == "nccl")
        self._watch = ClusterWatch(engines, self._nodes, waits=self._config.trainer.deterministic or shared)
        return self._watch

    def rollouts(self, config: Config, engines: list[Any], model_path: str) -> ElasticRollouts:
        made = ElasticRollouts(config, engines, model_path, self._nodes, self._env_nodes, self._cores)
        self._watch.rollouts = made
        return made


class ClusterWatch(EngineWatch):
    """An engine that died is `away`: nobody waits for it while another is there, and others play its episodes."""

    def __init__(self, engines: list[Any], nodes: list[str], waits: bool) -> None:
        """waits: for every engine, where each episode is to be played by its own, or a sync needs all."""
        self._waits = waits
        self._nodes = nodes
        self._seen = set[str]()
        self._coming: dict[int, Any] = {}
        self.rollouts: ElasticRollouts | None = None
        super().__init__(engines)

    def check(self, wait: float = 0.0) -> bool:
        nodes = {node.node_id: node.cores for node in living()}
        if nodes.keys() != self._seen and self.rollouts:
            self._seen = set(nodes)
            self.rollouts.settle(nodes)
        found, deadline = super().check(wait), time.monotonic() + RESTART_SECONDS
        while self.away:
            for index in sorted(self.away):
                self._come_back(index)
            if len(self.away) < len(self._engines):
                break
            if time.monotonic() > deadline:
                raise EngineDied(
                    f"All {len(self._engines)} engines died, and none was back after {RESTART_SECONDS:.0f} s: the "
                    "cluster has no room for one. Join nodes and start again; the run goes on."
                )
            time.sleep(0.2)
        if self.rollouts:
            self.rollouts.welcome()
        return found

    def _bring_back(self, index: int) -> None:
        if not self._waits:
            self._coming[index] = self._engines[index].ready.remote()
            self.away.add(index)
            if self.rollouts:
                self.rollouts.leave(index)
            return
        deaths, self._deaths = self._deaths, []
        super()._bring_back(index)
        self._deaths = deaths
        with suppress(RayActorError, GetTimeoutError):  # died again, or busy
            if not self._moved(index):
                self._count(index)

    def _moved(self, index: int) -> bool:
        died = self._nodes[index] not in {node.node_id for node in living()}
        self._nodes[index] = ray.get(self._engines[index].__ray_call__.remote(node_of), timeout=CONNECT_SECONDS)
        return died

    def _come_back(self, index: int) -> None:
        """An engine that is away, if it is ready."""
        call = self._coming[index]
        if not ray.wait([call], timeout=0)[0]:
            return
        try:
            ray.get(call)
            if not self._moved(index):
                self._count(index)
            self._hang(index)
            self.restore(index)
        except (EngineLost, RayActorError, GetTimeoutError, RayTaskError) as error:  # until Ray has a place for it
            if isinstance(error, ActorDiedError | RayTaskError) and not isinstance(error, EngineLost):
                cause = getattr(error, "cause", None) or str(error).strip().splitlines()[-1]
                raise EngineDied(f"Engine {index} died and could not be restarted. {cause}") from error
            self._calls.pop(index, None)
            self._coming[index] = self._engines[index].ready.remote()
            return
        self.away.remove(index)
        if self.rollouts:
            self.rollouts.come_back(index, self._nodes[index])


class Found(NamedTuple):  # what a node says of itself
    python: str
    packages: dict[str, str]
    """Versions; without a build's `+cpu`."""
    memory: int
    """Bytes that are free."""
    shared_memory: int
    """Bytes that are free in /dev/shm; then in the temporary folder."""
    temporary: int
    store_shares: bool
    """Whether Ray's object store lies in /dev/shm, too."""
    missing: list[str]


def look(files: list[str]) -> Found:
    """Of the machine that this runs on; `missing` of these files."""
    return Found(
        platform.python_version(),
        {name: next((d.version.partition("+")[0] for d in distributions(name=name)), "none") for name in PACKAGES},
        psutil.virtual_memory().available,
        shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        shutil.disk_usage(tempfile.gettempdir()).free,
        _store_shares(),
        [file for file in files if not Path(file).exists()],
    )


# In a task of Ray's, whose parent is the raylet.
def _store_shares() -> bool:
    try:
        return f"--plasma_directory={SHARED_MEMORY}" in psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # the first process of a container has no parent there
        return False


def differences(name: str, found: Found, ours: Found) -> Iterator[str]:
    """A sentence for each thing that is not as on the driver's node."""
    if found.python != ours.python:
        yield f"{name} has Python {found.python}, and the driver {ours.python}: install the same"
    for package, version in ours.packages.items():
        if found.packages[package] != version:
            yield f"{name} has {package} {found.packages[package]}, and the driver {version}: install the same"
    for file in found.missing:
        yield f"{name} does not see {Path(file).parent}: put it into a folder that all machines share"


def buffer_bytes(config: Config) -> int:
    """Of the weights in a flat buffer, about; 0 where there is none, or the model is not known yet."""
    shape = model_shape(config)
    return shape.parameters * shape.width if shape and sync_backend(config) not in ("nccl", "cuda_ipc") else 0


def shortage(name: str, found: Found, weights: int, store: int) -> list[str]:
    """A sentence where a flat buffer has no room. store: bytes of /dev/shm that Ray's object store may yet take."""
    buffer, shared, other = int(ROOM * weights), found.shared_memory, found.temporary
    outside = shared <= buffer  # then the buffer goes to the temporary folder
    fits = other > buffer if outside else shared >= buffer + store
    if not weights or (fits and shared >= store):
        return []
    has = f"{name} has {shared >> 20:,} MiB free in /dev/shm and {other >> 20:,} in its temporary folder"
    needs = f"{buffer >> 20:,} for the weights and {store >> 20:,} of /dev/shm for Ray's object store"
    way = ", or set TMPDIR to a folder with room" * (outside and shared >= store)
    return [f"{has}, and needs {needs}: free some, enlarge /dev/shm (docker run --shm-size){way}"]


def check_here(config: Config, learns: bool = True) -> None:
    """UserError where a run without a cluster has no room for its weights."""
    if config.ray.address or not learns:
        return
    found = look([])
    store = OBJECT_STORE_BYTES if found.shared_memory >= OBJECT_STORE_BYTES else 0  # else Ray puts it elsewhere, too
    if wrong := shortage(f"This machine ({platform.node()})", found, buffer_bytes(config), store):
        raise UserError(f"{wrong[0]}.")


def examine(
    config: Config, places: list[str], files: list[Path], learns: bool
) -> Iterator[tuple[Node, Found | str, list[str]]]:
    """A node, what it found, or why it could not look, and what would stop a run there; the driver's first.
    places: of the engines. files: to be seen. learns: engines get weights."""
    paths = [str(file.resolve()) for file in files if file.exists()]
    nodes, ours = living(), look([])
    weights = buffer_bytes(config) if learns else 0
    asked = []
    for node in nodes:
        task = ray.remote(look).options(num_cpus=0, max_retries=0, **at(node.node_id, only=True))
        asked.append((node, task.remote(paths)))
    deadline = time.monotonic() + LOOK_SECONDS
    for node, call in asked:
        name = f"node {node.name}"
        try:
            found = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except RayError as error:
            reason = f"{name} cannot run a task of this project: {str(error).strip().splitlines()[-1]}"
            yield node, reason, [reason]
            continue
        wrong = list(differences(name, found, ours))
        if node == nodes[0] or node.node_id in places:
            passes = found.store_shares and {*places} - {nodes[0].node_id} and weights <= node.store
            wrong += shortage(name, found, weights, weights if passes else 0)
        yield node, found, wrong
