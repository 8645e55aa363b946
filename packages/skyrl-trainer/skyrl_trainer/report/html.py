"""report.html: curves of metrics.jsonl and settings of config.yaml, of one run or of several side by side."""

import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skyrl_trainer.config import Config, flatten, load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import read_metrics, read_spans
from skyrl_trainer.report.page import asset, lean, write_page

DRAWN_STEPS = 16
"""Of the time line: more would be too narrow."""


def write_report(run_dirs: list[Path], out: Path) -> None:
    """Writes `out`, and each run's trajectories.html where it is older than they; what a run lacks is a gap."""
    runs = [_run(path, out.parent, len(run_dirs) == 1) for path in run_dirs]
    title = " against ".join(run["name"] for run in runs)
    write_page(out, title, {"runs": runs}, asset("report.css"), asset("charts.js") + asset("report.js"))


def _run(path: Path, beside: Path, alone: bool) -> dict[str, Any]:
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "trajectories")):
        raise UserError(f"{path} is not a run folder: it has no config.yaml, no metrics.jsonl and no trajectories.")
    notes: list[str] = []
    rows = read_metrics(path)
    keys = sorted({key for row in rows for key in row} - {"step"})
    return {
        "name": path.resolve().name if alone else str(path),  # names may be alike
        "path": str(path),
        "metrics": {key: [[row["step"], lean(row[key])] for row in rows if key in row] for key in keys},
        "timeline": read_spans(path)[-DRAWN_STEPS:],
        "settings": _settings(path, notes),
        "trajectories": _trajectories(path, beside, notes),
        "notes": notes,
    }


def _trajectories(run: Path, beside: Path, notes: list[str]) -> str | None:
    from skyrl_trainer.report import viewer

    store, page = viewer.Store(run / "trajectories"), run / viewer.PAGE
    steps = store.steps()
    if not steps:
        notes.append("no trajectories stored")
        return None
    newest = store.path(steps[-1]).stat().st_mtime
    if not (page.exists() and newest < page.stat().st_mtime <= time.time()):
        try:
            viewer.view(run, page, (steps[0], steps[len(steps) // 2], steps[-1]), viewer.BRIEF)
        except UserError as error:
            notes.append(str(error).rstrip("."))
            return None
    return quote(os.path.relpath(page, beside))


def _settings(path: Path, notes: list[str]) -> list[list[Any]]:
    file = path / "config.yaml"
    if not file.is_file():
        notes.append("no config.yaml, so no settings")
        return []
    try:
        values, defaults = flatten(load_config(str(file), [])), flatten(Config())
    except UserError as error:
        notes.append(f"settings not readable: {error}")
        return []
    return [[name, json.dumps(value, ensure_ascii=False), value == defaults[name]] for name, value in values.items()]
