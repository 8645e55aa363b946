"""Ctrl-C, SIGTERM and SIGHUP at the right moment: at once while a command starts or waits, after an update.

An optimizer step that is cut in two can't be saved; a rollout that is cut in two costs nothing but its time.
"""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Self

from skyrl_trainer.errors import UserError


class Stopped(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignal:
    """Inside, a signal raises Stopped; with `at_once = False` only in `interruptible`.
    Outside of that the first is kept, and raised when the next `interruptible` begins; a second one is raised at once.
    One that was ignored before (SIGHUP under nohup) still is.
    """

    def __init__(self) -> None:
        self.at_once = True
        self.requested = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if current_thread() is not main_thread():
            raise UserError("Commands and trainers listen to signals: call them in the main thread of a process.")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (previous := signal.getsignal(number)) is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        # Ray drops ours, and in its place comes what is written to a terminal that was closed.
        if self.requested and (type(error[1]) is KeyboardInterrupt or getattr(error[1], "errno", 0) == errno.EIO):
            raise Stopped(self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, number
        if self.at_once or not first:
            raise Stopped(number)

    def check(self) -> None:
        """Stopped where a signal was kept."""
        if self.requested:
            raise Stopped(self.requested)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self.check()
        self.at_once = True
        try:
            yield
        finally:
            self.at_once = False
