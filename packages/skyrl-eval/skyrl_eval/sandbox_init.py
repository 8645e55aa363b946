"""Run as a script: puts a command into new namespaces, where it sees a few read-only folders and one of its own.

Its argument is JSON: root (an empty folder), binds ([outside, inside, writable]), cwd, limits, environment, command. No
network but the loopback; no processes, files or capabilities of the machine's; all of it ends when this process does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount uts ipc user pid net
NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
DEVICES = ("null", "zero", "full", "random", "urandom")


def checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    checked(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def bind(outside: str, inside: str, writable: bool) -> None:
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(outside):  # /bin -> usr/bin
        os.symlink(os.readlink(outside), inside)
        return
    if os.path.isdir(outside):
        os.makedirs(inside, exist_ok=True)
    else:
        os.close(os.open(inside, os.O_CREAT))
    mount(outside, inside, None, BIND | REC)
    attributes = struct.pack("QQQQ", 2 | (0 if writable else 1), 0, 0, 0)  # nosuid, and read-only
    checked(libc.syscall(442, -100, inside.encode(), 0x8000, attributes, ctypes.c_size_t(len(attributes))))


def build(root: str, binds: list[tuple[str, str, bool]]) -> None:
    """The file system: everything of the machine that is not in `binds` is gone afterwards."""
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=16m,mode=755")
    for folder, size in (("/tmp", "1g"), ("/dev", "1m"), ("/dev/shm", "256m")):
        os.makedirs(root + folder, exist_ok=True)
        mount("tmpfs", root + folder, "tmpfs", NOSUID, f"size={size},mode=1777")
    for outside, inside, writable in binds:
        bind(outside, root + inside, writable)
    for device in DEVICES:
        bind(f"/dev/{device}", f"{root}/dev/{device}", True)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.makedirs(f"{root}/proc")
    with contextlib.suppress(OSError):  # a container may not mount one: most programs do without
        mount("proc", f"{root}/proc", "proc", NOSUID | NODEV)
    os.makedirs(f"{root}/.old")
    checked(libc.syscall(155, root.encode(), f"{root}/.old".encode()))  # pivot_root
    os.chdir("/")
    checked(libc.umount2(b"/.old", DETACH))
    os.rmdir("/.old")


def confine(limits: dict[str, int]) -> None:
    """Loopback up, limits, and no capabilities, now or by any program that is started."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
    libc.prctl(38, 1, 0, 0, 0)
    checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))


def main(spec: dict[str, Any]) -> int:
    libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # ends with whoever asked, even when that one is killed
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(NAMESPACES))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if first := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))  # whose end waits for all others'
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # and everything else here ends with this process
    build(spec["root"], spec["binds"])
    confine(spec["limits"])
    if not (command := os.fork()):
        os.chdir(spec["cwd"])
        os.execvpe(spec["command"][0], spec["command"], spec["environment"])
    while True:
        pid, status = os.wait()
        if pid == command:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


if __name__ == "__main__":
    try:
        code = main(json.loads(sys.argv[1]))
    except OSError as problem:
        print(f"sandbox: {problem}", file=sys.stderr)
        os._exit(125)
    os._exit(code % 256)
