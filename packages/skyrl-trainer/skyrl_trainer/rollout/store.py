"""Trajectories on disk: one gzip-compressed JSON-lines file a step, written aside and renamed.

`trajectories/step_000003.jsonl.gz`: the first line is the header {"schema": 1, "step": 3, "groups": 32,
"trajectories": 256, "omitted": 0}, every other line one trajectory with its group's number. Token ids and logprobs
are JSON numbers, written so that reading gives the same floats back, bit by bit. Every step keeps its file; a file
holds at most `max_bytes` of lines, and the header counts the trajectories that did not fit.
"""

import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, Self

from skyrl_trainer.errors import UserError
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn

SCHEMA = 1
TURN_FIELDS = tuple(field.name for field in fields(Turn))
TRAJECTORY_FIELDS = tuple(field.name for field in fields(Trajectory))
SAMPLE_FIELDS = tuple(field.name for field in fields(Sample))


class JsonlTrajectoryStore:
    """In a folder, which is made when the first step is written; what was written is read back exactly."""

    def __init__(self, folder: Path, max_bytes: int = 256 * 2**20) -> None:
        """`max_bytes`: of a file's lines before compression."""
        self._folder = Path(folder)
        self._max_bytes = max_bytes

    def inside(self, name: str) -> Self:
        """Another one, in a folder of this one's."""
        self._folder.mkdir(exist_ok=True)
        return type(self)(self._folder / name, self._max_bytes)

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.jsonl.gz"

    def write(self, batch: RolloutBatch) -> None:
        """Replaces the step's file, if there is one: a resumed run repeats it."""
        lines: list[str] = []
        size = omitted = 0
        for number, group in enumerate(batch.groups):
            for trajectory in group:
                line = json.dumps({"group": number, **_to_dict(trajectory)}, default=_plain, separators=(",", ":"))
                if size + len(line) > self._max_bytes:
                    omitted += 1
                    continue
                size += len(line)
                lines.append(line)
        header = {"schema": SCHEMA, "step": batch.step, "groups": len(batch.groups)}
        header |= {"trajectories": len(lines), "omitted": omitted}
        path = self.path(batch.step)
        aside = path.with_name(f".{path.name}")  # of a process that was killed, too
        try:
            self._folder.mkdir(exist_ok=True)
            with aside.open("wb") as raw:
                with gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed:
                    packed.write("\n".join([json.dumps(header), *lines, ""]).encode())
                raw.flush()
                os.fsync(raw.fileno())
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise UserError(
                f"The trajectories of step {batch.step} cannot be written to {path}: {error.strerror or error}; "
                "free some space or choose another trainer.run_dir."
            ) from error

    def lines(self, step: int) -> Iterator[dict[str, Any]]:
        """The file's objects one by one, header first; a damaged file is a UserError that names the line."""
        path = self.path(step)
        number = 0
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    entry = json.loads(line)
                    if number == 1 and (not isinstance(entry, dict) or entry.get("schema") != SCHEMA):
                        raise UserError(
                            f"{path} is not a trajectory file of schema {SCHEMA}: another version wrote it."
                        )
                    yield entry
        except FileNotFoundError:
            raise UserError(f"There are no trajectories of step {step}: {path} does not exist.") from None
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(
                f"{path} cannot be read after line {number}: {error}; the file is damaged, delete it."
            ) from error

    def header(self, step: int) -> dict[str, Any]:
        """The file's first line."""
        header = next(self.lines(step), {})
        if not all(isinstance(header.get(name), int) for name in ("step", "groups", "trajectories")):
            raise UserError(f"{self.path(step)} has no header: the file is damaged, delete it.")
        return header

    def trajectories(self, step: int) -> Iterator[tuple[int, Trajectory]]:
        """Each with its group's number, read one by one."""
        header, count = self.header(step), 0
        groups = range(header["groups"])
        for count, entry in enumerate(islice(self.lines(step), 1, None), 1):
            try:
                group, trajectory = groups[entry.pop("group")], _from_dict(entry)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                where = f"{self.path(step)}, line {count + 1}"
                raise UserError(f"{where}, is not a trajectory: {error!r}; the file is damaged, delete it.") from error
            yield group, trajectory
        if count != header["trajectories"]:
            of = f"{count} of {header['trajectories']} trajectories"
            raise UserError(f"{self.path(step)} has {of}: the file is damaged, delete it.")

    def read(self, step: int) -> RolloutBatch:
        """The batch as it was written (without what the header counts as omitted)."""
        header = self.header(step)
        batch = RolloutBatch(header["step"], [[] for _ in range(header["groups"])])
        for group, trajectory in self.trajectories(step):
            batch.groups[group].append(trajectory)
        return batch

    def steps(self) -> list[int]:
        """The steps with a file, in order."""
        found = (re.fullmatch(r"step_(\d+)\.jsonl\.gz", path.name) for path in self._folder.glob("step_*.jsonl.gz"))
        return sorted(int(match[1]) for match in found if match)


def open_store(path: Path) -> JsonlTrajectoryStore:
    """The trajectories of a run, or of their folder itself. Raises UserError where there are none."""
    for folder in (path / "trajectories", path):
        store = JsonlTrajectoryStore(folder)
        if store.steps():
            return store
    raise UserError(f"{path} holds no stored trajectories: give a run folder, or a folder with step_*.jsonl.gz files.")


def _to_dict(trajectory: Trajectory) -> dict[str, Any]:
    entry = {name: getattr(trajectory, name) for name in TRAJECTORY_FIELDS}
    entry["sample"] = {name: getattr(trajectory.sample, name) for name in SAMPLE_FIELDS}
    turns = [{name: getattr(turn, name) for name in TURN_FIELDS} for turn in entry.pop("turns")]
    return entry | {"turns": turns}  # last, where a person finds them


def plain_sample(sample: Sample) -> dict[str, Any]:
    """As JSON has it, for a checkpoint."""
    entry = {name: getattr(sample, name) for name in SAMPLE_FIELDS}
    plain: dict[str, Any] = json.loads(json.dumps(entry, default=_plain))
    return plain


def _from_dict(entry: dict[str, Any]) -> Trajectory:
    turns = [Turn(**turn) for turn in entry.pop("turns")]
    sample, reason = Sample(**entry.pop("sample")), StopReason(entry.pop("stop_reason"))
    return Trajectory(sample=sample, turns=turns, stop_reason=reason, **entry)


def _plain(value: Any) -> Any:
    """Arrays and numpy's scalars of a data row as numbers and lists; any other object as its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
