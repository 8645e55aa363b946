"""The OpenEnv protocol, both ways: `server` serves an environment, `client` plays one that is served elsewhere."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
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
