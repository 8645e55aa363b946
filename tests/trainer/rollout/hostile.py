"""Envs that do what no env should, by name, and good neighbours. EnvWorkers load this file as environment.env_file.

A function gets its env in step 2, or where its name says: `reset_...`, `close_...`, `del_...`. What it returns is the
step's answer; without any the env goes on as a good one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

HOME = os.getcwd()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class Deadly(Exception):
    def __str__(self) -> str:
        sys.exit(5)


class Own(BaseException):
    pass


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


class Node:
    def __repr__(self) -> str:
        raise Own

    def __del__(self) -> None:
        if hasattr(self, "me"):
            os._exit(6)


def throw(error: BaseException) -> Callable[[Any], Any]:
    def do(env: Any) -> Any:
        raise error

    return do


def hang(env: Any = None, caught: type[BaseException] = Exception) -> None:
    while True:
        with contextlib.suppress(caught):
            time.sleep(0.01)


def recurse(env: Any) -> Any:
    return recurse(env)


def close_descriptors(env: Any) -> None:
    os.closerange(0, 256)


def cycle(env: Any) -> None:
    node: Any = Node()
    node.me = node
    del node
    gc.collect()


def memory(env: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    hog = []
    while True:
        hog.append(bytearray(2**22))


def later(env: Any) -> None:
    threading.Timer(0.05, os._exit, (5,)).start()
    env.sleep = 0.2


def deaf(env: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    hang()


def ignore(env: Any) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    hang()


def disarm(env: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    hang()


def trace(env: Any) -> None:
    sys.settrace(lambda *_: 1 / 0)  # type: ignore[func-returns-value, arg-type, return-value]


def scribble(env: Any) -> None:
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, b"not json\n")


def recursive(env: Any) -> Any:
    info: dict[str, Any] = {}
    info["me"] = info
    return answer(info=info)


def answer(**changes: Any) -> tuple[Any, ...]:
    said = {"observation": "bad", "reward": 0.0, "terminated": False, "truncated": False, "info": {}} | changes
    return tuple(said.values())


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "exit": lambda env: sys.exit(),
    "reset_exit": lambda env: sys.exit(3),
    "reset_raises": throw(Own("no\n\n  never")),
    "generator_exit": throw(GeneratorExit()),
    "interrupt": throw(KeyboardInterrupt()),
    "cancelled": throw(asyncio.CancelledError()),
    "own": throw(Own("no")),
    "group": throw(BaseExceptionGroup("all", [Own(), SystemExit(2)])),
    "mute": throw(Mute()),
    "deadly": throw(Deadly()),
    "unpicklable": throw(Unpicklable()),
    "long": throw(ValueError("x" * 10_000_000)),
    "half_a_character": throw(ValueError("\ud800")),
    "recursion": recurse,
    "exit_0": lambda env: os._exit(0),
    "exit_3": lambda env: os._exit(3),
    "reset_exit_3": lambda env: os._exit(3),
    "close_exit_3": lambda env: os._exit(3),
    "del_exit_3": lambda env: os._exit(3),
    "exec": lambda env: os.execv("/bin/true", ["true"]),
    "abort": lambda env: os.abort(),
    "kill": lambda env: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda env: os.kill(os.getpid(), signal.SIGTERM),
    "null": lambda env: ctypes.string_at(0),
    "descriptors": close_descriptors,
    "output": lambda env: os.close(1),
    "stream": lambda env: sys.stdout.close(),
    "cycle": cycle,
    "later": later,
    "trace": trace,
    "scribble": scribble,
    "hang": hang,
    "hang_for_good": lambda env: hang(caught=BaseException),
    "hang_in_c": lambda env: max(itertools.repeat(0)),
    "deaf": deaf,
    "ignore": ignore,
    "disarm": disarm,
    "clock": lambda env: setattr(time, "monotonic", None),
    "huge": lambda env: bytearray(2**60),
    "memory": memory,
    "nan": lambda env: answer(reward=float("nan")),
    "infinite": lambda env: answer(reward=np.float32("inf")),
    "giant": lambda env: answer(reward=-1e20),
    "reward_text": lambda env: answer(reward="1.0"),
    "reward_none": lambda env: answer(reward=None),
    "reward_array": lambda env: answer(reward=np.ones(2)),
    "part_nan": lambda env: answer(info={"reward_parts": {"a": float("nan")}}),
    "part_text": lambda env: answer(info={"reward_parts": {"a": "much"}}),
    "terminated_array": lambda env: answer(terminated=np.ones(2)),
    "observation_none": lambda env: answer(observation=None),
    "observation_bytes": lambda env: answer(observation=b"bad"),
    "info_none": lambda env: answer(info=None),
    "success_text": lambda env: answer(info={"success": "false"}),
    "info_recursive": recursive,
    "info_giant": lambda env: answer(info={"text": "x" * 20_000_000}),
    "info_repr": lambda env: answer(info={"node": Node()}),
    "info_keys": lambda env: answer(info={Mute(): 1}),
    "three": lambda env: ("bad", 0.0, True),
}
"""Fail, alone."""
ODD: dict[str, Callable[[Any], Any]] = {
    "slow": lambda env: setattr(env, "sleep", 0.7),
    "close_exit": lambda env: sys.exit(3),
    "close_own": throw(Own("no")),
    "close_hang": hang,
    "directory": lambda env: os.chdir(tempfile.mkdtemp()),
    "streams": lambda env: [setattr(sys, name, None) for name in ("stdin", "stdout", "stderr")],
    "alarm": lambda env: signal.signal(signal.SIGALRM, signal.SIG_DFL) and signal.alarm(1),
    "shallow": lambda env: sys.setrecursionlimit(150),
    "fork": lambda env: os.fork(),
    "keeper": lambda env: os.kill(os.getppid(), signal.SIGKILL),
    "surrogate": lambda env: answer(observation="\ud800", info={"reward_parts": {"\ud800": 0.0}}),
    "info_nan": lambda env: answer(info={float("nan"): float("inf"), (1, 2): {3}, "n": np.float64(1), "a": np.ones(2)}),
}
"""Do not fail, and do their neighbours no harm either."""
ALL = HOSTILE | ODD
STAGES = ("reset_", "close_", "del_")


class Drill(gymnasium.Env[str, str]):
    """Ends after four steps with reward 1; asks for what every process owes it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.do, self.count, self.sleep = (options or {})["do"], 0, 0.0
        self._at("reset")
        return "start", {}

    def step(self, action: str) -> tuple[Any, ...]:  # type: ignore[override]
        self.count += 1
        time.sleep(self.sleep)
        print("on standard output")
        assert os.getcwd() == HOME and sys.getrecursionlimit() >= 1000
        said = None
        if self.count == 2 and self.do and not self.do.startswith(STAGES):
            said = ALL[self.do](self)
        over = self.count == 4
        return said if isinstance(said, tuple) else (f"now {self.count}", float(over), over, False, {"success": over})

    def _at(self, stage: str) -> None:
        if self.do.startswith(stage + "_"):
            ALL[self.do](self)

    def close(self) -> None:
        self._at("close")

    def __del__(self) -> None:
        self._at("del")


class Waiting(Drill):
    """The same in a thread."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "waits": True}


class Unreadable(Drill):
    """Fails before its first reset."""

    @property
    def metadata(self) -> Any:  # type: ignore[override]
        sys.exit(2)


gymnasium.register("test/Drill-v0", Drill)
gymnasium.register("test/DrillWaiting-v0", Waiting)
gymnasium.register("test/DrillUnreadable-v0", Unreadable)
