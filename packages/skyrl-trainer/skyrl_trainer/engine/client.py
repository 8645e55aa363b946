"""The asyncio side of an engine: awaits single generations, talks to the actor in batches.

One `submit` is outstanding at a time and takes everything that became ready during the previous one. An engine that
dies is restarted by Ray; what was not answered is sent again, in the same order.
"""

import asyncio
import time
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from skyrl_trainer.errors import EngineDied, UserError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

COLLECT_SECONDS = 10.0
"""How long one `collect` waits inside the engine."""
RESTART_SECONDS = 300.0
"""How long a dead engine may take until its next process takes requests."""
RETRY_SECONDS = 0.5


class EngineClient:
    """Of one event loop, under an id of its own. Every request gets one output, or EngineDied: it failed or is gone."""

    def __init__(self, actor: Any, client_id: str) -> None:
        self._actor = actor
        self._client_id = client_id
        self._outbox: list[GenerationRequest] = []
        self._waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._unanswered: dict[str, GenerationRequest] = {}
        self._submitting = asyncio.Lock()
        self._lives = 0
        """Of the engine, as far as this client has seen."""
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None
        self._error: EngineDied | None = None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        (output,) = await self.generate_round([request])
        return output

    async def generate_round(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        """All requests enter the engine in this order and in one call; their outputs, in the same order."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self._waiting.update((request.request_id, future) for request, future in zip(requests, futures, strict=True))
        self._outbox += requests
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._guard(self._send()))
        try:
            return await asyncio.gather(*futures)
        finally:
            for request in requests:
                self._waiting.pop(request.request_id, None)

    async def _send(self) -> None:
        await asyncio.sleep(0)  # whoever is ready in this tick of the loop comes along
        while self._outbox:
            async with self._submitting:
                batch, self._outbox = self._outbox, []
                self._unanswered.update((each.request_id, each) for each in batch)
                try:
                    await self._actor.submit.remote(self._client_id, batch)
                except ActorUnavailableError:
                    await self._submit_again()
                self._error = None
            if self._collector is None or self._collector.done():
                self._collector = asyncio.create_task(self._guard(self._collect()))

    async def _collect(self) -> None:
        while self._unanswered:
            lives = self._lives
            try:
                outputs = await self._actor.collect.remote(self._client_id, COLLECT_SECONDS)
            except ActorUnavailableError:
                async with self._submitting:
                    if lives == self._lives:  # else the sender has met the same death
                        await self._submit_again()
                continue
            for output in outputs:
                known = self._unanswered.pop(output.request_id, None)
                future = self._waiting.pop(output.request_id, None) if known else None
                if future is not None and not future.done():  # else nobody waits any more, or it came before
                    future.set_result(output)

    async def _submit_again(self) -> None:
        deadline = time.monotonic() + (0 if self._error else RESTART_SECONDS)
        while True:
            again = {name: request for name, request in self._unanswered.items() if name in self._waiting}
            try:
                await self._actor.submit.remote(self._client_id, list(again.values()))
                break
            except ActorUnavailableError as error:
                if time.monotonic() > deadline:
                    raise EngineDied(f"An engine was not back {RESTART_SECONDS:.0f} s after its death.") from error
                await asyncio.sleep(RETRY_SECONDS)
        self._unanswered = again
        self._lives += 1

    async def _guard(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self._error = _engine_died(error)
            self._outbox = []
            self._unanswered = {}
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._error)


def _engine_died(error: Exception) -> EngineDied:
    cause = getattr(error, "cause", error)  # Ray's own words are a traceback
    if isinstance(cause, UserError):
        return EngineDied(str(cause))
    if isinstance(error, RayTaskError):
        return EngineDied(f"An engine failed: {cause!r}")
    if isinstance(error, RayActorError):
        return EngineDied(
            "The engine's process died (killed, or out of memory): if memory ran out, lower generator.max_concurrency "
            "or engine_kwargs.kv_cache_memory_bytes; a training run leaves ray-logs."
        )
    return EngineDied(f"The connection to an engine failed: {error!r}")
