"""Learner and engines that share GPUs take turns: the engines sleep while the learner computes.

awake --sleep--> asleep --(publishing)--> weights awake --(published)--> awake
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.settings import Config
from skyrl_trainer.weight_sync.shared_memory import EngineCalls

State = Literal["awake", "asleep", "weights awake"]


def shares_gpus(config: Config) -> bool:
    return config.trainer.placement.colocate_all and config.trainer.placement.policy_num_gpus_per_node > 0


def sync_backend(config: Config) -> str:
    """How weights reach the engines, as generator.weight_sync_backend asks. UserError where it cannot be."""
    generator, place = config.generator, config.trainer.placement
    model, asked = config.trainer.policy.model, generator.weight_sync_backend
    if asked == "adapter" or (asked == "auto" and model.lora.quantization == "nf4" and config.num_learners == 1):
        load("skyrl_trainer.weight_sync.lora:check_adapter")(config)
        return "adapter"
    if shares_gpus(config):
        # NCCL joins no two processes on one GPU: there it gives way, as in SkyRL.
        engines = generator.num_inference_engines * generator.inference_engine_tensor_parallel_size
        pair = config.num_learners == engines == 1 and generator.backend == "vllm"
        return "cuda_ipc" if pair and asked != "shared_memory" else "shared_memory"
    obstacle = "" if generator.backend == "vllm" else f"generator.backend is {generator.backend}"
    if place.policy_num_gpus_per_node == 0:
        obstacle = "the learner is on the processor (policy_num_gpus_per_node=0)"
    if obstacle and asked == "nccl":
        raise UserError(f"generator.weight_sync_backend is nccl, but {obstacle}: set it to auto.")
    return "shared_memory" if obstacle or asked == "shared_memory" else "nccl"


class Colocation(EngineCalls):
    """`release()`: lets the learner give back memory that it holds for later. `hold`: as Episodes.hold. A method
    raises SyncError when an engine fails, RuntimeError when it comes at the wrong time."""

    def __init__(
        self, engines: list[Any], level: int, shared: bool, release: Callable[[], Any], hold: Callable[[bool], Any]
    ) -> None:
        super().__init__(engines)
        self.level, self.shared, self.release, self.hold = level, shared, release, hold
        self.state: State = "awake"

    def sleep(self) -> None:
        """Before the learner computes."""
        self._move("awake", "asleep", "sleep", self.level)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around a weight sync. Engines that are awake (before the first update) stay so."""
        if self.state == "awake":
            yield
            return
        self._move("asleep", "weights awake", "wake_up", ["weights"])
        yield
        self._move("weights awake", "awake", "wake_up", ["kv_cache"])

    def _move(self, before: State, after: State, method: str, argument: Any) -> None:
        if self.state != before:
            raise RuntimeError(f"Engines that are {self.state} cannot become {after}: they have to be {before}.")
        if self.shared:
            if method == "wake_up":
                self.release()
            self._everywhere(method, argument)
            self.hold(after != "awake")
        self.state = after
