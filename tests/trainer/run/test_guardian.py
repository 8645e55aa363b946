"""What a killed driver leaves: no process after seconds, no file; also when its guardian is killed with it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from skyrl_trainer.errors import UserError
from skyrl_trainer.run.guardian import PREFIX, SHARED_MEMORY, guarded, users

KILLS = 10 if os.environ.get("SKYRL_TEST_FULL") else 1
DRIVER = """
import ray, sys, tempfile, time
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.processes import start_ray
from skyrl_trainer.settings import Config
from skyrl_trainer.weight_sync.buffer import FlatBuffer
import torch

with guarded():
    print(tempfile.gettempdir(), flush=True)
    start_ray(Config())
    tempfile.mkdtemp(prefix="skyrl-swe-")
    buffer = FlatBuffer.create([("w", torch.zeros(1000))])

    @ray.remote
    class Worker:
        def start(self):
            return tempfile.mkdtemp()

    worker = Worker.remote()
    print(ray.get(worker.start.remote()), flush=True)
    {then}
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def start(then: str = "time.sleep(600)") -> tuple[subprocess.Popen[str], Path]:
    """A driver, and the folder of its temporary files."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER.replace("{then}", then)], stdout=subprocess.PIPE, text=True)
    folder = Path(driver.stdout.readline().strip())
    made = driver.stdout.readline().strip()
    assert Path(made).parent == folder and folder.name.startswith(PREFIX), made
    return driver, folder


def of(folder: Path) -> list[tuple[int, str]]:
    found = []
    for pid in users(str(folder)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or nobody has waited for it yet
            found.append((pid, " ".join(psutil.Process(pid).cmdline())))
    return found


def test_the_guardian_of_a_run_that_is_over_goes_with_it(shared: Path) -> None:
    """A process may train a hundred times. Where something is left, the guardian waits for the end of all."""

    def guardians() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if "guardian.py" in " ".join(each.cmdline())]

    before, opened = len(guardians()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with guarded():
            assert len(guardians()) == before + 1
    assert len(guardians()) == before and len(os.listdir("/proc/self/fd")) == opened
    with guarded():
        left = subprocess.Popen(["sleep", "600"])
    assert len(guardians()) == before + 1
    left.kill()
    left.wait()


def test_a_run_whose_guardian_was_killed_keeps_its_folder(shared: Path) -> None:
    with guarded():
        (folder,) = shared.glob(f"{PREFIX}*")
        (guardian,) = (p for p in psutil.Process().children() if str(folder) in p.cmdline())
        guardian.kill()
        guardian.wait()
        another = "from skyrl_trainer.run.guardian import guarded\nwith guarded(): pass"
        subprocess.run([sys.executable, "-c", another], check=True, env=os.environ | {"TMPDIR": str(shared)})
        assert folder.exists()
    assert not folder.exists()


def test_a_deep_folder_goes_too(shared: Path) -> None:
    with guarded():
        deep = "import os, tempfile\nos.chdir(tempfile.mkdtemp())\nfor _ in range(3000): os.mkdir('x'); os.chdir('x')"
        subprocess.run([sys.executable, "-c", deep], check=True)
        assert len(list(shared.glob(f"{PREFIX}*"))) == 1
    assert not list(shared.glob(f"{PREFIX}*"))


def nothing_left(folder: Path, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not of(folder) and not folder.exists() and not list(SHARED_MEMORY.glob(f"{folder.name}*")):
            return True
        time.sleep(0.2)
    return False


def test_a_killed_driver_leaves_no_process_and_no_file(shared: Path) -> None:
    for number in range(KILLS):
        driver, folder = start()
        found = [line for _, line in of(folder)]
        assert any("Agent" in line for line in found), "Ray's agents overwrite their environment, and are seen"
        assert list(SHARED_MEMORY.glob(f"{folder.name}*"))
        time.sleep(random.Random(number).random())
        driver.kill()
        driver.wait()
        assert nothing_left(folder, within=30), of(folder)
        assert [path.name for path in shared.iterdir() if not path.name.startswith("torchinductor_")] == []


def test_what_a_killed_guardian_leaves_goes_at_the_next_start(shared: Path) -> None:
    driver, folder = start()
    guardians = [p for p in psutil.Process(driver.pid).children() if "guardian.py" in " ".join(p.cmdline())]
    assert len(guardians) == 1
    with guarded():
        assert folder.exists(), "it is in use"
    for process in (*guardians, driver):
        process.kill()
    driver.wait()
    for pid, _ in of(folder):
        os.kill(pid, signal.SIGKILL)
    assert folder.exists() and list(SHARED_MEMORY.glob(f"{folder.name}*"))
    with guarded():
        assert not folder.exists() and not list(SHARED_MEMORY.glob(f"{folder.name}*"))


def test_the_folder_of_temporary_files_is_made_and_one_that_cannot_be_is_a_sentence(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(shared / "ray" / "here"))
    with guarded():
        assert Path(tempfile.gettempdir()).parent == shared / "ray" / "here"
    (shared / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(shared / "file"))
    with pytest.raises(UserError, match=r"RAY_TMPDIR=.*/file cannot be written: .* name another folder"), guarded():
        pass


def test_a_run_that_ends_has_removed_its_files_and_gives_the_folder_back(shared: Path) -> None:
    driver, folder = start(then="ray.shutdown()")
    assert driver.wait(60) == 0
    assert nothing_left(folder, within=30)
    before = os.environ["TMPDIR"], tempfile.gettempdir()
    with guarded():
        assert tempfile.gettempdir() == os.environ["TMPDIR"] != before[0]
    assert (os.environ["TMPDIR"], tempfile.gettempdir()) == before


def test_who_reads_a_log_of_a_run_is_none_of_its_processes(tmp_path: Path) -> None:
    """The guardian kills those: `tail -f` in another window stays."""
    (tmp_path / "log").touch()
    code = "import sys; file = open({!r}, {!r}); print(flush=True); sys.stdin.read()"
    found = {}
    for mode in "ra":
        command = [sys.executable, "-c", code.format(f"{tmp_path}/log", mode)]
        # Its own words must not name the folder: that is told by /proc/PID/environ and the open files alone.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            found[mode] = process.pid in users(str(tmp_path))
            process.stdin.close()
    assert found == {"r": False, "a": True}
