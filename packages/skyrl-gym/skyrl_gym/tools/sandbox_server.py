"""The process behind python_exec: it has imported the usual modules, and forks a confined child for each call.

It never holds what a later call must not find in its memory: a child takes its code from the owner's file and answers
into the owner's pipes. It gives up, before it sees code: session, open files, environment, capabilities; all files but
the standard library, shared libraries and a flat folder emptied after each call (Landlock); all system calls and
arguments not in sandbox_policy.json (seccomp).
"""

import ast
import builtins
import gc
import json
import linecache
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

import confine  # lies beside this program

K = confine.K
PACKAGES = ("python", "site-packages", "dist-packages")  # what holds this package may also hold answers
SHOWN, REPORT, LONGEST_REPORT = "<code>", 3, 1200


def rights(folder: str) -> dict[str, int]:
    """By path, what Landlock grants: reading what imports need (no installed packages), and files in `folder`."""
    standard = os.path.dirname(os.path.realpath(os.__file__))
    granted = {standard: K.READ_DIR, "/dev/null": K.READ | K.WRITE_FILE}
    granted[folder] = K.READ | K.WRITE_FILE | K.REMOVE_FILE | K.MAKE_FILE | K.TRUNCATE
    granted |= dict.fromkeys(("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo"), K.READ)
    for library in (standard, os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        with suppress(OSError), os.scandir(library) as entries:
            granted |= {e.path: K.READ for e in entries if not e.name.startswith(PACKAGES)}
    return granted


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
    with suppress(BaseException):
        sys.stdout.flush()
    os.write(REPORT, report.encode("utf-8", "backslashreplace"))
    os._exit(1 if report else 0)


class Server:
    """Forks, confines, kills and waits. One call at a time."""

    def __init__(self, limits: dict[str, Any], folder: str) -> None:
        self.limits, self.folder, self.pid = limits, folder, os.getpid()
        self.ruleset, self.program = -1, b""
        # The children inherit all that is done here.
        confine.drop_privileges()
        if abi := confine.landlock_abi():
            self.ruleset = confine.landlock_ruleset(rights(folder), abi)
        with suppress(OSError):
            self.program = confine.seccomp_program("call")
        for name in confine.POLICY["modules"]:
            __import__(name)
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # site is off
        sys.path.pop(0)  # where this program lies
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder, LANG="C.UTF-8", TZ="UTC")
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore
        gc.freeze()

    def confine(self, output: int, report: int) -> None:
        """In the child: gives up everything that the code must not have. Raises where that fails."""
        os.setsid()
        confine.die_with_parent()
        if os.getppid() != self.pid:
            os._exit(1)
        confine.restrict(self.ruleset, self.program)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # opened anew: the next call would see flags of a shared one
        for source, target in (output, 1), (output, 2), (report, REPORT):
            os.dup2(source, target)
        os.closerange(REPORT + 1, 1 << 20)
        os.chdir(self.folder)
        os.umask(0o077)
        limits = {"CPU": self.limits["cpu_seconds"], "NOFILE": self.limits["open_files"], "STACK": 8 << 20, "CORE": 0}
        limits |= {"AS": self.limits["memory_mib"] << 20, "FSIZE": self.limits["file_mib"] << 20}
        confine.set_limits(limits)

    def call(self, source: int, output: int, report: int) -> int:
        """Runs the code in the file `source` in a new child till that ends or the owner says more; its exit status."""
        pid = os.fork()
        if pid == 0:
            try:
                code = os.pread(source, os.fstat(source).st_size, 0).decode("utf-8", "surrogatepass")
                self.confine(output, report)
                run_code(code, self.limits["memory_mib"])
            finally:
                os._exit(1)
        for end in source, output, report:
            os.close(end)
        with open(os.pidfd_open(pid), "rb", 0) as child:
            select.select([child.fileno(), 0], [], [])
        os.kill(pid, signal.SIGKILL)  # has not been waited for, so that the number is still its own
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def serve(self) -> None:
        """Answers each message that has three files with an exit status, till the owner ends."""
        with socket.socket(fileno=0) as owner, suppress(ConnectionError):
            while (message := socket.recv_fds(owner, 99, 3))[0]:
                if files := message[1]:  # without them: asked to stop a call that had just ended
                    owner.send(str(self.call(*files)).encode())
        import shutil  # not before: what this process holds costs each fork time

        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    Server(**json.loads(sys.argv[1])).serve()
