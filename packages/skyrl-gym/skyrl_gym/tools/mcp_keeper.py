"""Runs an MCP server's command; all that it starts ends with it, with this process or with its owner, however that is.

    python mcp_keeper.py OWNER MOST_BYTES MOST_MESSAGES COMMAND ...

No more messages than these reach OWNER, the process above; what is printed beside messages is left out.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

PARENT_DEATH, SUBREAPER = 1, 36  # of prctl


def pass_on(server: Popen[bytes], left: int, most_messages: int) -> None:
    assert server.stdout is not None
    for _ in range(most_messages):
        line = server.stdout.readline(left + 1)
        left -= len(line)
        if not line or left < 0:
            return
        if line.startswith(b"{"):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def main(command: list[str], owner: int, most_bytes: int, most_messages: int) -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1)  # orphans become children of this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    prctl(PARENT_DEATH, int(signal.SIGTERM))
    try:
        if os.getppid() == owner:  # which may have ended before the line above
            server = Popen(command, stdout=PIPE)
            with contextlib.suppress(BrokenPipeError):
                pass_on(server, most_bytes, most_messages)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        listed = Path(f"/proc/self/task/{os.getpid()}/children")
        while children := listed.read_text().split():
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
        os._exit(0)  # nobody reads what is left in a buffer


if __name__ == "__main__":
    main(sys.argv[4:], *map(int, sys.argv[1:4]))
