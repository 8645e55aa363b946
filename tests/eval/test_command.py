"""`skyrl-trainer eval` against endpoints of the standard library: the whole way, failures, sentences."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl_eval import sandbox
from skyrl_trainer.cli import main
from tests.eval.made_up import ROWS
from tests.eval.scripted_server import Reply, match, served

pytestmark = pytest.mark.usefixtures("one_ray")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(out: Path, url: str, data: str, *words: str, bench: str = "gsm8k") -> int:
    return main(
        [
            "eval",
            "agent",
            f"--bench={bench}",
            f"--data={data}",
            f"--base-url={url}",
            "--model=m",
            f"--out={out}",
            *words,
        ]
    )


def sums(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + {n}?", "answer": f"So.\n#### {2 * n}"} for n in range(count)]


def answer_sums(request: dict[str, Any]) -> tuple[int, str]:
    words = request["messages"][-1]["content"]
    return (200, f"#### {2 * int(words.split()[2])}") if "What is" in words else (200, "Hello.")


def test_messages_go_through_the_loop_and_tools_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write(tmp_path / "corpus.jsonl", [{"url": "https://made.up/g", "title": "Glorp", "text": "Seven legs."}])
    data = write(tmp_path / "hle.jsonl", ROWS["hle"])
    script = ['Look. <tool_call>{"tool": "search", "args": {"query": "legs"}}</tool_call>',
              '<tool_call>{"tool": "open_page", "args": {"url": "https://made.up/g"}}</tool_call>',
              "Explanation: so.\nAnswer: 7\nConfidence: 70%"]  # fmt: skip

    def model(request: dict[str, Any]) -> tuple[int, str]:
        return 200, script[sum(message["role"] == "assistant" for message in request["messages"])]

    with served(model) as (url, asked), served(lambda request: (200, match("yes", 70))) as (judge, judged):
        words = [f"--judge-url={judge}", "--judge-model=j", f"--tools={corpus}", "--n=all"]
        assert run(tmp_path / "run", url, data, *words, bench="hle") == 0
        before = (tmp_path / "run" / "verdicts.jsonl").read_bytes(), (tmp_path / "run" / "results.json").read_bytes()
        spent = len(asked), len(judged)
        again = ["eval", "agent", "--grade-only", f"--out={tmp_path / 'run'}", *words[:2]]
        assert main(again) == 0
        assert (
            (tmp_path / "run" / "verdicts.jsonl").read_bytes(),
            (tmp_path / "run" / "results.json").read_bytes(),
        ) == before
        assert (len(asked), len(judged)) == spent
        assert "100.0 %" in capsys.readouterr().out
        manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
        del manifest["facts"]["samples"]
        old = shutil.copytree(tmp_path / "run", tmp_path / "old")
        (old / "manifest.json").write_text(json.dumps(manifest))
        assert main([*again, f"--out={old}"]) == 2, "a folder of a version that did not note them"
        assert "was begun by an earlier version" in capsys.readouterr().err
    first, second = lines(tmp_path / "run" / "attempts.jsonl")
    assert {first["item_id"], second["item_id"]} == {"h1", "h2"}, "the one with an image is left out"
    assert (first["steps"], first["tool_calls"], first["tool_errors"], first["stop"]) == (3, 2, 0, "done")
    assert first["urls"] == ["https://made.up/g"] and first["answer"] == script[-1]
    assert [message["role"] for message in first["messages"]] == ["system", *["user", "assistant"] * 3]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (33, 15), "as the endpoint says"
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["title"].startswith("hle, 2 of 2 items, text only, tools: corpus.jsonl ")
    assert results["accuracy"] == 1 and results["counts"]["correct"] == 2 and results["judge"] == "j"
    assert "1 items with images are left out" in results["notes"]


def test_a_question_shows_its_image_and_a_reply_that_is_cut_counts_as_truncated(tmp_path: Path) -> None:
    data = write(tmp_path / "hle.jsonl", ROWS["hle"][2:])
    with served(lambda request: (200, "")) as (url, asked), served(lambda request: (200, match("no"))) as (judge, _):
        assert run(tmp_path / "run", url, data, "--images", f"--judge-url={judge}", "--judge-model=j", bench="hle") == 0
    content = asked[-1]["messages"][-1]["content"]
    assert content[1] == {"type": "image_url", "image_url": {"url": ROWS["hle"][2]["image"]}}
    assert json.loads((tmp_path / "run" / "results.json").read_text())["title"] == "hle, 1 of 1 items, no tools"


def test_programs_run_in_namespaces_where_containers_would_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """LiveCodeBench's: it has no images."""
    request.addfinalizer(sandbox.check.cache_clear)
    docker, out = tmp_path / "docker", tmp_path / "run"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    data = write(tmp_path / "lcb.jsonl", ROWS["livecodebench"][:1])
    with served(lambda _: (200, "```python\nprint(2 * int(input()))\n```")) as (url, _):
        words = ["--bench=livecodebench", f"--data={data}", f"--base-url={url}", "--model=m", f"--out={out}"]
        assert main(["eval", "code", *words]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["title"].endswith("executor namespace") and results["accuracy"] == 1


def test_a_larger_n_extends_a_run_and_another_setting_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(20)), tmp_path / "run"
    with served(answer_sums) as (url, asked):
        assert run(out, url, data, "--n=5", "--samples=2") == 0
        assert run(out, url, data, "--n=8", "--samples=2") == 0
        assert run(out, url, data, "--n=8", "--samples=2", "--temperature=1") == 2
        assert "was begun with temperature=0.0, not with 1.0" in capsys.readouterr().err
    questions = Counter(request["messages"][-1]["content"] for request in asked if "messages" in request)
    del questions["Hello."]
    assert len(questions) == 8 and set(questions.values()) == {2}
    assert len(lines(out / "attempts.jsonl")) == 16
    results = json.loads((out / "results.json").read_text())
    assert results["accuracy"] == 1 and results["title"] == "gsm8k, 8 of 20 items, no tools"


def test_a_busy_endpoint_is_asked_again_and_what_it_refuses_is_an_error_to_be_tried_again(
    tmp_path: Path,
) -> None:
    data, out, seen, lock = write(tmp_path / "sums.jsonl", sums(6)), tmp_path / "run", Counter[str](), threading.Lock()
    broken = True

    def moody(request: dict[str, Any]) -> tuple[int, str]:
        words = request["messages"][-1]["content"]
        with lock:
            seen[words] += 1
        if "What is 1 " in words and seen[words] < 3:
            return 429, "slow down"
        if "What is 2 " in words and seen[words] < 2:
            return 503, "loading"
        if "What is 3 " in words and broken:
            return 401, "who are you?"
        if "What is 4 " in words:
            return 400, "the maximum context length is 5 tokens"
        if "max_completion_tokens" in request:
            return 400, "unknown member max_completion_tokens"
        return answer_sums(request)

    with served(moody) as (url, _):
        assert run(out, url, data) == 3
        stops = {line["messages"][-1]["content"][:9]: line for line in lines(out / "attempts.jsonl")}
        assert Counter(line["stop"] for line in lines(out / "attempts.jsonl")) == {"done": 4, "error": 2}
        failed = {line["error"] for line in lines(out / "attempts.jsonl") if line["stop"] == "error"}
        assert failed == {"HTTP 401: who are you?", "HTTP 400: the maximum context length is 5 tokens"} and stops
        counts = json.loads((out / "results.json").read_text())["counts"]
        assert (counts["correct"], counts["truncated"], counts["ungraded"]) == (4, 0, 2)
        broken = False
        assert run(out, url, data) == 3
    counts = json.loads((out / "results.json").read_text())["counts"]
    assert (counts["correct"], counts["truncated"], counts["ungraded"]) == (5, 0, 1)


def test_an_endpoint_that_is_gone_ends_the_run_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "sums.jsonl", sums(50))
    reply: Reply = lambda r: (500, "gone") if "What is" in str(r) else (200, "Hello.")  # noqa: E731
    with served(reply) as (url, asked):
        assert run(tmp_path / "run", url, data, "--concurrency=4") == 2
    assert "answers no more: HTTP 500: gone; the same command goes on" in capsys.readouterr().err
    assert len(asked) < 100


def test_a_run_goes_on_with_its_data_in_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(8)), tmp_path / "run"
    with served(answer_sums) as (url, _):
        assert run(out, url, data, "--n=5") == 0
        moved = Path(data).rename(tmp_path / "moved.jsonl")
        assert run(out, url, str(moved), "--n=8") == 0
        capsys.readouterr()
        assert run(out, url, write(tmp_path / "sums.jsonl", sums(9)), "--n=8") == 2
    assert "was begun with data_sha256=" in capsys.readouterr().err and len(lines(out / "attempts.jsonl")) == 8


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--samples=5", "samples is 1 in {}, not 5."),
        ("--model=other", "model is 'm' in {}, not 'other'."),
        ("--temperature=1", "temperature is 0.0 in {}, not 1.0."),
        ("--bench=mmlu", "bench is 'gsm8k' in {}, not 'mmlu'."),
        ("--seed=5", "seed is 0 in {}, not 5."),
        ("--max-tokens=9", "max_tokens is 16384 in {}, not 9."),
        ("--n=1", "{} has other items than --n and --only choose: leave them out."),
        ("--images", "images is False in {}, not True."),
    ],
)
def test_what_grading_alone_cannot_change_is_refused(
    word: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(2)), tmp_path / "run"
    with served(answer_sums) as (url, _):
        assert run(out, url, data) == 0
    same = ["--bench=gsm8k", "--model=m", "--samples=1"]
    for n in ("2", "9", "all"):
        assert main(["eval", "agent", "--grade-only", f"--out={out}", *same, f"--n={n}"]) == 0
    capsys.readouterr()
    assert main(["eval", "agent", "--grade-only", f"--out={out}", word]) == 2
    assert f"--grade-only: {sentence.format(out)}" in capsys.readouterr().err


def test_an_address_without_v1_is_asked_whether_it_ends_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "sums.jsonl", sums(2))
    with served(lambda _: (404, "Not Found")) as (url, _):
        assert run(tmp_path / "a", url.removesuffix("/v1"), data) == 2
        assert "(does the address end in /v1?)." in capsys.readouterr().err
        assert run(tmp_path / "b", url, data) == 2
    assert "does the address" not in capsys.readouterr().err


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "sums.jsonl", sums(10))
    wrong: Reply = lambda r: (200, "#### 1")  # noqa: E731
    for name, reply in (("a", wrong), ("b", answer_sums)):
        with served(reply) as (url, _):
            assert run(tmp_path / name, url, data) == 0
    capsys.readouterr()
    assert main(["eval", "agent", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "10 items that both have" in said and "difference +100.0 points" in said and "better on 10, worse" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["agent"], "Say once what is to be evaluated: --base-url and --model, or --checkpoint."),
        (["code"], "or --predictions."),
        (["agent", "--base-url=x", "--checkpoint=y"], "Say once"),
        (["agent", "--base-url=http://127.0.0.1:9/v1", "--bench=gsm8k", "--data=DATA"], "does not answer"),
        (["agent", "--base-url=127.0.0.1:9/v1", "--bench=gsm8k", "--data=DATA"], "it begins with no http://"),
        (["agent", "--base-url=http://127.0.0.1:9/v1", "--data=HLE"], "graded by a judge (officially o3-mini"),
        (["agent", "--base-url=x", "--data=HLE", "--judge-url=x"], "A judge needs both"),
        (["agent", "--base-url=x", "--bench=gsm8k", "--data=DATA", "--n=0"], "--n is '0'"),
        (["agent", "--base-url=x", "--bench=gsm8k", "--data=DATA", "--n=²"], "--n is '²'"),
        (["agent", "--base-url=x", "--seed=-1"], "--seed is -1, but should be 0 or more."),
        (["agent", "--base-url=x", "--temperature=nan"], "--temperature is nan, but should be 0 or more."),
        (["agent", "--base-url=x", "--cost-limit=-1"], "--cost-limit is -1.0, but should be 0 or more."),
        (
            ["agent", "--checkpoint=none", "--bench=gsm8k", "--data=DATA"],
            "neither a run with a saved policy nor a model",
        ),
        (["agent", "--base-url=x", "--bench=gsm8k", "--data=deep.json"], "deep.json cannot be read: maximum recursion"),
        (["agent", "--base-url=x", "--bench=gsm8k", "--data=DATA", "--lenient"], "gsm8k has no letters to read"),
        (["code", "--base-url=x", "--data=SWE", "--tools=DATA"], "has an environment with tools of its own"),
        (["agent", "--grade-only"], "--grade-only needs --out"),
        (["agent", "--grade-only", "--out=none"], "none/manifest.json"),
        (["agent", "--base-url=x", "--bench=gsm8k", "--data=DATA", "--tools=none.jsonl"], "--tools none.jsonl cannot"),
        (["code", "--predictions=none.jsonl", "--data=SWE"], "--predictions none.jsonl cannot be read"),
        (["code", "--predictions=TWICE", "--data=SWE"], "an instance twice, or a patch that is no text"),
        (["code", "--predictions=NUMBER", "--data=SWE"], "an instance twice, or a patch that is no text"),
        (["code", "--predictions=OTHERS", "--data=SWE"], "1 of 1 predictions are of no item of the data: made__upp-1."),
        (["code", "--predictions=BYID", "--data=SWE"], "1 of 1 predictions are of no item of the data: made__upp-1."),
        (["code", "--predictions=ROWS", "--data=SWE"], "2 of 2 predictions are of no item of the data: 5."),
        (["code", "--predictions=deep.json", "--data=SWE"], "--predictions deep.json cannot be read (RecursionError"),
        (
            ["code", "--bench=livecodebench", "--predictions=gold", "--data=LCB"],
            "of livecodebench have no official patch",
        ),
        (
            ["code", "--bench=livecodebench", "--executor=podman", "--base-url=x", "--data=LCB"],
            "--executor podman: livecodebench takes namespace.",
        ),
        (["agent", "--compare", "a", "b"], "a is not a graded run: its manifest.json"),
    ],
)
def test_what_is_missing_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    swe = {"repo": "made/up", "instance_id": "made__up-1", "base_commit": "0" * 40, "patch": "", "test_patch": ""}
    swe |= {"problem_statement": "?", "FAIL_TO_PASS": '["a"]', "PASS_TO_PASS": "[]", "eval_script": "true"}
    files = {"DATA": write(tmp_path / "d.jsonl", sums(3)), "HLE": write(tmp_path / "h.jsonl", ROWS["hle"])}
    files |= {"SWE": write(tmp_path / "s.jsonl", [swe]), "LCB": write(tmp_path / "l.jsonl", ROWS["livecodebench"])}
    patch = {"instance_id": "made__up-1", "model_name_or_path": "m", "model_patch": "-"}
    files |= {"TWICE": write(tmp_path / "p.jsonl", [patch, patch])}
    files |= {"NUMBER": write(tmp_path / "n.jsonl", [patch | {"model_patch": 1}])}
    other = patch | {"instance_id": "made__upp-1"}
    files |= {"OTHERS": str(tmp_path / "o.json"), "BYID": str(tmp_path / "i.json")}
    Path(files["OTHERS"]).write_text(json.dumps([other]))
    del other["instance_id"]
    Path(files["BYID"]).write_text(json.dumps({"made__upp-1": other}))  # as mini-SWE-agent writes them
    rows = [other | {"instance_id": 5}, other | {"instance_id": "zz"}]
    files |= {"ROWS": write(tmp_path / "rows.json", rows)}  # a row a line
    (tmp_path / "deep.json").write_text("[" * 10**5)
    for name, path in files.items():
        words = [word.replace(name, path) for word in words]
    assert main(["eval", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1
    assert not os.path.isdir("runs")
