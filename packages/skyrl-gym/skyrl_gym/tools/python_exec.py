"""python_exec: runs a model's Python in a confined process, without Docker.

Every call starts from the same state and leaves none; only the standard library can be imported; the value of a last
expression is printed, as in a notebook. docs/environments/python_exec.md says what it promises, and what not.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import Any, BinaryIO, cast

log = logging.getLogger(__name__)
UNSAFE = "SKYRL_UNSAFE_PYTHON_EXEC"
LONGEST_CODE = 1 << 20
PATIENCE = 60.0  # seconds that the server may take to start, or longer than a call's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use: address space, CPU time of all threads, output of both streams, and of files."""

    wall_seconds: float = 2.0
    cpu_seconds: int = 2
    memory_mib: int = 256
    output_bytes: int = 16 << 10
    file_mib: int = 4
    folder_mib: int = 16
    open_files: int = 32

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) not in ((int, float) if name == "wall_seconds" else (int,)) or not 0 < value < 1 << 30:
                raise ValueError(f"Limits: {name} is {value!r}; expected a positive int (or float, for wall_seconds).")


@dataclasses.dataclass(frozen=True, slots=True)
class ExecResult:
    """For the model; `error` is the end of a traceback or a sentence. Example: ExecResult("4\\n", None, 0.002)"""

    output: str
    error: str | None
    seconds: float


class Sandbox:
    """Runs code, one call at a time; threads may share it, and a fork of this process gets a server of its own.
    `unsafe` allows to run where the kernel offers too little, as SKYRL_UNSAFE_PYTHON_EXEC=1 does."""

    def __init__(self, limits: Limits = Limits(), unsafe: bool = False) -> None:
        self.limits, self.unsafe = limits, unsafe or os.environ.get(UNSAFE) == "1"
        self._lock = threading.RLock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket, BinaryIO] | None = None
        self._folder, self._layers = "", dict[str, str]()
        _sandboxes.add(self)

    def run(self, code: str) -> ExecResult:
        """Runs code; whatever it does becomes a result. Raises as `start` does."""
        if len(code) > LONGEST_CODE:
            return ExecResult("", f"The code has {len(code)} characters; at most {LONGEST_CODE} are run.", 0.0)
        with self._lock:
            for _ in range(2):
                self.start()
                try:
                    return ExecResult(**self._answer(json.dumps(code) + "\n", self.limits.wall_seconds + PATIENCE))
                except OSError as error:
                    log.warning("python_exec's server has died (%s); a new one is started.", error)
        return ExecResult("", "The sandbox's server died twice during this call.", 0.0)

    def start(self) -> dict[str, str]:
        """Starts the server unless it runs. Returns the layers of protection, each "on" (with a version) or "missing";
        raises RuntimeError for a missing one unless `unsafe`, OSError where the server cannot be started."""
        with self._lock:
            if self._server and self._server[0].poll() is None:
                return self._layers
            self.close()
            self._folder = os.path.realpath(tempfile.mkdtemp(prefix="skyrl-python-exec-"))
            settings = json.dumps({"limits": dataclasses.asdict(self.limits), "folder": self._folder})
            program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_server.py")
            # Not -I, under which Python would ignore the hash seed.
            command = [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", program, settings]
            clean = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
            clean["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")  # Python's own library may be there
            ours, theirs = socket.socketpair()
            with theirs:
                end = theirs.fileno()
                process = subprocess.Popen(command, stdin=end, stdout=end, cwd="/", env=clean, start_new_session=True)
            self._server = process, ours, ours.makefile("rb")
            self._layers = self._answer("", PATIENCE)
            missing = ", ".join(layer for layer, state in self._layers.items() if state == "missing")
            if missing and not self.unsafe:
                self.close()
                raise RuntimeError(
                    f"python_exec runs no code, as protection is missing: {missing}. Linux from 5.13 with Landlock "
                    f"and seccomp gives it. To run code unprotected, knowingly: {UNSAFE}=1 or Sandbox(unsafe=True)."
                )
            return self._layers

    def close(self) -> None:
        """Ends the server, waits for it and removes its folder. A later call starts a new one."""
        with self._lock:
            if self._server:
                (process, ours, lines), self._server = self._server, None
                process.kill()  # its child dies with it
                process.wait()
                ours.close()
                lines.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, request: str, patience: float) -> Any:
        """The server's next line. Whatever goes wrong, it is ended: a later call must not read this one's answer."""
        _, ours, lines = cast(Any, self._server)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            ours.settimeout(patience)
            ours.sendall(request.encode())
            if not (line := lines.readline()).endswith(b"\n"):
                raise ConnectionError("it closed the connection")
            on_error.pop_all()
            return json.loads(line)


_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


@functools.cache
def shared_sandbox() -> Sandbox:
    """This process's sandbox with the default limits. Its server ends with this process, however that ends."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


def probe() -> dict[str, str]:
    """The layers of protection on this machine, as Sandbox.start says them; refuses nothing."""
    with contextlib.closing(Sandbox(unsafe=True)) as sandbox:
        return sandbox.start()


def _after_fork() -> None:
    """In a fork: the servers are the parent's."""
    for sandbox in list(_sandboxes):
        if sandbox._server:
            sandbox._server[0].returncode = 0  # not this process's child
        sandbox.__init__(sandbox.limits, sandbox.unsafe)  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
