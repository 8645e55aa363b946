"""Trajectories on disk: one gzip-compressed JSON-lines file a step, written aside and renamed.

`trajectories/step_000003.jsonl.gz`: the first line is the header {"schema": 1, "step": 3, "groups": 32,
"trajectories": 256, "omitted": 0}, every other line one trajectory with its group's number. Token ids and logprobs
are JSON numbers, and reading gives the same floats, bit by bit. `omitted`: those that alone have more than `max_bytes`.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_json

from skyrl_trainer.errors import UserError
from skyrl_trainer.files import write_whole, writing
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn

SCHEMA = 1
DAMAGED = "the file is damaged, delete it."
NUMBERS = ("prompt_ids", "output_ids", "logprobs", "weight_versions")
"""Of a turn: they change no more once it was played."""
OTHERS = tuple(field.name for field in fields(Turn) if field.name not in (*NUMBERS, "advantages"))
TRAJECTORY_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name not in ("turns", "encoded"))
SAMPLE_FIELDS = tuple(field.name for field in fields(Sample))


class JsonlTrajectoryStore:
    def __init__(self, folder: Path, max_bytes: int = 64 * 2**20) -> None:
        self._folder, self._max_bytes = Path(folder), max_bytes

    def inside(self, name: str) -> Self:
        """Another one, in a folder of this one's."""
        self._folder.mkdir(exist_ok=True)
        return type(self)(self._folder / name, self._max_bytes)

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.jsonl.gz"

    def write(self, batch: RolloutBatch) -> None:
        """Replaces the step's file, if there is one: a resumed run repeats it."""
        lines = list[bytes]()
        for number, group in enumerate(batch.groups):
            for trajectory in group:
                members = _line(number, trajectory)
                length = sum(int.from_bytes(member[-4:], "little") for member in members)  # each ends with its own
                if length <= self._max_bytes:
                    lines.append(b"".join(members))
        header = {"schema": SCHEMA, "step": batch.step, "groups": len(batch.groups)}
        header |= {"trajectories": len(lines), "omitted": len(batch.trajectories) - len(lines)}
        path = self.path(batch.step)
        with writing(path):
            self._folder.mkdir(exist_ok=True)
            write_whole(path, b"".join([_member(json.dumps(header) + "\n"), *lines]))

    def lines(self, step: int) -> Iterator[dict[str, Any]]:
        """The file's objects one by one, header first; a damaged file is a UserError that names the line."""
        path, number = self.path(step), 0
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    entry = json.loads(line)
                    if number == 1 and (not isinstance(entry, dict) or entry.get("schema") != SCHEMA):
                        raise UserError(f"{path} is not of schema {SCHEMA}: another version wrote it.")
                    yield entry
        except FileNotFoundError:
            raise UserError(f"There are no trajectories of step {step}: {path} does not exist.") from None
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"{path} cannot be read after line {number}: {error}; {DAMAGED}") from error

    def header(self, step: int) -> dict[str, Any]:
        """The file's first line."""
        header = next(self.lines(step), {})
        if not all(isinstance(header.get(name), int) for name in ("step", "groups", "trajectories")):
            raise UserError(f"{self.path(step)} has no header: {DAMAGED}")
        return header

    def trajectories(self, step: int) -> Iterator[tuple[int, Trajectory]]:
        """Each with its group's number, read one by one."""
        header, count = self.header(step), 0
        for count, entry in enumerate(islice(self.lines(step), 1, None), 1):
            try:
                group = range(header["groups"])[entry.pop("group")]
                sample = Sample(**entry.pop("sample"))
                turns = [Turn(**turn) for turn in entry.pop("turns")]
                reason = StopReason(entry.pop("stop_reason"))
                trajectory = Trajectory(sample=sample, turns=turns, stop_reason=reason, **entry)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                where = f"{self.path(step)}, line {count + 1}"
                raise UserError(f"{where}, is not a trajectory: {error!r}; {DAMAGED}") from error
            yield group, trajectory
        if count != (wanted := header["trajectories"]):
            raise UserError(f"{self.path(step)} has {count} of {wanted} trajectories: {DAMAGED}")

    def read(self, step: int) -> RolloutBatch:
        """The batch as it was written (without what the header counts as omitted)."""
        header = self.header(step)
        batch = RolloutBatch(header["step"], [[] for _ in range(header["groups"])])
        for group, trajectory in self.trajectories(step):
            batch.groups[group].append(trajectory)
        return batch

    def forget(self, last: int) -> None:
        """Deletes the files of later steps, those of stores within it, too."""
        for path in self._folder.rglob("step_*.jsonl.gz"):
            if path.name[5:-9].isdecimal() and int(path.name[5:-9]) > last:
                path.unlink()

    def steps(self) -> list[int]:
        """The steps with a file, in order."""
        found = (path.name[5:-9] for path in self._folder.glob("step_*.jsonl.gz"))
        return sorted(map(int, filter(str.isdecimal, found)))


def encoded(trajectory: Trajectory) -> list[bytes]:
    """What playing settles of each turn, a gzip member each; numbers by a faster encoder than json's."""
    members = []
    for turn in trajectory.turns:
        numbers, others = _named(turn, NUMBERS), _named(turn, OTHERS)
        members.append(_member(f'{_numbers(numbers)[:-1]},{_dumps(others)[1:-1]},"advantages":'))
    return members


def _line(group: int, trajectory: Trajectory) -> list[bytes]:
    entry = {"group": group, **_named(trajectory, TRAJECTORY_FIELDS)}
    entry["sample"] = _named(trajectory.sample, SAMPLE_FIELDS)
    text, members = _dumps(entry)[:-1] + ',"turns":[', list[bytes]()  # last, where a person finds them
    for turn, settled in zip(trajectory.turns, trajectory.encoded or encoded(trajectory), strict=True):
        members += _member(text), settled
        text = _numbers(turn.advantages) + "},"
    return [*members, _member(text.removesuffix(",") + "]}\n")]


def _member(text: str) -> bytes:
    return gzip.compress(text.encode(), 1, mtime=0)


def plain_sample(sample: Sample) -> dict[str, Any]:
    """As JSON has it, for a checkpoint."""
    return dict(json.loads(json.dumps(_named(sample, SAMPLE_FIELDS), default=_plain)))


def _named(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _numbers(value: Any) -> str:
    return to_json(value, inf_nan_mode="constants", fallback=_plain).decode()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


_dumps = json.JSONEncoder(default=_plain, separators=(",", ":")).encode
