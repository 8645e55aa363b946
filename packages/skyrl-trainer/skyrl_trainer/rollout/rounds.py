"""Deterministic rollouts: the engine's batches are the same however fast envs answer."""

import asyncio
from typing import Any

from skyrl_trainer.rollout.env_client import settle
from skyrl_trainer.types import GenerationOutput, GenerationRequest


class Rounds:
    """When every living episode waits for tokens, all requests go at once, in trajectory order."""

    def __init__(self, client: Any, living: int) -> None:
        self._client, self._living = client, living
        self._waiting: dict[int, tuple[GenerationRequest, asyncio.Future[GenerationOutput]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, order: int, request: GenerationRequest) -> GenerationOutput:
        """`order`: the trajectory's place in the batch."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[order] = (request, future)
        self._leave_if_complete()
        try:
            return await future
        finally:
            self._waiting.pop(order, None)  # timed out before the round left

    def episode_over(self) -> None:
        self._living -= 1
        self._leave_if_complete()

    def _leave_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._living:
            requests, futures = zip(*[self._waiting[order] for order in sorted(self._waiting)], strict=True)
            self._waiting = {}
            task = asyncio.create_task(settle(futures, self._client.generate_round, list(requests)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
