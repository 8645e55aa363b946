"""The OpenEnv protocol, both ways: `server` serves an environment, `client` plays one that is served elsewhere."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

MAX_MESSAGE = 1 << 24
"""Bytes of a message: the longest action has 2^20 characters, and JSON escapes them."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TRUNCATED, TERMINATED = "TimeLimit.truncated", "terminated"
"""In the metadata of a last observation where a limit has ended the episode: true, and whether it had ended anyway."""


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """What the call will give, in a thread that nobody has to wait for, not even at the end of the process."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}


def loop_of(process: int, name: str) -> asyncio.AbstractEventLoop:
    """In a thread, which a fork of the process has not. name: whose; one that is held up holds up no other."""
    new = None
    loop = _loops.get((process, name)) or _loops.setdefault((process, name), new := asyncio.new_event_loop())

    def turn() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # a coroutine's: its caller gets it
                loop.run_forever()

    if loop is new:
        in_thread(turn)
    elif new:
        new.close()
    return loop


def result_of(work: Coroutine[Any, Any, Any], seconds: float | None = None, loop: Any = None) -> Any:
    """Of a coroutine, or TimeoutError. All run in one loop: a client or a lock serves later calls, too."""
    used = loop or loop_of(os.getpid(), "coroutines")
    future = asyncio.run_coroutine_threadsafe(work, used)
    try:
        return future.result(seconds)
    finally:
        late = future.cancel() and used is not loop
        # Or after Ctrl-C, or an env's time limit. A loop that the work still blocks is left to it.
        if late and wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), used)], 1.0).not_done:
            _loops.pop((os.getpid(), "coroutines"), None)
