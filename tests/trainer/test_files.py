"""Folders that are whole or not there, also where a signal comes between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_trainer import files
from skyrl_trainer.files import written_aside


def test_a_signal_between_the_two_renames_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "best", Path.rename
    with written_aside(target) as folder:
        (folder / "weights").write_text("old")

    def stopping(path: Path, to: Path) -> Path:
        moved = rename(path, to)
        if path == target:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", stopping)
    with pytest.raises(KeyboardInterrupt), written_aside(target) as folder:
        (folder / "weights").write_text("new")
    monkeypatch.undo()
    assert (target / "weights").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_signal_while_a_file_is_written_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush", stopping)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(tmp_path / "report.html", b"page", 7)
    assert list(tmp_path.iterdir()) == []
