"""The OpenEnv protocol, both ways: `server` serves an environment, `client` plays one that is served elsewhere."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

MAX_MESSAGE = 1 << 24
"""Bytes of a message: the longest action has 2^20 characters, and JSON escapes them."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TRUNCATED, TERMINATED = "TimeLimit.truncated", "terminated"
"""In the metadata of a last observation where a limit has ended the episode: true, and whether it had ended anyway."""


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """What the call will give, in a thread that nobody has to wait for, not even at the end of the process."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@cache
def loop_of(process: int, name: str) -> asyncio.AbstractEventLoop:
    """In a thread, which a fork of the process has not. name: whose; one that is held up holds up no other."""
    loop = asyncio.new_event_loop()

    def turn() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # a coroutine's: its caller gets it
                loop.run_forever()

    in_thread(turn)
    return loop


def result_of(work: Coroutine[Any, Any, Any], seconds: float | None = None, loop: Any = None) -> Any:
    """Of a coroutine, or TimeoutError. All run in one loop, so that a client or a lock serves later calls, too."""
    future = asyncio.run_coroutine_threadsafe(work, loop or loop_of(os.getpid(), "coroutines"))
    try:
        return future.result(seconds)
    finally:  # as after Ctrl-C
        future.cancel()
