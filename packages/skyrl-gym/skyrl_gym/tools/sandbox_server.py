"""The process behind python_exec: it has imported the usual modules, and forks a confined child for each call.

Runs as `python -P -s -S sandbox_server.py '{"limits": ..., "folder": ...}'` with a clean environment, never inside
the user's process, and imports the standard library only. It says first which layers of protection hold, each tried
from inside, then reads code and answers with a result, a line of JSON each, until its owner, a Sandbox, is gone.

Before it sees any code, a child gives up its session, open files, environment and capabilities; then every file but
the standard library, shared libraries and a flat folder that is emptied after each call (Landlock); then every
system call, or argument of one, that sandbox_policy.json does not list (seccomp).
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import json
import linecache
import os
import platform
import random
import resource
import select
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_policy.json")) as _file:
    POLICY: dict[str, Any] = json.load(_file)
libc = ctypes.CDLL(None, use_errno=True)

# What the kernel calls things: linux/prctl.h, landlock.h, seccomp.h, bpf_common.h, audit.h.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_FILE, TRUNCATE = 12, 2, 4, 8, 1 << 5, 1 << 8, 1 << 14
LOAD, AND, IF_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

OWN_PID = 0x7FFFFFF1  # stands in the seccomp program for the child's own, which the server cannot know
SHOWN, REPORT, LONGEST_REPORT, MOST_FILES = "<code>", 3, 1200, 1000


def checked(result: int) -> int:
    """A C function's result; raises OSError for -1."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_ruleset(folder: str, abi: int) -> int:
    """Grants reading what imports need, and files in `folder`. Forbids TCP, and signals and abstract sockets to the
    outside, where Landlock is new enough. Installed packages are not granted: this one's tasks and answers would be.
    """
    known = (1 << 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)) - 1
    attributes = struct.pack("QQQ", known, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = checked(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0))
    standard = os.path.dirname(os.path.realpath(os.__file__))
    rights = {standard: READ_DIR, "/dev/null": READ | WRITE_FILE}
    rights[folder] = (READ | WRITE_FILE | REMOVE_FILE | MAKE_FILE | TRUNCATE) & known
    rights |= dict.fromkeys(("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo"), READ)
    for library in (standard, os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        with contextlib.suppress(OSError), os.scandir(library) as entries:
            names = [e.path for e in entries if not e.name.startswith(("python", "site-packages", "dist-packages"))]
            rights |= dict.fromkeys(names, READ)
    for path, right in rights.items():
        with contextlib.suppress(FileNotFoundError, PermissionError):  # what cannot be opened need not be granted
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
            right &= -1 if os.path.isdir(path) else ~READ_DIR  # which a file cannot be given
            checked(libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", right, target), 0))
            os.close(target)
    return ruleset


def seccomp_program(machine: str) -> bytes:
    """A BPF program that allows what sandbox_policy.json lists for this processor; with OWN_PID to be replaced."""
    program = [(LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for name, number in POLICY["system_calls"][machine].items():
        body = []
        for rule in POLICY["arguments"].get(name, ()):
            values = [OWN_PID if value == "own pid" else value for value in rule["values"]]
            body += [(LOAD, 0, 0, 16 + 8 * rule["argument"]), (AND, 0, 0, rule["mask"])]
            body += [(IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
            body += [(RETURN, 0, 0, EPERM)]
        body += [(RETURN, 0, 0, ALLOW)]
        program += [(IF_EQUAL, 0, len(body), number), *body]
    for number in (435, 437):  # clone3, openat2: their flags cannot be seen, and the C library then uses the older ones
        program += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ENOSYS)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, (RETURN, 0, 0, EPERM)])


def install(program: bytes) -> None:
    """Puts this process under a seccomp filter for good; it must have no new privileges."""
    buffer = ctypes.create_string_buffer(program, len(program))
    checked(libc.prctl(PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)), 0, 0))


def run_code(code: str, memory: int) -> NoReturn:
    """Runs code as the main module, prints the value of a last expression, reports an error, and exits."""
    random.seed(0)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    report = ""
    try:
        linecache.cache[SHOWN] = (len(code), None, code.splitlines(keepends=True), SHOWN)
        body = ast.parse(code, SHOWN).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        program = compile(ast.Module(body, []), SHOWN, "exec")
        expression = compile(ast.Expression(last.value), SHOWN, "eval") if isinstance(last, ast.Expr) else "None"
        exec(program, main.__dict__)
        if (value := eval(expression, main.__dict__)) is not None:
            print(repr(value))
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at every end of a program
    except MemoryError:
        report = f"MemoryError: the limit is {memory} MiB."
    except SystemExit as error:
        report = f"SystemExit: {error.code}" if error.code else ""
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != SHOWN:
            trace = trace.tb_next
        report = "".join(traceback.format_exception(type(error), error, trace, limit=-8)).strip()
        if len(report) > LONGEST_REPORT:
            report = report[: LONGEST_REPORT // 2] + "\n[...]\n" + report[-LONGEST_REPORT // 2 :]
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.write(REPORT, report.encode("utf-8", "backslashreplace"))
    os._exit(1 if report else 0)


def rest(source: int) -> bytes:
    """What is left in a pipe, which holds 64 KiB, without waiting for more; closes it."""
    data = os.read(source, 1 << 16) if select.select([source], [], [], 0)[0] else b""
    os.close(source)
    return data


class Server:
    """Forks, limits, listens, kills and cleans up. One call at a time."""

    def __init__(self, limits: dict[str, Any], folder: str) -> None:
        self.limits, self.folder, self.pid = limits, folder, os.getpid()
        self.layers, self.ruleset, self.program = {"Landlock": "missing"}, -1, b""
        # The children inherit all that is done here.
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        with contextlib.suppress(OSError):
            abi = checked(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
            self.ruleset, self.layers["Landlock"] = landlock_ruleset(folder, abi), f"on, ABI {abi}"
        libc.prctl(PR_SET_SECCOMP, 2, None, 0, 0)  # EFAULT, 14, where filters are known
        if (machine := platform.machine()) in AUDIT_ARCH and ctypes.get_errno() == 14:
            self.program = seccomp_program(machine)
        for name in POLICY["modules"]:
            importlib.import_module(name)
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder, LANG="C.UTF-8", TZ="UTC")
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore
        gc.freeze()

    def confine(self, output: int, report: int) -> None:
        """In the child: gives up everything that the code must not have. Raises where that fails."""
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self.pid:
            os._exit(1)
        if self.ruleset >= 0:
            checked(libc.syscall(LANDLOCK_RESTRICT, self.ruleset, 0))
        # Opened anew: flags set on a file that calls share would be seen by the next one.
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        for source, target in (output, 1), (output, 2), (report, REPORT):
            os.dup2(source, target)
        os.closerange(REPORT + 1, 1 << 20)
        os.chdir(self.folder)
        os.umask(0o077)
        limits = {"CPU": self.limits["cpu_seconds"], "NOFILE": self.limits["open_files"], "STACK": 8 << 20, "CORE": 0}
        limits |= {"AS": self.limits["memory_mib"] << 20, "FSIZE": self.limits["file_mib"] << 20}
        for name, value in limits.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            most = resource.getrlimit(kind)[1] % (1 << 64)
            resource.setrlimit(kind, (min(value, most), min(value + 1, most)))  # at the second one, CPU kills
        if self.program:
            install(self.program.replace(struct.pack("I", OWN_PID), struct.pack("I", os.getpid())))

    def call(self, code: str) -> dict[str, Any]:
        """Runs code in a new child; returns the fields of python_exec.ExecResult."""
        (output_end, output), (report_end, report) = os.pipe(), os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                self.confine(output, report)
                run_code(code, self.limits["memory_mib"])
            except BaseException as failure:  # not the code's, which run_code reports
                os.write(report, f"The code was not run, because it could not be confined: {failure!r}".encode())
            finally:
                os._exit(1)
        os.close(output)
        os.close(report)
        text, error = self.listen(pid, output_end, started + self.limits["wall_seconds"])
        seconds = time.monotonic() - started
        os.kill(pid, signal.SIGKILL)  # has not been waited for, so that the number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        text += rest(output_end)
        reported = rest(report_end)[: 4 * LONGEST_REPORT].decode("utf-8", "replace")
        self.empty()
        if not error and status < 0:
            cpu = f" (CPU limit {self.limits['cpu_seconds']} s)" if -status == signal.SIGXCPU else ""
            error = f"Killed by signal {-status}, {signal.strsignal(-status)}{cpu}."
        most = self.limits["output_bytes"]
        shown = text[:most].decode("utf-8", "replace") + f"\n[output cut after {most} bytes]" * (len(text) > most)
        error = error or reported or (f"Exited with status {status}." if status else None)
        return {"output": shown, "error": error, "seconds": seconds}

    def listen(self, pid: int, output_end: int, deadline: float) -> tuple[bytes, str | None]:
        """What the child writes until it ends, up to a little more than the limit; and why it must be killed."""
        kept, child, next_look = b"", os.pidfd_open(pid), 0.0
        poller = select.poll()
        poller.register(child, select.POLLIN)
        poller.register(output_end, select.POLLIN)
        try:
            while (now := time.monotonic()) < deadline:
                ready = dict(poller.poll(min((deadline - now) * 1000 + 1, 50)))
                if output_end in ready:
                    chunk = os.read(output_end, 1 << 16)
                    kept += chunk[: max(self.limits["output_bytes"] + 1 - len(kept), 0)]
                    if not chunk:
                        poller.unregister(output_end)
                elif child in ready:
                    return kept, None
                if now > next_look and self.overfull():
                    return kept, f"Killed: more than {self.limits['folder_mib']} MiB or {MOST_FILES} files."
                next_look = max(next_look, now + 0.05)
            return kept, f"Timed out after {self.limits['wall_seconds']:g} s of wall clock."
        finally:
            os.close(child)

    def overfull(self) -> bool:
        """Whether the code has written more than it may; nothing in the kernel limits all files together."""
        size = 0
        for files, entry in enumerate(os.scandir(self.folder)):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                size += entry.stat(follow_symlinks=False).st_size
            if size > self.limits["folder_mib"] << 20 or files > MOST_FILES:
                return True
        return False

    def empty(self) -> None:
        for entry in os.scandir(self.folder):
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)

    def serve(self) -> None:
        outside, mib = os.path.abspath(__file__), self.limits["memory_mib"]
        for layer, (code, expected) in POLICY["probes"].items():
            failed = self.call(code.format(outside=outside, mib=mib))["error"] or ""
            self.layers[layer] = "on" if expected in failed else "missing"
        print(json.dumps(self.layers), flush=True)
        for line in sys.stdin.buffer:  # ends when the owner does
            print(json.dumps(self.call(json.loads(line))), flush=True)


if __name__ == "__main__":
    server = Server(**json.loads(sys.argv[1]))
    try:
        with contextlib.suppress(BrokenPipeError):
            server.serve()
    finally:
        server.empty()
        os.rmdir(server.folder)
