"""Answers that are read while they are sampled, as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, BeforeValidator, PrivateAttr

Json = dict[str, Any]
Told = AsyncIterator[str]
Answering = asyncio.Task[Json]
NULL_IS_ONE = BeforeValidator(lambda given: 1 if given is None else given)


class Streamed(BaseModel):
    """A request whose answer may be told before it is complete. Used from one event loop."""

    stream: bool | None = False
    _told: asyncio.Queue[str | None] = PrivateAttr(default_factory=asyncio.Queue)

    def tell(self, text: str) -> None:
        """The answer's beginning, each time from its first character."""
        self._told.put_nowait(text)

    def tells_for(self, other: "Streamed") -> None:
        """What is told of this request, the readers of the other get."""
        self._told = other._told

    async def told(self, answering: Answering) -> Told:
        """What is new, each time, until the answer is complete."""
        answering.add_done_callback(lambda _: self._told.put_nowait(None))
        length = 0
        while (text := await self._told.get()) is not None:
            if len(text) > length:
                yield text[length:]
                length = len(text)


def settled(text: str, ends: list[str]) -> str:
    """The beginning of a text that no later token can change: up to the first of `ends`, without what may yet become
    one of them, without half a character, and without white space at its end."""
    text = min((text.partition(end)[0] for end in ends), key=len, default=text).rstrip("\ufffd")
    longest = max((n for end in ends for n in range(1, len(end)) if text.endswith(end[:n])), default=0)
    return text[: len(text) - longest].rstrip()


def rest_of(text: str | None, said: str) -> str | None:
    """What has not been said of it. ValueError where it does not begin with what has."""
    if not said:
        return text
    if not (text or "").startswith(said):
        raise ValueError("The engine died while it answered, and its new answer is another one: ask again.")
    return (text or "").removeprefix(said)


async def after(first: str, rest: Told) -> Told:
    yield first
    async for text in rest:
        yield text


def event_of(data: Any, name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"
