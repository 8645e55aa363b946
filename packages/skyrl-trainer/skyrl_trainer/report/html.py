"""report.html: one file without any request to elsewhere, from nothing but run folders.

Curves of metrics.jsonl, the settings of config.yaml, and transcripts of the first, middle and last stored steps; of
several runs side by side. What a model wrote reaches the page as JSON that cannot end its script element, and is only
ever put there as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_trainer.config import Config, flatten, load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import read_metrics

if TYPE_CHECKING:
    from skyrl_trainer.types import RolloutBatch, Trajectory

NUM_BEST = NUM_WORST = 4
MAX_FAILED = 2
MAX_CHARACTERS = 12_000
"""Of one text in a transcript; what is longer is cut, and says so."""


def write_report(run_dirs: list[Path], out: Path) -> None:
    """Writes `out`. A run without metrics, settings or trajectories has gaps, not errors."""
    runs = [_run(path) for path in run_dirs]
    if len(runs) > 1:  # names may be alike
        for run in runs:
            run["name"] = run["path"]
    template = (files("skyrl_trainer.report") / "template.html").read_text(encoding="utf-8")
    title = escape(" against ".join(run["name"] for run in runs))
    page = template.replace("{{data}}", as_json({"runs": runs}), 1).replace("{{title}}", title, 1)
    write_page("report", page, out)


def as_json(data: dict[str, Any]) -> str:
    """For a script element: with "<" escaped, no text can close the element, or open a comment in it."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def write_page(what: str, page: str, out: Path) -> int:
    """The page's size in bytes; UserError when it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"The {what} cannot be written to {out}: {error.strerror or error}.") from error


def _run(path: Path) -> dict[str, Any]:
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "trajectories")):
        raise UserError(f"{path} is not a run folder: it has no config.yaml, no metrics.jsonl and no trajectories.")
    notes: list[str] = []
    rows = read_metrics(path)
    keys = sorted({key for row in rows for key in row} - {"step"})
    return {
        "name": path.resolve().name,
        "path": str(path),
        "metrics": {key: [[row["step"], _finite(row[key])] for row in rows if key in row] for key in keys},
        "settings": _settings(path, notes),
        "transcripts": _transcripts(path, notes),
        "notes": notes,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _settings(path: Path, notes: list[str]) -> list[list[Any]]:
    """[name, value as JSON, whether it is the default]; a file of another version is shown as it can be."""
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


def _transcripts(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    from skyrl_trainer.rollout.store import JsonlTrajectoryStore

    store = JsonlTrajectoryStore(path / "trajectories")
    steps = store.steps()
    if not steps:
        notes.append("no trajectories stored")
        return []
    decode = _decoder(path, notes)
    transcripts = []
    for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]}):
        try:
            transcripts += [_transcript(step, trajectory, decode) for trajectory in _choose(store.read(step))]
        except UserError as error:
            notes.append(str(error))
    return transcripts


def _choose(batch: RolloutBatch) -> list[Trajectory]:
    """The best and the worst by reward, then some that failed."""
    done = [trajectory for trajectory in batch.trajectories if not trajectory.stop_reason.failed]
    done.sort(key=lambda trajectory: -trajectory.total_reward)
    if len(done) > NUM_BEST + NUM_WORST:
        done = done[:NUM_BEST] + done[-NUM_WORST:]
    return done + [trajectory for trajectory in batch.trajectories if trajectory.stop_reason.failed][:MAX_FAILED]


def _decoder(path: Path, notes: list[str]) -> Callable[[list[int]], str]:
    """Token ids -> text by the tokenizer of a saved policy; a prompt is stored as ids only."""
    file = next(path.glob("model/*/tokenizer.json"), None)
    if file:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    notes.append("no saved policy, so prompts are not decoded")
    return lambda ids: f"({len(ids)} tokens)"


def _transcript(step: int, trajectory: Trajectory, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    turns = [
        {
            "prompt": _cut(decode(turn.prompt_ids)) if number == 0 else "",
            "action": _cut(turn.action),
            "observation": _cut(turn.observation),
            "reward": _finite(turn.reward),
            "parts": {name: _finite(value) for name, value in turn.reward_parts.items()},
            "tokens": len(turn.output_ids),
        }
        for number, turn in enumerate(trajectory.turns)
    ]
    truth = trajectory.sample.ground_truth
    return {
        "step": step,
        "id": trajectory.trajectory_id,
        "sample": trajectory.sample.sample_id,
        "truth": "" if truth is None else _cut(str(truth)),
        "success": trajectory.success,
        "reward": _finite(trajectory.total_reward),
        "stop": str(trajectory.stop_reason),
        "error": _cut(trajectory.error or ""),
        "tokens": trajectory.num_output_tokens,
        "turns": turns,
    }


def _cut(text: str) -> str:
    left = len(text) - MAX_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_CHARACTERS]}… ({left} characters more)"
