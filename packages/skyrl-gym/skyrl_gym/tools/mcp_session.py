"""Sessions with MCP servers, by the official client; all of a process live in one event loop, in one thread."""

import asyncio
import os
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from skyrl_gym.openenv import loop_of, result_of

Answer = TypeVar("Answer")
Transport = AbstractAsyncContextManager[Any]
MOST_BYTES, MOST_MESSAGES = 16 << 20, 2000
"""That a server may send in an episode; more ends its session. Messages are counted over stdio only."""


class Session:
    """From the connection, which begins here, to `close`, or the end of its owner."""

    def __init__(self, owner: object, settings: Mapping[str, Any]) -> None:
        self.process = os.getpid()
        self._loop, self._client, over = loop_of(self.process, "mcp sessions"), Future[Client](), asyncio.Event()
        transport = _http(settings["url"]) if "url" in settings else _stdio(settings)
        asyncio.run_coroutine_threadsafe(_live(transport, self._client, over), self._loop)
        self.close = weakref.finalize(owner, self._loop.call_soon_threadsafe, over.set)
        """Returns at once; the session's processes are gone some seconds later."""

    def ask(self, question: Callable[[Client], Awaitable[Answer]], seconds: float) -> Answer:
        async def asked() -> Answer:
            return await question(await asyncio.shield(asyncio.wrap_future(self._client)))

        return result_of(asked(), seconds, self._loop)


# It ends by a scope: from a cancelled task, the transport would not shield its clean-up.
async def _live(transport: Transport, connected: Future[Client], over: asyncio.Event) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_connect, transport, connected)
        await over.wait()
        group.cancel_scope.cancel()


async def _connect(transport: Transport, connected: Future[Client]) -> None:
    try:
        async with Client(transport, cache=None) as client:
            connected.set_result(client)
            await anyio.sleep_forever()
    except Exception as error:
        if not connected.done():
            connected.set_exception(error)


def _stdio(settings: Mapping[str, Any]) -> Transport:
    keeper = Path(__file__).with_name("mcp_keeper.py")
    limits = (os.getpid(), MOST_BYTES, MOST_MESSAGES)
    arguments = ["-I", "-S", str(keeper), *map(str, limits), *settings["command"]]
    return stdio_client(StdioServerParameters(command=sys.executable, args=arguments, env=settings.get("env")))


@asynccontextmanager
async def _http(url: str) -> AsyncIterator[Any]:
    left = [MOST_BYTES]

    async def bound(response: httpx2.Response) -> None:
        response.stream = _Bounded(response.stream, left)

    client = httpx2.AsyncClient(timeout=httpx2.Timeout(30.0, read=300.0), event_hooks={"response": [bound]})
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, left: list[int]) -> None:
        self._stream, self._left = stream, left

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left[0] -= len(part)
            if self._left[0] < 0:
                raise ConnectionError(f"it sent more than {MOST_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
