"""A run folder on an object store: what a kill in an upload or a fetch leaves, and whose the folder is.

fsspec's own stores stand in for S3: `memory` has no folders and no locks, as S3; `file` is a disk. No bucket was asked.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from skyrl_trainer import cli
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.run import remote
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.run.remote import OWNER, Store, Unreachable, fetched, mirrored
from skyrl_trainer.types import LearnerState
from tests.trainer.report.synthetic import make_run

ADDRESS = "memory://bucket/runs/a"


class Machine:
    """Its cache is a folder of its own; `with` it, the process is there."""

    def __init__(self, folder: Path, name: str, patch: pytest.MonkeyPatch) -> None:
        self.cache, self.name, self.patch = folder / name, name, patch

    def __enter__(self) -> Machine:
        self.patch.setenv("XDG_CACHE_HOME", str(self.cache))
        self.patch.setattr(remote.socket, "gethostname", lambda: self.name)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()

    def store(self, address: str = ADDRESS) -> Store:
        with self:
            return Store(address)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Machine]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return lambda name: Machine(tmp_path, name, monkeypatch)


def save(folder: Path, step: int, keep: int = 2) -> None:
    """What a Run saves, in its order; every file says its step."""
    folder.mkdir(parents=True, exist_ok=True)
    state = LearnerState({"model.w": torch.full((64,), float(step))}, {"optimizer_steps": step})
    Checkpoints(folder, keep).save(step, state, {"step": step})
    texts = {f"trajectories/step_{step:06d}.jsonl.gz": "", "config.yaml": "", "report.html": "", "metrics.jsonl": ""}
    texts |= dict.fromkeys(("model/last/config.json", "model/last/model.safetensors"), "")
    texts |= {"trajectories/waiting/step_000001.jsonl.gz": "", "trajectories/.torn": "", ".lock": ""}
    for name in texts:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of step {step}")


def contents(folder: Path) -> dict[str, bytes]:
    hidden = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in hidden}


def uploaded(store: Store, *steps: int) -> Store:
    store.claim()
    for step in steps:
        save(store.local, step)
        store.upload()
    return store


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_another_machine_gets_all_that_a_resume_needs_and_uploads_what_it_changes(
    machine: Any, tmp_path: Path, kind: str
) -> None:
    address = ADDRESS if kind == "memory" else f"file://{tmp_path}/bucket/runs/a"
    one, two = uploaded(machine("one").store(address), 2, 4), machine("two").store(address)
    two.fetch()
    assert two.local != one.local and str(two.local).endswith("bucket/runs/a")
    here = contents(one.local)
    here = {name: here[name] for name in here if not name.startswith("checkpoints/step_000002")}
    assert contents(two.local) == here, "with the newest checkpoint"
    assert Checkpoints(two.local, 2).load_latest().step == 4
    two.claim()
    sent = count(two, "put")
    save(two.local, 6)
    (two.local / "trajectories/waiting/step_000001.jsonl.gz").unlink()
    two.upload()
    names = [name.split("/runs/a/")[1] for call in sent for name in call[1]]
    assert "trajectories/step_000004.jsonl.gz" not in names, "it is there already"
    three = machine("three").store(address)
    three.fetch()
    assert contents(three.local) == {
        name: text for name, text in contents(two.local).items() if not name.startswith("checkpoints/step_000004")
    }, "what was learned from waits no more"


def test_a_copy_of_a_checkpoint_under_another_name_is_neither_taken_for_the_newest_nor_deleted(machine: Any) -> None:
    one = uploaded(machine("one").store(), 2)
    folder = one.local / "checkpoints"
    shutil.copytree(folder / "step_000002", folder / "step_000002.bak9")
    one.upload()
    two = machine("two").store()
    kept = two.local / "checkpoints" / "step_000001.bak"
    kept.mkdir(parents=True)
    two.fetch()
    assert Checkpoints(two.local, 2).load_latest().step == 2
    assert {path.name for path in kept.parent.iterdir()} == {"step_000002", kept.name}
    uploaded(two, 4, 6, 8)
    there = {name.split("/")[5] for name in MemoryFileSystem.store if "/checkpoints/" in name}
    assert there >= {"step_000002.bak9", "step_000008"} and "step_000002" not in there


def count(store: Store, call: str) -> list[tuple[Any, ...]]:
    """The arguments of each such call from now on."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(store._files, call)
    store._files = SimpleNamespace(**{name: getattr(store._files, name) for name in CALLS})

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **more)

    setattr(store._files, call, counted)
    return calls


CALLS = ("find", "cat_file", "pipe_file", "put", "put_file", "get", "exists", "rm_file")


class Killed(BaseException):
    pass


class Dying:
    """A store that answers so many calls for a file, then the process is dead; a batch is cut within."""

    def __init__(self, files: Any, calls: int) -> None:
        self._files, self._left = files, calls

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed

    def put(self, paths: list[str], names: list[str]) -> None:
        for path, name in zip(paths, names, strict=True):
            self._count()
            self._files.put_file(path, name)

    def get(self, names: list[str], paths: list[str]) -> None:
        for path, name in zip(paths, names, strict=True):
            self._count()
            self._files.get([name], [path])

    def rm_file(self, name: str) -> None:
        self._count()
        self._files.rm_file(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def test_a_kill_anywhere_in_an_upload_leaves_a_checkpoint_and_no_torn_policy(machine: Any) -> None:
    for calls in range(100):
        MemoryFileSystem.store.clear()
        one = uploaded(machine(f"one{calls}").store(), 2, 4)
        save(one.local, 6)
        files, one._files = one._files, Dying(one._files, calls)
        try:
            one.upload()
            over = True
        except Killed:
            over = False
        two = machine(f"two{calls}").store()
        two.fetch()
        assert Checkpoints(two.local, 2).load_latest().step in (4, 6)
        policy = {path.read_text()[-1] for path in (two.local / "model/last").glob("*")}
        assert len(policy) <= 1, "of one step, or none"
        two.claim()
        save(two.local, 8)
        two.upload()
        one._files = files
        with pytest.raises(UserError, match=r"now of process \d+ on two"):
            one.upload()
        three = machine(f"three{calls}").store()
        three.fetch()
        assert Checkpoints(three.local, 2).load_latest().step == 8
        if over:
            break
    assert 10 < calls < 99


def test_an_upload_that_was_cut_goes_on_in_the_next_process_of_the_machine(machine: Any) -> None:
    for calls in (0, 3, 6, 9):
        MemoryFileSystem.store.clear()
        one = uploaded(machine(f"one{calls}").store(), 2)
        save(one.local, 4)
        one._files = Dying(one._files, calls)
        with pytest.raises(Killed):
            one.upload()
        again = machine(f"one{calls}").store()
        again.fetch()
        assert Checkpoints(again.local, 2).load_latest().step == 4, "its own is newer than what is there"
        again.claim()
        again.upload()
        two = machine(f"two{calls}").store()
        two.fetch()
        names = contents(two.local)
        assert names.pop("checkpoints/step_000004/manifest.txt") and (two.local / "model/last/config.json").exists()
        assert all(contents(one.local)[name] == text for name, text in names.items())


def test_a_kill_anywhere_in_a_fetch_leaves_what_was_there_and_the_next_gets_all(machine: Any) -> None:
    old = uploaded(machine("old").store(), 2)
    uploaded(machine("new").store(), 4)
    for calls in range(100):
        old._files = Dying(fsspec.filesystem("memory"), calls)
        try:
            old.fetch()
            break
        except Killed:
            assert Checkpoints(old.local, 2).load_latest().step == 2
    assert 5 < calls < 99 and Checkpoints(old.local, 2).load_latest().step == 4
    assert (old.local / "report.html").read_text().endswith("of step 4")


def test_a_kill_while_a_fetch_moves_its_files_leaves_no_checkpoint_that_counts(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(machine("new").store(), 4)
    rename, left = Path.rename, 0
    for calls in range(100):
        left = calls

        def cut(self: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return rename(self, target)

        store = machine(f"killed{calls}").store()
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Path, "rename", cut)
            store.fetch()
            break
        store = machine(f"killed{calls}").store()
        store.fetch()
        assert Checkpoints(store.local, 2).load_latest().step == 4 and (store.local / "metrics.jsonl").exists()
    assert 5 < calls < 99


def test_what_is_as_new_here_is_not_fetched_and_another_run_of_that_step_is(machine: Any) -> None:
    one = uploaded(machine("one").store(), 2)
    assert not (got := count(one, "get")) and one.fetch() is None and not got
    other = machine("two").store()
    other.claim()
    save(other.local, 2)
    save(other.local, 2)  # step_000002-01, which is newer
    other.upload()
    one.fetch()
    assert Checkpoints(one.local, 2).names() == ["step_000002-01"] and len(got) == 1
    store = machine("three").store("memory://bucket/runs/none")
    store.fetch()
    assert not store.local.exists(), "a new run has nothing to fetch"


def test_a_run_uploads_each_checkpoint_goes_on_without_the_network_and_says_so_at_the_end(
    machine: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class Saving:
        """In place of Run."""

        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def save(self, step: int, loop_state: dict[str, Any]) -> None:
            save(self.folder, step)

    down = False

    def put(*arguments: Any) -> None:
        if down:
            raise OSError("no route to host")
        real(*arguments)

    config = load_config(None, ["trainer.run_dir=memory://bucket/runs/{run_name}", "trainer.run_name=a"])
    with machine("one") as here:
        folder = config.run_path
        real = fsspec.filesystem("memory").put
        here.patch.setattr(MemoryFileSystem, "put", lambda self, *arguments: put(*arguments))
        sentence = r"a could not be reached \(OSError: no route to host\).* is in .*runs/a"
        with pytest.raises(Unreachable, match=sentence), mirrored(config, Saving) as kind:  # type: ignore[arg-type]
            run: Any = kind(folder)  # type: ignore[arg-type]
            run.save(2, {})
            assert "/bucket/runs/a/checkpoints/step_000002/manifest.txt" in MemoryFileSystem.store
            down = True
            run.save(4, {})
            assert "The next upload sends it, too." in caplog.text
        with pytest.raises(ZeroDivisionError), mirrored(config, Saving):  # type: ignore[arg-type]
            (folder / "timeline.jsonl").touch()
            raise ZeroDivisionError("which is what must be said")
        down = False
        with mirrored(config, Saving):  # type: ignore[arg-type]
            pass
        assert "/bucket/runs/a/checkpoints/step_000004/manifest.txt" in MemoryFileSystem.store
        assert f"memory://bucket/runs/a: the run works in {folder}" in capsys.readouterr().out
        assert b" on one, " in MemoryFileSystem.store["/bucket/runs/a/" + OWNER].getvalue()
        with mirrored(load_config(None, [f"trainer.run_dir={folder}"]), Saving) as kind:  # type: ignore[arg-type]
            assert kind is Saving, "on a disk nothing is wrapped"


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("s3://bucket/a", r"The run folder s3://bucket/a cannot be opened here: Install s3fs to access S3\.$"),
        ("nope://bucket/a", r"cannot be opened here: Protocol not known: nope\.$"),
    ],
)
def test_an_address_that_cannot_be_opened_is_one_sentence(
    machine: Any, address: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    with pytest.raises(UserError, match=sentence):
        Store(address)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("The specified bucket does not exist"), PermissionError("Access Denied")]
)
def test_a_store_that_refuses_ends_a_run_before_it_begins(machine: Any, error: Exception) -> None:
    store = machine("one").store()

    def refuse(*arguments: Any, **more: Any) -> None:
        raise error

    store._files = SimpleNamespace(find=refuse, pipe_file=refuse)
    for call in (store.fetch, store.claim):
        with pytest.raises(Unreachable, match=f"{type(error).__name__}: {error}.*credentials and the network"):
            call()


def test_a_store_that_never_answers_is_waited_for_so_long_and_no_longer(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, over = machine("one").store(), threading.Event()
    store._files = SimpleNamespace(find=lambda *arguments, **more: over.wait(60))
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(Unreachable, match="TimeoutError"):
        store.fetch()
    over.set()
    assert time.monotonic() - start < 30


def test_commands_that_read_a_run_fetch_it_without_checkpoints(
    machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with machine("one"):
        store = Store(ADDRESS)
        make_run(store.local, max_steps=3)
        save(store.local / "more", 2)
        (store.local / "more" / "checkpoints").rename(store.local / "checkpoints")
        store.claim()
        store.upload()
    with machine("two"):
        local = fetched(ADDRESS)
        assert not (local / "checkpoints").exists()
        for words in (["report", ADDRESS], ["view", ADDRESS], ["report", ADDRESS, str(store.local)]):
            assert cli.main(words) == 0
            assert str(local) in capsys.readouterr().out
        assert cli.main(["eval", ADDRESS]) == 2
        assert "There is no policy in" in capsys.readouterr().err
        (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}')
        assert (
            cli.main(["eval", "agent", "--bench=gsm8k", f"--data={tmp_path}/gsm8k.jsonl", f"--checkpoint={ADDRESS}"])
            == 2
        )
        assert f"--checkpoint {ADDRESS} is neither a run with a saved policy" in capsys.readouterr().err
        assert cli.main(["report", "memory://bucket/runs/none"]) == 2
        assert capsys.readouterr().err == "skyrl-trainer: There is no run at memory://bucket/runs/none.\n"
        assert cli.main(["sft", "data.train_data=x.jsonl", f"trainer.run_dir={ADDRESS}"]) == 2
        assert "sft writes to a disk only" in capsys.readouterr().err


def test_links_and_what_is_damaged_stay_here(machine: Any, tmp_path: Path) -> None:
    store = machine("one").store()
    save(store.local, 2)
    (store.local / "init" / "given").mkdir(parents=True)
    (store.local / "init/given/model.safetensors").symlink_to(tmp_path)
    (store.local / "checkpoints/step_000002").rename(store.local / "checkpoints/damaged-step_000002")
    store.claim()
    store.upload()
    assert not [name for name in MemoryFileSystem.store if "damaged" in name or "given" in name or "/." in name]


def test_a_torn_record_of_what_was_sent_sends_it_again(machine: Any) -> None:
    one = uploaded(machine("one").store(), 2)
    (one.local / ".uploaded.json").write_text('{"config.yaml": [1')
    again = machine("one").store()
    again.fetch()
    again.claim()
    again.upload()
    two = machine("two").store()
    two.fetch()
    assert Checkpoints(two.local, 2).load_latest().step == 2


def test_what_the_store_has_lost_is_sent_again(machine: Any) -> None:
    uploaded(machine("one").store(), 2)
    before = dict(MemoryFileSystem.store)
    for name in list(MemoryFileSystem.store):
        if name.endswith(("config.yaml", "safetensors")):
            del MemoryFileSystem.store[name]
    assert len(MemoryFileSystem.store) < len(before)
    again = machine("one").store()
    again.fetch()
    again.claim()
    again.upload()
    assert MemoryFileSystem.store.keys() == before.keys()


@pytest.mark.parametrize("name", ["../../evil", "/evil", "{cache}/evil"])
def test_a_store_cannot_write_outside_the_runs_folder(machine: Any, name: str) -> None:
    """Names of objects are any texts: with dots, or with the root in the middle, they would lead elsewhere."""
    uploaded(machine("one").store(), 2)
    two = machine("two").store()
    evil = name.format(cache=two.local.parents[3])
    MemoryFileSystem.store[f"/bucket/runs/a/{evil}"] = next(iter(MemoryFileSystem.store.values()))
    two.fetch()
    assert (two.local / "config.yaml").exists()
    assert not list(two.local.parents[3].rglob("evil")) and not Path("/evil").exists()


def test_checkpoints_that_other_machines_left_are_deleted(machine: Any) -> None:
    for number, step in enumerate((2, 4, 6)):
        store = machine(f"machine{number}").store()
        store.fetch()
        uploaded(store, step, step + 1)
    there = {path.split("/")[-2] for path in MemoryFileSystem.store if path.endswith("manifest.txt")}
    assert there == {"step_000006", "step_000007"}


def test_a_call_that_did_not_return_in_time_is_waited_for_before_the_next(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write over what the next upload sends."""
    one, go_on = uploaded(machine("one").store(), 2), threading.Event()
    save(one.local, 4)
    put = one._files.put
    monkeypatch.setattr(one._files, "put", lambda *given, **more: (go_on.wait(20), put(*given, **more)))
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.1)
    with pytest.raises(Unreachable, match="TimeoutError"):
        one.upload()
    with pytest.raises(Unreachable, match="an earlier call still runs"):
        one.upload()
    go_on.set()
    assert one._late is not None and one._late.result(20)
    monkeypatch.setattr(remote, "WAIT_SECONDS", 20.0)
    one.upload()
    two = machine("two").store()
    two.fetch()
    assert Checkpoints(two.local, 2).load_latest().step == 4


@pytest.mark.parametrize("address", ["ftp://no-such-host.invalid/a", "github://a/b", "nosuch://a/b"])
def test_an_address_that_cannot_be_opened_is_a_sentence(machine: Any, address: str) -> None:
    with pytest.raises(UserError, match=f"The run folder {address} cannot be opened here: .+[.]$"):
        machine("one").store(address)
