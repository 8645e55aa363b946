"""Learner and engines that share GPUs take turns: the engines sleep while the learner computes.

    awake --sleep--> asleep --(publishing)--> weights awake --(published)--> awake

Before an update the engines drop weights and KV cache (level 2; level 1, which keeps the weights in the processor's
memory, where a sync brings adapters only). After it the learner gives back what it does not hold on to, memory for the
weights comes first, the sync fills it, and only then is the KV cache made again: both sides' peaks never meet.

The states are kept on every machine, so that a wrong order is found on a CPU too; engines are told only where memory
is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError
from skyrl_trainer.weight_sync.shared_memory import EngineCalls


class State(StrEnum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "weights awake"


def shares_gpus(config: Config) -> bool:
    return config.trainer.placement.colocate_all and config.trainer.placement.policy_num_gpus_per_node > 0


def sync_backend(config: Config) -> str:
    """`nccl` or `shared_memory`, as generator.weight_sync_backend asks. UserError where nccl cannot be.

    On GPUs that learner and engines share NCCL, which joins no two processes on one GPU, gives way, as in SkyRL.
    """
    generator, place = config.generator, config.trainer.placement
    if shares_gpus(config):
        return "shared_memory"
    obstacles = (
        (place.policy_num_gpus_per_node == 0, "the learner is on the processor (policy_num_gpus_per_node=0)"),
        (generator.backend != "vllm", f"generator.backend is {generator.backend}"),
        (config.trainer.policy.model.lora.hot_load, "adapters are hot-loaded from files (lora.sync: adapter)"),
    )
    obstacle = next((reason for is_so, reason in obstacles if is_so), None)
    if obstacle and generator.weight_sync_backend == "nccl":
        raise UserError(f"generator.weight_sync_backend is nccl, but {obstacle}: set it to auto.")
    return "shared_memory" if obstacle or generator.weight_sync_backend == "shared_memory" else "nccl"


class Colocation(EngineCalls):
    """`release()`: lets the learner give back memory that it holds for later. A method raises SyncError when an engine
    fails, RuntimeError when it comes at the wrong time."""

    def __init__(self, engines: list[Any], level: int, shared: bool, release: Callable[[], Any]) -> None:
        super().__init__(engines)
        self.level, self.shared, self.release = level, shared, release
        self.state = State.AWAKE

    def sleep(self) -> None:
        """Before the learner computes: no rollout may be under way."""
        self._move(State.AWAKE, State.ASLEEP, "sleep", self.level)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around a weight sync. Engines that are awake (before the first update) stay so."""
        if self.state is State.AWAKE:
            yield
            return
        self._move(State.ASLEEP, State.WEIGHTS_AWAKE, "wake_up", ["weights"])
        yield
        self._move(State.WEIGHTS_AWAKE, State.AWAKE, "wake_up", ["kv_cache"])

    def _move(self, before: State, after: State, method: str, argument: Any) -> None:
        if self.state is not before:
            raise RuntimeError(f"Engines that are {self.state} cannot become {after}: they have to be {before}.")
        if self.shared:
            if method == "wake_up":
                self.release()
            self._everywhere(method, argument)
        self.state = after
