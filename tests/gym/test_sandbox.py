"""python_exec's sandbox: every attack is contained, nothing stays for the next call, and the process behind it dies.

An attack prints ESCAPED where it succeeds. After each one the folder is empty, the same server answers, and it has no
child; what lies outside (SECRET: a file, a variable, sockets) is neither seen nor changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from skyrl_gym.tools import confine, python_exec
from skyrl_gym.tools.python_exec import ExecResult, Limits, Sandbox, shared_sandbox

DENIED, TIME, MEMORY = "PermissionError", "Timed out after 0.6 s", "MemoryError: the limit is 256 MiB."
SYSCALL = "import ctypes, os; call = lambda *a: print('-1' if ctypes.CDLL(None).syscall(*a) == -1 else 'ESCAPED')\n"
ESCAPED = "\nprint('ESCAPED')"
STEAL = "print('ESCAPED', open({path}).read())"

ATTACKS: dict[str, tuple[str, str]] = {
    # Files. The second of each pair is what the error, or else the output, must contain.
    "read a file": (STEAL.format(path="{secret!r}"), DENIED),
    "read /etc/passwd": (STEAL.format(path="'/etc/passwd'"), DENIED),
    "symbolic link": ("import os; os.symlink({secret!r}, 'x')" + ESCAPED, DENIED),
    "hard link": ("import os; os.link({secret!r}, 'x')" + ESCAPED, DENIED),
    "append to a file": ("open({secret!r}, 'a').write('x')" + ESCAPED, DENIED),
    "truncate a library by opening": ("import os; os.open(os.__file__, os.O_TRUNC)" + ESCAPED, DENIED),
    "write into a library": ("import os; open(os.__file__, 'a')" + ESCAPED, DENIED),
    "chmod": ("import os; os.chmod({secret!r}, 0o777)" + ESCAPED, DENIED),
    "chown": ("import os; os.chown({secret!r}, 1, 1)" + ESCAPED, DENIED),
    "setxattr": ("import os; os.setxattr('.', 'user.x', b'x')" + ESCAPED, DENIED),
    "remove": ("import os; os.remove({secret!r})" + ESCAPED, DENIED),
    "rename away": ("import os; os.rename({secret!r}, 'x')" + ESCAPED, ""),
    "write beside the folder": ("import os; open('../escaped', 'w')" + ESCAPED, DENIED),
    "make a folder": ("import os; os.mkdir('x')" + ESCAPED, DENIED),
    "the tasks' own code": ("import sys; sys.path.append({package!r}); import skyrl_gym" + ESCAPED, "ModuleNotFound"),
    "the owner's memory": ("open('/proc/{owner}/mem', 'r+b')" + ESCAPED, DENIED),
    "the owner's variables": (STEAL.format(path="'/proc/{owner}/environ'"), DENIED),
    "the first process's memory": ("open('/proc/1/mem', 'rb')" + ESCAPED, DENIED),
    "the first process's variables": ("open('/proc/1/environ', 'rb')" + ESCAPED, DENIED),
    "the machine's settings": ("import os; os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)" + ESCAPED, DENIED),
    "its own variables": ("import os; print(dict(os.environ)); open('/proc/self/environ')", DENIED),
    "variables in memory": (
        "import ctypes; e = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
        "i = 0\nwhile e[i]: print(e[i]); i += 1",
        "HOME",
    ),
    # Network.
    "TCP": ("import socket; socket.create_connection(('127.0.0.1', {port}))" + ESCAPED, DENIED),
    "abstract Unix socket": ("import socket; socket.socket(1).connect('\\0' + {name!r})" + ESCAPED, DENIED),
    "datagrams": ("import socket; socket.socketpair(1, 2)[0].sendto(b'x', '\\0' + {name!r} + 'd')" + ESCAPED, DENIED),
    "socket without Python": (SYSCALL + "call({socket}, 2, 1, 0)", "-1"),
    "socket to the host": ("import socket; socket.socket(40)" + ESCAPED, DENIED),
    # Processes.
    "fork": ("import os; os.fork()" + ESCAPED, DENIED),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork(); print('ESCAPED')\n    except OSError: pass", TIME),
    "subprocess": ("import subprocess; print(subprocess.run(['id'], executable='/usr/bin/id'))" + ESCAPED, DENIED),
    "os.system": ("import os; os.system('echo ESCAPED')", ""),
    "posix_spawn": ("import os; os.posix_spawn('/bin/true', ['true'], {{}})" + ESCAPED, DENIED),
    "multiprocessing": ("import multiprocessing as m; m.Process(target=print).start()" + ESCAPED, DENIED),
    "exec": ("import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])", DENIED),
    "clone without Python": (SYSCALL + "call({clone}, 17, 0, 0, 0, 0)", "-1"),
    "clone3 without Python": (SYSCALL + "call(435, (ctypes.c_char * 64)(), 64)", "-1"),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "thread",
    ),
    # Signals and other processes.
    "kill the server": ("import os; os.kill(os.getppid(), 9)" + ESCAPED, DENIED),
    "kill the owner": ("import os; os.kill({owner}, 9)" + ESCAPED, DENIED),
    "kill everyone": ("import os; os.kill(-1, 9)" + ESCAPED, DENIED),
    "kill by a file": ("import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())" + ESCAPED, DENIED),
    "kill by a process's file": ("import os; os.pidfd_open(os.getppid())" + ESCAPED, DENIED),
    "the server's limits": ("import os, resource; resource.prlimit(os.getppid(), 0, (0, 0))" + ESCAPED, DENIED),
    "survive the server": (SYSCALL + "call({prctl}, 1, 0, 0, 0, 0)", "-1"),
    "leave the session": ("import os; os.setsid()" + ESCAPED, DENIED),
    "ptrace": (SYSCALL + "call({ptrace}, 16, os.getppid(), 0, 0)", "-1"),
    "stop itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)" + ESCAPED, TIME),
    # The kernel, called directly.
    "mount": (SYSCALL + "call({mount}, b'none', b'/', b'tmpfs', 0, 0)", "-1"),
    "user namespace": (SYSCALL + "call({unshare}, 0x10000000)", "-1"),
    "user namespace by clone": (SYSCALL + "call({clone}, 0x10000011, 0, 0, 0, 0)", "-1"),
    "user namespace by clone3": (SYSCALL + "call(435, (ctypes.c_char * 64)(0, 0, 0, 16), 64)", "-1"),
    "user namespace by its x32 number": (SYSCALL + "call(0x40000000 + {unshare}, 0x10000000)", "-1"),
    "user namespace by i386's calls": (
        "import ctypes, mmap; memory = mmap.mmap(-1, 4096, prot=7)  # mov eax, 310; mov ebx, 1 << 28; int 0x80; ret\n"
        "memory.write(bytes.fromhex('b836010000bb00000010cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()" + ESCAPED,
        "Killed by signal",
    ),
    "another's namespace": (SYSCALL + "call({setns}, os.open('.', 0), 0)", ""),
    "keyring": (SYSCALL + "call({keyctl}, 0, -3, 1)", "-1"),
    "userfaultfd": (SYSCALL + "call({userfaultfd}, 1)", "-1"),
    "performance counters": (SYSCALL + "call({perf}, (ctypes.c_char * 128)(), 0, -1, -1, 0)", "-1"),
    "another user": ("import os; os.setuid(1)" + ESCAPED, DENIED),
    "bpf": (SYSCALL + "call({bpf}, 0, (ctypes.c_char * 64)(), 64)", "-1"),
    "io_uring": (SYSCALL + "call(425, 8, (ctypes.c_char * 120)())", "-1"),
    "memory outside the limit": ("import os; os.memfd_create('x')" + ESCAPED, DENIED),
    "raise limits": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))" + ESCAPED, "not allowed"),
    # Resources.
    "endless loop": ("while True: pass", TIME),
    "endless loop in C": ("pow(3, 10**9)" + ESCAPED, TIME),
    "ignore signals": ("import signal\nfor s in 2, 15, 24: signal.signal(s, signal.SIG_IGN)\nwhile True: pass", TIME),
    "endless output": ("while True: print('x' * 1000)", TIME),
    "memory by lists": ("x = []\nwhile True: x.append('x' * 10**6)", MEMORY),
    "memory by mmap": ("import mmap\nmmap.mmap(-1, 1 << 30)" + ESCAPED, "Cannot allocate memory"),
    "memory in a report": ("raise ValueError('x' * 10**8)", "Exited with status 1."),
    "big file": ("open('x', 'wb').write(bytes(9 << 20))" + ESCAPED, "File too large"),
    "big files": (
        "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))\nimport time; time.sleep(9)",
        "Killed: more",
    ),
    "many files": ("import time\nfor i in range(1100): open(str(i), 'w').close()\ntime.sleep(9)", "Killed: more"),
    "disk beyond a file's end": (
        SYSCALL + "call({fallocate}, os.open('x', os.O_RDWR | os.O_CREAT), 1, 0, 99 << 20)",
        "-1",
    ),
    "deep recursion": ("import sys; sys.setrecursionlimit(10**8)\nf = lambda n: [f(n)]\nf(0)", ""),
    "bad memory": ("import ctypes; ctypes.string_at(1)", "Killed by signal 11"),
    # The channels back.
    "close everything": ("import os; os.closerange(0, 999)", "status 1"),
    "write everywhere": ("import os\nwhile True:\n    for fd in range(3, 9): os.write(fd, b'{{}}\\n' * 99)", "{}"),
    "exit": ("import os; print('shown', flush=True); os._exit(0)", "shown"),
    "an error that lies": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "exception str() failed"),
    "NUL": ("print(1)\0", "null bytes"),
    "surrogate": ("'\ud800'", "surrogates not allowed"),
    "not UTF-8": ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe'); print('\\ud800')", "\ufffd\ufffd\\ud800"),
    "syntax": ("x = (1,", "SyntaxError: '(' was never closed"),
    "long code": ("x = 1\n" * 170_000 + "x", ""),
    "too long code": ("#" * (1 << 20) + "#", "at most 1048576"),
}
PACKAGE = str(Path(python_exec.__file__).parents[2])
ENVIRONMENT = {"PYTHONPATH": PACKAGE}
_X86 = {"socket": 41, "clone": 56, "ptrace": 101, "prctl": 157, "mount": 165, "unshare": 272, "bpf": 321}
_X86 |= {"keyctl": 250, "fallocate": 285, "perf": 298, "setns": 308, "userfaultfd": 323}
_ARM = {"socket": 198, "clone": 220, "ptrace": 117, "prctl": 167, "mount": 40, "unshare": 97, "bpf": 280}
_ARM |= {"keyctl": 219, "fallocate": 47, "perf": 241, "setns": 268, "userfaultfd": 282}
NUMBERS = _X86 if os.uname().machine == "x86_64" else _ARM


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with contextlib.closing(Sandbox(Limits(wall_seconds=9, cpu_seconds=1))) as sandbox:  # 9: the machine may be busy
        yield sandbox


@pytest.fixture(scope="module")
def brief() -> Iterator[Sandbox]:
    with contextlib.closing(Sandbox(Limits(wall_seconds=0.6))) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def outside() -> Iterator[dict[str, object]]:
    """What an attack may aim at; afterwards nothing may have come in."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secret, name = folder / "secret", f"skyrl-test-{os.getpid()}"
        secret.write_text("SECRET")
        before = secret.stat()
        tcp, stream, datagram = socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, 2)
        for target, address in (tcp, ("127.0.0.1", 0)), (stream, "\0" + name), (datagram, "\0" + name + "d"):
            stack.enter_context(target).bind(address)
            target.setblocking(False)
        tcp.listen()
        stream.listen()
        yield {"secret": str(secret), "name": name, "port": tcp.getsockname()[1], "package": PACKAGE}
        after = secret.stat()
        assert secret.read_text() == "SECRET" and (before.st_mode, before.st_mtime) == (after.st_mode, after.st_mtime)
        for receive in tcp.accept, stream.accept, lambda: datagram.recv(1):
            with pytest.raises(BlockingIOError):
                receive()


def server_of(sandbox: Sandbox) -> int:
    sandbox.start()
    assert sandbox._server
    return sandbox._server[0].pid


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_gone(pid: str) -> bool:
    """Whether a process has ended, within some seconds; what its new parent has not waited for has no command line."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes():
                time.sleep(0.01)
                continue
        return True
    return False


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str, sandbox: Sandbox, brief: Sandbox, outside: dict[str, object]) -> None:
    code, expected = ATTACKS[name]
    sandbox = brief if expected == TIME else sandbox
    server = server_of(sandbox)
    result = sandbox.run(code.format(**outside, **NUMBERS, owner=os.getpid()) if len(code) < 1000 else code)
    assert result.seconds < 1.6 or sandbox is not brief
    assert "ESCAPED" not in result.output and "SECRET" not in result.output
    assert expected in (result.error or result.output)
    assert len(result.output) < 17_000 and len(result.error or "") < 5000
    assert sandbox.run("import os; os.listdir()").output == "[]\n"
    assert server_of(sandbox) == server and children(server) == []


@pytest.mark.parametrize(
    ("code", "output", "error"),
    [
        ("1 + 1", "2\n", None),
        ("print('a')\nx = '你好'\nx", "a\n'你好'\n", None),
        ("import sys; print('a'); print('b', file=sys.stderr); print('c')", "a\nb\nc\n", None),
        ("def f():\n    yield 1 / 0\nlist(f())", "", "ZeroDivisionError: division by zero"),
        ("print('before'); 1 / 0", "before\n", "ZeroDivisionError"),
        ("print('before')\nwhile True: pass", "before\n", "Killed by signal 24, CPU time limit exceeded."),
        ("input()", "", "EOFError"),
        ("print(1); exit(); print(2)", "1\n", None),
        ("print(1); quit(0); print(2)", "1\n", None),
        ("exit(3)", "", "SystemExit: 3"),
        ("import sys; sys.exit(3)", "", "SystemExit: 3"),
        ("open('x', 'w').write('a'); open('x').read()", "'a'\n", None),
        ("import threading\nthreading.Timer(0.05, print, ['late']).start()", "late\n", None),
        ("import asyncio\nasync def f(): return 5\nasyncio.run(f())", "5\n", None),
        ("import sqlite3, ssl, ctypes, csv, uuid, zoneinfo; zoneinfo.ZoneInfo('UTC').key", "'UTC'\n", None),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)\n", None),
        ("print('x' * 20_000); print('later')", "x" * 16384 + "\n[output cut after 16384 bytes]", None),
        ("print('x' * 40_000_000)", "x" * 16384 + "\n[output cut after 16384 bytes]", None),
    ],
)
def test_honest_code(code: str, output: str, error: str | None, sandbox: Sandbox) -> None:
    result = sandbox.run(code)
    assert result.output == output
    assert result.error is None if error is None else error in (result.error or "")


def test_nothing_stays_for_the_next_call(sandbox: Sandbox) -> None:
    sandbox.run(
        "import builtins, fcntl, json, math, os, random, sys\nopen('left', 'w').write('x'); os.umask(0)\n"
        "math.pi = builtins.len = json.dumps = sys.flag = 3; os.environ['LEFT'] = 'x'; random.seed(7)\n"
        "fcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)"
    )
    look = (
        "import fcntl, math, os, sys; flags = fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK)\n"
        "[os.listdir(), len('ab'), math.pi > 3, 'LEFT' in os.environ, hasattr(sys, 'flag'), os.umask(0), flags]"
    )
    assert sandbox.run(look).output == "[[], 2, True, False, False, 63, 0]\n"


READ_MEMORY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
first, second, found = b"a word of ", b"an earlier call", 0
own = first + second if {known} else b""
for middle in libc.sbrk(0), id(object()):
    for page in range(middle // 4096 * 4096 - (1 << 27), middle + (1 << 27), 4096):
        libc.access(ctypes.c_void_p(page), 0)
        if ctypes.get_errno() != 14:  # EFAULT
            parts = ctypes.string_at(page, 4096).split(first)
            found += sum(part.startswith(second) for part in parts[1:])
found
"""


def test_no_earlier_call_can_be_read_in_memory() -> None:
    word = "a word of an earlier call"
    with contextlib.closing(Sandbox(Limits(wall_seconds=60, cpu_seconds=60))) as sandbox:
        earlier = sandbox.run(f"open({word!r}, 'w'); print({word!r}); raise ValueError({word!r})")
        assert word in earlier.output and word in (earlier.error or "")
        assert sandbox.run(READ_MEMORY.format(known=False)).output == "0\n"
        assert int(sandbox.run(READ_MEMORY.format(known=True)).output) > 0  # it does read memory


def test_files_that_are_given_are_in_the_folder_and_gone_after_the_call(sandbox: Sandbox) -> None:
    listing = "import os; print(*sorted(os.listdir()), *(open(name).read() for name in sorted(os.listdir())))"
    assert sandbox.run(listing, {"a": b"one", "b.db": b"two"}).output == "a b.db one two\n"
    assert sandbox.run(listing).output == "\n"
    assert "more than 16 MiB" in (sandbox.run("while True: pass", {"large": bytes(20 << 20)}).error or "")


def test_results_are_the_same_in_every_server(sandbox: Sandbox) -> None:
    code = "import random; print(random.random(), list({'a', 'b', 'c', 'd'}), hash('x'))"
    with contextlib.closing(Sandbox()) as other:
        assert sandbox.run(code).output == sandbox.run(code).output == other.run(code).output


def test_threads_share_a_sandbox(sandbox: Sandbox) -> None:
    found: dict[int, str] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: sandbox.run(f"{n}").output})) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"{n}\n" for n in range(9)}


def test_a_killed_server_is_replaced_and_its_child_dies_with_it(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Sandbox()) as sandbox:
        server = server_of(sandbox)
        results: list[ExecResult] = []
        thread = threading.Thread(target=lambda: results.append(sandbox.run("import time; time.sleep(0.5); 5")))
        thread.start()
        while not children(server):
            time.sleep(0.01)
        child = children(server)[0]
        os.kill(server, signal.SIGKILL)
        thread.join()
        assert results[0].output == "5\n" and "a new one is started" in caplog.text
        assert is_gone(child)
        os.kill(server_of(sandbox), signal.SIGKILL)
        assert sandbox.run("1").output == "1\n"


def test_close_leaves_nothing_and_a_fork_has_its_own_server(sandbox: Sandbox) -> None:
    other = Sandbox()
    server, folder = server_of(other), other._folder
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        other.run("1")
        os.write(writer, f"{server_of(other)}".encode())
        other.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(reader, 99)) != server and server_of(other) == server and other.run("2").output == "2\n"
    other.close()
    assert not os.path.exists(folder) and not Path(f"/proc/{server}").exists()
    assert shared_sandbox(Limits()) is shared_sandbox(Limits()) is not shared_sandbox(Limits(wall_seconds=3))


@pytest.mark.parametrize("meanwhile", ["", "open('left', 'w'); import time; time.sleep(99)"])
def test_the_server_ends_with_its_owner_however_that_dies(meanwhile: str) -> None:
    code = (
        "from skyrl_gym.tools.python_exec import *; import time; s = Sandbox(Limits(wall_seconds=99)); s.start()\n"
        f"print(s._server[0].pid, s._folder); threading.Thread(target=s.run, args=({meanwhile!r},)).start()\n"
        f"while {bool(meanwhile)} and not os.listdir(s._folder): time.sleep(0.01)\n"
    )
    command = [sys.executable, "-uc", code + "os.kill(os.getpid(), 9)"]
    server, folder = subprocess.run(command, capture_output=True, env=ENVIRONMENT).stdout.decode().split()
    assert is_gone(server) and not os.path.exists(folder)


LACKING = """
import struct, sys
from skyrl_gym.tools import confine as s
from skyrl_gym.tools.python_exec import Sandbox, UNSAFE
syscall, argument, errno = map(int, sys.argv[1:])
k = s.K
rule = [(k.LOAD, 0, 0, 0), (k.IF_EQUAL, 0, 3, syscall), (k.LOAD, 0, 0, 16), (k.IF_EQUAL, 0, 1, argument),
        (k.RETURN, 0, 0, 0x50000 | errno), (k.RETURN, 0, 0, k.ALLOW)]
s.libc.prctl(38, 1, 0, 0, 0)
s.restrict(-1, b"".join(struct.pack("HBBI", *i) for i in rule))
try:
    Sandbox().run("print('ESCAPED')")
except RuntimeError as error:
    print(error)
print(Sandbox(unsafe=True).run("import os; os.getpid() > 1"))
"""


@pytest.mark.parametrize(
    ("lack", "syscall", "argument", "errno"),
    [("Landlock, reading files", 444, 0, 38), ("network, processes", NUMBERS["prctl"], 22, 22)],
)
def test_where_the_kernel_offers_too_little_it_refuses(lack: str, syscall: int, argument: int, errno: int) -> None:
    """A seccomp filter plays the kernel that does not know Landlock, or seccomp."""
    command = [sys.executable, "-c", LACKING, *map(str, (syscall, argument, errno))]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    refusal, result = run.stdout.splitlines()
    assert lack in refusal and python_exec.UNSAFE in refusal and "ESCAPED" not in run.stdout
    assert "output='True\\n', error=None" in result


def test_every_layer_holds_here_and_older_landlocks_are_known(tmp_path: Path) -> None:
    with contextlib.closing(Sandbox(unsafe=True)) as sandbox:
        layers = sandbox.start()
    assert set(layers.values()) - {"on"} <= {f"on, ABI {n}" for n in range(1, 99)}
    for abi in range(1, 1 + int(layers["Landlock"].split()[-1])):
        os.close(confine.landlock_ruleset({str(tmp_path): -1}, abi))


@pytest.mark.parametrize("limits", [{"memory_mib": 0}, {"wall_seconds": "2"}, {"cpu_seconds": 1.5}])
def test_bad_limits_are_named(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("memory_mib", 1, "MemoryError: the limit is 1 MiB."),
        ("memory_mib", 16, "MemoryError: the limit is 16 MiB."),
        ("open_files", 4, "Too many open files"),
    ],
)
@pytest.mark.parametrize("unsafe", [False, True])
def test_limits_too_small_to_run_anything_are_named_and_not_taken_for_missing_protection(
    name: str, value: int, reason: str, unsafe: bool
) -> None:
    sandbox = Sandbox(Limits(**{name: value}), unsafe)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"needs more than Limits\(.*{name}={value}\D.*: .*{reason}") as caught:
        sandbox.run("1")
    assert "protection" not in str(caught.value) and sandbox._server is None


def test_small_limits_that_suffice_leave_every_layer_on() -> None:
    limits = Limits(
        wall_seconds=0.001, cpu_seconds=1, memory_mib=48, output_bytes=1, file_mib=1, folder_mib=1, open_files=5
    )
    with contextlib.closing(Sandbox(limits)) as sandbox:
        assert "missing" not in sandbox.start().values()
        assert sandbox.run("while True: pass").error == "Timed out after 0.001 s of wall clock."


@pytest.mark.parametrize(
    "code, wrong",
    [
        ("print('x' * 9000); 1 / 0", "ZeroDivisionError: division by zero"),
        ("print('x' * 500_000); 1 / 0", "ZeroDivisionError: division by zero"),
        ("while True: print('on')", "Timed out after 2 s"),
    ],
)
def test_what_went_wrong_stands_behind_however_much_was_printed(code: str, wrong: str) -> None:
    env = gymnasium.make("skyrl_gym:skyrl/tool_use-v0", tools=["python_exec"])
    env.reset(options={"task": {"prompt": "?", "ground_truth": "1"}})
    call = json.dumps({"tool": "python_exec", "args": {"code": code}})
    observation = env.step(f"<tool_call>{call}</tool_call>")[0]
    assert len(observation) < 4200 and " characters left out " in observation
    assert wrong in observation[-200:]


def test_an_environment_gives_its_programs_limits_of_its_own_and_says_so_to_the_model() -> None:
    env = gymnasium.make("skyrl/tool_use-v0", tools=[{"python_exec": {"output_bytes": 8}}, "calculator"])
    _, info = env.reset(seed=0)
    assert info["tools"][0]["function"]["description"].endswith("prints. Limits: output_bytes 8.")
    call = {"tool": "python_exec", "args": {"code": "print('0123456789')"}}
    [made] = env.step(f"<tool_call>{json.dumps(call)}</tool_call>")[4]["tool_calls"]
    assert made["result"] == "01234567\n[output cut after 8 bytes]"
    assert "waits" not in env.metadata  # its programs run one after the other in any case
    again = pickle.loads(pickle.dumps(env.unwrapped))
    assert again.step(f"<tool_call>{json.dumps(call)}</tool_call>")[4]["tool_calls"] == [made]
    usual = gymnasium.make("skyrl/tool_use-v0").reset(seed=0)[1]["tools"][3]["function"]
    assert usual["description"] == "Runs a Python program on its own and returns what it prints."
