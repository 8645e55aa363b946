"""The run folder: one writer, who notices when the folder is taken away."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from skyrl_trainer.errors import UserError
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.guardian import guarded
from tests.trainer.learner.tiny_models import make_config


def test_a_folder_that_was_deleted_or_replaced_is_noticed(tmp_path: Path) -> None:
    config = make_config(trainer={"run_dir": str(tmp_path / "run")})
    with RunFolder(config) as folder:
        folder.check()
        with pytest.raises(UserError, match="in use by process"):
            RunFolder(config).__enter__()
        shutil.rmtree(folder.path)
        with pytest.raises(UserError, match=r"run was deleted or replaced during the run"):
            folder.check()
        with RunFolder(config) as other:
            other.check()
            with pytest.raises(UserError, match=r"run was deleted or replaced during the run"):
                folder.check()


def test_a_run_that_was_refused_leaves_no_folder(tmp_path: Path) -> None:
    config = make_config(trainer={"run_dir": str(tmp_path / "run")})
    for begun in (False, True):
        with pytest.raises(UserError, match="no such file"), guarded(), RunFolder(config) as folder:
            if begun:
                folder.write_config()
            raise UserError("There is no such file.")
        assert folder.path.exists() is begun
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError), RunFolder(make_config(trainer={"run_dir": str(tmp_path / "mine")})):
        raise UserError("There is no such file.")
    assert (tmp_path / "mine").exists(), "it was there before"


@pytest.mark.parametrize("kind", [UserError, RuntimeError])
@pytest.mark.parametrize("own", [True, False])
def test_the_logs_of_the_runs_own_ray_are_kept_when_it_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, kind: type[Exception]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # which `guarded` sets back
    config = make_config(trainer={"run_dir": str(tmp_path / "run")})
    with pytest.raises(kind, match="died"), guarded() if own else nullcontext(), RunFolder(config):
        logs = Path(tempfile.gettempdir(), "ray", "session_latest", "logs")
        logs.mkdir(parents=True)
        (logs / "worker-1.err").write_text("why")
        raise kind("A RolloutWorker died.")
    assert [path.name for path in (tmp_path / "run" / "ray-logs").glob("*")] == ["worker-1.err"] * own
    if own:
        assert (tmp_path / "run" / "ray-logs").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_was_deleted_is_not_made_again_for_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = make_config(trainer={"run_dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match="deleted"), guarded(), RunFolder(config) as folder:
        Path(tempfile.gettempdir(), "ray", "session_latest", "logs").mkdir(parents=True)
        shutil.rmtree(folder.path)
        folder.check()
    assert not folder.path.exists()
