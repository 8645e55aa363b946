"""The process behind python_exec: it has imported the usual modules, and forks a confined child for each call.

It has a clean environment and the standard library only, and says first which layers of protection hold, each tried
from inside; then it answers code with results, lines of JSON, till the owner ends. A child gives up, before it sees
code: session, open files, environment, capabilities; all files but the standard library, shared libraries and a flat
folder emptied after each call (Landlock); all system calls and arguments not in sandbox_policy.json (seccomp).
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import json
import linecache
import os
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
K = types.SimpleNamespace(**POLICY["kernel"])  # what linux/{prctl,landlock,seccomp,bpf_common,audit}.h call things
libc = ctypes.CDLL(None, use_errno=True)
PACKAGES = ("python", "site-packages", "dist-packages")  # what holds this package may also hold answers
OWN_PID = 0x7FFFFFF1  # stands in the seccomp program for the child's own, which the server cannot know
SHOWN, REPORT, LONGEST_REPORT, MOST_FILES = "<code>", 3, 1200, 1000


def checked(result: int) -> int:
    """A C function's result; raises OSError for -1."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_ruleset(folder: str, abi: int) -> int:
    """Grants reading what imports need (no installed packages), and files in `folder`. Where Landlock is new enough, it
    forbids TCP, and signals and abstract sockets to the outside."""
    known = (1 << 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)) - 1
    attributes = struct.pack("QQQ", known, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = checked(libc.syscall(K.landlock_create, attributes, ctypes.c_size_t(len(attributes)), 0))
    standard = os.path.dirname(os.path.realpath(os.__file__))
    rights = {standard: K.READ_DIR, "/dev/null": K.READ | K.WRITE_FILE}
    rights[folder] = (K.READ | K.WRITE_FILE | K.REMOVE_FILE | K.MAKE_FILE | K.TRUNCATE) & known
    rights |= dict.fromkeys(("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo"), K.READ)
    for library in (standard, os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        with contextlib.suppress(OSError), os.scandir(library) as entries:
            rights |= {e.path: K.READ for e in entries if not e.name.startswith(PACKAGES)}
    for path, right in rights.items():
        with contextlib.suppress(FileNotFoundError, PermissionError):  # what cannot be opened need not be granted
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
            right &= -1 if os.path.isdir(path) else ~K.READ_DIR  # which a file cannot be given
            checked(libc.syscall(K.landlock_add, ruleset, 1, struct.pack("=Qi", right, target), 0))
            os.close(target)
    return ruleset


def seccomp_program(machine: str) -> bytes:
    """A BPF program that allows what sandbox_policy.json lists for this processor; with OWN_PID to be replaced."""
    arch = getattr(K, f"AUDIT_ARCH_{machine}")
    program = [(K.LOAD, 0, 0, 4), (K.IF_EQUAL, 1, 0, arch), (K.RETURN, 0, 0, K.KILL), (K.LOAD, 0, 0, 0)]
    for name, number in POLICY["system_calls"][machine].items():
        body = []
        for rule in POLICY["arguments"].get(name, ()):
            values = [OWN_PID if value == "own pid" else value for value in rule["values"]]
            body += [(K.LOAD, 0, 0, 16 + 8 * rule["argument"]), (K.AND, 0, 0, rule["mask"])]
            body += [(K.IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
            body += [(K.RETURN, 0, 0, K.EPERM)]
        body += [(K.RETURN, 0, 0, K.ALLOW)]
        program += [(K.IF_EQUAL, 0, len(body), number), *body]
    for number in (435, 437):  # clone3, openat2: their flags cannot be seen, and the C library then uses the older ones
        program += [(K.IF_EQUAL, 0, 1, number), (K.RETURN, 0, 0, K.ENOSYS)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, (K.RETURN, 0, 0, K.EPERM)])


def install(program: bytes) -> None:
    """Puts this process under a seccomp filter for good; it must have no new privileges."""
    buffer = ctypes.create_string_buffer(program, len(program))
    checked(libc.prctl(K.PR_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)), 0, 0))


def run_code(code: str, memory: int) -> NoReturn:
    """Runs code as the main module, prints the value of a last expression, reports an error, and exits."""
    random.seed(0)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    report = ""
    try:
        linecache.cache[SHOWN] = (len(code), None, code.splitlines(keepends=True), SHOWN)
        body = compile(code, SHOWN, "exec", ast.PyCF_ONLY_AST).body  # type: ignore[attr-defined]
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
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this function
        report = "".join(traceback.format_exception(type(error), error, trace, limit=-8)).strip()
        if len(report) > LONGEST_REPORT:
            report = report[: LONGEST_REPORT // 2] + "\n[...]\n" + report[-LONGEST_REPORT // 2 :]
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.write(REPORT, report.encode("utf-8", "backslashreplace"))
    os._exit(1 if report else 0)


class Server:
    """Forks, limits, listens, kills and cleans up. One call at a time."""

    def __init__(self, limits: dict[str, Any], folder: str) -> None:
        self.limits, self.folder, self.pid = limits, folder, os.getpid()
        self.layers, self.ruleset, self.program = {"Landlock": "missing"}, -1, b""
        # The children inherit all that is done here.
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
        libc.prctl(K.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(K.PR_SET_DUMPABLE, 0, 0, 0, 0)
        with contextlib.suppress(OSError):
            abi = checked(libc.syscall(K.landlock_create, None, ctypes.c_size_t(0), 1))
            self.ruleset, self.layers["Landlock"] = landlock_ruleset(folder, abi), f"on, ABI {abi}"
        libc.prctl(K.PR_SET_SECCOMP, 2, None, 0, 0)  # EFAULT, 14, where filters are known
        if (machine := os.uname().machine) in POLICY["system_calls"] and ctypes.get_errno() == 14:
            self.program = seccomp_program(machine)
        for name in POLICY["modules"]:
            __import__(name)
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder, LANG="C.UTF-8", TZ="UTC")
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore
        gc.freeze()

    def confine(self, output: int, report: int) -> None:
        """In the child: gives up everything that the code must not have. Raises where that fails."""
        os.setsid()
        libc.prctl(K.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self.pid:
            os._exit(1)
        if self.ruleset >= 0:
            checked(libc.syscall(K.landlock_restrict, self.ruleset, 0))
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # opened anew: the next call would see flags of a shared one
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

    def call(self, code: str, wall: float) -> dict[str, Any]:
        """Runs code in a new child; returns the fields of python_exec.ExecResult."""
        (output_end, output), (report_end, report) = os.pipe(), os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                self.confine(output, report)
                run_code(code, self.limits["memory_mib"])
            finally:
                os._exit(1)
        os.close(output)
        os.close(report)
        text, error = self.listen(pid, output_end, wall)
        os.kill(pid, signal.SIGKILL)  # has not been waited for, so that the number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        reported = os.read(report_end, 4 * LONGEST_REPORT) if select.select([report_end], [], [], 0)[0] else b""
        os.close(output_end)
        os.close(report_end)
        for entry in list(os.scandir(self.folder)):
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        if not error and status < 0:
            error = f"Killed by signal {-status}, {signal.strsignal(-status)}."
        most = self.limits["output_bytes"]
        shown = text[:most].decode("utf-8", "replace") + f"\n[output cut after {most} bytes]" * (len(text) > most)
        error = error or reported.decode("utf-8", "replace") or (f"Exited with status {status}." if status else None)
        return {"output": shown, "error": error, "seconds": time.monotonic() - started}

    def listen(self, pid: int, output_end: int, wall: float) -> tuple[bytes, str | None]:
        """What the child writes until it ends, up to a little more than the limit; and why it must be killed."""
        kept, deadline = b"", time.monotonic() + wall
        with open(os.pidfd_open(pid), "rb", 0) as child:
            sources = [child.fileno(), output_end]
            while (now := time.monotonic()) < deadline:
                ready = select.select(sources, [], [], min(deadline - now, 0.05))[0]
                if output_end in ready:
                    chunk = os.read(output_end, 1 << 16)
                    kept += chunk[: max(self.limits["output_bytes"] + 1 - len(kept), 0)]
                    if not chunk:
                        sources.remove(output_end)
                elif ready:
                    return kept, None
                if self.overfull():
                    return kept, f"Killed: more than {self.limits['folder_mib']} MiB or {MOST_FILES} files."
        return kept, f"Timed out after {wall:g} s of wall clock."

    def overfull(self) -> bool:
        """Whether the code has written more than it may; nothing in the kernel limits all files together."""
        size = 0
        for files, entry in enumerate(os.scandir(self.folder)):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                size += entry.stat(follow_symlinks=False).st_size
            if size > self.limits["folder_mib"] << 20 or files > MOST_FILES:
                return True
        return False

    def serve(self) -> None:
        for layer, (code, expected) in POLICY["probes"].items():
            code = code.format(outside=os.path.abspath(__file__), mib=self.limits["memory_mib"])
            self.layers[layer] = "on" if expected in (self.call(code, 20)["error"] or "") else "missing"
        print(json.dumps(self.layers), flush=True)
        for line in sys.stdin.buffer:  # ends when the owner does
            print(json.dumps(self.call(json.loads(line), self.limits["wall_seconds"])), flush=True)


if __name__ == "__main__":
    server = Server(**json.loads(sys.argv[1]))
    with contextlib.suppress(ConnectionError):
        server.serve()
    os.rmdir(server.folder)
