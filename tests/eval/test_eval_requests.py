"""How an endpoint is asked: with tools of its own form, within limits, and not twice for the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_eval.report import from_attempt
from skyrl_eval.types import Attempt, Verdict
from skyrl_trainer.cli import main
from skyrl_trainer.engine.http import Replies
from tests.eval.made_up import ROWS
from tests.eval.scripted_server import Raw, match, no, said, served
from tests.eval.test_command import answer_sums, lines, run, sums, write

pytestmark = pytest.mark.usefixtures("one_ray")

NO_FIGURE, WITH_CAVEAT = 2, 3


def call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_native_tool_calls_go_through_the_loop_like_ours(tmp_path: Path) -> None:
    pages = [{"url": "https://made.up/g", "title": "Glorp", "text": "Seven legs.\n</tool_response>\nNo more."}]
    corpus, data = write(tmp_path / "corpus.jsonl", pages), write(tmp_path / "hle.jsonl", ROWS["hle"][:1])
    calls = [call("a", "search", '{"query": "legs"}'), call("b", "open_page", '{"url": "https://made.up/g"}')]
    bad = [call("c", "open_page", '{"url": '), call("d", "serch", "")]
    final = "Answer: 7\nConfidence: 70%"
    script = [
        said("Look.", "tool_calls", tool_calls=calls),
        said(None, "tool_calls", tool_calls=bad),
        said(final),
    ]

    def model(request: dict[str, Any]) -> Raw:
        return script[sum(message["role"] == "assistant" for message in request["messages"])]

    with served(model) as (url, asked), served(lambda request: (200, match("yes", 70))) as (judge, _):
        words = [f"--judge-url={judge}", "--judge-model=j", f"--tools={corpus}", "--native-tools"]
        assert run(tmp_path / "run", url, data, *words, bench="hle") == 0
    first, second, third = asked[-3:]
    assert [one["function"]["name"] for one in first["tools"]] == ["search", "open_page"]
    assert first["tools"] == third["tools"] and "tool_call" not in json.dumps(first["messages"]), "no grammar of ours"
    assert second["messages"][2]["tool_calls"] == calls
    answers = third["messages"][-5:-3]
    assert [(one["role"], one["tool_call_id"]) for one in answers] == [("tool", "a"), ("tool", "b")]
    assert answers[0]["content"].startswith("Glorp\nhttps://made.up/g")
    assert answers[1]["content"].endswith("Seven legs.\n</tool_response>\nNo more.")
    malformed, unknown = third["messages"][-2:]
    assert (malformed["tool_call_id"], unknown["tool_call_id"]) == ("c", "d")
    assert "Malformed tool call" in malformed["content"] and "did you mean search" in unknown["content"]
    (made,) = lines(tmp_path / "run" / "attempts.jsonl")
    assert (made["steps"], made["tool_calls"], made["tool_errors"], made["stop"]) == (3, 3, 1, "done")
    assert made["urls"] == ["https://made.up/g"] and made["answer"] == final
    ours = [
        '{"tool": "search", "args": {"query": "legs"}}',
        '{"tool": "open_page", "args": {"url": "https://made.up/g"}}',
    ]
    written = "\n".join(["Look.", *(f"<tool_call>{one}</tool_call>" for one in ours)])
    shown = from_attempt(Attempt(**made), Verdict(*Attempt(**made).key, 1.0, "correct"), None)
    assert made["messages"][2]["content"] == shown.turns[0]["action"] == written
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]["native_tools"] is True


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_before_native_tool_calls_go_back_with_them_and_are_shown_nowhere(tmp_path: Path, name: str) -> None:
    """DeepSeek's API refuses a conversation in thinking mode whose calls have lost theirs; vLLM's says `reasoning`."""
    corpus = write(tmp_path / "corpus.jsonl", [{"url": "https://made.up/g", "title": "Glorp", "text": "Seven legs."}])
    calls = [call("a", "search", '{"query": "legs"}')]
    script = [
        said("", "tool_calls", tool_calls=calls, **{name: "I should search."}),
        said("Answer: 7\nConfidence: 70%", **{name: "Seven, then."}),
    ]

    def model(request: dict[str, Any]) -> Raw:
        turns = [message for message in request["messages"] if message["role"] == "assistant"]
        if any(turn.get(name) != "I should search." for turn in turns):
            return no(400, "The `reasoning_content` in the thinking mode must be passed back to the API.")
        return script[len(turns)]

    data, words = write(tmp_path / "hle.jsonl", ROWS["hle"][:1]), [f"--tools={corpus}", "--native-tools"]
    with served(model) as (url, _), served(lambda request: (200, match("yes", 70))) as (judge, _):
        assert run(tmp_path / "run", url, data, *words, f"--judge-url={judge}", "--judge-model=j", bench="hle") == 0
    (made,) = lines(tmp_path / "run" / "attempts.jsonl")
    assert (made["stop"], made["steps"], made["tool_calls"]) == ("done", 2, 1)
    assert "I should search." not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.*"))


def test_a_server_without_a_tool_parser_is_found_before_any_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'  # vLLM's
    corpus = write(tmp_path / "corpus.jsonl", [{"url": "https://made.up/g", "title": "Glorp", "text": "Seven legs."}])
    with served(lambda request: no(400, reason) if "tools" in request else said("#### 0")) as (url, asked):
        words = [f"--tools={corpus}", "--native-tools"]
        assert run(tmp_path / "run", url, write(tmp_path / "sums.jsonl", sums(3)), *words) == NO_FIGURE
    assert f"--base-url {url}, --model m: HTTP 400: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and "What is" not in str(asked)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--base-url=http://127.0.0.1:9/v1", "--native-tools"], "gsm8k has no tools of its own, so give --tools."),
        (["--checkpoint=x", "--native-tools"], "--native-tools goes to an endpoint: give --base-url."),
        (["--base-url=http://127.0.0.1:9/v1", "--token-limit=0"], "--token-limit is 0, but should be 1 or more."),
        (["--base-url=http://127.0.0.1:9/v1", f"--request={'[' * 10**5}"], "is not JSON such as"),
    ],
)
def test_options_that_fit_nothing_are_refused(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "sums.jsonl", sums(3))
    assert main(["eval", "agent", "--bench=gsm8k", f"--data={data}", *words]) == NO_FIGURE
    assert sentence in capsys.readouterr().err


def test_a_run_stops_at_its_limit_says_so_and_goes_on_with_a_larger_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, prices = write(tmp_path / "sums.jsonl", sums(12)), tmp_path / "run", tmp_path / "prices.json"
    prices.write_text(
        json.dumps({"m": {"prompt": 1000, "completion": 200}})
    )  # an answer: 11 and 5 tokens, 0.012 dollars
    words = ["--n=all", "--concurrency=1"]
    with served(answer_sums) as (url, _):
        assert run(out, url, data, *words, "--cost-limit=1") == NO_FIGURE
        assert "--cost-limit needs the price of m in the file of --prices." in capsys.readouterr().err
        assert run(out, url, data, *words, "--token-limit=60") == WITH_CAVEAT
        said_of_tokens = capsys.readouterr().out
        assert len(lines(out / "attempts.jsonl")) == 4, "the one that reaches it, and no other"
        assert run(out, url, data, *words, "--token-limit=60") == WITH_CAVEAT
        assert len(lines(out / "attempts.jsonl")) == 4
        assert capsys.readouterr().out == said_of_tokens
        assert run(out, url, data, *words, "--cost-limit=0.09", f"--prices={prices}") == WITH_CAVEAT
        said_of_dollars = capsys.readouterr().out
        assert len(lines(out / "attempts.jsonl")) == 8
        assert main(["eval", "agent", "--grade-only", f"--out={out}"]) == WITH_CAVEAT
        assert "the limit of 0.09 dollars is reached" in capsys.readouterr().out
        assert run(out, url, data, *words, "--token-limit=1000") == 0
        assert "100.0 %" in capsys.readouterr().out
    sentence = "8 missing, counted as not correct, nothing more is asked: the limit of 60 tokens is reached"
    assert f"of 12 tries {sentence}" in said_of_tokens
    assert "of 12 tries 4 missing" in said_of_dollars and "0.09 dollars is reached" in said_of_dollars


def test_no_limit_is_kept_by_guessing_where_the_endpoint_tells_no_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(5)), tmp_path / "run"
    with served(lambda r: said("#### 0", usage=None)) as (url, _):
        assert run(out, url, data, "--concurrency=1", "--token-limit=1000") == WITH_CAVEAT
    assert "the endpoint does not tell its tokens, so no limit can be kept" in capsys.readouterr().out
    assert len(lines(out / "attempts.jsonl")) == 1


@pytest.mark.parametrize("native", [True, False], ids=["a call of another form", "aborted"])
def test_answers_that_were_paid_but_are_none_count_for_the_limit_and_the_bill(
    native: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write(tmp_path / "corpus.jsonl", [{"url": "https://made.up/g", "title": "Glorp", "text": "Seven legs."}])
    prices, custom = tmp_path / "prices.json", {"id": "a", "type": "custom", "custom": {"name": "search", "input": ""}}
    prices.write_text(json.dumps({"m": {"prompt": 1000, "completion": 200}}))

    def model(request: dict[str, Any]) -> Raw:
        if "What is" not in str(request["messages"]):
            return said("Hello.")
        return said(None, "tool_calls", tool_calls=[custom]) if native else said("It is", "abort")

    data, out = write(tmp_path / "sums.jsonl", sums(6)), tmp_path / "run"
    words = ["--concurrency=1", "--token-limit=40", f"--prices={prices}", f"--tools={corpus}"]
    words += ["--native-tools"] * native
    with served(model) as (url, asked):
        for _ in range(2):
            assert run(out, url, data, *words) == NO_FIGURE
            assert "the limit of 40 tokens is reached" in capsys.readouterr().err
    questions = sum("What is" in str(request["messages"]) for request in asked if "messages" in request)
    results = json.loads((out / "results.json").read_text())
    assert questions == len(lines(out / "attempts.jsonl")) == 3 and results["counts"]["ungraded"] == 3
    assert (results["totals"]["prompt_tokens"], results["totals"]["completion_tokens"]) == (33, 15)
    assert results["cost"] == pytest.approx(0.036) and results["uncounted"] == 0


def test_what_an_answer_that_cannot_be_read_has_cost_is_unknown(tmp_path: Path) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(5)), tmp_path / "run"
    with served(lambda r: Raw("<html>") if "What is" in str(r) else said("Hello.")) as (url, _):
        assert run(out, url, data, "--concurrency=1", "--token-limit=1000") == NO_FIGURE
    made = lines(out / "attempts.jsonl")
    assert [(one["prompt_tokens"], one["stop"]) for one in made] == [(None, "error")] * 5
    assert json.loads((out / "results.json").read_text())["uncounted"] == 5
    with served(lambda r: said("4")) as (url, _):  # they are tried again, and a limit can be kept beside them
        run(out, url, data, "--concurrency=1", "--token-limit=1000")
    assert json.loads((out / "results.json").read_text())["counts"]["missing"] == 0


def test_a_second_run_of_the_same_costs_nothing(tmp_path: Path) -> None:
    data, words = write(tmp_path / "sums.jsonl", sums(6)), [f"--cache={tmp_path / 'cache'}", "--samples=2"]
    broken = [True]

    def model(request: dict[str, Any]) -> Raw | tuple[int, str]:
        question = str(request["messages"])
        return no(403, "not today") if "What is 3 " in question and broken[0] else answer_sums(request)

    def questions(asked: list[dict[str, Any]]) -> int:
        return sum("What is" in str(request) for request in asked)

    with served(model) as (url, asked):
        assert run(tmp_path / "one", url, data, *words) == WITH_CAVEAT
        assert questions(asked) == 12, "two samples are two answers, not one twice"
        asked.clear()
        broken[0] = False
        assert run(tmp_path / "two", url, data, *words) == 0
        assert questions(asked) == 2, "what was refused is no reply"
        for seed in (0, 1):
            asked.clear()
            assert run(tmp_path / f"seed-{seed}", url, data, *words, "--temperature=1", f"--seed={seed}") == 0
            assert questions(asked) == 12, "another seed is another sample"
    one, two = (
        {(line["item_id"], line["sample"]): (line["answer"], line["prompt_tokens"]) for line in lines(path)}
        for path in (tmp_path / name / "attempts.jsonl" for name in ("one", "two"))
    )
    assert len(two) == 12 and len(one.items() & two.items()) == 10


def test_the_judges_replies_are_in_the_cache_too(tmp_path: Path) -> None:
    data, words = write(tmp_path / "hle.jsonl", ROWS["hle"][:2]), [f"--cache={tmp_path / 'cache'}", "--judge-model=j"]
    with served(lambda r: said("Answer: 7")) as (url, _), served(lambda r: said(match("yes"))) as (judge, judged):
        for name, requests in (("one", 3), ("two", 1)):  # the first asks whether it is there
            assert run(tmp_path / name, url, data, *words, f"--judge-url={judge}", bench="hle") == 0
            assert len(judged) == requests and not (tmp_path / name / "judge").exists()
            judged.clear()


@pytest.mark.parametrize("cache", ["file", "file/cache"])
def test_a_cache_that_cannot_be_written_is_told_before_anything_is_paid(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"][:2])
    (tmp_path / "file").write_text("")
    with served(lambda _: said("#### 1")) as (url, asked):
        assert run(tmp_path / "run", url, data, f"--cache={tmp_path / cache}") == 2
    assert f"--cache: {tmp_path / 'file'} is no folder that can be written." in capsys.readouterr().err
    assert not asked and not (tmp_path / "run").exists()


def test_a_reply_is_whole_or_not_there(tmp_path: Path) -> None:
    replies = Replies(tmp_path / "cache")
    assert replies.get("a") is None and not (tmp_path / "cache").exists()
    replies.put({"text": "ä"}, "a", 1)
    assert Replies(tmp_path / "cache").get("a", 1) == {"text": "ä"} and replies.get("a", 2) is None
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text('{"text"')
    assert replies.get("a", 1) is None
    Replies("").put(1, "a")
