"""Confines a process by the kernel's own means: Landlock, seccomp, namespaces, mounts, limits, privileges.

python_exec's server imports this. As a script it is skyrl_eval's sandbox: it runs a command in new namespaces, with no
network but the loopback, and no processes, files, keys or capabilities of the machine's; all ends with this process.
Its argument is JSON: root (an empty folder), binds ([outside, inside, writable]), cwd, limits, environment, command.
It needs no installed packages. sandbox_policy.json has the kernel's numbers and the two filters.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import types
from struct import pack
from typing import Any, NoReturn

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_policy.json")) as _file:
    POLICY: dict[str, Any] = json.load(_file)
K = types.SimpleNamespace(**POLICY["kernel"])  # as linux's headers call them
libc = ctypes.CDLL(None, use_errno=True)
OWN_PID = 0x7FFFFFF1  # stands in a filter for the number of the process that installs it
FAILED = 125  # the script's status where it, not the command, failed


def checked(result: int) -> int:
    """A C function's result; raises OSError for -1."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def drop_privileges() -> None:
    """No capabilities, now or by any program that is started; no other process may read this one's memory."""
    for capability in range(64):
        libc.prctl(K.PR_CAPBSET_DROP, capability, 0, 0, 0)
    checked(libc.prctl(K.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.capset(pack("Ii", 0x20080522, 0), bytes(24)))
    checked(libc.prctl(K.PR_SET_DUMPABLE, 0, 0, 0, 0))


def die_with_parent() -> None:
    """This process is killed when the one that forked it ends."""
    checked(libc.prctl(K.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))


def set_limits(limits: dict[str, int]) -> None:
    """Sets resource limits for good; {"AS": bytes} is RLIMIT_AS. None is above what this process was given."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1] % (1 << 64)
        resource.setrlimit(kind, (min(value, most), min(value + 1, most)))  # at the second one, CPU kills


def landlock_abi() -> int:
    """The version of this kernel's Landlock; 0 for none."""
    return max(libc.syscall(K.landlock_create, None, ctypes.c_size_t(0), 1), 0)


def landlock_ruleset(rights: dict[str, int], abi: int) -> int:
    """A file descriptor for `restrict`: grants each path its rights (folders with what is in them), and nothing
    else. Where Landlock is new enough, it forbids TCP, and signals and abstract sockets to the outside."""
    known = (1 << 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)) - 1
    attributes = pack("QQQ", known, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = checked(libc.syscall(K.landlock_create, attributes, ctypes.c_size_t(len(attributes)), 0))
    for path, right in rights.items():
        with contextlib.suppress(FileNotFoundError, PermissionError):  # what cannot be opened need not be granted
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
            right &= known if os.path.isdir(path) else known & ~K.READ_DIR  # which a file cannot be given
            checked(libc.syscall(K.landlock_add, ruleset, 1, pack("=Qi", right, target), 0))
            os.close(target)
    return ruleset


def seccomp_program(name: str) -> bytes:
    """A filter of sandbox_policy.json for this processor, as BPF. A listed system call is answered by `listed`, or with
    `arguments` allowed with these only; any other by `others`. `unseen` ones have arguments that no filter sees: the C
    library does without them. Raises OSError where the kernel has no filters, or the processor no table."""
    policy, processors, machine = POLICY[name], POLICY["processors"], os.uname().machine
    libc.prctl(K.PR_SET_SECCOMP, 2, None, 0, 0)  # EFAULT, 14, where filters are known
    if ctypes.get_errno() != 14 or machine not in processors:
        raise OSError(f"no seccomp filter for this kernel on {machine}")
    program = [(K.LOAD, 0, 0, 4), (K.IF_EQUAL, 1, 0, processors[machine]), (K.RETURN, 0, 0, K.KILL)]
    program += [(K.LOAD, 0, 0, 0), (K.IF_AT_LEAST, 0, 1, 1 << 30), (K.RETURN, 0, 0, K.EPERM)]  # x32's numbers
    column = list(processors).index(machine)
    listed = {call: row[column] for call, row in policy["system_calls"].items() if row[column] is not None}
    for call, number in listed.items():
        body = []
        for rule in policy["arguments"].get(call, ()):
            values = [OWN_PID if value == "own pid" else value for value in rule["values"]]
            body += [(K.LOAD, 0, 0, 16 + 8 * rule["argument"]), (K.AND, 0, 0, rule.get("mask", 0xFFFFFFFF))]
            body += [(K.IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
            body += [(K.RETURN, 0, 0, K.EPERM)]
        body += [(K.RETURN, 0, 0, K.ALLOW if body else getattr(K, policy["listed"]))]
        program += [(K.IF_EQUAL, 0, len(body), number), *body]
    for number in policy["unseen"].values():
        program += [(K.IF_EQUAL, 0, 1, number), (K.RETURN, 0, 0, K.ENOSYS)]
    program += [(K.RETURN, 0, 0, getattr(K, policy["others"]))]
    return b"".join(pack("HBBI", *instruction) for instruction in program)


def restrict(ruleset: int, program: bytes) -> None:
    """Puts this process, which can have no new privileges, under Landlock (-1: not) and seccomp (b"": not) for good."""
    if ruleset >= 0:
        checked(libc.syscall(K.landlock_restrict, ruleset, 0))
    if program:
        program = program.replace(pack("I", OWN_PID), pack("I", os.getpid()))
        buffer = ctypes.create_string_buffer(program, len(program))
        described = pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        checked(libc.prctl(K.PR_SET_SECCOMP, 2, described, 0, 0))


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
    mount(outside, inside, None, K.BIND | K.REC)
    attributes = pack("QQQQ", K.NOSUID | (0 if writable else K.RDONLY), 0, 0, 0)
    checked(libc.syscall(K.mount_setattr, -100, inside.encode(), 0x8000, attributes, ctypes.c_size_t(32)))


def build(root: str, binds: list[tuple[str, str, bool]]) -> None:
    """The file system: everything of the machine that is not in `binds` is gone afterwards."""
    mount("none", "/", None, K.REC | K.PRIVATE)
    mount("tmpfs", root, "tmpfs", K.NOSUID | K.NODEV, "size=16m,mode=755")
    for folder, size in (("/tmp", "1g"), ("/dev", "1m"), ("/dev/shm", "256m")):
        os.makedirs(root + folder, exist_ok=True)
        mount("tmpfs", root + folder, "tmpfs", K.NOSUID, f"size={size},mode=1777")
    for outside, inside, writable in sorted(binds, key=lambda place: place[1].count("/")):  # the outer one first
        bind(outside, root + inside, writable)
    with open(f"{root}/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost\n::1 localhost\n")
    for device in "null", "zero", "full", "random", "urandom":
        bind(f"/dev/{device}", f"{root}/dev/{device}", True)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.makedirs(f"{root}/proc")
    with contextlib.suppress(OSError):  # a container may not mount one: most programs do without
        # Read-only: /proc/sys has settings of the whole machine, which its root could change from in here.
        mount("proc", f"{root}/proc", "proc", K.RDONLY | K.NOSUID | K.NODEV | K.NOEXEC)
    os.chdir(root)
    checked(libc.pivot_root(b".", b"."))
    checked(libc.umount2(b".", K.DETACH))


def main(spec: dict[str, Any]) -> NoReturn:
    """Runs the script's command, and exits as it does."""
    die_with_parent()
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(sum(POLICY["namespaces"].values())))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if first := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))  # whose end waits for all others'
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) % 256)
    die_with_parent()  # and everything else here ends with this process
    build(spec["root"], spec["binds"])
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, pack("16sH14x", b"lo", 1))  # loopback up
    os.chdir(spec["cwd"])  # while it may: a command before this one can have closed it
    set_limits(spec["limits"])
    drop_privileges()
    restrict(-1, seccomp_program("command"))
    # A program that was started has no end of it, and cannot say that none was.
    failed, tell = os.pipe()
    if not (command := os.fork()):
        try:
            os.execvpe(spec["command"][0], spec["command"], spec["environment"])
        finally:
            os.write(tell, b"!")
    os.close(tell)
    while True:
        pid, status = os.wait()
        if pid == command:
            code = os.waitstatus_to_exitcode(status) % 256
            os._exit(code if code != FAILED or os.read(failed, 1) else 1)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as problem:
        print(f"sandbox: {problem}", file=sys.stderr)
        os._exit(FAILED)
