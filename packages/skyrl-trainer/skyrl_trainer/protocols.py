"""What the rooms expect of each other; an implementation is found by its methods, not by inheritance."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from skyrl_trainer.types import GenerationOutput, GenerationRequest, Sample, Trajectory


class InferenceEngine(Protocol):
    """The methods of an engine actor. Between `start_weight_update` and `resume` nothing is generated."""

    def ready(self) -> dict[str, Any]:
        """Loads the model if need be; returns its process's {"pid"}."""

    def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        """Queues requests in the given order, between two engine steps, all at once."""

    async def collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        """Waits until at least one request of this client is done, and returns all that are; [] after `timeout`."""

    def pause(self) -> None:
        """Lets the running step end and takes no other; requests in flight keep their place."""

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, version: int) -> str:
        """Resets the prefix cache, sets the version of all tokens to come, returns a checksum of what was loaded."""

    def resume(self) -> None: ...

    def sleep(self, level: int) -> None:
        """Frees the GPU: 1 keeps the weights in the processor's memory, 2 drops them. Nothing is generated until the
        cache is back; requests in flight stay, and are prefilled again."""

    def wake_up(self, tags: list[str]) -> None:
        """Takes memory back for "weights" (after level 2 they hold nothing until the next update) or "kv_cache"."""

    def worked(self) -> list[tuple[float, float]]:
        """When it computed, by time.time(), since this was asked last."""


class Sampler(Protocol):
    """Chooses tasks. Pure: its state is a small dictionary that a checkpoint holds."""

    def next_tasks(self, n: int) -> list[Sample]: ...

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        """Whether a finished group takes part in learning; asked once per group, in order.
        group: the tries of one task, without those that failed. returns: what each earned in all.
        """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RewardFunction(Protocol):
    """TRL's signature: one number per trajectory, None where the function does not apply. May be `async`.
    prompts, completions: a list of messages {"role", "content"} per trajectory; a completion is the policy's answers
    and, between them, what the env said. columns: `ground_truth`, `sample_id`, `env_id` and the sample's options.
    """

    def __call__(
        self,
        *,
        prompts: list[list[dict[str, str]]],
        completions: list[list[dict[str, str]]],
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> Any: ...


NamedTensors = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""The learner's weights under their Hugging Face names, in a fixed order."""
