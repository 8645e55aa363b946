"""trajectories.html: every turn of a run's trajectories in one file, without a server or a request to elsewhere.

The page holds a small JSON index for its list, and one block a trajectory: JSON, deflated, in base64, which the browser
inflates when that trajectory is opened. What a model or an env wrote stands in JSON that cannot end its script element,
or in a block, and viewer.js only ever shows it as text.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.store import TURN_FIELDS, JsonlTrajectoryStore
from skyrl_trainer.types import Trajectory

MAX_TRAJECTORIES, MAX_BYTES = 2_000, 50_000_000
MAX_CHARACTERS = 50_000
"""Of one text of an env or a tool; what is longer is cut, and says so. A policy's tokens are all there."""
BROKEN = "\ufffd"
"""What decoding puts in the place of bytes that are not a character."""
FIELDS = ("id", "step", "task", "env", "difficulty", "reward", "outcome", "stop", "turns", "tokens")
"""Of an index row: ["3/0/1", 3, "tool_use#17", "tool_use-v0", 2, 1.1, "success", "terminated", 4, 96]."""

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class Page:
    """What a file will show. Example: Page(rows=[["3/0/1", 3, ...]], blocks=["eJyrVkrL..."], peaks=[0.7], size=912)"""

    rows: list[list[Any]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    """The largest advantage of each trajectory, without its sign: nearly the largest of them has the full colour."""
    size: int = 0


def write_viewer(
    run: Path, out: Path, steps: list[int] | None = None, limit: int = MAX_TRAJECTORIES, max_bytes: int = MAX_BYTES
) -> str:
    """Writes `out` with the trajectories of `steps` (default: all), the newest that fit; returns what it did, in words.

    Raises UserError where the run, a step or any readable trajectory is missing, or `out` cannot be written.
    """
    store = JsonlTrajectoryStore(run / "trajectories")
    stored = store.steps()
    if not stored:
        raise UserError(f"{run} has no trajectories: give the folder of a run that has finished a step.")
    if missing := sorted(set(steps or ()) - set(stored)):
        raise UserError(f"{run} has no trajectories of --step {missing[0]}: it has {_span(stored)}.")
    folder = files("skyrl_trainer.report")
    template, script = ((folder / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    page, notes, left_out = Page(size=len(template) + len(script) + 2_000), list[str](), 0
    decode = _decoder(run, notes)
    for step in sorted(set(steps or stored), reverse=True):
        try:
            left_out += _add_step(page, store, step, decode, limit, max_bytes)
        except UserError as error:
            notes.append(str(error).rstrip("."))
    if left_out:
        bounds = f"{limit:,} trajectories and {max_bytes / 1e6:g} MB"
        notes.insert(0, f"{left_out:,} more are left out (at most {bounds} go in): --step chooses others")
    if not page.rows:
        raise UserError("; ".join([f"{run} has no trajectory to show", *notes]) + ".")
    what = f"{len(page.rows):,} trajectories, {_span([row[1] for row in page.rows])}"
    name, scale = run.resolve().name, sorted(page.peaks)[len(page.peaks) * 19 // 20]
    index = {"run": name, "what": what, "notes": notes, "scale": scale, "fields": FIELDS, "rows": page.rows}
    # "<" escaped: no text can close the element, or open a comment in it.
    data = json.dumps(index, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    element = '<script type="application/octet-stream" id="block-{}">{}</script>'
    blocks = "\n".join(element.format(number, block) for number, block in enumerate(page.blocks))
    text = template.replace("{{script}}", script, 1)  # from the end: what a replacement says is not replaced again
    text = text.replace("{{blocks}}", blocks, 1).replace("{{index}}", data, 1).replace("{{title}}", escape(name), 1)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        size = out.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"The viewer cannot be written to {out}: {error.strerror or error}.") from error
    return "; ".join([f"{what}, {size / 1e6:.1f} MB", *notes])


def _span(steps: list[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if min(steps) < max(steps) else f"step {steps[0]}"


def _add_step(page: Page, store: JsonlTrajectoryStore, step: int, decode: Decode | None, limit: int, size: int) -> int:
    """Adds what fits of a step, and returns how many did not; of a step that finds the page full only the count."""
    if page.size >= size or len(page.rows) >= limit:
        return int(next(store.lines(step), {}).get("trajectories", 0))
    trajectories = store.read(step).trajectories
    for number, trajectory in enumerate(trajectories):
        row, data = _row(step, trajectory), _data(trajectory, decode)
        packed = zlib.compress(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))
        block = base64.b64encode(packed).decode()
        more = len(block) + len(json.dumps(row)) + 80  # the element around a block
        if page.size + more > size or len(page.rows) >= limit:
            page.size = size
            return len(trajectories) - number
        page.size += more
        page.rows.append(row)
        page.blocks.append(block)
        page.peaks.append(max((abs(x) for turn in data["turns"] for x in turn["advantages"] if x), default=0.0))
    return 0


def _row(step: int, trajectory: Trajectory) -> list[Any]:
    sample, stop, size = trajectory.sample, trajectory.stop_reason, len(trajectory.turns)
    outcome = "failed" if stop.failed else "success" if trajectory.success else "no success"
    env = [sample.env_id.removeprefix("skyrl/"), sample.options.get("difficulty")]
    figures = [trajectory.total_reward, outcome, stop.value, size, trajectory.num_output_tokens]
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
        text = decode([token])
        if run and BROKEN not in text:  # a character begins here, so those bytes were none
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
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

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
