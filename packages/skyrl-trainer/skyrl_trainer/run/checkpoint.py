"""Checkpoints that are whole or not there: checkpoints/step_000010/ holds

learner.safetensors  weights and optimizer, comparable byte by byte
state.json           schema, step, numbers of the learner, what the loop adds
manifest.txt         checksum, size and name of each of the others
"""

import hashlib
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skyrl_trainer import __version__
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import written_aside
from skyrl_trainer.learner.checks import check_weights
from skyrl_trainer.types import LearnerState

log = logging.getLogger(__name__)
SCHEMA = 2
MANIFEST = "manifest.txt"
NAME = r"step_\d+(-\d+)?"
"""Of a checkpoint's folder; whatever else is there is left alone."""
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


class Loaded(NamedTuple):
    """`extra`: what the loop had added (sampler, ...). version: of the package that wrote it."""

    step: int
    learner: LearnerState
    extra: dict[str, Any]
    version: str


class Checkpoints:
    """Saves into `run_dir/checkpoints`, keeps the newest `keep`, and reads the newest one that is whole."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.keep = keep

    def save(self, step: int, learner: LearnerState, extra: dict[str, Any]) -> Path:
        """Returns its folder. UserError for what is not finite, and on a full disk."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in learner.tensors.items()}
        check_weights(tensors, step)
        for torn in self.folder.glob(".tmp-*"):  # by a kill
            shutil.rmtree(torn, ignore_errors=True)
        # A step saved again after a resume gets a name of its own: nothing is ever replaced.
        name = f"step_{step:06d}"
        taken = [int(re.sub(r"\D", "", path.name.partition(name)[2]) or 0) for path in self.folder.glob(f"*{name}*")]
        path = self.folder / (f"{name}-{max(taken) + 1:02d}" if taken else name)
        with written_aside(path) as aside:
            save_file(tensors, aside / "learner.safetensors")
            record = {"schema": SCHEMA, "version": __version__, "step": step}
            record |= {"learner": learner.numbers, "extra": extra}
            (aside / "state.json").write_text(json.dumps(record, sort_keys=True))
            (aside / MANIFEST).write_bytes(_manifest(aside))
        for name in self.names()[: -self.keep]:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return path

    def load_latest(self) -> Loaded | None:
        """The newest whole checkpoint, or None; UserError where all are damaged. Newer damaged ones are renamed."""
        damaged = []
        for name in reversed(self.names()):
            try:
                found = read_checkpoint(self.folder / name)
            except DAMAGED as error:
                damaged.append((name, error))
                continue
            for worse, reason in damaged:
                aside = (self.folder / worse).rename(self.folder / f"damaged-{worse}")
                log.warning("Checkpoint %s is damaged (%s), and now %s; going on from %s.", worse, reason, aside, name)
            return found
        if damaged:
            wanted = "restore one, or start anew in another trainer.run_dir"
            raise UserError(f"No checkpoint in {self.folder} can be read, all are damaged: {wanted}.")
        return None

    def names(self) -> list[str]:
        """The checkpoints' folder names, oldest first."""
        found = [path.name for path in self.folder.glob("step_*/") if re.fullmatch(NAME, path.name)]
        return sorted(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def read_checkpoint(path: Path) -> Loaded:
    """Raises one of DAMAGED where the folder is no whole checkpoint, UserError where another version's."""
    manifest = path / MANIFEST
    if manifest.exists() and manifest.read_bytes() != _manifest(path):
        raise ValueError(f"its files do not match {MANIFEST}")
    record = json.loads((path / "state.json").read_bytes())
    if not manifest.exists() and "checksum" not in record:  # which stood there before there were manifests
        raise ValueError(f"{MANIFEST} is missing")
    version = record.get("version", "before 0.2")
    if record["schema"] != SCHEMA:
        raise UserError(f"{path} was written by skyrl-trainer {version}: resume with that version.")
    state = LearnerState(load_file(path / "learner.safetensors"), record["learner"])
    return Loaded(int(record["step"]), state, record["extra"], version)


def _manifest(path: Path) -> bytes:
    lines = ""
    for name in ("learner.safetensors", "state.json"):
        with (path / name).open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            lines += f"{digest.hexdigest()} {file.tell()} {name}\n"
    return lines.encode()
