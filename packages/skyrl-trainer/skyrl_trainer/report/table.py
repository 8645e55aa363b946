"""What a run shows while it trains: one line per step, and on a terminal a status line that moves below."""

import math
from typing import Any, Self

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from skyrl_trainer.types import StepMetrics

Columns = dict[str, tuple[str, int, str]]
COLUMNS: Columns = {
    "step": ("step", 5, "{:.0f}"),
    "reward": ("reward/total", 6, "{:.3f}"),
    "held-out": ("eval/success", 8, "{:.3f}"),
    "turns": ("turns/mean", 5, "{:.1f}"),
    "tokens/s": ("tokens/per_second", 8, "{:,.0f}"),
    "KL": ("kl/engine_learner", 8, "{:.1e}"),
    "rollout": ("time/rollout", 7, "{:.2f}s"),
    "train": ("time/train", 7, "{:.2f}s"),
    "sync": ("time/sync", 7, "{:.2f}s"),
    "eval": ("time/eval", 7, "{:.2f}s"),
}
"""Title -> metric, width, format."""
OVERLAPPED = {
    **{title: COLUMNS[title] for title in list(COLUMNS)[:5]},
    "age": ("staleness/mean", 4, "{:.1f}"),
    "idle": ("idle/learner", 4, "{:.0%}"),
    **{title: COLUMNS[title] for title in list(COLUMNS)[6:]},
}
"""Beside the learner: the tokens' age and its wait, for few are fresh enough for a KL."""
HEADER_EVERY = 25


def header(columns: Columns = COLUMNS) -> str:
    return " ".join(f"{title:>{width}}" for title, (_, width, _) in columns.items())


def row(metrics: StepMetrics, columns: Columns = COLUMNS) -> str:
    """One line; a metric that is missing is blank, and one that is not a number says so."""
    cells = []
    for key, width, form in columns.values():
        value = metrics.get(key)
        text = "" if value is None else form.format(value) if math.isfinite(value) else str(value)
        cells.append(f"{text:>{width}}")
    return " ".join(cells)


class LiveTable:
    """first: step of a run that resumes, for the time left is estimated from this process's steps."""

    def __init__(self, steps: int, first: int = 0, columns: Columns = COLUMNS, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._columns = columns
        self._rows = 0
        parts = (SpinnerColumn(), *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        how: dict[str, Any] = {"transient": True, "speed_estimate_period": 600}
        self._progress = Progress(*parts, console=self.console, disable=not self.console.is_terminal, **how)
        self._task = self._progress.add_task("starting", total=steps, completed=first)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, name: str) -> None:
        """What is being done now; without a terminal until the first row."""
        self._progress.update(self._task, description=name.translate(str.maketrans("[]", "()")))  # no markup
        if not (self._rows or self.console.is_terminal):
            self._print(f"{name} ...", "")

    def note(self, text: str) -> None:
        """A line between the rows: a checkpoint, a restarted worker."""
        self._print(text, "yellow")

    def step(self, metrics: StepMetrics) -> None:
        if self._rows % HEADER_EVERY == 0:
            self._print(header(self._columns), "bold")
        self._rows += 1
        self._print(row(metrics, self._columns), "green" if "eval/success" in metrics else "")
        self._progress.update(self._task, completed=metrics["step"])
        if failed := metrics.get("failed", 0.0) + metrics.get("eval/failed", 0.0):
            self.note(f"step {metrics['step']:.0f}: {failed:.0f} episodes failed; `skyrl-trainer view` shows why")

    def _print(self, text: str, style: str) -> None:
        # soft_wrap: never cut or broken by us, however narrow the window or file is thought to be.
        self.console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
