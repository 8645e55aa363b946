"""Judging, grading and the run folder: nothing lost, nothing twice, nothing silently wrong, the same every time."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import skyrl_gym.answers
from skyrl_eval import benchmarks, grade, metrics, report
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.data import Data
from skyrl_eval.judge import Judge, JudgeFailed, parse_match
from skyrl_eval.store import Run, write_json
from skyrl_eval.types import Attempt, Item, Verdict
from skyrl_gym.envs.code_lite import rows
from skyrl_gym.tools import confine
from skyrl_trainer.errors import UserError
from tests.eval.made_up import attempt, items
from tests.eval.scripted_server import match, said, served

CONFIG = {"bench": "hle", "model": "made-up", "seed": 0}


def hle(n: int) -> list[Item]:
    rows = [
        {"id": f"q{i}", "question": f"What is {i}?", "answer": str(i), "answer_type": "exactMatch"} for i in range(n)
    ]
    return items("hle", rows)


def say(request: dict[str, Any]) -> tuple[int, str]:
    """A judge that compares what follows Answer: with the correct answer."""
    prompt = request["messages"][0]["content"]
    given, right = re.findall(r"Answer: (\d+)", prompt)[0], re.findall(r"\[correct_answer\]: (\d+)", prompt)[0]
    return 200, match("yes" if given == right else "no", int(given))


def test_a_judge_that_cannot_be_read_is_asked_three_times_and_never_remembered(tmp_path: Path) -> None:
    with served(lambda request: (200, "It depends.")) as (url, requests):
        judge = Judge(url, "judge", tmp_path / "judge")
        with pytest.raises(JudgeFailed, match=r"cannot be read: 'It depends\.'"):
            judge.ask("?", parse_match)
        assert len(requests) == 3
    assert not (tmp_path / "judge").exists()


def test_a_judge_without_structured_output_is_asked_without(tmp_path: Path) -> None:
    def reply(request: dict[str, Any]) -> tuple[int, str]:
        return (400, "no response_format here") if "response_format" in request else (200, "correct: yes")

    item = hle(1)[0]
    with served(reply) as (url, requests):
        context = Context(Judge(url, "judge", tmp_path / "judge"))
        assert benchmarks.find("hle").grade(item, attempt(item, "Answer: 0"), context).score == 1
        assert len(requests) == 2


def test_a_judge_thinks_as_long_as_it_likes_where_its_script_sets_no_limit() -> None:
    with served(lambda request: (400, "no")) as (url, requests):
        for bench in ("hle", "deepsearchqa"):
            item = items(bench)[0]
            with pytest.raises(JudgeFailed, match="HTTP 400"):
                benchmarks.find(bench).grade(item, attempt(item, "Answer: 0"), Context(Judge(url, "judge")))
    assert [request.get("max_completion_tokens") for request in requests] == [4096, None, None]


def test_replies_are_kept_by_model_and_prompt_and_a_damaged_one_is_asked_for_again(tmp_path: Path) -> None:
    cache = tmp_path / "judge"
    with served(lambda request: (200, match("yes"))) as (url, requests):
        assert Judge(url, "judge", cache).ask("?", parse_match) == Judge(url, "judge", cache).ask("?", parse_match)
        assert len(requests) == 1
        Judge(url, "another", cache).ask("?", parse_match)
        Judge(url, "judge", cache).ask("??", parse_match)
        assert len(requests) == 3
    kept = sorted(cache.iterdir())
    for file in kept:
        file.write_bytes(file.read_bytes()[:-9])
    with served(lambda request: (200, match("no"))) as (url, requests):
        Judge(url, "judge", cache).ask("???", parse_match)
        assert Judge(url, "judge", cache).ask("?", parse_match)[0].correct == "no" and len(requests) == 2
    assert Judge("http://127.0.0.1:9/v1", "judge", cache).ask("???", parse_match)[0].correct == "no"
    assert Judge("http://127.0.0.1:9/v1", "judge", cache).ask("?", parse_match)[0].correct == "no"
    assert len(kept) == 3 and len(list(cache.iterdir())) == 4, "nothing else is left there"


def test_grading_again_asks_nobody_and_gives_the_same_files(tmp_path: Path) -> None:
    tasks = hle(24)
    files = []
    with served(say) as (url, requests):
        for name, most in (("one", 48), ("two", 0)):
            requests.clear()
            with Run(tmp_path / name, CONFIG, {}, tasks) as run:
                for sample in range(2):
                    for i, item in enumerate(tasks):
                        run.add(attempt(item, f"Answer: {i if (i + sample) % 3 else i + 1}", sample, seconds=1.5))
                context = Context(Judge(url, "judge", tmp_path / "judge"))
                for _ in range(2):
                    grade.grade_run(run, "hle", context)
                    write_json(run.folder / "results.json", grade.results(run, "hle", 2, context, {}, "made-up"))
                verdicts, results = ((tmp_path / name / f).read_bytes() for f in ("verdicts.jsonl", "results.json"))
                files.append([b"\n".join(sorted(verdicts.splitlines())), results])  # written as the judge answers
            assert len(requests) <= most
    assert files[0] == files[1]
    keys = [Verdict(**json.loads(line)).key for line in files[0][0].splitlines()]
    assert sorted(keys) == sorted(("hle", f"q{i}", s) for s in range(2) for i in range(24))
    results = json.loads(files[0][1])
    assert results["accuracy"] == pytest.approx(32 / 48)
    assert results["own"]["calibration"]["official"] is None
    assert "Judged by judge, not by the official o3-mini" in " ".join(results["notes"])


def test_tries_of_one_answer_have_one_verdict_of_a_judge_that_wavers(tmp_path: Path) -> None:
    tasks, waver = hle(1), iter(["yes", "no"] * 8)
    with served(lambda request: (time.sleep(0.2), (200, match(next(waver))))[1]) as (url, requests):
        context = Context(Judge(url, "judge", tmp_path / "judge"))
        tries = [attempt(tasks[0], "Answer: 0", sample) for sample in range(8)]
        found = [*grade.grade_all(benchmarks.find("hle"), tasks * 8, tries, context)]
    assert [each.score for each in found] == [1] * 8 and len(requests) == 1


def test_another_judge_or_another_answer_is_graded_anew(tmp_path: Path) -> None:
    (item,) = hle(1)
    with served(say) as (url, requests), Run(tmp_path / "run", CONFIG, {}, [item]) as run:
        run.add(attempt(item, "Answer: 0"))
        contexts = [Context(Judge(url, name, tmp_path / "judge")) for name in ("a", "a", "b")]
        graders = [grade.grade_run(run, "hle", context)[0].grader for context in contexts]
        assert graders[0] == graders[1] != graders[2] and len(requests) == 2


def test_a_dead_judge_leaves_ungraded_and_a_later_one_grades_what_is_left(tmp_path: Path) -> None:
    tasks = hle(3)
    with Run(tmp_path / "run", CONFIG, {}, tasks) as run:
        for item in tasks[:2]:
            run.add(attempt(item, "Answer: 0"))
        run.add(attempt(tasks[2], "", stop="error", error="The engine died."))
        with served(lambda request: (404, "no such model")) as (url, _):
            dead = Context(Judge(url, "judge", tmp_path / "judge"))
            verdicts = grade.grade_run(run, "hle", dead)
        assert [verdict.status for verdict in verdicts] == ["ungraded"] * 3
        assert "no such model" in str(verdicts[0].error) and "The engine died." in str(verdicts[2].error)
        results = grade.results(run, "hle", 1, dead, {}, "made-up")
        assert (results["accuracy"], results["accuracy_graded"], results["counts"]["ungraded"]) == (0, None, 3)
        with served(say) as (url, _):
            alive = Context(Judge(url, "judge", tmp_path / "judge"))
            assert [v.status for v in grade.grade_run(run, "hle", alive)] == ["correct", "wrong", "ungraded"]


def test_the_judges_tokens_are_those_of_all_gradings_by_it(tmp_path: Path) -> None:
    (item,) = hle(1)
    prices: Any = {name: {"prompt": 1.0, "completion": 10.0} for name in ("judge", "another", "third")}
    replies = iter([*["It depends."] * 6, match("yes")])

    def spent(run: Run, context: Context) -> tuple[list[int], float | None]:
        grade.grade_run(run, "hle", context)
        found = grade.results(run, "hle", 1, context, prices, "m")
        return found["judge_tokens"], found["judge_cost"]

    with (
        served(lambda request: (200, next(replies))) as (url, requests),
        served(lambda request: said("It depends.", usage=None)) as (silent, _),
        Run(tmp_path / "run", CONFIG, {}, [item]) as run,
    ):
        run.add(attempt(item, "Answer: 0"))
        context = Context(Judge(url, "judge"))
        for asked in (3, 6, 7, 7):  # unreadable, unreadable, readable, graded already
            expected = [11 * asked, 5 * asked], pytest.approx(61e-6 * asked)
            assert spent(run, context) == expected and len(requests) == asked
        assert run.verdicts[item.key(0)].status == "correct"
        for address in (silent, url):
            replies = iter([match("yes")])
            assert spent(run, Context(Judge(address, "another")))[1] is None, "what was not told stays unknown"
        assert run.verdicts[item.key(0)].status == "correct"
        replies = iter([match("yes")])
        assert spent(run, Context(Judge(url, "third")))[0] == [11, 5], "another judge has prices of its own"


def test_a_grader_is_all_code_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox's own module, the kernel's numbers beside it, and what a benchmark inherits."""
    policy = Path(confine.__file__).with_name("sandbox_policy.json")
    for place in (Path(confine.__file__), policy):
        (tmp_path / place.name).write_bytes(place.read_bytes())
    before = grade.grader_hash("swe-verified", Context())
    monkeypatch.setattr(confine, "__file__", str(tmp_path / "confine.py"))
    assert grade.grader_hash("swe-verified", Context()) == before
    for name in ("confine.py", policy.name):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
        assert before != (before := grade.grader_hash("swe-verified", Context()))


@pytest.mark.parametrize("module", [skyrl_gym.answers, rows], ids=["answers", "rows"])
def test_a_grader_is_also_what_skyrl_gym_compares_with(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MATH, `verified`; of LiveCodeBench the prelude, the private tests and the comparison of outputs."""
    before = grade.grader_hash("math", Context()), grade.grader_hash("livecodebench", Context())
    changed = tmp_path / "changed.py"
    changed.write_text(Path(str(module.__file__)).read_text() + "\n")
    monkeypatch.setattr(module, "__file__", str(changed))
    after = grade.grader_hash("math", Context()), grade.grader_hash("livecodebench", Context())
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_one_attempt_that_breaks_a_grader_does_not_end_the_others(tmp_path: Path) -> None:
    good, bad = items("gsm8k")
    with Run(tmp_path, CONFIG, {}, [good, bad]) as run:
        broken = attempt(bad, "x")
        broken.answer = None  # type: ignore[assignment]
        run.add(broken)
        run.add(attempt(good, "#### 999"))
        verdicts = grade.grade_run(run, "gsm8k", Context())
    assert [verdict.status for verdict in verdicts] == ["ungraded", "correct"]
    assert "The grader failed" in str(verdicts[0].error)


def test_a_grader_that_gives_a_number_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = items("gsm8k")[:1]
    monkeypatch.setattr(type(benchmarks.find("gsm8k")), "grade", lambda *_: 1.0)
    with Run(tmp_path, CONFIG, {}, [one]) as run:
        run.add(attempt(one, "#### 999"))
        (found,) = grade.grade_run(run, "gsm8k", Context())
    assert "The grader failed: TypeError: it gave 1.0, and should give a Verdict" in str(found.error)


def test_what_grading_needs_is_asked_for_before_anything_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"officially o3-mini-2025-01-31.*--judge-url and --judge-model"):
        benchmarks.find("hle").check(Context())
    with pytest.raises(UserError, match="--executor magic: swe-verified takes docker or podman or namespace"):
        benchmarks.find("swe-verified").check(Context(executor="magic"))
    benchmarks.find("gsm8k").check(Context())
    benchmarks.find("livecodebench").check(Context())
    with pytest.raises(UserError, match="--executor docker: livecodebench takes namespace"):
        benchmarks.find("livecodebench").check(Context(executor="docker"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"graded by the package swebench: pip install 'skyrl-trainer\[swebench\]'"):
        benchmarks.find("swe-verified").check(Context())


def test_a_run_is_refused_when_its_configuration_changed_and_extended_by_more_items(tmp_path: Path) -> None:
    tasks = hle(5)
    with Run(tmp_path, CONFIG, {"note": 1}, tasks[:2]) as run:
        run.add(attempt(tasks[0], "Answer: 0"))
    with pytest.raises(UserError, match=r"cannot be written .*: choose another --out"):
        Run(tmp_path / "manifest.json" / "run", CONFIG, {}, tasks)
    with pytest.raises(UserError, match="begun with model='made-up', not with 'other'"):
        Run(tmp_path, CONFIG | {"model": "other"}, {}, tasks)
    with Run(tmp_path, CONFIG, {"note": 2}, tasks) as run:
        left = [(tasks[i], sample) for sample in range(2) for i in range(5) if (i, sample) != (0, 0)]
        assert run.missing(2) == left
        with pytest.raises(UserError, match="Another process works in"):
            Run(tmp_path, CONFIG, {}, tasks)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["config"] == CONFIG and len(manifest["ids"]) == 5 and "python" in manifest["versions"]


def test_the_same_data_may_lie_elsewhere_and_nothing_else_may_change(tmp_path: Path) -> None:
    config = CONFIG | {"data_sha256": "same", "source": "a/b", "revision": "1", "prompts": {"hle_system": "1"}}
    for moved in ({}, {"source": "here.jsonl"}, {"source": "here.jsonl", "revision": "2"}):
        with Run(tmp_path, config | moved, {}, hle(1)):
            pass
    for name, value in (("prompts", {"hle_system": "2"}), ("seed", 1), ("data_sha256", "other")):
        with pytest.raises(UserError, match=f"begun with {name}="):
            Run(tmp_path, config | {name: value}, {}, hle(1))


def test_two_runs_are_compared_by_the_items_and_verdicts_of_their_results(tmp_path: Path) -> None:
    tasks = items("gsm8k")
    for name, answers in (("a", ("#### 1", "#### 1200")), ("b", ("#### 999", "#### 1200"))):
        with Run(tmp_path / name, {}, {}, tasks) as run:
            for item, answer in zip(tasks, answers, strict=True):
                run.add(attempt(item, answer))
            grade.grade_run(run, "gsm8k", Context())
    results = {"items": 2, "samples": 1, "grader": grade.grader_hash("gsm8k", Context())}
    found = metrics.compare(*(grade.item_scores(tmp_path / name, results) for name in "ab"))
    assert (found["items"], found["difference"], found["better"]) == (2, 0.5, 1)
    with pytest.raises(UserError, match="grade the run first"):
        grade.item_scores(tmp_path / "a", results | {"grader": "another"})
    with Run(tmp_path / "a", {}, {}, tasks[:1]):  # goes on with fewer items: the others' verdicts are of before
        pass
    with pytest.raises(UserError, match="grade the run first"):
        grade.item_scores(tmp_path / "a", results)
    one = results | {"items": 1}
    assert list(grade.item_scores(tmp_path / "a", one)) == [f"gsm8k:{tasks[0].item_id}"]
    with pytest.raises(UserError, match="would be compared with itself: name two runs"):
        report.comparison(tmp_path / "a", tmp_path / "b" / ".." / "a")


def test_tries_beyond_those_of_the_results_are_in_no_comparison(tmp_path: Path) -> None:
    [item] = tasks = items("gsm8k")[:1]
    with Run(tmp_path, {}, {}, tasks) as run:
        for sample, answer in enumerate(("#### 1", f"#### {item.gold}")):
            run.add(attempt(item, answer, sample))
        grade.grade_run(run, "gsm8k", Context())
    results = {"items": 1, "grader": grade.grader_hash("gsm8k", Context())}
    found = [[*grade.item_scores(tmp_path, results | {"samples": samples}).values()] for samples in (1, 2)]
    assert found == [[0.0], [0.5]]


def test_a_benchmarks_own_figures_and_a_comparison_count_what_is_missing_as_its_accuracy_does(tmp_path: Path) -> None:
    tasks = items("gsm8k")
    with Run(tmp_path, {}, {}, tasks) as run:
        run.add(attempt(tasks[0], "#### 999"))
        grade.grade_run(run, "gsm8k", Context())
        found = grade.results(run, "gsm8k", 2, Context(), {}, "m")
    assert found["counts"]["missing"] == 3 and found["accuracy"] == found["own"]["strict"] == 0.25
    scores = grade.item_scores(tmp_path, found)
    assert scores == {f"gsm8k:{tasks[0].item_id}": 0.5, f"gsm8k:{tasks[1].item_id}": 0.0}
    assert "3 missing, counted as not correct" in found["caveat"]


@pytest.mark.parametrize("name", [*benchmarks.names("agent"), *benchmarks.names("code")])
def test_every_benchmark_has_figures_of_tries_that_are_missing(name: str) -> None:
    missing = Verdict(name, "q1", 0, score=None, status="missing")
    own = benchmarks.find(name).summary([missing])
    assert all(not value for value in own.values() if isinstance(value, float))


def test_verdicts_are_written_as_they_come(tmp_path: Path) -> None:
    """A slow one at the beginning keeps none back; and one that is left at Ctrl-C does not hold up the end."""
    tasks, go_on = items("gsm8k"), threading.Event()

    class Slow(type(benchmarks.find("gsm8k"))):  # type: ignore[misc]
        executors = ("namespace",)

        def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
            assert item != tasks[0] or go_on.wait(30)
            return super().grade(item, attempt, context)  # type: ignore[no-any-return]

    found = grade.grade_all(Slow(), tasks, [attempt(item, "#### 1") for item in tasks], Context())
    assert next(found).item_id == tasks[1].item_id
    go_on.set()
    assert next(found).item_id == tasks[0].item_id


def test_a_judges_address_is_told_without_its_login() -> None:
    class Refused(type(benchmarks.find("gsm8k"))):  # type: ignore[misc]
        def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
            raise JudgeFailed("http://me:secret@host:1/v1 answered HTTP 400")

    (task, *_) = items("gsm8k")
    [found] = grade.grade_all(Refused(), [task], [attempt(task, "1")], Context())
    assert found.error == "http://host:1/v1 answered HTTP 400" and found.score is None


def test_tokens_of_tries_that_failed_and_were_made_again_count_for_the_limit_and_the_bill(tmp_path: Path) -> None:
    (task, *_) = items("gsm8k")
    failed = replace(attempt(task, ""), stop="error", prompt_tokens=400, completion_tokens=200)
    for _ in range(2):
        with Run(tmp_path, {}, {}, [task]) as run:
            run.add(failed)
    with Run(tmp_path, {}, {}, [task]) as run:
        run.add(failed)
        limits = {"tokens": 1700, "dollars": None, "price": None}
        assert "limit of 1700 tokens" in metrics.limit_reached(limits, run.tries)
        run.facts["limits"] = limits
        stopped = grade.results(run, "gsm8k", 1, Context(), {"other": {"prompt": 1.0, "completion": 1.0}}, "m")
        assert "limit of 1700 tokens" in stopped["caveat"] and "--prices has no m, but other." in stopped["notes"]
        run.add(replace(attempt(task, "#### 1"), prompt_tokens=100, completion_tokens=10))
    with Run(tmp_path, {}, {}, [task]) as run:
        prices = {"m": {"prompt": 1.0, "completion": 10.0}}
        found = grade.results(run, "gsm8k", 1, Context(), prices, "m")
    assert found["stops"] == {"done": 1} and found["means"]["prompt_tokens"] == 100
    assert found["totals"]["prompt_tokens"] == 1300
    assert found["cost"] == pytest.approx((1300 + 10 * 610) / 1e6)


def test_a_runs_identity_holds_data_and_prompts() -> None:
    read = Data(items("gsm8k"), "made/up", "abc", "123", [])
    config = grade.configuration("gsm8k", read, model="m")
    assert config["data_sha256"] == "123" and len(config["prompts"]["gsm8k_question"]) == 64 and config["model"] == "m"


def test_an_error_is_tried_again_and_a_good_attempt_is_final(tmp_path: Path) -> None:
    (item,) = hle(1)
    with Run(tmp_path, CONFIG, {}, [item]) as run:
        run.add(attempt(item, "", stop="error", error="down"))
        assert run.missing(1) == [(item, 0)]
        run.add(attempt(item, "Answer: 0"))
        assert run.missing(1) == []
        with pytest.raises(ValueError, match="already"):
            run.add(attempt(item, "Answer: 1"))
        run.add(attempt(item, "caf\udce9 日本", 1))  # a patch of a file that is not in UTF-8
    with Run(tmp_path, CONFIG, {}, [item]) as run:
        assert [run.attempts["hle", "q0", i].answer for i in range(2)] == ["Answer: 0", "caf\udce9 日本"]
    (tmp_path / "attempts.jsonl").write_text('{"who": "knows"}\n')
    with pytest.raises(UserError, match="not of this version"):
        Run(tmp_path, CONFIG, {}, [item])


WRITER = """
import sys, pathlib
from skyrl_eval.store import Run
from skyrl_eval.types import Attempt, Item
with Run(pathlib.Path(sys.argv[1]), {}, {}, [Item("hle", f"q{i}", "?") for i in range(1000)]) as run:
    print("begun", flush=True)
    for item, sample in run.missing(2):
        run.add(Attempt(item.bench, item.item_id, sample, "x" * 5000))
        print(item.item_id, sample, flush=True)
print("done", flush=True)
"""


def test_kill_9_at_random_points_loses_no_recorded_attempt_and_records_none_twice(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    rng, said, deaths = random.Random(time.time_ns()), set(), 0
    while True:
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        if deaths < 3:
            time.sleep(rng.uniform(0.0, 0.03))  # writing all of it takes several times three of these
            process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")
        process.wait(60)
        deaths += 1
        said |= {line for line in lines[:-1] if line != "done"}
        if "done" in lines:
            break
        if deaths == 2:
            with (tmp_path / "attempts.jsonl").open("a") as file:
                file.write('{"bench": "hle", "item_id": "torn')
    written = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    keys = [f"{line['item_id']} {line['sample']}" for line in written]
    assert deaths > 3 and len(keys) == len(set(keys)) == 2000 and said <= set(keys)


def test_a_full_disk_ends_the_grading_before_every_judgement_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One odd answer does not."""
    full = UserError("cache cannot be written: No space left on device.")
    full.__cause__ = OSError(28, "No space left on device")
    (item,) = hle(1)
    late = ValueError("late")
    late.__cause__ = TimeoutError()
    for error, ends in ((full, True), (UserError("odd"), False), (late, False)):
        bench = SimpleNamespace(grade=lambda *_, error=error: (_ for _ in ()).throw(error))
        if ends:
            with pytest.raises(UserError, match="No space left"):
                grade._graded(bench, Context(), item, attempt(item, "1"))
        else:
            assert grade._graded(bench, Context(), item, attempt(item, "1")).status == "ungraded"
