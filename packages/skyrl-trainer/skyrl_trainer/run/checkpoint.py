"""Checkpoints that are whole or not there, and the refusal to go on from one with settings that cannot.

    checkpoints/step_000010/learner.safetensors   weights and optimizer, comparable byte by byte
                            state.json            schema, step, checksum, numbers of the learner, what the loop adds
    checkpoints/latest                            the name of the newest one

A checkpoint is written to `.tmp-...`, flushed to the disk, and renamed; then `latest` is replaced. Whatever kills the
process in between leaves the previous checkpoint, and `latest` pointing at it.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skyrl_trainer import __version__
from skyrl_trainer.config import flatten, saved_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import disk_errors_explained, flush, written_aside
from skyrl_trainer.settings import FREE, ROUNDING, Config, leaf_fields
from skyrl_trainer.types import LearnerState

log = logging.getLogger(__name__)

SCHEMA = 1
DAMAGED = (OSError, ValueError, KeyError, SafetensorError)
"""What reading a damaged checkpoint raises."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint read back; `extra` is what the loop had added (sampler, pending rollouts, configuration, ...)."""

    step: int
    learner: LearnerState
    extra: dict[str, Any]
    version: str
    """Of skyrl-trainer, that wrote it."""


class Checkpoints:
    """Saves into `run_dir/checkpoints`, keeps the newest `keep`, and reads the newest one that is whole."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.keep = keep

    def save(self, step: int, learner: LearnerState, extra: dict[str, Any]) -> Path:
        """Returns the checkpoint's folder. Raises UserError when the disk is full; what was saved is then intact."""
        path = self._unused(step)
        with written_aside(path) as aside:
            tensors = {name: value.detach().cpu().contiguous() for name, value in learner.tensors.items()}
            save_file(tensors, aside / "learner.safetensors")
            record = {
                "schema": SCHEMA,
                "version": __version__,
                "step": step,
                "checksum": _checksum(aside / "learner.safetensors"),
                "learner": learner.numbers,
                "extra": extra,
            }
            (aside / "state.json").write_text(json.dumps(record, sort_keys=True))
        with disk_errors_explained(self.folder / "latest"):
            pointer = self.folder / ".tmp-latest"
            pointer.write_text(path.name + "\n")
            flush(pointer)
            pointer.replace(self.folder / "latest")
            flush(self.folder)
        self._remove_old(path.name)
        return path

    def load_latest(self) -> Loaded | None:
        """The checkpoint that `latest` names; if it is damaged, says so and takes the newest whole one before it.

        None when the run has none yet. Raises UserError when there are some and all are damaged.
        """
        names = self.names()
        pointer = self.folder / "latest"
        newest = pointer.read_text().strip() if pointer.is_file() else ""
        if newest in names:  # one that was renamed but not yet pointed at had not been announced: it does not count
            names = names[: names.index(newest) + 1]
        for name in reversed(names):
            try:
                return read_checkpoint(self.folder / name)
            except DAMAGED as error:
                log.warning("Checkpoint %s is damaged (%s); trying the one before it.", self.folder / name, error)
        if names or newest:
            raise UserError(
                f"No checkpoint in {self.folder} can be read ({newest or names[-1]} is damaged or missing); restore "
                "one, or start anew in another trainer.run_dir."
            )
        return None

    def names(self) -> list[str]:
        """The whole checkpoints' folder names, oldest first."""
        return sorted(path.name for path in self.folder.glob("step_*") if path.is_dir())

    def _unused(self, step: int) -> Path:
        """A step saved again after a resume gets a name of its own: nothing whole is ever replaced."""
        again = sum(name.startswith(f"step_{step:06d}") for name in self.names())
        return self.folder / (f"step_{step:06d}" + (f"-{again:02d}" if again else ""))

    def _remove_old(self, newest: str) -> None:
        older = [name for name in self.names() if name != newest]
        for name in older[: max(0, len(older) - self.keep + 1)]:
            shutil.rmtree(self.folder / name, ignore_errors=True)


def read_checkpoint(path: Path) -> Loaded:
    """Raises one of DAMAGED where the folder is not a whole checkpoint, UserError where it is not this version's."""
    record = json.loads((path / "state.json").read_text())
    version = record.get("version", "before 0.2")
    if record["schema"] != SCHEMA:
        raise UserError(f"{path} was written by skyrl-trainer {version}: resume with that version.")
    if record["checksum"] != _checksum(path / "learner.safetensors"):
        raise ValueError("learner.safetensors does not match its checksum")
    state = LearnerState(load_file(path / "learner.safetensors"), record["learner"])
    return Loaded(int(record["step"]), state, record["extra"], version)


def _checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, mode="r").data)


OPEN_ENDED_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Their learning rate does not depend on `trainer.max_steps`, so a run may be made longer or shorter."""


def check_resumable(saved: dict[str, Any], config: Config, version: str = __version__) -> None:
    """Raises UserError, naming the settings, when a run that `version` saved (Config.model_dump) cannot go on."""
    try:
        before = flatten(saved_config(saved))
    except UserError as error:
        raise UserError(
            f"The checkpoint's configuration is not one of this version. {error} It was written by skyrl-trainer "
            f"{version}: resume with that, or start anew in another trainer.run_dir."
        ) from error
    marks = {FREE} if config.trainer.deterministic else {FREE, ROUNDING}
    free = {name for name, field in leaf_fields().items() if marks & set(field.metadata)}
    if config.trainer.lr_scheduler_type in OPEN_ENDED_SCHEDULES:
        free.add("trainer.max_steps")
    now = flatten(config)
    changed = [name for name in now if name not in free and before[name] != now[name]]
    if changed:
        differences = "; ".join(f"{name} was {before[name]!r}, is {now[name]!r}" for name in changed)
        raise UserError(
            f"This run cannot go on with other settings ({differences}); restore them, or start anew in "
            "another trainer.run_dir."
        )
