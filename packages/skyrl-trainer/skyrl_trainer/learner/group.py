"""Several learners: the same Learner and algorithm in each of N Ray actors; the driver calls all of them alike.

rank 0 opens a store, where all meet -> each loads the policy and keeps its part of it (learner/ranks.py)
update(batch)       the whole rollout to every actor; each computes its share; all return the same metrics
named_tensors()     put together by all, written by rank 0 into the memory from which the engines load
state_dict()        the same: what is saved does not show how many learners there were
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import TCPStore
from transformers import AutoTokenizer

from skyrl_trainer.config import Config
from skyrl_trainer.engine.weights import FlatBuffer
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.checkpoint import State
from skyrl_trainer.learner.learner import Learner, Scorer
from skyrl_trainer.learner.ranks import DistributedRanks, whole
from skyrl_trainer.learner.trainers import trainer_class
from skyrl_trainer.types import RewardBatch, StepMetrics

CALL_SECONDS = 4 * 3600.0
"""Limit of one call to all learners; the longest is an update. One that only hangs ends after COLLECTIVE_SECONDS."""
BLAME_SECONDS = 10.0
"""After a first error, the time in which the others' errors say who was its cause."""
LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables by which accelerate would take the driver's launcher for ours."""


def num_learners(config: Config) -> int:
    place = config.trainer.placement
    return place.policy_num_nodes * max(1, place.policy_num_gpus_per_node)


class LearnerProcess:
    """The Ray actor: one learner of `size`. Every method but `host` must be called on all of them."""

    store: TCPStore

    def __init__(self, config: Config, rank: int, size: int) -> None:
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        self.config, self.rank, self.size = config, rank, size

    def host(self) -> tuple[str, int]:
        """Opens the store where all meet; its address and port."""
        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, self.size, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def load(self, place: tuple[str, int], weights: str, total_optimizer_steps: int) -> tuple[int, Any]:
        """Returns the process id and, from rank 0, the buffer of the weights."""
        store = self.store if self.rank == 0 else TCPStore(*place, self.size)
        gpus = self.config.trainer.placement.policy_num_gpus_per_node
        device = torch.device("cuda", 0) if gpus else torch.device("cpu")  # a process sees its own GPU only
        ranks = DistributedRanks(self.rank, self.size, store, device)
        self.algorithm = trainer_class(self.config.trainer.algorithm.name)(self.config)
        self.learner = Learner(self.config, weights, total_optimizer_steps, ranks)
        reference = Scorer(self.config, weights) if self.algorithm.beta > 0 else None
        if reference is not None:
            ranks.shard(reference.model)
        self.algorithm.start(self.learner, reference)
        self.buffer = self._buffer_for(self.learner.named_tensors())
        return os.getpid(), self.buffer and (self.buffer.path, self.buffer.layout)

    def update(self, *arguments: Any) -> StepMetrics:
        return self.algorithm.update(*arguments)

    def token_logprobs(self, ids: list[int]) -> torch.Tensor | None:
        logprobs_TV = self.learner.token_logprobs(ids)
        return logprobs_TV if self.rank == 0 else None

    def save_pretrained(self, folder: Path) -> None:
        self.learner.save_pretrained(folder)

    def write_weights(self) -> None:
        self._write(self.learner.named_tensors(), self.buffer)

    def write_state(self) -> tuple[Any, dict[str, Any]]:
        """From rank 0: a new buffer that holds all tensors, and the numbers."""
        state = self.learner.state_dict()
        buffer = self._buffer_for(state.tensors.items())
        self._write(state.tensors.items(), buffer)
        return buffer and (buffer.path, buffer.layout), state.numbers

    def read_state(self, path: str, layout: list[dict[str, Any]], numbers: dict[str, Any]) -> None:
        if self.rank == 0:
            tensors = FlatBuffer(path, layout).tensors
        else:  # perhaps on another machine: the tensors come from rank 0
            tensors = {e["name"]: torch.empty(e["shape"], dtype=getattr(torch, e["dtype"])) for e in layout}
        self.learner.load_state_dict(State(tensors, numbers))

    def _buffer_for(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> FlatBuffer | None:
        return FlatBuffer.create(tensors) if self.rank == 0 else None

    @torch.no_grad()
    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], buffer: FlatBuffer | None) -> None:
        for name, tensor in tensors:
            full = whole(tensor)
            if buffer is not None:
                buffer.tensors[name].copy_(full)


class LearnerGroup:
    """What a run needs of its learner and its algorithm, done by `num_learners(config)` actors.

    Every method raises UserError, with the learner that is to blame, when one fails, dies or takes too long; the group
    is of no use then.
    """

    process: ClassVar[type[LearnerProcess]] = LearnerProcess

    def __init__(self, config: Config, weights: str, total_optimizer_steps: int) -> None:
        if config.trainer.policy.model.lora:
            raise UserError(
                "trainer.policy.model.lora trains with one learner only: set trainer.placement.policy_num_nodes=1 "
                "and policy_num_gpus_per_node to 0 or 1."
            )
        self.config, self.size = config, num_learners(config)
        self.tokenizer = AutoTokenizer.from_pretrained(weights)
        self.pids: list[int] = []
        self._failure: UserError | None = None
        weights = str(Path(weights).resolve()) if Path(weights).exists() else weights
        self.actors = [self._start(rank) for rank in range(self.size)]
        try:
            place = self._call("host", self.actors[:1])[0]
            loaded = self._call("load", self.actors, place, weights, total_optimizer_steps)
            self.pids = [pid for pid, _ in loaded]
            self.buffer = FlatBuffer(*loaded[0][1])
        except BaseException:
            self.close()
            raise

    def update(
        self,
        batch: RewardBatch,
        old_logprob: Sequence[torch.Tensor] | None = None,
        value: Sequence[torch.Tensor] | None = None,
        reward: list[list[float]] | None = None,
    ) -> StepMetrics:
        return self._call("update", self.actors, ray.put(batch), old_logprob, value, reward)[0]

    def token_logprobs(self, ids: list[int]) -> torch.Tensor:
        return self._call("token_logprobs", self.actors, ids)[0]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As they lie in `buffer`, once the learners have written them there."""
        self._call("write_weights", self.actors)
        return iter(self.buffer.tensors.items())

    def save_pretrained(self, folder: Path) -> None:
        self._call("save_pretrained", self.actors, folder.resolve())

    def state_dict(self) -> State:
        buffer, numbers = self._call("write_state", self.actors)[0]
        mapped = FlatBuffer(*buffer)
        mapped.unlink()
        return State(mapped.tensors, numbers)

    def load_state_dict(self, state: State) -> None:
        buffer = FlatBuffer.create(state.tensors.items())
        try:
            for name, tensor in state.tensors.items():
                buffer.tensors[name].copy_(tensor)
            self._call("read_state", self.actors, buffer.path, buffer.layout, state.numbers)
        finally:
            buffer.unlink()

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if hasattr(self, "buffer"):
            self.buffer.unlink()

    def _start(self, rank: int) -> Any:
        place = self.config.trainer.placement
        gpus, here = place.policy_num_gpus_per_node, ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        nodes = [here, *sorted(others)][: place.policy_num_nodes if gpus else 1]
        if gpus and rank // gpus >= len(nodes):
            raise UserError(
                f"trainer.placement.policy_num_nodes is {place.policy_num_nodes}, but the Ray cluster has "
                f"{len(nodes)} machines: lower it, or join a larger cluster by ray.address."
            )
        env_vars = {} if gpus else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.size))}
        if gpus and place.colocate_all:  # the engines own the GPUs in Ray's books; learners take turns with them
            env_vars["CUDA_VISIBLE_DEVICES"] = str(rank % gpus)
        options = {
            "num_cpus": 0,
            "num_gpus": 1 if gpus and not place.colocate_all else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[rank // gpus if gpus else 0], soft=False),
            "runtime_env": {"env_vars": env_vars},
        }
        return ray.remote(self.process).options(**options).remote(self.config, rank, self.size)

    def _call(self, method: str, actors: list[Any], *arguments: Any) -> list[Any]:
        """The answers of these actors, by rank."""
        if self._failure is not None:
            raise self._failure
        calls = [getattr(actor, method).remote(*arguments) for actor in actors]
        waiting, answers, errors = calls, {}, {}
        deadline = time.monotonic() + CALL_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            done, waiting = ray.wait(waiting, timeout=left)
            for call in done:
                try:
                    answers[calls.index(call)] = ray.get(call)
                except ray.exceptions.RayError as error:
                    errors[calls.index(call)] = error
                    deadline = min(deadline, time.monotonic() + BLAME_SECONDS)
        if errors or waiting:
            late = [rank for rank, call in enumerate(calls) if call in waiting]
            self._failure = self._explained(method, errors, late)
            raise self._failure from next(iter(errors.values()), None)
        return [answers[rank] for rank in range(len(calls))]

    def _explained(self, method: str, errors: dict[int, Exception], late: list[int]) -> UserError:
        """The first cause: a learner that died, then one with a sentence of its own, then any other error."""
        for rank, error in errors.items():
            if isinstance(error, ray.exceptions.RayActorError):
                said = self._last_words(rank) or str(error).strip().splitlines()[-1].strip()
                return UserError(
                    f"Learner {rank} of {self.size} died during {method} (the last it said: {said}). Start the same "
                    "command again to go on from the newest checkpoint; if memory ran out, lower "
                    "trainer.micro_batch_tokens."
                )
        causes = {rank: getattr(error, "cause", None) or error for rank, error in errors.items()}
        for cause in causes.values():
            if isinstance(cause, UserError):
                return UserError(str(cause))
        if not causes:
            return UserError(f"The learners {late} of {self.size} did not finish {method} in {CALL_SECONDS:.0f} s.")
        rank, cause = next(iter(causes.items()))
        return UserError(f"Learner {rank} of {self.size} failed in {method}: {type(cause).__name__}: {cause}")

    def _last_words(self, rank: int) -> str:
        """The last line of the process's log, if it is on this machine."""
        with suppress(AttributeError, IndexError, OSError):
            folder = Path(ray._private.worker._global_node.get_logs_dir_path())
            log = next(folder.glob(f"worker-*-{self.pids[rank]}.err"), None)
            lines = log.read_text(errors="replace").split("\n") if log else []
            return [line for line in lines if line.strip() and not line.startswith(":")][-1].strip()
        return ""
