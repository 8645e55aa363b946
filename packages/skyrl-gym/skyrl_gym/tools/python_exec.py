"""python_exec: runs a model's Python in a confined process, without Docker.

Every call starts from the same state, and leaves none: hash seed and `random` are fixed, the folder is empty, the
standard library is what can be imported. As in a notebook, the value of a last expression is printed. What each call
cannot do, and what this does not promise, is in docs/environments/python_exec.md; the layers are in sandbox_server.py.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import Any

log = logging.getLogger(__name__)
UNSAFE = "SKYRL_UNSAFE_PYTHON_EXEC"
LONGEST_CODE = 1 << 20
PATIENCE = 20.0
"""Seconds that the server may take to start, or longer than a call's own limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use. The interpreter's own 40 MiB count as memory, which is address space; `cpu_seconds` are
    those of all threads; output beyond `output_bytes` (both streams together) is dropped, and what is shown marked."""

    wall_seconds: float = 2.0
    cpu_seconds: int = 2
    memory_mib: int = 256
    output_bytes: int = 16 << 10
    file_mib: int = 8
    folder_mib: int = 16
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) not in (int, *[float] * (name == "wall_seconds")) or not 0 < value < 1 << 30:
                raise ValueError(
                    f"Limits: {name} is {value!r}; expected a positive whole number (wall_seconds: or float)."
                )


@dataclasses.dataclass(frozen=True, slots=True)
class ExecResult:
    """What a call came to. Example: ExecResult("4\\n", None, 0.002)"""

    output: str
    error: str | None
    """For the model: the end of a traceback, or a sentence such as "Timed out after 2 s of wall clock."."""
    seconds: float


class Sandbox:
    """Runs code, one call at a time; threads may share it, and a fork of this process gets a server of its own.

    Args:
        limits: what one call may use.
        unsafe: run even where the kernel offers too little; so does the environment variable of UNSAFE's name, if "1".
    """

    def __init__(self, limits: Limits = Limits(), unsafe: bool = False) -> None:
        self.limits, self.unsafe = limits, unsafe or os.environ.get(UNSAFE) == "1"
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._layers: dict[str, str] = {}
        _sandboxes.add(self)

    def run(self, code: str) -> ExecResult:
        """Runs code; whatever it does becomes a result. Raises RuntimeError as `start` does."""
        if len(code) > LONGEST_CODE:
            return ExecResult("", f"The code has {len(code)} characters; at most {LONGEST_CODE} are run.", 0.0)
        with self._lock:
            for _ in range(2):
                self.start()
                try:
                    return ExecResult(**self._exchange(code, self.limits.wall_seconds + PATIENCE))
                except OSError as error:
                    log.warning("python_exec's server has died (%s); a new one is started.", error)
                    self.close()
        return ExecResult("", "The sandbox's server died twice during this call.", 0.0)

    def start(self) -> dict[str, str]:
        """Starts the server unless it runs. Returns the layers of protection, each "on" (with a version) or "missing".

        Raises:
            RuntimeError: a layer is missing and `unsafe` was not given, or no server could be started.
        """
        with self._lock:
            if self._process and self._process.poll() is None:
                return self._layers
            self.close()
            self._folder = os.path.realpath(tempfile.mkdtemp(prefix="skyrl-python-exec-"))
            settings = json.dumps({"limits": dataclasses.asdict(self.limits), "folder": self._folder})
            server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_server.py")
            clean = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
            self._process = subprocess.Popen(
                # Not -I, under which Python would ignore the hash seed.
                [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", server, settings],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env=clean | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                start_new_session=True,
            )
            try:
                self._layers = self._exchange(None, PATIENCE)
            except OSError as error:
                raise RuntimeError(f"python_exec's server could not be started: {error}.") from error
            missing = ", ".join(layer for layer, state in self._layers.items() if state == "missing")
            if missing and not self.unsafe:
                self.close()
                raise RuntimeError(
                    f"python_exec refuses to run code: this system lacks {missing}. Linux from 5.13 with Landlock and "
                    f"seccomp has them. To run code unprotected, knowingly: {UNSAFE}=1 or Sandbox(unsafe=True)."
                )
            return self._layers

    def close(self) -> None:
        """Ends the server, waits for it and removes its folder. A later call starts a new one."""
        with self._lock:
            if self._process:
                self._process.kill()  # its child dies with it
                with self._process:  # closes the pipes and waits
                    self._process = None
                shutil.rmtree(self._folder, ignore_errors=True)

    def _exchange(self, code: str | None, patience: float) -> dict[str, Any]:
        """Sends code, if any, and returns the server's next line. Whatever goes wrong, the server is ended: a later
        call must not read this one's answer."""
        assert self._process and self._process.stdin and self._process.stdout
        try:
            left = b"" if code is None else json.dumps(code).encode() + b"\n"
            while left:
                left = left[self._process.stdin.write(left) :]
            line, deadline = b"", time.monotonic() + patience
            while not line.endswith(b"\n"):
                if not select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                    raise TimeoutError(f"no answer in {patience:g} s")
                if not (chunk := self._process.stdout.read(1 << 16)):
                    raise ConnectionError("it closed its output")
                line += chunk
            return json.loads(line)
        except BaseException:
            self.close()
            raise


_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


@functools.cache
def shared_sandbox() -> Sandbox:
    """This process's sandbox with the default limits, ended with it."""
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
        if sandbox._process:
            sandbox._process.returncode = 0  # not this process's child
        sandbox.__init__(sandbox.limits, sandbox.unsafe)  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
