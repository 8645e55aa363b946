"""Several learners: the same Learner and algorithm in each of N Ray actors; the driver calls all of them alike.

Weights and checkpoints are put together by all and written by rank 0 into memory that the driver shares.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch.distributed import TCPStore

from skyrl_trainer.agent.tokenizer import load_tokenizer
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.learner.ranks import Ranks, reshard, whole
from skyrl_trainer.process_memory import INTERVAL, return_free_memory
from skyrl_trainer.rollout.pool import at
from skyrl_trainer.settings import Config
from skyrl_trainer.types import LearnerState, RewardBatch, StepMetrics
from skyrl_trainer.user_file import load_plugin
from skyrl_trainer.weight_sync.buffer import FlatBuffer, empty_tensors
from skyrl_trainer.weight_sync.machines import machines

CALL_SECONDS = 4 * 3600.0
"""Limit of one call to all learners, the longest being an update."""
BLAME_SECONDS = 10.0
"""After a first error, the time in which the others' may say who was its cause."""


class LearnerProcess:
    """The Ray actor: learner `rank` of `size`. Every method must be called on all of them; rank 0 answers."""

    def __init__(self, config: Config, rank: int, size: int, address: str, port: int) -> None:
        self.config = config
        self.rank = rank
        load_plugin(config)  # before an algorithm of the user's arrives
        device = "cuda" if config.trainer.placement.policy_num_gpus_per_node else "cpu"
        self.ranks = Ranks(rank, size, TCPStore(address, port), device)

    def load(self, algorithm: bytes, weights: str, total_optimizer_steps: int) -> int:
        """Returns the process id."""
        self.algorithm = cloudpickle.loads(algorithm)
        self.learner = make_learner(self.config, weights, total_optimizer_steps, self.ranks)
        self.reference = self.learner.reference() if self.algorithm.beta > 0 else None
        self.algorithm.start(self.learner, self.reference)
        return os.getpid()

    def update(self, batch: RewardBatch, positional: Any, named: Any) -> tuple[StepMetrics, list[list[list[float]]]]:
        """The metrics, and the advantages by trajectory and turn."""
        print(f"update of step {batch.rollouts.step}", file=sys.stderr, flush=True)
        if batch.rollouts.step % INTERVAL == 0:
            return_free_memory()
        metrics = self.algorithm.update(batch, *positional, **named)
        if self.reference is not None:
            reshard(self.reference.model)
        answered = () if self.rank else batch.trajectories
        return metrics, [[turn.advantages for turn in each.turns] for each in answered]

    def call(self, owner: str, method: str, *arguments: Any) -> Any:
        answer = getattr(getattr(self, owner), method)(*arguments)
        reshard(self.learner.model)  # no gathered weights beside an engine that is awake
        return answer if self.rank == 0 else None

    def share_weights(self) -> Any:
        """Path and layout of the buffer into which `write_weights` writes."""
        self.buffer = FlatBuffer.create(self.learner.named_tensors()) if self.rank == 0 else None
        return self.buffer and (self.buffer.path, self.buffer.layout)

    def write_weights(self) -> None:
        self._write(self.learner.named_tensors(), self.buffer)

    def write_state(self) -> tuple[Any, dict[str, Any]]:
        """Path and layout of a new buffer that holds all tensors, and the numbers."""
        state = self.algorithm.state_dict()
        buffer = FlatBuffer.create(state.tensors.items()) if self.rank == 0 else None
        self._write(state.tensors.items(), buffer)
        return buffer and (buffer.path, buffer.layout), state.numbers

    @torch.no_grad()
    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], buffer: FlatBuffer | None) -> None:
        for name, tensor in tensors:
            full = whole(tensor)
            if buffer is not None:
                buffer.tensors[name].copy_(full)

    def read_state(self, path: str, layout: list[dict[str, Any]], numbers: dict[str, Any]) -> None:
        # The others are perhaps on another machine: their values come from rank 0.
        tensors = FlatBuffer(path, layout).tensors if self.rank == 0 else empty_tensors(layout)
        self.algorithm.load_state_dict(LearnerState(tensors, numbers))


class LearnerGroup:
    """What a run needs of learner and algorithm. After a UserError, which names the learner, it is of no use."""

    process: ClassVar[type[LearnerProcess]] = LearnerProcess

    def __init__(self, config: Config, algorithm: Any, weights: str, total_optimizer_steps: int) -> None:
        """algorithm: a GRPO or an SFTTrainer; each learner has a copy."""
        self.config, self.size = config, config.num_learners
        self.tokenizer = load_tokenizer(weights)
        self.failure: UserError | None = None
        self.pids: list[int] = []
        weights = str(Path(weights).resolve()) if Path(weights).exists() else weights
        try:
            sent = cloudpickle.dumps(algorithm)
        except Exception as error:
            raise UserError(f"{type(algorithm).__name__} cannot go to {self.size} learners: {error}.") from error
        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.actors = [self._start(rank, address) for rank in range(self.size)]
        try:
            self.pids = self._everywhere("load", sent, weights, total_optimizer_steps)
        except BaseException:
            self.close()
            raise

    def update(self, batch: RewardBatch, *others: Any, **named: Any) -> StepMetrics:
        metrics, advantages = self._everywhere("update", ray.put(batch), others, named)[0]
        for trajectory, of_turns in zip(batch.trajectories, advantages, strict=True):
            for turn, values in zip(trajectory.turns, of_turns, strict=True):
                turn.advantages[:] = values
        return metrics

    def call(self, owner: str, method: str, *arguments: Any) -> Any:
        """A method of the "learner" or the "algorithm", on all; what rank 0 answers."""
        return self._everywhere("call", owner, method, *arguments)[0]

    token_logprobs = partialmethod(call, "learner", "token_logprobs")
    transfer = partialmethod(call, "learner", "transfer")
    release_memory = partialmethod(call, "learner", "release_memory")

    def save_pretrained(self, folder: Path, step: int = 0) -> None:
        self.call("learner", "save_pretrained", folder.resolve(), step)

    def share_weights(self) -> FlatBuffer:
        """The memory in which `named_tensors` will lie; to be unlinked by the caller."""
        self.buffer = FlatBuffer(*self._everywhere("share_weights")[0])
        return self.buffer

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Once the learners have written them."""
        self._everywhere("write_weights")
        return iter(self.buffer.tensors.items())

    def state_dict(self) -> LearnerState:
        shared, numbers = self._everywhere("write_state")[0]
        buffer = FlatBuffer(*shared)
        buffer.unlink()
        return LearnerState(buffer.tensors, numbers)

    def load_state_dict(self, state: LearnerState) -> None:
        buffer = FlatBuffer.create(state.tensors.items())
        try:
            for name, tensor in state.tensors.items():
                buffer.tensors[name].copy_(tensor)
            self._everywhere("read_state", buffer.path, buffer.layout, state.numbers)
        finally:
            buffer.unlink()

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def _start(self, rank: int, address: str) -> Any:
        place = self.config.trainer.placement
        gpus = place.policy_num_gpus_per_node
        nodes = [node["NodeID"] for node in machines() if node["Resources"].get("GPU", 0) >= gpus]
        if gpus and rank // gpus >= len(nodes):
            many = f"trainer.placement.policy_num_nodes is more than Ray's {len(nodes)} machines"
            raise UserError(f"{many} with {gpus} GPUs: lower it.")
        env_vars = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.size))}
        env_vars |= {} if rank else {"TMPDIR": tempfile.gettempdir()}  # for the guardian, in /dev/shm
        if gpus and place.colocate_all:  # in Ray's books the engines own the GPUs
            visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
            env_vars["CUDA_VISIBLE_DEVICES"] = visible[rank] if len(visible) >= gpus > rank else str(rank % gpus)
        actor = ray.remote(self.process).options(
            num_cpus=0,
            num_gpus=1 if gpus and not place.colocate_all else 0,
            runtime_env={"env_vars": env_vars},
            **at(nodes[rank // gpus if gpus else 0], only=True),
        )
        return actor.remote(self.config, rank, self.size, address, self.store.port)

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        calls = [getattr(actor, method).remote(*arguments) for actor in self.actors]
        try:
            return ray.get(calls, timeout=CALL_SECONDS)
        except RayError as first:  # the others may wait for the one that failed
            ray.wait(calls, num_returns=len(calls), timeout=BLAME_SECONDS)
            errors = [_error_of(call) for call in calls]
            failure = self._explained(method, errors)
            if not all(error is None or isinstance(error, UserError) for error in errors):
                self.failure = failure  # from now on they are not all at the same place
            raise failure from first

    def _explained(self, method: str, errors: list[Exception | None]) -> UserError:
        last_to_blame = (type(None), GetTimeoutError, UserError)
        order = [([isinstance(e, kind) for kind in last_to_blame], not isinstance(e, RayActorError)) for e in errors]
        rank = order.index(min(order))
        error, who = errors[rank], f"Learner {rank} of {self.size}"
        if isinstance(error, UserError):
            return type(error)(str(error))
        if isinstance(error, GetTimeoutError):
            return UserError(f"{who} did not finish {method} within {CALL_SECONDS:.0f} s.")
        if not isinstance(error, RayActorError):
            return UserError(f"{who} failed in {method}: {type(error).__name__}: {error}")
        said = self._end_of_log(rank) or str(error).strip().splitlines()[-1].strip()
        return UserError(
            f"{who} died during {method}; the last that it said: {said}. The same command goes on from the newest "
            "checkpoint; if the memory was full, lower trainer.micro_batch_tokens."
        )

    def _end_of_log(self, rank: int) -> str:
        with suppress(AttributeError, IndexError, OSError, StopIteration):
            logs = Path(ray._private.worker._global_node.get_logs_dir_path())
            log = next(logs.glob(f"worker-*-{self.pids[rank]}.err"))
            return log.read_text(errors="replace").strip().splitlines()[-1].strip()
        return ""


def _error_of(call: Any) -> Exception | None:
    try:
        ray.get(call, timeout=0)
    except RayError as error:
        return getattr(error, "cause", None) or error
    return None
