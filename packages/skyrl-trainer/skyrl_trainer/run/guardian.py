"""A small process that outlives the driver by a few seconds and sees to it that nothing else does.

After SIGKILL of a driver some of Ray's helper processes stay. Every process of a run inherits a mark in its
environment; the guardian waits until the driver is gone, however it ended, and kills whatever still carries the mark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "SKYRL_RUN_MARK"
GRACE_SECONDS = 5.0
"""Time that Ray gets to end its processes by itself."""


def start_guardian() -> None:
    """Marks this process and all its children to come; call it once, before the first of them starts."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    # The guardian's standard input is a pipe whose other end only we hold: it is closed when we die.
    guardian = subprocess.Popen(
        [sys.executable, "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _kept.append(guardian)


_kept: list[subprocess.Popen[bytes]] = []
"""Holds the pipes open until the interpreter ends."""


def marked(mark: str) -> list[int]:
    """Processes of ours that carry the mark, this one excepted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue  # it ended, or belongs to somebody else
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def main() -> None:
    mark = sys.argv[1]
    sys.stdin.buffer.read()
    deadline = time.monotonic() + GRACE_SECONDS
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    for _ in range(10):  # a process may have forked while we looked
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    main()
