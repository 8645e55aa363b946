"""What a run writes a line of after each step.

metrics.jsonl   one JSON object, each step once; what is not finite is written as null, and read as NaN
timeline.jsonl  who worked from when to when, in seconds of time.time(); "rollout" is the driver's wait. Example:
                {"step": 3, "train": [[1790000000.1, 1790000001.4]], "engine 0": [[1790000000.0, 1790000000.9]]}
"""

import json
import math
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from skyrl_trainer.errors import UserError
from skyrl_trainer.files import write_whole, writing
from skyrl_trainer.types import StepMetrics

FILE_NAME, TIMELINE = "metrics.jsonl", "timeline.jsonl"
Spans = dict[str, list[tuple[float, float]]]


def read_metrics(run_dir: Path) -> list[StepMetrics]:
    """The rows of a run folder; [] without a file. A last line torn by a crash is left out."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return []
    lines, rows = path.read_bytes().splitlines(), list[StepMetrics]()
    for number, line in enumerate(lines, 1):
        try:
            row = {key: math.nan if value is None else float(value) for key, value in json.loads(line).items()}
            int(row["step"])
        except (ValueError, TypeError, AttributeError, KeyError):
            if number == len(lines):
                break
            shown = line[:80].decode(errors="replace")
            raise UserError(f"{path}, line {number}, is no JSON object of numbers with a step: {shown!r}.") from None
        rows.append(row)
    return rows


class MetricsWriter:
    """Appends rows. What was written after `last_step`, the resumed checkpoint's, is dropped; without
    one (a new run) an older file is kept as metrics.<n>.jsonl."""

    def __init__(self, run_dir: Path, last_step: int | None = None) -> None:
        self.path = run_dir / FILE_NAME
        with writing(self.path, run_dir):
            if last_step is not None:
                kept = [_line(row) for row in read_metrics(run_dir) if row["step"] <= last_step]
                write_whole(self.path, "".join(kept).encode())
            elif self.path.exists():
                older = (run_dir / f"metrics.{n}.jsonl" for n in count(1))
                self.path.rename(next(path for path in older if not path.exists()))
            self._file = self.path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        with writing(self.path):
            self._file.write(_line(metrics))
            self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # said by `write`
            self._file.close()


def _line(metrics: StepMetrics) -> str:
    row = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
    return json.dumps(row | {"step": int(metrics["step"])}) + "\n"


def write_spans(run_dir: Path, step: int, spans: Spans) -> None:
    rounded = {who: [(round(start, 3), round(end, 3)) for start, end in own] for who, own in spans.items()}
    with (run_dir / TIMELINE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **rounded}) + "\n")


def read_spans(run_dir: Path) -> list[dict[str, Any]]:
    """A line each; [] without a file. One torn by a crash is left out, or of a step that was undone."""
    path, spans = run_dir / TIMELINE, dict[int, Any]()
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            while spans and next(reversed(spans)) >= row["step"]:
                spans.popitem()
            spans[row["step"]] = row
    return [*spans.values()]
