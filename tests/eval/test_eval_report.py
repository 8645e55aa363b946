"""Both pages of an evaluation: what a reader sees, with texts that attack them; comparisons in words."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.viewer import Browser, find_browser
from skyrl_eval import grade, report
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.report import PAGE, TRAJECTORIES, compare, write_report
from skyrl_eval.store import Run, write_json
from skyrl_eval.types import Attempt, Verdict
from skyrl_trainer import cli
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.page import MAX_CHARACTERS
from tests.eval.made_up import items
from tests.trainer.report.test_viewer import index_of

NASTY = "</script><script>pwned=1</script><!-- <img src=x onerror=pwned=1>\u2028{{title}}{{data}} *"
MAX_PAGE = 300_000
HALF = "\ud83d"  # of a pair of surrogates: no UTF-8 has it


def made_run(
    folder: Path, n: int = 40, samples: int = 1, luck: float = 0.4, model: str = "made-up-7b", **config: Any
) -> Path:
    """A graded run on made-up questions of HLE's form: verdicts of every status, and figures that vary."""
    rows = [
        {
            "id": f"q{i}{NASTY if i == 0 else ''}",
            "question": f"SECRET question {i}?",
            "answer": "7",
            "answer_type": "exactMatch",
            "category": ["Chemistry", "Mathematics", "Glorpology" + NASTY][i % 3],
        }
        for i in range(n)
    ]
    tasks, rng = items("hle", rows), random.Random(n)
    config = {"bench": "hle", "model": model, "data_sha256": "ab12", "seed": 0, "tools": None, **config}
    context = Context()
    with Run(folder, config, {"items": n, "notes": ["2 items with images are left out"]}, tasks) as run:
        for i, item in enumerate(tasks[: n - 1]):
            for sample in range(samples):
                status = rng.choices(
                    ("correct", "wrong", "unparsed", "truncated", "ungraded"), (luck, 1 - luck, 0.1, 0.08, 0.05)
                )[0]
                answer = f"Answer: {i}{NASTY + HALF if i % 7 == 0 else ''}"
                said = [{"role": "user", "content": item.question}, {"role": "assistant", "content": answer}]
                tokens = {"prompt_tokens": rng.randint(90, 900), "completion_tokens": rng.randint(20, 4000)}
                run.add(
                    Attempt(
                        "hle",
                        item.item_id,
                        sample,
                        answer,
                        "length" if status == "truncated" else "done",
                        steps=rng.randint(1, 4),
                        tool_calls=2,
                        seconds=rng.random() * 30,
                        messages=said,
                        urls=["http://made.up/" + NASTY],
                        **tokens,
                    )
                )
                score = None if status == "ungraded" else float(status == "correct")
                error = "The judge is away. " + NASTY if score is None else None
                run.add(
                    Verdict(
                        "hle",
                        item.item_id,
                        sample,
                        score,
                        status,
                        str(i),
                        None if score is None else rng.random(),
                        {"flags": [NASTY]},
                        error=error,
                        grader=grade.grader_hash("hle", context),
                    )
                )
        results = grade.results(run, "hle", samples, context, {"made-up-7b": {"prompt": 0.4, "completion": 1.6}}, model)
        write_json(
            run.folder / "results.json",
            {"title": f"hle, {n} of 2158 items, text only, no tools", "model": model, **results},
        )
    return folder


def page_data(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    (inner,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return dict(json.loads(inner))


def test_the_page_is_small_has_no_question_and_cannot_be_broken_out_of(tmp_path: Path) -> None:
    page = write_report(made_run(tmp_path / "run", 60, model="made-up-7b" + NASTY))
    text = page.read_text(encoding="utf-8")
    assert page.name == PAGE and len(text.encode()) < MAX_PAGE
    assert "SECRET" not in text and "SECRET" in json.dumps(blocks(page.parent))
    assert "default-src 'none'" in text and "innerHTML" not in text and "document.write" not in text
    assert (
        text.count("<script") == 2 == text.count("</script>")
        and "<img" not in text
        and "http://" not in text.replace("http://www.w3.org", "")
    )
    assert "no tools" in re.findall("<title>(.*?)</title>", text, re.S)[0]
    data = page_data(page)
    assert data["results"] == json.loads((page.parent / "results.json").read_text())
    assert data["spread"]["tool_calls"] == [2, 2, 2]


def blocks(folder: Path) -> list[Any]:
    index, found, _ = index_of(folder / TRAJECTORIES)
    assert len(index["rows"]) == len(found) and all(len(row) == len(index["fields"]) for row in index["rows"])
    return found


def test_an_attempt_is_a_trajectory_with_its_verdict(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", 40, 2)
    write_report(folder)
    index, found, page = index_of(folder / TRAJECTORIES)
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    verdicts = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]
    assert index["notes"] == ["it holds the benchmark's questions: keep to the terms of its data"]
    assert index["rows"][3] == [
        "q1/1", None, "q1", "hle", None, verdicts[3]["score"], verdicts[3]["status"], attempts[3]["stop"],
        attempts[3]["steps"], attempts[3]["completion_tokens"],
    ]  # fmt: skip
    assert found[3]["prompt"] == attempts[3]["messages"][:1]
    assert [turn["action"] for turn in found[3]["turns"]] == [attempts[3]["answer"]]
    facts, spent = found[3]["facts"], attempts[3]["prompt_tokens"] * 0.4 + attempts[3]["completion_tokens"] * 1.6
    assert facts["dollars"] == pytest.approx(spent / 1e6) and facts["answer"] == "1"
    assert facts["confidence"] == verdicts[3]["confidence"] and facts["seconds"] == attempts[3]["seconds"]
    assert found[3]["texts"] == {"the grader's detail": {"flags": [NASTY]}, "fetched": "http://made.up/" + NASTY}
    ungraded = next(n for n, verdict in enumerate(verdicts) if verdict["status"] == "ungraded")
    assert found[ungraded]["error"] == "The judge is away. " + NASTY
    assert "img" not in page.tags and page.addresses == [] and page.tags.count("script") == 2 + len(found)


def test_turns_are_what_the_model_said_and_what_came_back() -> None:
    said = [("system", "s"), ("user", "q"), ("assistant", "call"), ("user", "result"), ("assistant", "7")]
    messages = [{"role": role, "content": content} for role, content in said]
    attempt = Attempt("swe", "i", 0, "diff --git", steps=2, messages=messages)
    made = report.from_attempt(attempt, Verdict("swe", "i", 0, 0.0, "wrong"), None)
    assert made.prompt == messages[:2] and made.texts == {"submitted": "diff --git"} and made.facts["dollars"] is None
    assert made.turns == [{"action": "call", "observation": "result"}, {"action": "7", "observation": ""}]


def test_view_shows_an_evaluation_that_is_not_graded_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path / "run", 5)
    for name in ("verdicts.jsonl", "results.json"):
        (folder / name).unlink()
    assert cli.main(["view", str(folder)]) == 0
    assert f"{folder / TRAJECTORIES}: 4 trajectories, 0.0 MB; it holds the benchmark's" in capsys.readouterr().out
    assert {row[6] for row in index_of(folder / TRAJECTORIES)[0]["rows"]} == {"missing"}
    assert cli.main(["view", str(folder), "--step", "3"]) == 2
    assert "is an evaluation, which has no steps: leave out --step." in capsys.readouterr().err


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_run(tmp_path / "run", 30)
    monkeypatch.setattr(report, "MAX_BYTES", 46_000)
    told = page_data(write_report(folder))["trajectories"]
    left_out = 29 - len(blocks(folder))
    assert 0 < left_out < 29 and f"; {left_out} more are left out (at most 20,000" in told["about"]
    assert 40_000 < (folder / TRAJECTORIES).stat().st_size < 46_000 and told["page"] == TRAJECTORIES
    monkeypatch.undo()
    first, *others = (folder / "attempts.jsonl").read_text().splitlines()
    long = json.loads(first)
    long["messages"][0]["content"] = "x" * (MAX_CHARACTERS + 5)
    (folder / "attempts.jsonl").write_text("\n".join([json.dumps(long), *others, ""]))
    write_report(folder)
    assert blocks(folder)[0]["prompt"][0]["content"].endswith("x… (5 characters more)")


def test_a_page_stays_small_whatever_the_run_has_in_it(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", 5, note="x" * 400_000, listed=["y" * 100] * 10_000)
    results = json.loads((folder / "results.json").read_text())
    results["by_category"] = {f"part {i}": {"items": 1, "accuracy": 0.0} for i in range(5000)}
    (folder / "results.json").write_text(json.dumps(results))
    assert len(write_report(folder).read_bytes()) < MAX_PAGE


def test_figures_per_attempt_are_of_the_selection_alone(tmp_path: Path) -> None:
    """A folder may hold more items and tries than its results are of."""
    folder = made_run(tmp_path / "run", 40, 3)
    manifest, results = (json.loads((folder / name).read_text()) for name in ("manifest.json", "results.json"))
    chosen = manifest["ids"][:5]
    write_json(folder / "manifest.json", manifest | {"ids": chosen})
    write_json(folder / "results.json", results | {"items": 5, "samples": 2})
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    taken = [one for one in attempts if [one["bench"], one["item_id"]] in chosen and one["sample"] < 2]
    spread = page_data(write_report(folder))["spread"]
    for name in ("seconds", "completion_tokens"):
        ordered = sorted(one[name] for one in taken)
        assert len(ordered) == 10 and spread[name] == [ordered[4], ordered[9], ordered[9]], name
    assert len(blocks(folder)) == len(attempts) > 10, "the other page shows all"


def test_two_runs_are_compared_in_words_and_on_the_page(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a", 60, luck=0.2), made_run(tmp_path / "b", 60, luck=0.8, model="better")
    said = compare(a, b)
    found = page_data(b / PAGE)["comparison"]
    assert re.search(r"difference \+\d+\.\d points \(95 %: ", said) and "model: 'made-up-7b' -> 'better'" in said
    assert found["items"] == 60 and found["difference"] > 0 and found["changed"]["model"] == ["made-up-7b", "better"]
    assert 0 < found["p"] < 0.05 and "McNemar" in said
    assert page_data(write_report(b))["comparison"] is None
    verdicts = [json.loads(line) for line in (b / "verdicts.jsonl").read_text().splitlines()]
    verdicts[0]["score"], fractions = 0.5, shutil.copytree(b, tmp_path / "fractions")
    (fractions / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in verdicts))
    assert "McNemar" not in compare(a, fractions) and page_data(fractions / PAGE)["comparison"]["p"] is None
    thrice = made_run(tmp_path / "thrice", 60, 3)
    assert "McNemar" not in compare(a, thrice) and page_data(thrice / PAGE)["comparison"]["p"] is None
    with pytest.raises(UserError, match="differ in data_sha256"):
        compare(a, made_run(tmp_path / "c", 5, data_sha256="other"))


@pytest.mark.parametrize("content", [None, "null", "[]", "7", "{}", '{"config": 5}', "[" * 100_000])
def test_a_folder_that_is_no_graded_run_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"is not a graded run: its manifest\.json cannot be read"):
        write_report(tmp_path)


def test_a_reader_sees_it_all_and_nothing_that_a_model_wrote_runs(tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        warnings.warn("Chromium is not here: the page was not opened.", stacklevel=1)
        return
    a, b = made_run(tmp_path / "a", 230), made_run(tmp_path / "b", 230, 2, luck=0.7, model="b" + NASTY)
    page = write_report(b, against=a)
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.call("Page.navigate", url=page.as_uri())
        browser.wait("document.querySelectorAll('h2').length > 5")
        shown = browser.run("document.body.innerText")
        for expected in (
            "no tools",
            "Wilson",
            "Calibration",
            "Chemistry",
            "Against",
            "better on",
            "pass@k",
            "Deviations",
            "ab12",
        ):
            assert expected in shown
        assert "SECRET" not in shown and "NaN" not in shown and "undefined" not in shown
        assert browser.run("typeof pwned") == "undefined"
        assert browser.run("document.images.length + document.querySelectorAll('script[src]').length") == 0
        browser.run("document.querySelector('a').click()")
        browser.wait("document.querySelectorAll('#list a').length > 20")
        assert "keep to the terms of its data" in browser.run("document.querySelector('header').innerText")
        heads = browser.run("[...document.querySelectorAll('#heads button')].map(head => head.innerText)")
        assert heads == ["✓", "id", "task", "score", "turns", "tokens", "stop"]
        browser.run("document.querySelector('#list a').click()")
        browser.wait("document.querySelectorAll('#detail pre').length > 2")
        shown = browser.run("document.getElementById('detail').innerText")
        assert "SECRET question 0?" in shown and "the grader's detail" in shown and "undefined" not in shown
        assert "shade by" not in shown and "compare with" in shown  # no tokens; a second try
        choose = "s = document.getElementById('outcome'); s.value = 'ungraded'; s.dispatchEvent(new Event('change'))"
        browser.run(f"{{ const {choose} }}")
        assert 0 < browser.run("state.shown.length") < 200
        assert browser.run("typeof pwned") == "undefined" and browser.run("document.images.length") == 0
    finally:
        browser.close()
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
