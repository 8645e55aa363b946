"""From attempts to verdicts and results: nothing is sampled here, and verdicts of the same grader are kept."""

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_eval import benchmarks, judge, metrics, prompts
from skyrl_eval.benchmarks.common import Benchmark, Context, verdict
from skyrl_eval.data import Data
from skyrl_eval.sandbox import SandboxFailed
from skyrl_eval.solve import STOPS
from skyrl_eval.store import Run, answer_hash, read_json, read_records, versions, without_login
from skyrl_eval.types import Attempt, Item, Verdict
from skyrl_gym import answers
from skyrl_gym.envs.code_lite import rows
from skyrl_gym.openenv import in_thread
from skyrl_gym.tools import confine
from skyrl_trainer.errors import UserError

JUDGES_AT_ONCE = 16
LACKING = ("ungraded", "missing")
"""Statuses that need a caveat beside the accuracy."""


def grader_hash(bench: str, context: Context) -> str:
    """Of everything that decides a verdict: the code of graders and of the sandbox, the prompts, the judge."""
    benchmark, here = benchmarks.find(bench), Path(__file__).parent
    kinds: list[Any] = [kind for kind in type(benchmark).__mro__ if issubclass(kind, Benchmark)]
    code = ("judge.py", "sandbox.py", "swe.py", "swe_guard.py", "swe_pytest.sh", "swe_steps/*")
    files = [Path(inspect.getfile(part)) for part in (*kinds, answers, rows, confine)]
    files += [files[-1].with_name("sandbox_policy.json"), *sorted(path for name in code for path in here.glob(name))]
    parts = [path.read_text(encoding="utf-8") for path in files] + [prompts.text(name) for name in benchmark.prompts]
    parts.append(context.judge.model if context.judge else context.executor)
    parts.append(f"lenient {context.lenient}")
    parts += [f"{name} {found}" for name, found in versions().items() if name in ("math-verify", "swebench")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def check_judge(benchmark: Benchmark, item: Item, context: Context) -> None:
    """Asks the judge about an answer that gives none, before a model is paid. UserError where it is no use."""
    if benchmark.judge and context.judge:
        attempt = Attempt(item.bench, item.item_id, 0, "I do not know.")
        context.judge.patience = judge.FIRST
        found = _graded(benchmark, context, item, attempt)
        context.judge.patience = judge.PATIENCE
        if found.score is None:
            raise UserError(f"{found.error} Nothing was asked of the model yet.")


def grade_run(run: Run, bench: str, context: Context) -> list[Verdict]:
    """Grades what is not graded yet, and returns the verdicts of the run's items."""
    benchmark, grader = benchmarks.find(bench), grader_hash(bench, context)
    items = {item.item_id: item for item in run.items}
    attempts = [each for each in run.attempts.values() if each.item_id in items]
    kept = {key: old.attempt for key, old in run.verdicts.items() if old.grader == grader and old.status != "ungraded"}
    todo = [each for each in attempts if kept.get(each.key) != answer_hash(each)]
    for result in grade_all(benchmark, [items[each.item_id] for each in todo], todo, context):
        result.grader, result.attempt = grader, answer_hash(run.attempts[result.key])
        old = run.verdicts.get(result.key)
        if old and (old.status, old.grader) == ("ungraded", grader):  # its judge was paid, too
            for name in judge.TOKENS:
                counts = getattr(old, name), getattr(result, name)
                setattr(result, name, None if None in counts else sum(counts))
        if old != result:
            run.add(result)
    return [run.verdicts[each.key] for each in attempts]


def grade_all(
    benchmark: Benchmark, items: Sequence[Item], attempts: Sequence[Attempt], context: Context
) -> Iterator[Verdict]:
    """Of attempts at items, as they come, without their hashes."""
    graded = partial(_graded, benchmark, context)
    if not (benchmark.judge or benchmark.executors):
        yield from map(graded, items, attempts)  # in this thread: math-verify's limits are signals
        return
    if context.judge:
        context.judge.failures = 0
    running, at_once = set[Future[Verdict]](), JUDGES_AT_ONCE if benchmark.judge else len(os.sched_getaffinity(0))
    for pair in zip(items, attempts, strict=True):
        if len(running) == at_once:
            over, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in over)
        running.add(in_thread(partial(graded, *pair)))  # which nobody waits for after Ctrl-C
    yield from (each.result() for each in as_completed(running))


def results(run: Run, bench: str, samples: int, context: Context, prices: metrics.Prices, model: str) -> dict[str, Any]:
    """What results.json says of a benchmark."""
    benchmark = benchmarks.find(bench)
    keys = sorted({item.key(sample) for item in run.items for sample in range(samples)})
    verdicts = [run.verdicts.get(key) or Verdict(*key, None, "missing") for key in keys]
    judge = context.judge.model if context.judge and benchmark.judge else None
    notes = list(benchmark.notes)
    if judge and judge != benchmark.judge:
        notes.append(f"Judged by {judge}, not by the official {benchmark.judge}: not comparable with published ones.")
    if prices and not {model, judge} & prices.keys():
        notes.append(f"--prices has no {model}, but {', '.join(prices)}.")
    if judge and judge == model:
        notes.append("The model judged itself: not comparable with published figures.")
    if context.lenient:
        notes.append("Answers were read with --lenient, not as by the official parser.")
    priced = prices.get(model), prices.get(judge or "")
    common = metrics.summarise(run.items, samples, run.tries, verdicts, *priced)
    odd = common["stops"].keys() - STOPS.values()
    notes += [f"{common['stops'][name]} tries ended in {name.replace('_', ' ')}." for name in sorted(odd)]
    if common["uncounted"]:
        notes.append(f"The endpoint did not tell the tokens of {common['uncounted']} tries.")
    who = {"bench": bench, "grader": grader_hash(bench, context), "judge": judge}
    who |= {"judge_url": without_login(context.judge.base_url) if context.judge else None}
    counts = common["counts"]
    lacking = " and ".join(f"{counts[name]} {name}" for name in LACKING if counts[name])
    caveats = [f"of {len(verdicts)} tries {lacking}, counted as not correct"] if lacking else []
    unmade = counts["missing"] or common["stops"].get("error")
    if unmade and (reached := metrics.limit_reached(run.facts.get("limits"), run.tries)):
        caveats.append(reached)
    if unreadable := run.facts.get("unreadable"):
        caveats.append(f"{unreadable} rows of the data cannot be read and are left out")
    return {**who, **common, "caveat": ", ".join(caveats), "own": benchmark.summary(verdicts), "notes": notes}


def configuration(bench: str, data: Data, **settings: Any) -> dict[str, Any]:
    """A run's identity: benchmark, data, prompts, and what else decides the attempts."""
    hashes = {name: prompts.digest(name) for name in benchmarks.find(bench).prompts}
    found = {"bench": bench, "source": data.source, "revision": data.revision, "data_sha256": data.sha256}
    return found | {"prompts": hashes} | settings


def item_scores(folder: Path, results: Mapping[str, Any]) -> dict[str, float]:
    """The mean score of every item that its results are of, for `metrics.compare`; a try without one counts as 0."""
    scores = {(bench, item_id): 0.0 for bench, item_id in read_json(folder, "manifest.json")["ids"]}
    found = [one for one in read_records(folder, Verdict).values() if one.key[:2] in scores]
    verdicts = [one for one in found if one.sample < results["samples"] and one.grader == results["grader"]]
    if not verdicts or len(scores) != results["items"]:
        raise UserError(f"{folder} has other verdicts or items than its results: grade the run first.")
    for one in verdicts:
        scores[one.key[:2]] += one.score or 0.0
    return {":".join(key): total / results["samples"] for key, total in scores.items()}


def _graded(benchmark: Benchmark, context: Context, item: Item, attempt: Attempt) -> Verdict:
    reason = f"The attempt failed: {attempt.error}" if attempt.stop == "error" else ""
    if not reason:
        try:
            if not isinstance(found := benchmark.grade(item, attempt, context), Verdict):
                raise TypeError(f"it gave {found!r:.80}, and should give a Verdict")
            return found
        except judge.JudgeFailed as error:
            return verdict(item, attempt, None, "", error=without_login(str(error)), **error.tokens)
        except SandboxFailed as error:
            reason = str(error)
        except Exception as error:  # one odd answer must not end the grading of all others; it is counted
            if isinstance(error, UserError) and isinstance(error.__cause__, OSError):  # a full disk
                raise
            reason = f"The grader failed: {type(error).__name__}: {error}"
            print(f"{item.bench} {item.item_id}: {reason}", file=sys.stderr)
    return verdict(item, attempt, None, "", error=reason)
