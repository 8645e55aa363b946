"""Ctrl-C and SIGTERM at the right moment: at once while the driver only waits, after the update while it computes.

An optimizer step that is cut in two can't be saved; a rollout that is cut in two costs nothing but its time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopSignal:
    """Inside `with StopSignal() as stop`, a signal raises KeyboardInterrupt only inside `with stop.interruptible()`.

    Outside of it the first is kept, and raised when the next `interruptible` begins; a second one is raised at once.
    """

    def __init__(self) -> None:
        self._requested = False
        self._waiting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._requested = not self._requested, True
        if self._waiting or not first:
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        if self._requested:
            raise KeyboardInterrupt
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
