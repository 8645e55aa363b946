"""metrics.jsonl: one JSON object per step, each once; what is not finite is written as null, and read as NaN."""

import json
import math
from contextlib import suppress
from pathlib import Path

from skyrl_trainer.errors import UserError
from skyrl_trainer.types import StepMetrics

FILE_NAME = "metrics.jsonl"


def read_metrics(run_dir: Path) -> list[StepMetrics]:
    """The rows of a run folder; [] without a file. A last line torn by a crash is left out."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = {key: math.nan if value is None else float(value) for key, value in json.loads(line).items()}
            int(row["step"])
        except (ValueError, TypeError, AttributeError, KeyError):
            if number == len(lines):
                break
            shown = line[:80].decode(errors="replace")
            raise UserError(
                f"{path}, line {number}, is not a JSON object of numbers: {shown!r}, or none of them is its step."
            ) from None
        rows.append(row)
    return rows


class MetricsWriter:
    """Appends rows. What was written after `last_step`, the resumed checkpoint's, is dropped; without
    one (a new run) an older file is kept as metrics.<n>.jsonl."""

    def __init__(self, run_dir: Path, last_step: int | None = None) -> None:
        self.path = run_dir / FILE_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if last_step is not None:
                aside = self.path.with_suffix(".tmp")
                kept = [_line(row) for row in read_metrics(run_dir) if row["step"] <= last_step]
                aside.write_text("".join(kept), encoding="utf-8")
                aside.replace(self.path)
            elif self.path.exists():
                self.path.rename(run_dir / f"metrics.{len(list(run_dir.glob('metrics*.jsonl')))}.jsonl")
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}.") from error

    def write(self, metrics: StepMetrics) -> None:
        try:
            self._file.write(_line(metrics))
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}; free some space and resume.") from error

    def close(self) -> None:
        with suppress(OSError):  # said by `write`
            self._file.close()


def _line(metrics: StepMetrics) -> str:
    row = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
    return json.dumps(row | {"step": int(metrics["step"])}) + "\n"
