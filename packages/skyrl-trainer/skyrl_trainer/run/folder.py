"""The folder of a run, and who may write to it.

config.yaml metrics.jsonl report.html {trajectories,held_out,checkpoints}/  model/{last,best}  ray-logs/
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from skyrl_trainer.config import Config, to_yaml
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import write_whole, writing
from skyrl_trainer.registry import load


class RunFolder:
    """Holds the lock of `path` while it is open. UserError where it is in use or can't be written."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_path.resolve()
        self.config = config

    def __enter__(self) -> Self:
        self._new = not self.path.exists()
        with writing(self.path, self.path):
            self._lock = open(self.path / ".lock", "a+")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._lock.seek(0)
                raise UserError(
                    f"The run folder {self.path} is in use by process {self._lock.read().strip() or 'unknown'}: "
                    "wait for it, stop it, or give another trainer.run_dir."
                ) from error
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        """Keeps Ray's logs of a failed run (outside `guarded` they are others'); an empty folder goes."""
        prefix = load("skyrl_trainer.run.guardian:PREFIX")
        with suppress(OSError, UserError):
            self.check()  # one that was deleted stays so
            logs = Path(tempfile.gettempdir(), "ray", "session_latest", "logs")
            if kind and issubclass(kind, Exception) and prefix in tempfile.gettempdir() and logs.exists():
                shutil.copytree(logs, self.path / "ray-logs", dirs_exist_ok=True)
                (self.path / "ray-logs").chmod(0o700)  # Ray lets everybody write
            elif kind and self._new and os.listdir(self.path) == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()
        self._lock.close()

    def check(self) -> None:
        """UserError where the folder was deleted, and the lock with it."""
        lock = self.path / ".lock"
        if not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(self._lock.fileno()))):
            raise UserError(f"The run folder {self.path} was deleted or replaced during the run: start the run again.")

    def write_config(self) -> None:
        write_whole(self.path / "config.yaml", to_yaml(self.config).encode())
