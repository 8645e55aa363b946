"""trajectories.html: every turn of a run's or an evaluation's episodes in one file, without a server."""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.report.page import asset, lean, write_page
from skyrl_trainer.rollout.store import JsonlTrajectoryStore as Store
from skyrl_trainer.types import Trajectory, Turn

PAGE = "trajectories.html"
MAX_TRAJECTORIES, MAX_BYTES = 2_000, 50_000_000
BRIEF = (96, 2_000_000)
"""The same for the page that a run writes with each checkpoint."""
BROKEN = "\ufffd"  # what decoding puts in the place of bytes that are not a character
FIELDS = ("id", "step", "task", "env", "difficulty", "reward", "outcome", "stop", "turns", "tokens")
"""Of an index row: ["3/0/1", 3, "tool_use#17", "tool_use-v0", 2, 1.1, "success", "terminated", 4, 96]."""
WHOLE = ("output_ids", "weight_versions", "logprobs", "advantages", "texts")  # per token, clean already
Decode = Callable[[list[int]], str]


class Episode(NamedTuple):
    row: list[Any]  # by FIELDS, with None for what there is not
    prompt: list[dict[str, str]]
    turns: list[dict[str, Any]]  # "action"; any other field of types.Turn, "texts" of tokens, "context"
    facts: dict[str, Any]  # figures and short texts
    texts: dict[str, Any]  # long texts, or JSON
    error: str | None


def write_viewer(folder: Path, out: Path, steps: list[int] | None = None) -> str:
    """Writes `out` with a run's newest trajectories, or those of `steps`, or an evaluation's attempts; in words."""
    if (folder / "attempts.jsonl").exists():  # an evaluation's
        return str(load("skyrl_eval.report:view")(folder, out, steps))
    return view(folder, out, steps)


def view(run: Path, out: Path, steps: Sequence[int] | None, bounds: tuple[int, int] | None = None) -> str:
    """`write_viewer` of a run. Steps that are named share the number of trajectories that go in."""
    store = Store(run / "trajectories" if (run / "trajectories").is_dir() else run)
    notes, total = list[str](), 0
    stored = store.steps()
    if not stored:
        raise UserError(f"{run} has no trajectories: give the folder of a run that has finished a step.")
    if missing := sorted(set(steps or ()) - set(stored)):
        raise UserError(f"{run} has no trajectories of --step {missing[0]}: it has {_span(stored)}.")
    most, size = bounds or (MAX_TRAJECTORIES, MAX_BYTES)
    chosen = sorted(set(steps or stored), reverse=True)
    for step in chosen:
        with suppress(UserError):  # reading it will say what is wrong
            total += int(store.header(step)["trajectories"])
    if bounds and len(chosen) < len(stored):
        notes.append(f"{len(stored) - len(chosen)} more steps are stored")
    folders = run, *run.resolve().parents[:2]
    of_run = next((each for each in folders if (each / "config.yaml").is_file()), run)
    decode = _decoder(of_run, notes)
    episodes = _episodes(store, chosen, -(-most // len(chosen)) if steps else most, decode, notes)
    return write_episodes(out, run, episodes, total, notes, (most, size))


def write_episodes(
    out: Path, folder: Path, episodes: Iterable[Episode], total: int, notes: list[str], bounds: tuple[int, int]
) -> str:
    """Writes the first of a folder's `total` episodes, `bounds` episodes and bytes at most; in words."""
    style, script, name = asset("viewer.css"), asset("viewer.js"), folder.resolve().name
    room = bounds[1] - len(style) - len(script) - 8_000  # page.html, and what stands around the blocks
    rows, blocks, peaks = list[list[Any]](), list[str](), list[float]()
    for episode in islice(episodes, bounds[0]):
        row, block = lean(episode.row), _block(episode)
        room -= len(block) + len(json.dumps(row)) + 90  # the element around a block
        if room < 0:
            break
        rows.append(row)
        blocks.append(f'<script type="application/octet-stream" id="block-{len(blocks)}">{block}</script>')
        peaks.append(max((abs(x) for turn in episode.turns for x in turn.get("advantages", ()) if x), default=0.0))
    if not rows:
        raise UserError("; ".join([f"{folder} has no trajectory to show", *notes]) + ".")
    steps = [row[1] for row in rows if row[1] is not None]
    noun = "trajectory" if len(rows) == 1 else "trajectories"
    what = f"{len(rows):,} {noun}" + (f", {_span(steps)}" if steps else "")
    if total > len(rows):
        limit = f"at most {bounds[0]:,} trajectories and {bounds[1] / 1e6:g} MB go in"
        hint = ": --step of `skyrl-trainer view` chooses others" if steps else ""
        notes.insert(0, f"{total - len(rows):,} more are left out ({limit}){hint}")
    scale = sorted(peaks)[len(peaks) * 19 // 20]  # has the full colour: the largest but for outliers
    index = {"name": name, "what": what, "notes": notes, "scale": scale, "fields": FIELDS, "rows": rows}
    written = write_page(out, f"{name}: trajectories", index, style, script, "\n".join(blocks))
    return "; ".join([f"{what}, {written / 1e6:.1f} MB", *notes])


def _block(episode: Episode) -> str:
    turns = [{name: x if name in WHOLE else lean(x) for name, x in turn.items()} for turn in episode.turns]
    data = lean(episode._replace(row=[], turns=[])._asdict()) | {"turns": turns}
    return base64.b64encode(zlib.compress(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))).decode()


def _span(steps: list[int]) -> str:
    return f"{len({*steps})} steps from {min(steps)} to {max(steps)}" if len({*steps}) > 1 else f"step {steps[0]}"


def _episodes(store: Store, steps: list[int], each: int, decode: Decode | None, notes: list[str]) -> Iterator[Episode]:
    for step in steps:
        try:
            for _, trajectory in islice(store.trajectories(step), each):
                yield from_trajectory(step, trajectory, decode)
        except UserError as error:
            notes.append(str(error).rstrip("."))


def from_trajectory(step: int, trajectory: Trajectory, decode: Decode | None) -> Episode:
    """The record as stored, with the text of each sampled token, and of a context that is not the history."""
    sample, stop, turns = trajectory.sample, trajectory.stop_reason, list[dict[str, Any]]()
    for turn in map(trajectory.turns.__getitem__, trajectory.by_time()):
        made = {name: getattr(turn, name) for name in Turn.__slots__} | {"prompt_ids": len(turn.prompt_ids)}
        for name in ("logprobs", "advantages"):
            made[name] = lean([float(f"{x:.5g}") for x in made[name]])
        made["info"] = {name: x for name, x in turn.info.items() if not name.startswith("skyrl/")}  # marks of ours
        made["texts"] = token_texts(turn.output_ids, decode) if decode else []
        made["context"] = decode(turn.prompt_ids) if decode and (turn.new_segment or not turns) else None
        turns.append(made)
    outcome = "failed" if stop.failed else "success" if trajectory.success else "no success"
    row = [
        trajectory.trajectory_id,
        step,
        sample.sample_id,
        sample.env_id.removeprefix("skyrl/"),
        sample.options.get("difficulty"),
        trajectory.env_reward,
        outcome,
        stop,
        len(turns),
        trajectory.num_output_tokens,
    ]
    facts = {"right answer": sample.ground_truth, **trajectory.scores, "seconds": trajectory.metrics.get("seconds")}
    return Episode(row, trajectory.prompt, turns, facts, {}, trajectory.error)


def token_texts(ids: list[int], decode: Decode) -> list[str]:
    """The text of each token, as long as `ids`; parts of one character have "", the last of them all.
    Example: [64, 161, 249, 121] -> ["a", "", "", "国"]. (The library's DecodeStream raises on some bytes of Llama 2.)
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
    found: Any = min(run.glob("*/[!.]*/tokenizer.json"), default=None)
    try:
        if found is None:
            model = load_config(str(run / "config.yaml"), []).trainer.policy.model.path
            local = Path(model, "tokenizer.json")
            found = local if local.is_file() else try_to_load_from_cache(model, "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(found))
    except Exception:  # another version's settings, no repository, a torn file
        notes.append("no tokenizer of this run is here, so tokens are not shown one by one")
        return None
    # Behind another token: some tokenizers drop the space at the beginning of a text.
    before = tokenizer.encode("a", add_special_tokens=False).ids
    skip = len(tokenizer.decode(before, skip_special_tokens=False))
    decode = lru_cache(2**16)(lambda *ids: tokenizer.decode([*before, *ids], skip_special_tokens=False)[skip:])
    return lambda ids: decode(*ids) if len(ids) <= 4 else decode.__wrapped__(*ids)
