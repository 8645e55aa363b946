"""Runs what a model wrote, without network, within limits: in namespaces (tools/confine.py) or a container."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_gym.tools import confine
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.guardian import remove

EXECUTORS = ("docker", "podman", "namespace")
LIMITED = "timeout", "60"
VISIBLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/passwd")
OUTPUT, MOST_READ = 64 << 20, 256 << 20


class SandboxFailed(Exception):
    """The sandbox, not what ran in it, failed: says why."""


@dataclass(frozen=True)
class Done:
    """What came of a command. Example: Done(0, "2 passed", False)"""

    code: int
    output: str
    """stdout and stderr together, the middle left out beyond 64 MiB."""
    timed_out: bool


Bind = tuple[Path, str, bool]
"""A folder or file outside, its path inside, and whether it may be written to."""


def run(
    command: Sequence[str],
    binds: Sequence[Bind] = (),
    *,
    seconds: float,
    cwd: str = "/tmp",
    executor: str = "namespace",
    image: str = "",
    memory_mib: int = 4096,
) -> Done:
    """Runs a command for so many seconds of wall clock; it and all that it started are gone when this returns.
    binds: what it sees beside the system's programs and this interpreter.
    """
    environment = {"TZ": "UTC", "PYTHONHASHSEED": "0"}
    if executor == "namespace":
        environment |= {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PATH"] = f"{os.path.dirname(os.path.abspath(sys.executable))}:/usr/local/bin:/usr/bin:/bin"
        limits = {"AS": memory_mib << 20, "FSIZE": 1 << 30, "NOFILE": 1024, "CORE": 0}
        mounts = [*((folder, folder, False) for folder in _visible()), *((str(o), i, w) for o, i, w in binds)]
        spec = {"binds": mounts, "cwd": cwd, "limits": limits, "environment": environment, "command": list(command)}
        with tempfile.TemporaryDirectory(prefix="skyrl-sandbox-") as root:
            return _run([sys.executable, "-I", "-S", confine.__file__, json.dumps(spec | {"root": root})], seconds)
    name = f"skyrl-eval-{uuid.uuid4().hex[:12]}"
    options = ["--rm", "--name", name, "--network", "none", "--memory", f"{memory_mib}m", "--pids-limit", "2048"]
    options += [part for key, value in environment.items() for part in ("-e", f"{key}={value}")]
    options += [part for outside, inside, w in binds for part in ("-v", f"{outside}:{inside}:{'rw' if w else 'ro'}")]
    options += ["-w", cwd, image, "timeout", "-s", "KILL", f"{seconds + 60:.0f}"]  # where we are killed, too
    try:
        return _run([executor, "run", *options, *command], seconds)
    finally:
        subprocess.run([*LIMITED, executor, "rm", "-f", name], capture_output=True)


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, which may become a deep one."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield path
    finally:
        remove(path)


def read_back(path: Path) -> str:
    """A file that was written in the sandbox; "" for what is no plain file, as a link to one of ours would be."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(MOST_READ).decode("utf-8", "surrogateescape") if plain else ""
    except OSError:
        return ""


@cache
def check(executor: str) -> None:
    """UserError, with what to do, where this executor does not work here."""
    if executor == "namespace":
        try:
            run(["true"], seconds=30)
        except SandboxFailed as error:
            raise UserError(
                f"Code is graded in namespaces, and this kernel makes none ({error}). Allow them (sysctl "
                "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), "
                "run the container with --security-opt seccomp=unconfined, or give --executor docker or podman."
            ) from error
    elif not shutil.which(executor) or subprocess.run([*LIMITED, executor, "info"], capture_output=True).returncode:
        raise UserError(f"--executor {executor}: `{executor} info` fails. Start it, or give --executor namespace.")


def _visible() -> list[str]:
    paths = [path for path in VISIBLE if os.path.exists(path)]
    own = sys.base_prefix, sys.prefix
    for path in *map(os.path.realpath, own), *own:  # which may be links to them
        if not any(f"{path}/".startswith(f"{known}/") for known in paths):
            paths.append(path)
    return paths


def _run(command: list[str], seconds: float) -> Done:
    timed_out = False
    with tempfile.TemporaryFile() as output:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **pipes, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        finally:  # also when an env's time limit, or Ctrl-C, interrupts the wait
            process.kill()
            process.wait()
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(OUTPUT // 2)
        if size > OUTPUT:
            output.seek(-(OUTPUT // 2), os.SEEK_END)
            text += f"\n[{size - OUTPUT} bytes left out]\n".encode()
        text += output.read()
    shown = text.decode("utf-8", "replace")
    if process.returncode == confine.FAILED and not timed_out:
        raise SandboxFailed(" ".join(shown[-500:].split()) or "the sandbox cannot start")
    return Done(process.returncode, shown, timed_out)
