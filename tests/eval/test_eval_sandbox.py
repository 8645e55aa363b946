"""The sandbox: what runs in it has no network, no files of ours, no way to stay; LiveCodeBench's rules on top of it."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_eval import benchmarks, sandbox
from skyrl_eval.benchmarks import livecodebench as lcb
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.types import Verdict
from skyrl_trainer.errors import UserError
from tests.eval.made_up import ROWS, attempt, items
from tests.gym import test_sandbox

ROOT = Path(__file__).parents[2]


def python(code: str, seconds: float = 20, **options: object) -> sandbox.Done:
    return sandbox.run(["python", "-I", "-c", code], seconds=seconds, **options)  # type: ignore[arg-type]


def test_what_runs_sees_its_own_folder_and_the_system_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("data")
    ssh = str(Path("/root", ".ssh"))
    hidden = {str(ROOT / "README.md"), "/home", "/etc/shadow", ssh, "/.old"} - {str(path) for path in ROOT.parents}
    code = f"""
import os, socket
print(open("/mine/given").read(), sorted(os.listdir("/mine")), os.environ.get("HOME"))
open("/mine/made", "w").write("x")
open("/tmp/made", "w").write("x")
assert not os.path.exists({str(ROOT)!r}) or os.listdir({str(ROOT)!r}) == [".venv"]  # where Python itself may lie
for path in {hidden}:
    assert not os.path.exists(path), path
for attempt in (lambda: open("/usr/x", "w"), lambda: socket.create_connection(("192.0.2.1", 80), 2),
                lambda: os.mount, lambda: open("/proc/1/environ")):
    try:
        attempt()
        print("possible")
    except (OSError, AttributeError) as error:
        print(type(error).__name__)
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 2)
print("CapEff:\\t0000000000000000" in open("/proc/self/status").read())
"""
    done = python(code, binds=[(tmp_path, "/mine", True)])
    lines = done.output.splitlines()
    assert lines[0] == "data ['given'] /tmp"
    assert lines[1:5] == ["OSError", "OSError", "AttributeError", "PermissionError"]
    assert lines[-1] == "True" and done.code == 0, done.output
    assert (tmp_path / "made").read_text() == "x"


outside = test_sandbox.outside
SHARED = (  # those of python_exec's attacks that a command may not succeed in either
    *("read a file", "append to a file", "truncate a library by opening", "write into a library", "chmod", "chown"),
    *("remove", "rename away", "the owner's memory", "the owner's variables", "the first process's memory"),
    *("the first process's variables", "the machine's settings", "TCP", "abstract Unix socket", "datagrams"),
    *("socket to the host", "kill the owner", "ptrace", "mount", "user namespace", "user namespace by clone"),
    *("user namespace by its x32 number", "user namespace by i386's calls"),
    *("user namespace by clone3", "another's namespace", "keyring", "userfaultfd", "performance counters"),
    *("another user", "bpf", "io_uring", "raise limits"),
)


@pytest.mark.parametrize("name", SHARED)
def test_an_attack_on_python_exec_is_none_on_a_command_either(name: str, outside: dict[str, object]) -> None:
    code = test_sandbox.ATTACKS[name][0].format(**outside, **test_sandbox.NUMBERS, owner=os.getpid())
    done = python(code)
    assert "ESCAPED" not in done.output and "SECRET" not in done.output
    assert done.code or done.output == "-1\n", done.output


BUILD = r"""
set -e
git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first && git log --oneline | wc -l
cat > main.c <<'END'
#include <pthread.h>
#include <stdio.h>
int two(void);
static void *run(void *x) { return x; }
int main(void) { pthread_t t; pthread_create(&t, 0, run, 0); pthread_join(t, 0); printf("%d\n", two()); }
END
echo 'int two(void) { return 2; }' > two.c
printf 'all: main.o two.o\n\tcc -pthread -o main $^ && ./main\n' > Makefile
make -s -j2
cat > test_it.py <<'END'
import asyncio, concurrent.futures, multiprocessing, os, socket, sqlite3, subprocess, sys, tempfile

def double(x):
    return 2 * x

def test_what_tests_do(tmp_path):
    with multiprocessing.Pool(2) as pool, concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert pool.map(double, range(3)) == list(threads.map(double, range(3))) == [0, 2, 4]
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout == "1\n"
    with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()):
        assert server.accept()
    assert asyncio.run(asyncio.sleep(0, 5)) == 5
    assert sqlite3.connect(tmp_path / "x.db").execute("select 1").fetchone() == (1,)
    os.mkfifo(tmp_path / "pipe"), os.symlink("pipe", tmp_path / "link"), os.chmod(tmp_path / "pipe", 0o600)
END
python -m pytest -q -p no:cacheprovider test_it.py
"""


def test_builds_and_tests_work_under_the_filter(tmp_path: Path) -> None:
    done = sandbox.run(["bash", "-c", BUILD], [(tmp_path, "/build", True)], seconds=120, cwd="/build")
    assert done.code == 0 and done.output.startswith("1\n2\n") and "1 passed" in done.output, done.output


def test_an_environment_behind_a_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(os.path.realpath(sys.prefix))
    monkeypatch.setattr(sys, "prefix", str(link))
    monkeypatch.setattr(sys, "executable", str(link / "bin" / "python"))
    assert python("import sys; print(sys.prefix)").output == f"{link}\n"


def test_a_link_to_a_file_of_ours_is_not_read_back(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    python(
        "import os; os.symlink('../secret', '/mine/result'); os.mkfifo('/mine/pipe')", binds=[(tmp_path, "/mine", True)]
    )
    assert sandbox.read_back(tmp_path / "secret") == "secret"
    assert sandbox.read_back(tmp_path / "result") == sandbox.read_back(tmp_path / "pipe") == ""


def test_a_folder_that_is_deep_or_closed_fails_nothing_and_is_deleted() -> None:
    with sandbox.folder("skyrl-test-") as folder:
        where: dict[str, object] = {"binds": [(folder, "/mine", True)], "cwd": "/mine"}
        python("import os\nfor _ in range(3000): os.mkdir('x'); os.chdir('x')", **where)
        python("import os; os.makedirs('y/z'); os.chmod('y', 0); os.chmod('.', 0)", **where)
        assert python("print(1)", **where).output == "1\n"
    assert not folder.exists()


def test_a_folder_that_nobody_closed_is_deleted_at_the_end_without_a_word() -> None:
    opened = "import contextlib\nfrom skyrl_eval import sandbox\nstack = contextlib.ExitStack()\n"
    opened += "print(stack.enter_context(sandbox.folder('skyrl-test-')))"
    done = subprocess.run([sys.executable, "-c", opened], capture_output=True, text=True, check=True)
    assert done.stderr == "" and not Path(done.stdout.strip()).exists()


def test_a_read_only_folder_is_read_only(tmp_path: Path) -> None:
    done = python("open('/mine/x', 'w')", binds=[(tmp_path, "/mine", False)])
    assert "Read-only file system" in done.output and done.code == 1


def test_time_is_up_for_all_processes_and_memory_is_bounded() -> None:
    began = time.monotonic()
    done = sandbox.run(["bash", "-c", "setsid sleep 4711 & sleep 4711"], seconds=0.5)
    assert done.timed_out and time.monotonic() - began < 30
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"sleep\x004711" in command for command in running)
    assert "MemoryError" in python("bytearray(2 << 30)", memory_mib=1024).output


def test_much_output_loses_its_middle_and_a_missing_program_is_the_sandboxs_failure() -> None:
    long = "print('a' + 'x' * (9 << 20) + '{}' + 'x' * ({} << 20) + 'z')"
    assert "middle" in python(long.format("middle", 9)).output, "as long as a log can be"
    done = python(long.format("", 60))
    assert len(done.output) < 65 << 20 and "bytes left out" in done.output
    assert done.output.startswith("ax") and done.output.endswith("xz\n")
    with pytest.raises(sandbox.SandboxFailed, match="No such file"):
        sandbox.run(["no-such-program"], seconds=5)
    assert sandbox.run(["bash", "-c", "exit 125"], seconds=5).code == 1, "the sandbox's own, where no program began"
    with pytest.raises(UserError, match="podman info"):
        sandbox.check("podman")


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("  1 \n2", "1\n2\n\n", True),
        ("1\n\n2", "1\n2", False),
        ("1.0 2", "1 2.00", True),
        ("1e2", "100", True),
        ("0.1", "0.10000000000000001", False),
        ("50000000000000001", "50000000000000000", False),
        ("1 2 3", "1 2", False),
        ("yes", "YES", False),
        ("NO 1", "NO 1.0", False),
        ("", "", True),
        ("1", "", False),
        ("nan", "nan", True),
        ("1  2", "1 2", True),
    ],
)
def test_livecodebenchs_rules_for_printed_output(output: str, expected: str, same: bool) -> None:
    assert lcb.same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, 2], "[1, 2]", True),
        ((1, 2), "[1, 2]", False),
        ([(1, 2)], "[[1, 2]]", False),
        (1, "1.0", True),
        (True, "true", True),
        ("a", '"a"', True),
        ("1", "1", False),
        (None, "null", True),
        ({"a": 1}, '{"a": 1}', True),
        (0.1 + 0.2, "0.3", False),
    ],
)
def test_livecodebenchs_rules_for_values(value: object, expected: str, same: bool) -> None:
    """A tuple at the top is made a list before it gets here; one within stays a tuple, which equals no list."""
    assert lcb.same_value(f"noise\n{lcb.MARK}{value!r}\n", expected) is same


def test_livecodebench_reads_no_value_that_is_far_longer_than_the_right_one() -> None:
    """Nor a set, which no JSON is: of numbers with one hash it takes minutes."""
    assert lcb.same_value(f"{lcb.MARK}[1{' ' * 900}]", "[1]")
    assert not lcb.same_value(f"{lcb.MARK}[1{' ' * 2000}]", "[1]")
    assert not lcb.same_value(f"{lcb.MARK}{{{', '.join(str(k * (2**61 - 1)) for k in range(9))}}}", "[1]")


def solved(number: int, code: str) -> Verdict:
    item = items("livecodebench")[number]
    return benchmarks.find("livecodebench").grade(item, attempt(item, f"Sure:\n```python\n{code}\n```"), Context())


STOPPING = """
import os, signal, time
for process in (os.getppid(), 1):
    try: os.kill(process, signal.SIGSTOP)
    except OSError: pass
time.sleep(3)
"""
PAIR = "class Solution:\n    def pair(self, a, b):\n        {}"


@pytest.mark.parametrize(
    ("number", "code", "status", "passed"),
    [
        (0, "print(2 * int(input()))", "correct", 2),
        (0, "if __name__ == '__main__':\n    print(sum([int(stdin.readline())] * 2)); exit(1)", "correct", 2),
        (0, "print(4)", "wrong", 1),
        (0, "len(str(10**5000)); print(2 * int(input()))", "correct", 2),
        (0, "open('/task/input').read(); print(2 * int(input())); open('/task/input', 'w')", "wrong", 0),
        (0, STOPPING + "print(2 * int(input()))", "wrong", 0),
        (0, "print(2 * int(input())", "wrong", 0),
        (0, "while True: pass", "wrong", 0),
        (1, PAIR.format("print('noise'); return (a + b, a - b)"), "correct", 2),
        (1, PAIR.format("return [a + b, a]"), "wrong", 0),
        (1, "def pair(a, b): return [a + b, a - b]", "correct", 2),
        (
            1,
            PAIR.format("open('/task/results.json', 'w').write('[[true, \"[4, 2]\"]]'); import os; os._exit(0)"),
            "wrong",
            0,
        ),
    ],
)
def test_livecodebench_runs_programs(
    number: int, code: str, status: str, passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "while True" in code or "sleep" in code
    monkeypatch.setattr(lcb, "SECONDS", 1 if slow else 30)  # a busy machine is slow to start Python
    verdict = solved(number, code)
    assert (verdict.status, verdict.detail) == (status, {"tests": 2, "passed": passed})


def test_livecodebench_says_where_there_is_no_python_and_reads_inputs_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [*lcb.outputs("print(repr(open(0).read()))", ["a\r\n", "\ud800"])] == ["'a\\n'\n", "'?'\n"]
    monkeypatch.setattr(sandbox, "VISIBLE", ("/lib", "/lib64"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(sandbox.SandboxFailed, match="No such file"):
        next(lcb.outputs("print(1)", [""]))


def test_livecodebench_has_no_right_program_where_there_is_no_test() -> None:
    item = items("livecodebench")[0]
    bare = replace(item, gold=item.gold | {"public": [], "private": "[]"})
    assert benchmarks.find("livecodebench").grade(bare, attempt(bare, "```\nprint(1)\n```"), Context()).score == 0


def test_a_python_that_was_started_by_a_relative_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", os.path.join(os.getcwd(), os.path.relpath(sys.executable)))
    assert "/../" in sys.executable and sandbox.run(["python", "-c", ""], seconds=60).code == 0


@pytest.mark.parametrize("read", ["input()", "input().split()", "stdin.read()"])
def test_livecodebench_calls_a_function_whose_module_has_a_main_part_that_would_read_the_test(read: str) -> None:
    main = f"\nif __name__ == '__main__':\n    print(Solution().pair(*map(int, {read})))"
    assert solved(1, PAIR.format("return [a + b, a - b]") + main).status == "correct"


@pytest.mark.parametrize("value", ["[np.int64(a + b), np.float64(a - b)]", "(np.int32(a + b), a - b)"])
def test_livecodebench_takes_numbers_of_numpy_for_numbers(value: str) -> None:
    assert solved(1, "import numpy as np\n" + PAIR.format(f"return {value}")).status == "correct"


def test_livecodebench_takes_the_last_block_and_says_when_there_is_none() -> None:
    assert lcb.code_of("```\na\n```\ntext\n```python\nb\n```") == "b"
    item = items("livecodebench")[0]
    assert benchmarks.find("livecodebench").grade(item, attempt(item, "no code"), Context()).status == "unparsed"


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


def test_private_tests_are_unpickled_as_text_only() -> None:
    assert lcb.opened(ROWS["livecodebench"][0]["private_test_cases"])[0]["output"] == "10"
    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.eval"):
        lcb.opened(packed)
