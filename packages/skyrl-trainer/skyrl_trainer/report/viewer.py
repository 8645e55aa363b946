"""trajectories.html: every turn of a run's trajectories in one file, without a server or a request to elsewhere.

The page holds a JSON index for its list, and one block a trajectory: JSON, deflated, in base64, inflated when it is
opened. What a model or an env wrote stands in JSON that cannot end its element; viewer.js only ever shows it as text.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.html import as_json, write_page
from skyrl_trainer.rollout.store import TURN_FIELDS
from skyrl_trainer.rollout.store import JsonlTrajectoryStore as Store
from skyrl_trainer.types import Trajectory

MAX_TRAJECTORIES, MAX_BYTES = 2_000, 50_000_000
MAX_CHARACTERS = 50_000
"""Of one text of an env or a tool; what is longer is cut, and says so. A policy's tokens are all there."""
BROKEN = "\ufffd"  # what decoding puts in the place of bytes that are not a character
FIELDS = ("id", "step", "task", "env", "difficulty", "reward", "outcome", "stop", "turns", "tokens")
"""Of an index row: ["3/0/1", 3, "tool_use#17", "tool_use-v0", 2, 1.1, "success", "terminated", 4, 96]."""

Decode = Callable[[list[int]], str]
Entry = tuple[list[Any], str, float]
"""A trajectory's index row, its block, and its largest advantage without the sign."""


def write_viewer(run: Path, out: Path, steps: list[int] | None = None) -> str:
    """Writes `out` with the trajectories of `steps` (default: all), the newest that fit; returns what it did, in words.

    Raises UserError where the run, a step or any readable trajectory is missing, or `out` cannot be written.
    """
    store = Store(run / "trajectories")
    stored = store.steps()
    if not stored:
        raise UserError(f"{run} has no trajectories: give the folder of a run that has finished a step.")
    if missing := sorted(set(steps or ()) - set(stored)):
        raise UserError(f"{run} has no trajectories of --step {missing[0]}: it has {_span(stored)}.")
    template, script = (files(__package__).joinpath(f"viewer.{kind}").read_text("utf-8") for kind in ("html", "js"))
    notes, room = list[str](), MAX_BYTES - len(template) - len(script) - 2_000
    entries = _collect(store, set(steps or stored), _decoder(run, notes), room, notes)
    if not entries:
        raise UserError("; ".join([f"{run} has no trajectory to show", *notes]) + ".")
    rows, blocks, peaks = zip(*entries, strict=True)
    what, name = f"{len(rows):,} trajectories, {_span([row[1] for row in rows])}", run.resolve().name
    scale = sorted(peaks)[len(peaks) * 19 // 20]  # has the full colour: the largest but for outliers
    index = {"run": name, "what": what, "notes": notes, "scale": scale, "fields": FIELDS, "rows": rows}
    element = '<script type="application/octet-stream" id="block-{}">{}</script>'
    elements = "\n".join(element.format(number, block) for number, block in enumerate(blocks))
    text = template.replace("{{script}}", script, 1)  # from the end: what a replacement says is not replaced again
    text = text.replace("{{blocks}}", elements, 1).replace("{{index}}", as_json(index), 1)
    size = write_page("viewer", text.replace("{{title}}", escape(name), 1), out)
    return "; ".join([f"{what}, {size / 1e6:.1f} MB", *notes])


def _span(steps: list[int]) -> str:
    return f"{len({*steps})} steps from {min(steps)} to {max(steps)}" if len({*steps}) > 1 else f"step {steps[0]}"


def _collect(store: Store, steps: set[int], decode: Decode | None, room: int, notes: list[str]) -> list[Entry]:
    entries, left_out = list[Entry](), 0
    for step in sorted(steps, reverse=True):
        try:
            if left_out:
                left_out += next(store.lines(step), {}).get("trajectories", 0)
                continue
            for trajectory in store.read(step).trajectories:
                row, data = _row(step, trajectory), _data(trajectory, decode)
                packed = zlib.compress(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))
                room -= len(packed) * 4 // 3 + len(json.dumps(row)) + 90  # the element around a block
                if left_out or room < 0 or len(entries) == MAX_TRAJECTORIES:
                    left_out += 1
                    continue
                peak = max((abs(x) for turn in data["turns"] for x in turn["advantages"] if x), default=0.0)
                entries.append((row, base64.b64encode(packed).decode(), peak))
        except UserError as error:
            notes.append(str(error).rstrip("."))
    if left_out:
        bounds = f"{MAX_TRAJECTORIES:,} trajectories and {MAX_BYTES / 1e6:g} MB"
        notes.insert(0, f"{left_out:,} more are left out (at most {bounds} go in): --step chooses others")
    return entries


def _row(step: int, trajectory: Trajectory) -> list[Any]:
    sample, stop = trajectory.sample, trajectory.stop_reason
    outcome = "failed" if stop.failed else "success" if trajectory.success else "no success"
    env = [sample.env_id.removeprefix("skyrl/"), sample.options.get("difficulty")]
    figures = [trajectory.total_reward, outcome, stop, len(trajectory.turns), trajectory.num_output_tokens]
    return _lean([trajectory.trajectory_id, step, sample.sample_id, *env, *figures])


def _data(trajectory: Trajectory, decode: Decode | None) -> dict[str, Any]:
    """The record as it is stored, with the text of each sampled token, and of a context that is not the history."""
    turns = []
    for turn in trajectory.turns:
        texts = token_texts(turn.output_ids, decode) if decode else []
        context = decode(turn.prompt_ids) if decode and turn.new_segment else None
        stored = {name: getattr(turn, name) for name in TURN_FIELDS}
        turns.append(stored | {"prompt_ids": len(turn.prompt_ids), "context": context, "texts": texts})
    stored = {name: getattr(trajectory, name) for name in ("error", "metrics", "prompt", "scores")}
    return _lean(stored | {"truth": trajectory.sample.ground_truth, "turns": turns})


def token_texts(ids: list[int], decode: Decode) -> list[str]:
    """The text of each token, as long as `ids`; tokens with parts of one character have "", and the last of them all.

    Example: [64, 161, 249, 121] of a byte-level tokenizer -> ["a", "", "", "国"].
    """
    texts, run = list[str](), list[int]()
    for token in ids:
        if run and BROKEN not in decode([token]):  # a character begins here, so those bytes were none
            texts[-1], run = decode(run), []
        texts.append("")
        run.append(token)
        # A character has at most 4 bytes, so 4 tokens tell whether one is open.
        if not decode(run[-4:]).endswith(BROKEN):
            texts[-1], run = decode(run), []
    if run:
        texts[-1] = decode(run)
    return texts


def _decoder(run: Path, notes: list[str]) -> Decode | None:
    """By the tokenizer of the run's policy, or of the model that it began with if that is on this machine."""
    found: Any = min(run.glob("*/*/tokenizer.json"), default=None)
    with suppress(UserError, ValueError):  # settings of another version; no name of a repository
        if found is None and (run / "config.yaml").is_file():
            model = load_config(str(run / "config.yaml"), []).trainer.policy.model.path
            local = Path(model, "tokenizer.json")
            found = local if local.is_file() else try_to_load_from_cache(model, "tokenizer.json")
    if not isinstance(found, str | Path):
        notes.append("no tokenizer of this run is here, so tokens are not shown one by one")
        return None
    tokenizer = Tokenizer.from_file(str(found))
    # Behind another token: some tokenizers drop the space at the beginning of a text.
    before = tokenizer.encode("a", add_special_tokens=False).ids
    skip = len(tokenizer.decode(before, skip_special_tokens=False))
    decode = lru_cache(2**16)(lambda *ids: tokenizer.decode([*before, *ids], skip_special_tokens=False)[skip:])
    return lambda ids: decode(*ids) if len(ids) <= 4 else decode.__wrapped__(*ids)


def _lean(value: Any) -> Any:
    """For JSON and for people: floats with five digits, null for what is no number, long texts cut."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}… ({len(value) - MAX_CHARACTERS:,} characters more)"
    if isinstance(value, dict):
        return {str(key): _lean(each) for key, each in value.items()}
    return [_lean(each) for each in value] if isinstance(value, list | tuple) else value
