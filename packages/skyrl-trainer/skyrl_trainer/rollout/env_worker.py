"""EnvWorker: the actor that holds many environments, in processes of their own (env_process.py).

SIGALRM interrupts their Python code after `step_timeout` seconds; a process that is silent for twice as long is killed.
"""

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle

Call = tuple[Any, ...]
"""("reset", key, sample) makes an env (closing an older one of that key) and resets it; ("step", key, action), and for
a repeated step the tool calls that it made the first time; ("close", key) closes what is still open; ("ended", "",
keys) asks for the replies that "waiting" stood for: the info has the fields of those that are there, by key."""
CRASHED = "The env hung or crashed its EnvWorker"
START_LIMIT = 120.0
"""Seconds that a process of envs has to start, and to run a user's file."""
CODE = "import sys; sys.path = {}; from skyrl_trainer.rollout.env_process import main; main({}, {}, {!r})"


@dataclass(slots=True)
class EnvReply:
    """What an env said. Example: EnvReply(observation="12+30=?", info={"instructions": ""}) after a reset."""

    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    kind: str = ""
    """With an error: "raised", "timeout", "died" (its process ended in this call) or "lost" (no such env here).
    Without one: "waiting", the call of an env that waits has only begun."""
    close_error: str | None = None

    @classmethod
    def read(cls, said: tuple[dict[str, Any], dict[str, Any]]) -> "EnvReply":
        """Of its other fields and its info."""
        fields, fields["info"] = said
        return cls(**fields)


class EnvWorker:
    """Made an actor by pool.start_env_workers."""

    def __init__(self, step_timeout: float, agent: str | list[str] | None = None) -> None:
        """`step_timeout`: wall-clock seconds of one env call. agent: a function of the user's, to import early."""
        self._limit = step_timeout
        self._agent = agent
        self._template: subprocess.Popen[bytes] | None = None
        self._forking = threading.Lock()
        self._shared = EnvProcess(self._fork, step_timeout)
        self._alone: dict[str, EnvProcess] = {}

    def call_many(self, calls: list[Call]) -> list[EnvReply]:
        return self._shared.call(calls)

    @ray.method(concurrency_group="alone")
    def alone(self, call: Call) -> EnvReply:
        """A call of an env that has a process to itself, from its reset to its end."""
        what, key, *_ = call
        if what == "close" and key not in self._alone:
            return EnvReply()
        process = self._alone.setdefault(key, EnvProcess(self._fork, self._limit))
        [reply] = process.call([(*call, True) if what == "reset" else call])
        if what == "close" or reply.error is not None or reply.terminated or reply.truncated:
            self._alone.pop(key, None)
            process.end()
        return reply

    def shutdown(self) -> None:
        """Closes all envs."""
        for process in (self._shared, *self._alone.values()):
            process.call([("shutdown", "")])
            process.end()

    def _fork(self, note: int) -> socket.socket:
        with self._forking:
            if self._template is None or self._template.poll() is not None:
                self._requests, theirs = socket.socketpair()
                code = CODE.format(sys.path, theirs.fileno(), self._limit, self._agent)
                with theirs:
                    self._template = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._requests, [b"."], [theirs.fileno(), note])
        return ours


class EnvProcess:
    """A process of envs, as its EnvWorker sees it: it starts with its first call, and anew after its end."""

    def __init__(self, fork: Callable[[int], socket.socket], step_timeout: float) -> None:
        self._fork = fork
        self._patience = 2 * step_timeout + 2  # a call has its limit, and so has the close that follows it
        self._channel: socket.socket | None = None
        self._lock = threading.RLock()
        self._note = memoryview(bytes(4)).cast("I")

    def call(self, calls: list[Call]) -> list[EnvReply]:
        replies: list[EnvReply] = []
        with self._lock:
            try:
                if self._channel is None:
                    self._channel = self._start()
                    self._lines = self._channel.makefile("rb")
                    self._loaded: set[str | None] = {None}
                    self._read(START_LIMIT)
                for file in {call[2].env_file for call in calls if call[0] == "reset"} - self._loaded:
                    self._loaded.add(file)
                    self._channel.sendall(cloudpickle.dumps([("load", file)]))
                    self._read(START_LIMIT)
                self._note[0] = 0
                with suppress(BrokenPipeError):  # its last words are read below
                    self._channel.sendall(cloudpickle.dumps(calls))
                while len(replies) < len(calls):
                    replies += self._read(self._patience)
            except (OSError, ValueError, TypeError, EOFError) as error:
                self.end()
                culprit = min(max(self._note[0], len(replies)), len(calls) - 1)
                lost = EnvReply(error="The env's process has ended.", kind="lost")
                replies += [lost] * (len(calls) - len(replies))
                replies[culprit] = EnvReply(error=f"{CRASHED}: {error}.", kind="died")
        return replies

    def _start(self) -> socket.socket:
        with os.fdopen(os.memfd_create("note"), "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._note = memoryview(mmap.mmap(file.fileno(), 0)).cast("I")
            return self._fork(file.fileno())

    def end(self) -> None:
        """Hangs up: its keeper kills it."""
        with self._lock:
            if self._channel is not None:
                self._lines.close()
                self._channel.close()
                self._channel = None

    def _read(self, seconds: float) -> list[EnvReply]:
        assert self._channel is not None
        self._channel.settimeout(seconds)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise TimeoutError(f"its process was silent for {seconds:g} seconds") from None
        said = json.loads(line) if line else "no word"
        if isinstance(said, str):
            raise EOFError(f"its process ended with {said}")
        return list(map(EnvReply.read, said))
