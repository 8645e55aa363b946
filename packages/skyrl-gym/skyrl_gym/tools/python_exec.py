"""python_exec: runs a model's Python in a confined process, without Docker.

Every call starts from the same state and leaves none; only the standard library can be imported; the value of a last
expression is printed, as in a notebook. docs/environments/python_exec.md says what it promises, and what not.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, BinaryIO, cast

from skyrl_gym.tools import confine

log = logging.getLogger(__name__)
UNSAFE = "SKYRL_UNSAFE_PYTHON_EXEC"
LONGEST_CODE, LONGEST_ERROR, MOST_FILES, PIPE = 1 << 20, 4800, 1000, 1 << 16
# Seconds that the server may take to start, or longer than a call's own limit
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
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
        for name, value in asdict(self).items():
            if type(value) not in ((int, float) if name == "wall_seconds" else (int,)) or not 0 < value < 1 << 30:
                raise ValueError(f"Limits: {name} is {value!r}; expected a positive int (or float, for wall_seconds).")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """For the model; `error` is the end of a traceback or a sentence. Example: ExecResult("4\\n", None, 0.002)"""

    output: str
    error: str | None
    seconds: float


class Sandbox:
    """Runs code, one call at a time; threads may share it, and a fork of this process gets a server of its own.
    `unsafe` allows to run where the kernel offers too little, as SKYRL_UNSAFE_PYTHON_EXEC=1 does."""

    def __init__(self, limits: Limits = Limits(), unsafe: bool = False) -> None:
        self.limits = limits
        self.unsafe = unsafe or os.environ.get(UNSAFE) == "1"
        self._lock = threading.RLock()
        self._server: tuple[Popen[bytes], socket.socket] | None = None
        self._folder, self._layers = "", dict[str, str]()
        _sandboxes.add(self)

    def run(self, code: str, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Runs code, with these files in its folder; whatever it does becomes a result. Raises as `start` does."""
        if len(code) > LONGEST_CODE:
            return ExecResult("", f"The code has {len(code)} characters; at most {LONGEST_CODE} are run.", 0.0)
        with self._lock:
            for _ in range(2):
                self.start()
                try:
                    return self._call(code, self.limits.wall_seconds, files)
                except (ConnectionError, TimeoutError) as error:
                    log.warning("python_exec's server has died (%s); a new one is started.", error)
        return ExecResult("", "The sandbox's server died twice during this call.", 0.0)

    def start(self) -> dict[str, str]:
        """Starts the server unless it runs; the layers of protection, each "on" (with a version) or "missing". Raises
        RuntimeError for that unless `unsafe`, ValueError for limits that are too small, OSError for no server."""
        with self._lock:
            if self._server and self._server[0].poll() is None:
                return self._layers
            self.close()
            self._folder = os.path.realpath(tempfile.mkdtemp(prefix="skyrl-python-exec-"))
            settings = json.dumps({"limits": asdict(self.limits), "folder": self._folder})
            program = str(Path(__file__).absolute().with_name("sandbox_server.py"))
            # Not -I, under which Python would ignore the hash seed.
            command = [sys.executable, "-s", "-S", "-B", "-X", "utf8", program, settings]
            clean = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
            clean["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")  # Python's own library may be there
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                end, null = theirs.fileno(), DEVNULL
                process = Popen(command, stdin=end, stdout=null, cwd="/", env=clean, start_new_session=True)
            self._server = process, ours
            self._layers = self._probed()
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
                (process, ours), self._server = self._server, None
                process.kill()  # its child dies with it
                process.wait()
                ours.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    # By layer of protection, whether it holds, tried from inside.
    def _probed(self) -> dict[str, str]:
        if error := self._call("open('/dev/null').close(); bytearray(1 << 20)", PATIENCE).error:
            self.close()
            raise ValueError(
                f"python_exec needs more than {self.limits}. Python itself takes about 30 MiB of memory_mib and 4 of "
                f"open_files; no code can run: {error.splitlines()[-1]}"
            )
        layers = {"Landlock": f"on, ABI {abi}" if (abi := confine.landlock_abi()) else "missing"}
        for layer, (code, expected) in confine.POLICY["probes"].items():
            code = code.format(outside=os.path.abspath(__file__), mib=self.limits.memory_mib)
            layers[layer] = "on" if expected in (self._call(code, 20).error or "") else "missing"
        return layers

    def _call(self, code: str, wall: float, given: Mapping[str, bytes] | None = None) -> ExecResult:
        started = time.monotonic()
        ours = cast(Any, self._server)[1]
        with contextlib.ExitStack() as stack:
            numbers = os.memfd_create("code"), *os.pipe(), *os.pipe()
            files = [stack.enter_context(open(number, "r+b", 0)) for number in numbers]
            source, output, output_end, report, report_end = files
            os.set_blocking(output.fileno(), False)
            os.set_blocking(report.fileno(), False)
            source.write(code.encode("utf-8", "surrogatepass"))
            try:
                for name, content in (given or {}).items():
                    Path(self._folder, name).write_bytes(content)
                socket.send_fds(ours, [b"run"], [file.fileno() for file in (source, output_end, report_end)])
                text, stopped, status = self._listen(ours, output, wall)
                for entry in list(os.scandir(self._folder)):
                    shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
            except BaseException:  # whatever it is, a later call must not get this one's answer
                self.close()
                raise
            reported = (report.read(LONGEST_ERROR) or b"").decode("utf-8", "replace")
        if not stopped and status < 0:
            stopped = f"Killed by signal {-status}, {signal.strsignal(-status)}."
        error = stopped or reported or (f"Exited with status {status}." if status else None)
        most = self.limits.output_bytes
        shown = text[:most].decode("utf-8", "replace") + f"\n[output cut after {most} bytes]" * (len(text) > most)
        return ExecResult(shown, error, time.monotonic() - started)

    # What the child prints, up to a byte more than the limit; why it had to be stopped, or ""; its exit status.
    def _listen(self, ours: socket.socket, output: BinaryIO, wall: float) -> tuple[bytes, str, int]:
        ours.settimeout(0.001)
        text, stopped, status, started = b"", "", None, time.monotonic()
        while status is None:
            with contextlib.suppress(TimeoutError):
                status = ours.recv(99)
            for _ in range(16):  # a full pipe holds the program up
                text += (output.read(PIPE) or b"")[: max(self.limits.output_bytes + 1 - len(text), 0)]
            seconds = time.monotonic() - started
            if seconds > wall + PATIENCE:
                raise TimeoutError("it does not end a call")
            if status is None and not stopped and (stopped := self._excess(seconds, wall)):
                ours.send(b"stop")
        if not status:
            raise ConnectionError("it closed the connection")
        return text, stopped, int(status)

    # Why the call must be stopped; "" if it need not be. Nothing in the kernel limits all files together.
    def _excess(self, seconds: float, wall: float) -> str:
        if seconds > wall:
            return f"Timed out after {wall:g} s of wall clock."
        size = 0
        for files, entry in enumerate(os.scandir(self._folder)):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                size += entry.stat(follow_symlinks=False).st_size
            if size > self.limits.folder_mib << 20 or files > MOST_FILES:
                return f"Killed: more than {self.limits.folder_mib} MiB or {MOST_FILES} files."
        return ""


_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


@functools.cache
def shared_sandbox(limits: Limits) -> Sandbox:
    """This process's sandbox with these limits. Its server ends with this process, however that ends."""
    return Sandbox(limits)


def _after_fork() -> None:
    """In a fork: the servers are the parent's."""
    for sandbox in list(_sandboxes):
        if sandbox._server:
            sandbox._server[0].returncode = 0  # not this process's child
        sandbox.__init__(sandbox.limits, sandbox.unsafe)  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
