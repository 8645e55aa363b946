"""What a run shows while it trains: one line a step, and on a terminal a status line that moves below.

Redirected output is plain lines of the same columns, without control characters.
"""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from skyrl_trainer.types import StepMetrics


COLUMNS = {
    "step": ("step", 5, "{:.0f}"),
    "reward": ("reward/mean", 6, "{:.3f}"),
    "held-out": ("eval/success", 8, "{:.3f}"),
    "tokens/s": ("tokens/per_second", 8, "{:,.0f}"),
    "KL": ("kl/engine_learner", 8, "{:.1e}"),
    "rollout": ("time/rollout", 7, "{:.2f}s"),
    "train": ("time/train", 7, "{:.2f}s"),
    "sync": ("time/sync", 7, "{:.2f}s"),
    "eval": ("time/eval", 7, "{:.2f}s"),
}
"""Title -> metric, width, format; the time left comes last."""
HEADER_EVERY = 25


def header() -> str:
    return " ".join(f"{title:>{width}}" for title, (_, width, _) in COLUMNS.items()) + f" {'left':>7}"


def row(metrics: StepMetrics, seconds_left: float | None = None) -> str:
    """One line; a metric that is missing is blank, and one that is not a number says so."""
    cells = []
    for key, width, form in COLUMNS.values():
        value = metrics.get(key)
        text = "" if value is None else form.format(value) if math.isfinite(value) else str(value)
        cells.append(f"{text:>{width}}")
    return " ".join(cells) + f" {duration(seconds_left):>7}"


def duration(seconds: float | None) -> str:
    """'1:05:09' or '5:09'."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class LiveTable:
    """`with LiveTable(50) as table: table.phase("rollout"); table.step(metrics)`.

    A run that resumes at step 20 gives `first_step=20`: the time left is estimated from this process's steps only.
    """

    def __init__(self, max_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.max_steps = max_steps
        self._seconds: list[float] = []
        self._rows = 0
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
        self._progress = Progress(
            *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=self.console, transient=True,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=max_steps, completed=first_step)

    def __enter__(self) -> LiveTable:
        self._last = time.monotonic()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str) -> None:
        """What is being done now; seen on a terminal only."""
        self._progress.update(self._task, description=name)

    def note(self, text: str) -> None:
        """A line between the rows: a checkpoint, a restarted worker."""
        self._print(text, "yellow")

    def step(self, metrics: StepMetrics) -> None:
        now = time.monotonic()
        step = metrics.get("step", 0)
        if step > 0:
            self._seconds.append(now - self._last)
        self._last = now
        recent = self._seconds[-20:]
        left = (self.max_steps - step) * sum(recent) / len(recent) if recent else None
        if self._rows % HEADER_EVERY == 0:
            self._print(header(), "bold")
        self._rows += 1
        self._print(row(metrics, left), "green" if "eval/success" in metrics else "")
        self._progress.update(self._task, completed=min(step, self.max_steps))

    def _print(self, text: str, style: str) -> None:
        if self.console.is_terminal:
            self._progress.console.print(Text(text, style=style), no_wrap=True, overflow="crop")
        else:
            self.console.file.write(text + "\n")
            self.console.file.flush()
