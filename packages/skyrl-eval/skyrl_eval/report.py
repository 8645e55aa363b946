"""report.html of an evaluated run, with its transcripts in report.transcripts.js beside it, read when asked for.

The page is below 300 KB, loads nothing from elsewhere, and holds no item of the benchmark: it can be shown to others.
The transcripts hold the questions, so they are for those who may read the data. What a model wrote reaches both as
JSON, and is only ever put into the page as text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_eval import grade, metrics
from skyrl_eval.metrics import COUNTERS
from skyrl_eval.store import read_records
from skyrl_eval.types import Attempt, Key, Verdict
from skyrl_trainer.errors import UserError

PAGE, TRANSCRIPTS = "report.html", "report.transcripts.js"
MAX_PAGE, MAX_TRANSCRIPTS, MAX_CHARACTERS, MAX_PARTS = 300_000, 50_000_000, 50_000, 400
ROW = ("item", "sample", "status", "score", "stop", *COUNTERS[:5], "seconds")
"""Of a line in the list of attempts: ["q7", 0, "wrong", 0.0, "done", 3, 2, 0, 812, 96, 4.1]."""


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Writes the page and the transcripts of a graded run, and returns the page's path.

    Args:
        against: another run, with which the page compares this one.

    Raises:
        UserError: the folder lacks a file of a graded run, or cannot be written to.
    """
    manifest, results = (_read(folder, name) for name in ("manifest.json", "results.json"))
    attempts, verdicts = read_records(folder, Attempt), read_records(folder, Verdict)
    count, left_out, script = _transcripts(attempts, verdicts)
    data = {
        "results": _shortened(results),
        "spread": _spread(attempts.values()),
        "config": _shortened(manifest["config"]),
        "facts": _shortened(manifest["facts"]),
        "versions": manifest["versions"],
        "comparison": comparison(against, folder) if against else None,
        "transcripts": {"file": TRANSCRIPTS, "count": count, "left_out": left_out, "bytes": len(script)},
    }
    title = str(results.get("title") or f"{results['bench']}, {results['items']} items")
    template = (files(__package__) / "report.html").read_text(encoding="utf-8")
    # "<" escaped: no text can close the element, or open a comment in it.
    page = template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"), 1)
    page = page.replace("{{title}}", escape(f"{title}: {results.get('model', '')}"), 1)
    if len(page) > MAX_PAGE:
        raise ValueError(f"The page has {len(page)} bytes.")
    try:
        (folder / TRANSCRIPTS).write_text(script, encoding="ascii")
        (folder / PAGE).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"The report cannot be written to {folder}: {error.strerror or error}.") from error
    return folder / PAGE


def comparison(a: Path, b: Path) -> dict[str, Any]:
    """The paired difference of two runs on the items that both have, and in what the runs differ.

    Raises:
        UserError: they are of different benchmarks or data, or have no item in common.
    """
    first, second = (_read(folder, "manifest.json")["config"] for folder in (a, b))
    for name in ("bench", "data_sha256"):
        if first.get(name) != second.get(name):
            raise UserError(f"{a} and {b} differ in {name} ({first.get(name)!r}, {second.get(name)!r}): no comparison.")
    found = metrics.compare(grade.item_scores(a), grade.item_scores(b))
    if not found["items"]:
        raise UserError(f"{a} and {b} have no graded item in common.")
    changed = {name: [first.get(name), second.get(name)] for name in sorted(first.keys() | second.keys())}
    results = [_read(folder, "results.json") for folder in (a, b)]
    changed |= {name: [one.get(name) for one in results] for name in ("grader", "judge", "samples")}
    changed = {name: both for name, both in changed.items() if both[0] != both[1]}
    if any(one["samples"] != 1 for one in results):
        found["p"] = None  # means of tries are not the yes and no that McNemar's test counts
    return {"a": str(a), "b": str(b), "changed": _shortened(changed), **found}


def compare(a: Path, b: Path) -> str:
    """The comparison in words; b's page gets it too."""
    found = comparison(a, b)
    write_report(b, against=a)
    interval, p = found["interval"], found["p"]
    span = f" (95 %: {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})" if interval else ""
    lines = [
        f"{b} against {a}, {found['items']} items that both have:",
        f"  difference {100 * found['difference']:+.1f} points{span}",
        f"  better on {found['better']}, worse on {found['worse']} items"
        + ("" if p is None else f", McNemar's exact p = {p:.3g}"),
        *(f"  {name}: {x!r} -> {y!r}" for name, (x, y) in found["changed"].items()),
    ]
    return "\n".join([*lines, f"  page: {b / PAGE}"])


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a graded run: its {name} cannot be read ({error}).") from error


def _spread(attempts: Collection[Attempt]) -> dict[str, list[float]]:
    """Median, 95th percentile and maximum over attempts."""
    if not attempts:
        return {}
    columns = {name: [float(getattr(attempt, name)) for attempt in attempts] for name in COUNTERS}
    marks = (0.5, 0.95, 1.0)
    return {name: np.quantile(column, marks, method="inverted_cdf").tolist() for name, column in columns.items()}


def _transcripts(attempts: dict[Key, Attempt], verdicts: dict[Key, Verdict]) -> tuple[int, int, str]:
    """How many are in it, how many did not fit, and the script: rows, and one deflated block an attempt."""
    rows: list[list[Any]] = []
    blocks: list[str] = []
    room = MAX_TRANSCRIPTS
    for key, attempt in attempts.items():
        verdict = verdicts.get(key) or Verdict(*key, score=None, status="missing")
        block = {name: getattr(attempt, name) for name in ("messages", "error", "urls", "answer")}
        said = {name: getattr(verdict, name) for name in ("answer", "confidence", "detail", "error")}
        packed = zlib.compress(json.dumps(_shortened({**block, "verdict": said}, MAX_CHARACTERS)).encode())
        row = [key[1], key[2], verdict.status, verdict.score, *(getattr(attempt, name) for name in ROW[4:])]
        room -= len(packed) * 4 // 3 + len(json.dumps(row)) + 8
        if room < 0:
            break
        rows.append(row)
        blocks.append(base64.b64encode(packed).decode())
    data = json.dumps({"fields": ROW, "rows": rows, "blocks": blocks})
    return len(rows), len(attempts) - len(rows), f"showTranscripts({data});\n"


def _shortened(value: Any, characters: int = 500) -> Any:
    """The value with long texts and, in the page, long lists cut, saying so."""
    if isinstance(value, str) and len(value) > characters:
        return f"{value[:characters]}… ({len(value) - characters} characters more)"
    if isinstance(value, dict):
        kept: Sequence[Any] = list(value.items())[:MAX_PARTS]
        return {str(_shortened(name, characters)): _shortened(part, characters) for name, part in kept}
    if isinstance(value, list | tuple):
        return [_shortened(part, characters) for part in (value if characters > 500 else value[:MAX_PARTS])]
    return value
