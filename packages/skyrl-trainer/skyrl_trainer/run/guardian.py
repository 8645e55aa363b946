"""What is left of a run when it is over, however it ended: no process, and no temporary file.

All of a run's processes put their temporary files, Ray's session among them, into one folder. A small process, the
guardian, waits until the driver is gone, kills whatever names the folder in its environment or writes to a file there
(Ray's agents overwrite their environment), and removes it. Where it was killed, its lock is free: the next start does.
"""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX = "skyrl-run-"
SHARED_MEMORY = Path("/dev/shm")
GRACE_SECONDS = 5.0
"""Time that Ray gets to end its processes by itself."""


@contextmanager
def guarded() -> Iterator[None]:
    """Around whatever starts processes: they, and their children, have temporary files of their own."""
    # Not above: the guardian itself has Python's library alone.
    from skyrl_trainer.files import writing

    shared = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for leftover in shared.glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(leftover):  # raises where it is in use, or somebody else's
            remove(leftover)
    with writing(f"RAY_TMPDIR={shared}", shared):
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=shared))
    lock = _locked(new)
    folder = new.rename(shared / new.name[1:])
    guardian = subprocess.Popen(
        [sys.executable, "-S", __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=[lock.fileno()],
    )
    _kept.append(guardian)
    outside = tempfile.gettempdir()
    # What torch compiled serves the next run, too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outside}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        os.environ["TMPDIR"] = tempfile.tempdir = outside
        lock.close()  # not before: the guardian may be killed
        remove(folder)
        if not users(str(folder), os.getpid(), guardian.pid):  # else it waits for our end
            with guardian:  # whose pipe is closed then
                guardian.kill()


_kept: list[subprocess.Popen[bytes]] = []
"""Guardians: each reads a pipe whose other end only we hold, so it is closed when we die."""


def _locked(folder: Path) -> IO[str]:
    file = open(folder / ".lock", "a")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def remove(folder: Path) -> None:
    """With what the run has in shared memory, of names that begin as the folder's. (shutil fails in deep folders.)"""
    for path in SHARED_MEMORY.glob(f"{folder.name}*"):
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["/bin/sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', folder], capture_output=True)


def users(folder: str, *but: int) -> list[int]:
    """Processes that know the folder, some excepted."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or belongs to somebody else
            known = folder.encode() in (process / "environ").read_bytes()
            files = (process / "fd").iterdir()  # whoever only reads a log is none of ours
            written = (os.readlink(file) for file in files if file.lstat().st_mode & stat.S_IWUSR)
            if int(process.name) not in but and (known or any(name.startswith(folder) for name in written)):
                found.append(int(process.name))
    return found


def main() -> None:
    folder, but = sys.argv[1], (os.getpid(), os.getppid())  # a driver that ends by itself may take its time
    sys.stdin.buffer.read()
    deadline = time.monotonic() + GRACE_SECONDS
    while users(folder, *but) and time.monotonic() < deadline:
        time.sleep(0.2)
    for _ in range(10):  # a process may have forked while we looked
        for pid in users(folder, *but):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    remove(Path(folder))


if __name__ == "__main__":
    main()
