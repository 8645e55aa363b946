"""The folder of a run: who may write to it, what was asked for, and how folders in it are replaced whole.

    config.yaml  metrics.jsonl  report.html  trajectories/  checkpoints/  model/{last,best}  tracker files  .lock
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import yaml

from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError


class RunFolder:
    """Holds the lock of `path` while it is open: one writer a folder. The lock dies with its process.

    Raises UserError where the folder is in use, can't be written, or holds something that is not a run.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.trainer.run_dir.format(run_name=config.trainer.run_name)).expanduser().resolve()
        self.config = config

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until __exit__
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} can't be written ({error.strerror}): give another trainer.run_dir."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            raise UserError(
                f"The run folder {self.path} is in use by process {self._lock.read().strip() or 'unknown'}: "
                "wait for it, stop it, or give another trainer.run_dir."
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.close()

    def saved_config(self) -> Config | None:
        """What the run in this folder was started with, None in an empty folder."""
        path = self.path / "config.yaml"
        if not path.exists():
            return None
        try:
            return Config.model_validate(yaml.safe_load(path.read_text()))
        except Exception as error:
            raise UserError(f"{path} is not a run's configuration ({error}): give another trainer.run_dir.") from error

    def write_config(self) -> None:
        aside = self.path / "config.yaml.tmp"
        aside.write_text(yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
        aside.replace(self.path / "config.yaml")


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to fill, which then takes the place of `folder`; on an error `folder` stays as it was."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk into a sentence; what was saved before is whole, since every file is written aside first."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"The disk that holds {path} is full: what was saved before is whole. Free some space and start the same "
            "command again, it goes on from the last checkpoint."
        ) from error
