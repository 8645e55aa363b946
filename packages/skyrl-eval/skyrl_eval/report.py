"""report.html of an evaluated run, which shows no item and can be passed on, and trajectories.html, which does."""

from pathlib import Path
from typing import Any

import numpy as np

from skyrl_eval import grade, metrics
from skyrl_eval.metrics import COUNTERS, Price
from skyrl_eval.store import read_json, read_records
from skyrl_eval.types import Attempt, Verdict
from skyrl_trainer.errors import UserError
from skyrl_trainer.report import viewer
from skyrl_trainer.report.page import asset, lean, write_page

PAGE = "report.html"
TRAJECTORIES = viewer.PAGE
MAX_ATTEMPTS, MAX_BYTES = 20_000, 50_000_000
SHORT, MAX_PARTS = 500, 400  # characters of a text, and parts of a list, on the page


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Writes both pages of a graded run, compared with another one if given; returns the path of the first."""
    manifest, results = (read_json(folder, name) for name in ("manifest.json", "results.json"))
    chosen = {(*each, number) for each in manifest["ids"] for number in range(results["samples"])}
    attempts = [one for key, one in read_records(folder, Attempt).items() if key in chosen]
    data = {name: manifest[name] for name in ("config", "facts", "versions")}
    columns = {name: metrics.values_of(attempts, name) for name in COUNTERS}
    marks = (0.5, 0.95, 1.0)  # median, 95th percentile and maximum
    spread = {name: np.quantile(each, marks, method="inverted_cdf").tolist() for name, each in columns.items() if each}
    compared = comparison(against, folder) if against else None
    shown = {"page": TRAJECTORIES, "about": view(folder, folder / TRAJECTORIES)} if attempts else None
    data |= {"results": results, "spread": spread, "comparison": compared, "trajectories": shown}
    what = results.get("title") or f"{results['bench']}, {results['items']} items"
    title = f"{what}: {results.get('model', '')}"
    script = asset("charts.js") + asset("report.js", __package__)
    write_page(folder / PAGE, title, lean(data, SHORT, MAX_PARTS), asset("report.css"), script)
    return folder / PAGE


def view(folder: Path, out: Path, steps: list[int] | None = None) -> str:
    if steps:
        raise UserError(f"{folder} is an evaluation, which has no steps: leave out --step.")
    attempts, verdicts = read_records(folder, Attempt), read_records(folder, Verdict)
    price = read_json(folder, "results.json").get("price") if (folder / "results.json").exists() else None
    verdicts |= {key: Verdict(*key, score=None, status="missing") for key in attempts.keys() - verdicts.keys()}
    episodes = (from_attempt(attempt, verdicts[key], price) for key, attempt in attempts.items())
    notes = ["it holds the benchmark's questions: keep to the terms of its data"]
    return viewer.write_episodes(out, folder, episodes, len(attempts), notes, (MAX_ATTEMPTS, MAX_BYTES))


def from_attempt(attempt: Attempt, verdict: Verdict, price: Price | None) -> viewer.Episode:
    prompt, turns = list[dict[str, str]](), list[dict[str, Any]]()
    for message in attempt.messages:
        if message["role"] == "assistant":
            turns.append({"action": message["content"], "observation": ""})
        elif turns:
            turns[-1]["observation"] += message["content"]
        else:
            prompt.append(message)
    tokens = (attempt.prompt_tokens, attempt.completion_tokens, attempt.cached_tokens)
    facts = {name: getattr(attempt, name) for name in (*COUNTERS[1:4], "cached_tokens", "seconds")}
    facts |= {"dollars": metrics.cost(*tokens, price), "answer": verdict.answer, "confidence": verdict.confidence}
    judged = verdict.judge_prompt_tokens or 0, verdict.judge_completion_tokens or 0
    facts["judge's tokens"] = sum(judged) or None
    texts = {"the grader's detail": verdict.detail, "fetched": "\n".join(attempt.urls)}
    if not turns or turns[-1]["action"] != attempt.answer:
        texts = {"submitted": attempt.answer, **texts}
    row: list[Any] = [f"{attempt.item_id}/{attempt.sample}", None, attempt.item_id, attempt.bench, None]
    row += [verdict.score, verdict.status, attempt.stop, attempt.steps, attempt.completion_tokens]
    texts = {name: text for name, text in texts.items() if text}
    return viewer.Episode(row, prompt, turns, facts, texts, verdict.error or attempt.error)


def comparison(a: Path, b: Path) -> dict[str, Any]:
    first, second = (read_json(folder, "manifest.json")["config"] for folder in (a, b))
    for name in ("bench", "data_sha256"):
        if first.get(name) != second.get(name):
            raise UserError(f"{a} and {b} differ in {name} ({first.get(name)!r}, {second.get(name)!r}): no comparison.")
    if a.resolve() == b.resolve():
        raise UserError(f"{a} would be compared with itself: name two runs.")
    results = {folder: read_json(folder, "results.json") for folder in (a, b)}
    found = metrics.compare(*(grade.item_scores(folder, one) for folder, one in results.items()))
    if not found["items"]:
        raise UserError(f"{a} and {b} have no item in common.")
    changed = {name: [first.get(name), second.get(name)] for name in sorted(first.keys() | second.keys())}
    changed |= {name: [one.get(name) for one in results.values()] for name in ("grader", "judge", "samples")}
    changed = {name: both for name, both in changed.items() if both[0] != both[1]}
    if any(one["samples"] != 1 for one in results.values()):
        found["p"] = None  # means of tries are not the yes and no that McNemar's test counts
    caveats = [f"{folder}: {one['caveat']}" for folder, one in results.items() if one.get("caveat")]
    return {"a": str(a), "b": str(b), "changed": changed, "caveats": caveats, **found}


def compare(a: Path, b: Path) -> str:
    """The comparison in words; b's page gets it too."""
    found = comparison(a, b)
    write_report(b, against=a)
    interval, p = found["interval"], found["p"]
    span = f" (95 %: {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})" if interval else ""
    exact = "" if p is None else f", McNemar's exact p = {p:.3g}"
    lines = [
        f"{b} against {a}, {found['items']} items that both have:",
        f"  difference {100 * found['difference']:+.1f} points{span}",
        f"  better on {found['better']}, worse on {found['worse']} items{exact}",
        *(f"  {caveat}" for caveat in found["caveats"]),
        *(f"  {name}: {x!r} -> {y!r}" for name, (x, y) in found["changed"].items()),
    ]
    return "\n".join([*lines, f"  page: {b / PAGE}"])
