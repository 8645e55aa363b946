"""report.html and its transcripts: what a reader sees, with texts that attack the page; comparisons in words."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.viewer import Browser, find_browser
from skyrl_eval import grade, report
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.report import MAX_PAGE, PAGE, TRANSCRIPTS, compare, write_report
from skyrl_eval.store import Run
from skyrl_eval.types import Attempt, Verdict
from skyrl_trainer.errors import UserError
from tests.eval.made_up import items

NASTY = "</script><script>pwned=1</script><!-- <img src=x onerror=pwned=1>\u2028{{title}}{{data}} *"
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
                    )
                )
        results = grade.results(run, "hle", samples, context, {"made-up-7b": {"prompt": 0.4, "completion": 1.6}}, model)
        run.write_results({"title": f"hle, {n} of 2158 items, text only, no tools", "model": model, **results})
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
    script = (folder / TRANSCRIPTS).read_text(encoding="ascii")
    data = json.loads(script.removeprefix("showTranscripts(").removesuffix(");\n"))
    assert len(data["rows"]) == len(data["blocks"]) and all(len(row) == len(data["fields"]) for row in data["rows"])
    return [json.loads(zlib.decompress(base64.b64decode(block))) for block in data["blocks"]]


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_run(tmp_path / "run", 30)
    monkeypatch.setattr(report, "MAX_TRANSCRIPTS", 4000)
    told = page_data(write_report(folder))["transcripts"]
    assert 0 < told["count"] == len(blocks(folder)) and told["count"] + told["left_out"] == 29
    monkeypatch.setattr(report, "MAX_CHARACTERS", 5)
    write_report(folder)
    assert "characters more)" in json.dumps(blocks(folder))


def test_a_page_stays_small_whatever_the_run_has_in_it(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", 5, note="x" * 400_000, listed=["y" * 100] * 10_000)
    results = json.loads((folder / "results.json").read_text())
    results["by_category"] = {f"part {i}": {"items": 1, "accuracy": 0.0} for i in range(5000)}
    (folder / "results.json").write_text(json.dumps(results))
    assert len(write_report(folder).read_bytes()) < MAX_PAGE


def test_two_runs_are_compared_in_words_and_on_the_page(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a", 60, luck=0.2), made_run(tmp_path / "b", 60, luck=0.8, model="better")
    said = compare(a, b)
    found = page_data(b / PAGE)["comparison"]
    assert re.search(r"difference \+\d+\.\d points \(95 %: ", said) and "model: 'made-up-7b' -> 'better'" in said
    assert found["items"] == 59 and found["difference"] > 0 and found["changed"]["model"] == ["made-up-7b", "better"]
    assert 0 < found["p"] < 0.05 and "McNemar" in said
    assert page_data(write_report(b))["comparison"] is None
    thrice = made_run(tmp_path / "thrice", 60, 3)
    assert "McNemar" not in compare(a, thrice) and page_data(thrice / PAGE)["comparison"]["p"] is None
    with pytest.raises(UserError, match="differ in data_sha256"):
        compare(a, made_run(tmp_path / "c", 5, data_sha256="other"))


def test_a_folder_that_is_no_graded_run_is_refused(tmp_path: Path) -> None:
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
        browser.run("document.getElementById('load').click()")
        browser.wait("document.querySelectorAll('tr.pick').length === 200")
        browser.run("document.querySelector('tr.pick').click()")
        browser.wait("document.querySelectorAll('td.transcript pre').length > 2")
        assert "SECRET question 0?" in browser.run("document.querySelector('td.transcript').innerText")
        browser.run(
            "const s = document.querySelector('select'); s.value = 'ungraded'; s.dispatchEvent(new Event('change'))"
        )
        assert 0 < browser.run("document.querySelectorAll('tr.pick').length") < 200
        assert browser.run("typeof pwned") == "undefined"
        assert browser.run("document.images.length + document.querySelectorAll('script[src]').length") == 1
        (b / TRANSCRIPTS).unlink()
        browser.call("Page.navigate", url=page.as_uri() + "?again")
        browser.wait("document.getElementById('load') !== null")
        browser.run("document.getElementById('load').click()")
        browser.wait("document.body.innerText.includes('is not beside this page')")
    finally:
        browser.close()
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
