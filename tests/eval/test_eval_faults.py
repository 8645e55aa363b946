"""What endpoints and judges do wrong: every figure has its caveat, and the exit code tells."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_eval import benchmarks, grade, judge
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.judge import Judge
from skyrl_eval.store import without_login
from skyrl_trainer.agent.message_prompt import MessagePrompt
from skyrl_trainer.cli import main
from skyrl_trainer.engine import endpoint, http
from skyrl_trainer.rollout.env_client import EnvClient
from skyrl_trainer.rollout.episode import How
from skyrl_trainer.rollout.rollout_worker import Episodes
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.types import Sample, SamplingOptions, StopReason, Trajectory
from tests.eval.made_up import attempt, items, mmlu_pro
from tests.eval.scripted_server import Raw, match, no, said, served
from tests.eval.test_command import answer_sums, lines, run, sums, write
from tests.trainer.fakes import FakeEnvWorker

pytestmark = pytest.mark.usefixtures("one_ray")

NO_FIGURE, WITH_CAVEAT = 2, 3
ITEMS = 100 if os.environ.get("SKYRL_TEST_FULL") else 30
"""Of an endpoint that answers ten in a second."""


def first(times: int, *faults: Callable[[], Raw]) -> Callable[[int, str, dict[str, Any]], Raw]:
    """The faults in turn for so many times, then the right answer."""
    return lambda number, right, request: faults[number % len(faults)]() if number < times else said(right)


Fault = Callable[[int, str, dict[str, Any]], Raw]
"""Of the number of the try, the right answer, and the request."""
CACHED = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": math.inf}}
AZURE = "the prompt triggering Azure OpenAI's content management policy. Please modify your prompt and retry."
OUT_OF_TOKENS = "Could not finish the message because max_tokens or model output limit was reached. Please try again."
ENDPOINT: dict[str, tuple[Fault, str, str]] = {
    "rate limit, more often than there are tries": (first(9, lambda: no(429, "slow", "0")), "done", ""),
    "rate limit in decimals": (first(2, lambda: no(429, "slow", "0.2")), "done", ""),
    "rate limit as a date": (first(1, lambda: no(429, "slow", formatdate(time.time() + 1, usegmt=True))), "done", ""),
    "rate limit in riddles": (first(1, lambda: no(429, "slow", "soon")), "done", ""),
    "quota": (lambda n, r, q: no(429, "no money", code="insufficient_quota"), "error", "no money"),
    "overloaded": (first(3, lambda: no(503, "loading", "0")), "done", ""),
    "always 500": (lambda n, r, q: no(500, "a bug", "0"), "error", "HTTP 500: a bug"),
    "forbidden": (lambda n, r, q: no(403, "not this question"), "error", "HTTP 403: not this question"),
    "closed in the middle": (first(1, lambda: said("#### 1")._replace(cut=20)), "done", ""),
    "a page": (lambda n, r, q: Raw("<html>Welcome!</html>"), "error", "its answer is no JSON"),
    "an error as an answer": (lambda n, r, q: no(200, "upstream died"), "error", "upstream died"),
    "its provider's error as an answer": (first(2, lambda: no(200, "overloaded", "0", code=502)), "done", ""),
    "its provider's limit as an answer": (first(7, lambda: no(200, "slow", "0", code=429)), "done", ""),
    "its provider's refusal as an answer": (lambda n, r, q: no(200, "not so", code="400"), "error", "HTTP 400: not so"),
    "a rate limit with a number of its own": (first(9, lambda: no(429, "slow", "0", code="1302")), "done", ""),
    "a refused key with a number of its own": (lambda n, r, q: no(401, "who?", code=1000), "error", "HTTP 401: who?"),
    "a filter with a number of its own": (lambda n, r, q: no(400, AZURE, code="1301"), "content_filter", ""),
    "an error without a status": (lambda n, r, q: no(200, "odd", code=1301), "error", "not an answer of OpenAI's API"),
    "a number that is none": (lambda n, r, q: Raw('{"error": {"code": 1e999}}'), "error", "not an answer of OpenAI"),
    "no choices": (lambda n, r, q: Raw('{"choices": []}'), "error", "not an answer of OpenAI's API"),
    "a choice of nothing": (lambda n, r, q: Raw('{"choices": [null]}'), "error", "not an answer of OpenAI's API"),
    "not UTF-8": (lambda n, r, q: Raw("\udcff\udcfe"), "error", "not an answer of OpenAI's API"),
    "no usage": (lambda n, r, q: said(r, usage=None), "done", ""),
    "usage of nulls": (lambda n, r, q: said(r, usage={"prompt_tokens": None, "completion_tokens": 3}), "done", ""),
    "usage below zero": (lambda n, r, q: said(r, usage={"prompt_tokens": -11, "completion_tokens": 5}), "done", ""),
    "infinitely many tokens in the cache": (lambda n, r, q: said(r, usage=CACHED), "done", ""),
    "nested too deep": (lambda n, r, q: Raw("[" * 100_000), "error", "not an answer of OpenAI's API"),
    "parts": (lambda n, r, q: said([{"type": "text", "text": r[:3]}, {"type": "text", "text": r[3:]}]), "done", ""),
    "no reason to finish": (lambda n, r, q: said(r, finish=None), "done", ""),
    "refusal": (lambda n, r, q: said(None, refusal="I cannot."), "refusal", ""),
    "content filter": (lambda n, r, q: said("", "content_filter"), "content_filter", ""),
    "Azure's filter": (lambda n, r, q: no(400, f"filtered due to {AZURE}"), "content_filter", ""),
    "OpenAI's filter": (lambda n, r, q: no(400, "flagged as violating our usage policy."), "content_filter", ""),
    "tool calls": (lambda n, r, q: said(None, "tool_calls", tool_calls=[{"id": "1"}]), "tool_calls", ""),
    "only thoughts": (lambda n, r, q: said(None, reasoning_content="Hm."), "reasoning_only", ""),
    "nothing": (lambda n, r, q: said(""), "empty", ""),
    "cut off": (lambda n, r, q: said("It is", "length"), "length", ""),
    "cut off in its thoughts": (
        lambda n, r, q: no(400, OUT_OF_TOKENS) if "max_completion_tokens" in q else said(r),
        "length",
        "",
    ),
    "aborted": (lambda n, r, q: said("It is", "abort"), "error", "ended the answer: abort"),
    "little room": (
        lambda n, r, q: no(400, "16384 is more than the context") if "max_completion_tokens" in q else said(r),
        "done",
        "",
    ),
    "no room": (lambda n, r, q: no(400, "the maximum context length is 5"), "error", "maximum context length is 5"),
}  # fmt: skip


def test_an_endpoint_with_every_fault_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One question each: what can be mended is, what is no answer has failed, and both are said."""
    rows, names = sums(len(ENDPOINT)), list(ENDPOINT)
    data, seen, lock = write(tmp_path / "sums.jsonl", rows), Counter[int](), threading.Lock()

    def reply(request: dict[str, Any]) -> Raw:
        words = request["messages"][-1]["content"].split()
        if words == ["Hello."]:
            return said("Hello.")
        number = int(words[2])
        with lock:
            seen[number] += 1
        return ENDPOINT[names[number]][0](seen[number] - 1, f"#### {2 * number}", request)

    with served(reply) as (url, _):
        assert run(tmp_path / "run", url, data) == WITH_CAVEAT
    found = {line["messages"][0]["content"].split()[2]: line for line in lines(tmp_path / "run" / "attempts.jsonl")}
    for number, (name, (_, stop, error)) in enumerate(ENDPOINT.items()):
        made = found[str(number)]
        assert made["stop"] == stop and error in (made["error"] or ""), (name, made)
        assert made["stop"] != "done" or made["answer"] == f"#### {2 * number}", name
        known = "usage" not in name
        assert stop != "done" or made["prompt_tokens"] == (11 if known else None), name
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    stops = Counter(stop for _, stop, _ in ENDPOINT.values())
    assert results["stops"] == dict(sorted(stops.items()))
    assert results["counts"]["correct"] == stops["done"] and results["counts"]["ungraded"] == stops["error"]
    assert results["cost"] is None and results["uncounted"] == 5 + 10, "of answers that are none, too"
    assert "4 tries ended in content filter." in results["notes"]
    out = capsys.readouterr().out
    assert f"of {len(ENDPOINT)} tries {stops['error']} ungraded, counted as not correct; the first: The attempt" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert results["caveat"] in out and results["caveat"] in page and "upstream died" not in page, "it is passed on"
    assert without_login("https://me:secret@made.up/v1") == "https://made.up/v1"


def judgement(**changes: Any) -> str:
    return json.dumps(json.loads(match("yes")) | changes)


JUDGE: dict[str, tuple[Fault, float | None, int]] = {
    "capitals": (lambda n, r, q: said(judgement(correct="Yes")), 1, 1),
    "a full stop": (lambda n, r, q: said(judgement(correct="NO.")), 0, 1),
    "a boolean": (lambda n, r, q: said(judgement(correct=True)), 1, 1),
    "decimals": (lambda n, r, q: said(judgement(confidence=85.5)), 1, 1),
    "a percentage": (lambda n, r, q: said(judgement(confidence="85%")), 1, 1),
    "no confidence": (lambda n, r, q: said(judgement(confidence=None)), 1, 1),
    "no answer in it": (lambda n, r, q: said(judgement(extracted_final_answer=None)), 1, 1),
    "a number for an answer": (lambda n, r, q: said(judgement(extracted_final_answer=7)), 1, 1),
    "one key more": (lambda n, r, q: said(judgement(mood="good")), 1, 1),
    "a brace in its thoughts": (lambda n, r, q: said("<think>{x} or {</think>" + judgement()), 1, 1),
    "a brace before it": (lambda n, r, q: said("The set {1, 2} fits. " + judgement()), 1, 1),
    "a verdict in its thoughts": (lambda n, r, q: said("<think>\ncorrect: no\n</think>\ncorrect: yes"), 1, 1),
    "a block of code": (lambda n, r, q: said("```json\n" + judgement(correct="no") + "\n```"), 0, 1),
    "raw line ends": (lambda n, r, q: said(judgement(reasoning="a#b").replace("#", "\n")), 1, 1),
    "no structured output": (lambda n, r, q: no(400, "?") if "response_format" in q else said(match("yes")), 1, 2),
    "a limit of another name": (
        lambda n, r, q: no(422, "?") if "max_completion_tokens" in q else said(match("yes")), 1, 2,
    ),
    "rate limit": (lambda n, r, q: no(429, "slow", "0.1") if n < 3 else said(match("yes")), 1, 4),
    "closed in the middle": (lambda n, r, q: said("x" * 99)._replace(cut=20) if n < 1 else said(match("yes")), 1, 2),
    "its provider's error as an answer": (
        lambda n, r, q: no(200, "busy", "0", code=503) if n < 2 else said(match("yes")), 1, 3,
    ),
    "nonsense once": (lambda n, r, q: said("It depends.") if n < 1 else said(match("yes")), 1, 2),
    "nonsense": (lambda n, r, q: said("It depends."), None, 3),
    "nothing": (lambda n, r, q: said(None), None, 3),
    "refusal": (lambda n, r, q: said(None, refusal="I cannot."), None, 3),
    "thoughts that are cut off": (lambda n, r, q: said("<think>\ncorrect: no\n", "length"), None, 3),
    "refuses the key": (lambda n, r, q: no(401, "who are you?"), None, 1),
    "no such model": (lambda n, r, q: no(404, "no such model"), None, 1),
    "always 500": (lambda n, r, q: no(500, "a bug", "0.01"), None, 5),
    "a page": (lambda n, r, q: Raw("<html>Welcome!</html>"), None, 1),
    "parts": (lambda n, r, q: said([{"type": "text", "text": match("yes")}]), 1, 1),
    "no choices": (lambda n, r, q: Raw('{"choices": []}'), None, 1),
    "no usage": (lambda n, r, q: said(match("yes"), usage=None), 1, 1),
    "usage as text": (lambda n, r, q: said(match("yes"), usage={"prompt_tokens": "11"}), 1, 1),
    "a confidence beyond all numbers": (lambda n, r, q: said(judgement(confidence=10**400)), 1, 1),
    "nested too deep": (lambda n, r, q: said('{"correct":' * 50_000), None, 3),
    "a number for a message": (lambda n, r, q: said(7), None, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGE)
def test_a_judges_reply_is_read_as_given_or_the_item_is_ungraded(name: str) -> None:
    fault, score, requests = JUDGE[name]
    item, numbers = items("hle")[0], iter(range(99))
    with served(lambda request: fault(next(numbers), "", request)) as (url, asked):
        context = Context(Judge(url, "m"))
        (found,) = grade.grade_all(benchmarks.find("hle"), [item], [attempt(item, "Answer: 7")], context)
    assert (found.score, found.status == "ungraded", len(asked)) == (score, score is None, requests)
    assert score is not None or (found.error and "The judge m at http" in found.error)
    read = {"nonsense once": 2, "nonsense": 3, "nothing": 3, "refusal": 3}
    read |= {"thoughts that are cut off": 3, "nested too deep": 3}
    if "usage" in name:
        assert found.judge_prompt_tokens is None
    elif score is not None or name in read:
        assert (found.judge_prompt_tokens, found.judge_completion_tokens) == (
            11 * read.get(name, 1),
            5 * read.get(name, 1),
        )
    expected = {"decimals": 0.86, "a percentage": 0.85, "no confidence": 1.0}
    assert name not in expected or found.confidence == expected[name]


def test_a_judge_that_has_died_is_not_asked_for_every_item() -> None:
    item = items("hle")[0]
    with served(lambda request: no(403, "gone")) as (url, asked):
        context = Context(Judge(url, "m"))
        tries = [attempt(item, f"Answer: {n}") for n in range(200)]
        found = list(grade.grade_all(benchmarks.find("hle"), [item] * 200, tries, context))
    assert {verdict.status for verdict in found} == {"ungraded"} and len(asked) < 30
    assert any("failed 8 times in a row and is asked no more" in str(verdict.error) for verdict in found)


def hle_run(out: Path, url: str, judge: str, data: str, *words: str) -> int:
    return run(out, url, data, f"--judge-url={judge}", "--judge-model=m", "--n=all", *words, bench="hle")


def hle(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"Q{n}?", "answer": "7", "answer_type": "exactMatch"} for n in range(count)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nonsense", "says what cannot be read: 'It depends.'"),
        ("refuses the key", "does not answer: HTTP 401: who are you?"),
        ("a page", "does not answer as OpenAI's API does, but with no JSON."),
        ("no choices", "does not answer as OpenAI's API does, but with {'choices': []}."),
        ("nothing", "says what cannot be read: ''"),
    ],
)
def test_a_judge_that_cannot_be_used_is_found_before_the_model_is_asked(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.jsonl").write_text('{"of": "somebody else", "and": "torn')
    data = write(tmp_path / "hle.jsonl", hle(3))
    with (
        served(lambda r: said("Answer: 7")) as (url, asked),
        served(lambda r: JUDGE[name][0](0, "", r)) as (other, _),
    ):
        assert hle_run(tmp_path / "run", url, other, data) == NO_FIGURE
    captured = capsys.readouterr()
    assert "The judge m at http" in captured.err and "Nothing was asked of the model yet." in captured.err
    assert reason in captured.err
    assert not asked and "%" not in captured.out and not (tmp_path / "run").exists()
    assert (tmp_path / "judge.jsonl").read_text() == '{"of": "somebody else", "and": "torn', "it is not ours"


def hanging(request: dict[str, Any]) -> Raw:
    """What takes a question and never answers: for longer than a test."""
    time.sleep(60)
    return said("")


@pytest.mark.parametrize("who", ["judge", "endpoint", "endpoint's list of models"])
def test_who_never_answers_is_found_within_the_limit_which_the_sentence_names(
    who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge.FIRST[0] <= 120 and endpoint.FIRST_SECONDS <= 120
    monkeypatch.setattr(judge, "FIRST", (0.5, *judge.FIRST[1:]))
    monkeypatch.setattr(endpoint, "FIRST_SECONDS", 0.5)
    data, start = write(tmp_path / "hle.jsonl", hle(3)), time.monotonic()
    with (
        served(lambda r: hanging(r) if who == "endpoint" else said("Answer: 7")) as (url, asked),
        served(lambda r: said(match("yes"))) as (other, judged),
        socket.create_server(("127.0.0.1", 0)) as silent,  # takes connections, and never answers
    ):
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        url, other = (address if "list" in who else url), (address if who == "judge" else other)
        assert hle_run(tmp_path / "run", url, other, data) == NO_FIGURE
    assert "no answer within 0.5 seconds" in capsys.readouterr().err and time.monotonic() - start < 20
    assert len(asked) <= 2 and len(judged) == (who != "judge"), "nobody is asked again and again"


def test_a_judge_that_hangs_midway_is_not_waited_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    item, start = items("hle")[0], time.monotonic()
    with served(hanging) as (url, asked):
        context = Context(Judge(url, "m"))
        monkeypatch.setattr(context.judge, "patience", (0.5, *judge.PATIENCE[1:]))
        tries = [attempt(item, f"Answer: {n}") for n in range(200)]
        found = list(grade.grade_all(benchmarks.find("hle"), [item] * 200, tries, context))
    assert {verdict.status for verdict in found} == {"ungraded"} and len(asked) < 30
    assert any("no answer within 0.5 seconds" in str(one.error) for one in found) and time.monotonic() - start < 20


def test_a_judge_that_dies_midway_leaves_a_figure_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, alive = write(tmp_path / "hle.jsonl", hle(30)), tmp_path / "run", [6]

    def judge_reply(request: dict[str, Any]) -> Raw:
        alive[0] -= 1
        return said(match("yes")) if alive[0] >= 0 else no(403, "your trial is over")

    with served(lambda r: said(f"Answer: {r['messages'][-1]['content']}")) as (url, _):
        with served(judge_reply) as (other, _):
            assert hle_run(out, url, other, data) == WITH_CAVEAT
        captured = capsys.readouterr()
        assert "16.7 %" in captured.out and "of 30 tries 25 ungraded, counted as not correct; the first" in captured.out
        assert "your trial is over" in captured.out
        with served(lambda r: said(match("yes"))) as (other, _):
            assert hle_run(out, url, other, data, "--grade-only") == 0
        assert "100.0 %" in capsys.readouterr().out
        before = [(out / name).read_bytes() for name in ("results.json", "report.html")]
        with served(lambda r: said("I see.")) as (other, _):
            assert hle_run(out, url, other, data, "--grade-only", "--judge-model=another") == NO_FIGURE
        assert "no figure, of 30 tries 30 ungraded" in (said_of_it := capsys.readouterr().err)
        assert said_of_it.endswith("The page stays as it was.\n")
        assert before == [(out / name).read_bytes() for name in ("results.json", "report.html")]


def test_attempts_that_all_failed_are_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "sums.jsonl", sums(5))
    reply = lambda r: said("Hello.") if "Hello" in str(r) else no(403, "not today")  # noqa: E731
    with served(reply) as (url, _):
        assert run(tmp_path / "run", url, data) == NO_FIGURE
    captured = capsys.readouterr()
    assert "no figure, of 5 tries 5 ungraded" in captured.err and "HTTP 403: not today" in captured.err
    assert "%" not in captured.out and (tmp_path / "run" / "report.html").is_file()
    with served(reply) as (url, _):
        assert run(tmp_path / "run", url, data) == NO_FIGURE
    assert f"{tmp_path / 'run' / 'report.html'}" in capsys.readouterr().err, "a page without a figure is made anew"


def test_items_that_always_fail_do_not_keep_the_others_from_being_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(24)), tmp_path / "run"

    def reply(request: dict[str, Any]) -> Raw:
        words = request["messages"][-1]["content"].split()
        if words == ["Hello."]:
            return said("Hello.")
        return no(500, "a bug", "0") if int(words[2]) < 9 else said(f"#### {2 * int(words[2])}")

    with served(reply) as (url, _):
        for _ in range(2):  # the second time nothing but these nine is left
            assert run(out, url, data, "--concurrency=16") == WITH_CAVEAT
            captured = capsys.readouterr()
            assert "62.5 %" in captured.out and "of 24 tries 9 ungraded" in captured.out
    results = json.loads((out / "results.json").read_text())
    assert results["counts"]["correct"] == 15 and results["accuracy_graded"] == 1


def test_an_honest_rate_limit_is_kept_to(tmp_path: Path) -> None:
    data, lock, window = write(tmp_path / "sums.jsonl", sums(ITEMS)), threading.Lock(), [0.0, 0.0]

    def reply(request: dict[str, Any]) -> Raw:
        words = request["messages"][-1]["content"].split()
        with lock:
            now = time.time()
            if now - window[0] >= 1.0:
                window[:] = [now, 0]
            window[1] += 1
            if window[1] > 10:
                left = window[0] + 1.0 - now
                forms = ("1", f"{left:.3f}", formatdate(now + 1, usegmt=True))
                return no(429, "10 in a second", forms[int(window[1]) % 3])
        return said(f"#### {2 * int(words[2])}" if len(words) > 2 else "Hello.")

    with served(reply) as (url, _):
        assert run(tmp_path / "run", url, data) == 0
    assert json.loads((tmp_path / "run" / "results.json").read_text())["counts"]["correct"] == ITEMS


@pytest.mark.parametrize(
    ("after", "times", "stop"),
    [
        ("0.8", 1, StopReason.TERMINATED),
        ("0.5", 2, StopReason.TERMINATED),
        ("0.8", 9, StopReason.TIMEOUT),  # they are not free for ever
        (None, 0, StopReason.TIMEOUT),
    ],
)
def test_the_pauses_of_a_rate_limit_do_not_run_on_an_episodes_clock(
    after: str | None, times: int, stop: StopReason
) -> None:
    numbers = iter(range(99))

    def reply(request: dict[str, Any]) -> Raw:
        if after is None:
            time.sleep(1.6)  # it thinks as long
        return no(429, "slow", after) if after and next(numbers) < times else said("Hello.")

    async def play(url: str) -> Trajectory:
        client = endpoint.EndpointClient(endpoint.Endpoint(url, "m"))
        prompt = client.conversations["0/0/0"] = MessagePrompt("")
        config = GeneratorConfig(max_turns=1, max_model_len=endpoint.UNBOUNDED, episode_timeout=0.7)
        episodes = Episodes(lambda _: prompt, client, EnvClient([FakeEnvWorker()]), config)
        sampling = SamplingOptions(8, stop_token_ids=prompt.stop_token_ids)
        how = How(sampling, False, False, False)
        return (await episodes.play([Trajectory("0/0/0", Sample("s", "fake", 0), 0, 0)], how))[0]

    with served(reply) as (url, _):
        assert asyncio.run(play(url)).stop_reason is stop


@pytest.mark.parametrize("card", [{"max_model_len": 512}, None])
def test_a_server_with_little_context_is_asked_for_what_fits(card: dict[str, Any] | None, tmp_path: Path) -> None:
    data = write(tmp_path / "sums.jsonl", sums(6))

    def reply(request: dict[str, Any]) -> Raw:
        most = request.get("max_completion_tokens", 1)
        if most + 30 > 512:
            return no(400, f"This model's maximum context length is 512 tokens, and {most} + 30 were requested.")
        words = request["messages"][-1]["content"].split()
        return said(f"#### {2 * int(words[2])}" if len(words) > 2 else "Hello.")

    with served(reply, card) as (url, asked):
        assert run(tmp_path / "run", url, data) == 0
    assert len([request for request in asked if "messages" in request]) == (1 + 6 if card else 1 + 12)


def test_an_answer_that_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    """Mended, the server is asked again, and only for that one."""
    data, words, broken = write(tmp_path / "sums.jsonl", sums(3)), [f"--cache={tmp_path / 'cache'}"], True

    def reply(request: dict[str, Any]) -> Raw:
        number = request["messages"][-1]["content"].split()[2:3]
        return said(7 if broken and number == ["1"] else f"#### {2 * int(number[0])}" if number else "Hello.")

    with served(reply) as (url, asked):
        assert run(tmp_path / "run", url, data, *words) == WITH_CAVEAT
        broken, before = False, len(asked)
        assert run(tmp_path / "run", url, data, *words) == 0
        assert (
            sum(len(each["messages"][-1]["content"].split()) > 2 for each in asked[before:] if "messages" in each) == 1
        )


@pytest.mark.parametrize(
    ("reason", "outgrown"),
    [
        ("This model's maximum context length is 512 tokens", True),
        ("prompt is too long: 2100 tokens > 2000 maximum", True),
        ("The input token count (9) exceeds the maximum number of tokens allowed (8).", True),
        ("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097.", True),
        ("Range of input length should be [1, 30720]", True),
        ("Please reduce the length of the messages or completion.", True),
        ("The decoder prompt (length 2000) is longer than the maximum model length of 1024.", True),
        ("Too many tokens in prompt", True),
        ("Invalid 'messages[3].tool_calls': array exceeds 128", False),
        ("Number of tool results exceeds number of tool calls", False),
        ("Tool call id was c1 but must be a-z, A-Z, 0-9, with a length of 9.", False),
        ("Invalid token in the tool's name", False),
    ],
)
def test_only_a_prompt_without_room_ends_an_episode_as_cut_off(reason: str, outgrown: bool) -> None:
    """Anything else that is refused later than in the first turn is an error, to be seen and tried again."""
    assert bool(re.search(endpoint.OUTGROWN, reason)) is outgrown


def test_a_model_that_thinks_longer_than_the_first_questions_limit_is_asked_all_the_same(tmp_path: Path) -> None:
    data = write(tmp_path / "sums.jsonl", sums(6))

    def reply(request: dict[str, Any]) -> Raw:
        if "max_tokens" in request:
            return no(400, "Unsupported parameter: 'max_tokens' is not supported with this model.")
        return answer_sums(request) if request["max_completion_tokens"] > 64 else no(400, OUT_OF_TOKENS)

    with served(reply) as (url, asked):
        assert run(tmp_path / "run", url, data) == 0
    assert sum("messages" in request for request in asked) == 1 + 6


@pytest.mark.parametrize(
    ("known", "reason"), [("max_completion_tokens", "Region not served."), ("max_tokens", "Not today.")]
)
def test_why_an_endpoint_cannot_be_asked_is_what_it_says_of_the_model(
    known: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that it calls the limit of an answer by another name."""
    other = {"max_completion_tokens": "max_tokens", "max_tokens": "max_completion_tokens"}[known]

    def reply(request: dict[str, Any]) -> Raw:
        return no(400, f"Unsupported parameter: '{other}'. Use '{known}'." if other in request else reason)

    with served(reply) as (url, _):
        assert run(tmp_path / "run", url, write(tmp_path / "sums.jsonl", sums(3)), "--temperature=1") == NO_FIGURE
    assert f"--base-url {url}, --model m: HTTP 400: {reason}" in capsys.readouterr().err


def test_an_odd_turn_before_the_last_does_not_name_the_attempt(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", [{"url": "https://made.up/g", "title": "Glorp", "text": "Seven legs."}])
    search = '<tool_call>{"tool": "search", "args": {"query": "legs"}}</tool_call>'

    def reply(request: dict[str, Any]) -> Raw:
        asked = "q0" if "Q0" in str(request["messages"]) else "q1"
        if all(message["role"] != "assistant" for message in request["messages"]):
            return said(search, "tool_calls" if asked == "q0" else "stop")
        return said("Answer: 7", "stop" if asked == "q0" else "content_filter")

    data = write(tmp_path / "hle.jsonl", hle(2))
    with served(reply) as (url, _), served(lambda r: said(match("yes"))) as (judge, _):
        assert hle_run(tmp_path / "run", url, judge, data, f"--tools={corpus}") == 0
    found = {line["item_id"]: (line["stop"], line["steps"]) for line in lines(tmp_path / "run" / "attempts.jsonl")}
    assert found == {"q0": ("done", 2), "q1": ("content_filter", 2)}
    notes = json.loads((tmp_path / "run" / "results.json").read_text())["notes"]
    assert [note for note in notes if "ended in" in note] == ["1 tries ended in content filter."]


def test_fewer_tries_at_more_items_count_these_tries_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(12)), tmp_path / "run"
    reply = lambda r: said(f"#### {2 * int((r['messages'][-1]['content'] + ' 0 0 0').split()[2])}")  # noqa: E731
    with served(reply) as (url, _):
        assert run(out, url, data, "--n=4", "--samples=4") == 0
        assert run(out, url, data, "--n=12", "--samples=1") == 0
    results = json.loads((out / "results.json").read_text())
    assert (results["accuracy"], results["samples"], results["counts"]["missing"]) == (1, 1, 0)
    assert json.loads((out / "manifest.json").read_text())["facts"]["base_url"] == url
    capsys.readouterr()
    assert main(["eval", "agent", f"--out={out}", "--grade-only"]) == 0 and "100.0 %" in capsys.readouterr().out


def test_failures_beyond_the_selection_are_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer items and tries than the folder holds: neither the exit code nor a sentence is about the others."""
    data, out, chosen, refused = write(tmp_path / "sums.jsonl", sums(6)), tmp_path / "run", set[str](), [""]

    def reply(request: dict[str, Any]) -> Raw | tuple[int, str]:
        question = request["messages"][-1]["content"]
        if refused[0] and "What is" in question and (refused[0] == "all" or question not in chosen):
            return no(403, f"not {refused[0]}")
        return answer_sums(request)

    with served(reply) as (url, asked):
        assert run(out, url, data, "--n=2") == 0
        chosen |= {request["messages"][-1]["content"] for request in asked if "messages" in request}
        refused[0] = "the others"
        assert run(out, url, data, "--n=all") == WITH_CAVEAT
        assert "the first: The attempt failed: HTTP 403: not the others" in capsys.readouterr().out
        assert run(out, url, data, "--n=2") == 0
        assert "the first" not in capsys.readouterr().out
        refused[0] = "all"
        assert run(out, url, data, "--n=2", "--samples=2") == WITH_CAVEAT
        captured = capsys.readouterr()
        assert "the first: The attempt failed: HTTP 403: not all" in captured.out
        assert "2 attempts ended in an error" in captured.err and "One: HTTP 403: not all" in captured.err
        assert run(out, url, data, "--n=2") == 0
    assert main(["eval", "agent", f"--out={out}", "--grade-only"]) == 0


def test_the_seed_goes_to_a_chat_endpoint_that_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key from a file\r\n")
    data = write(tmp_path / "sums.jsonl", sums(3))
    for takes in (True, False):

        def reply(request: dict[str, Any], takes: bool = takes) -> Raw:
            return said("#### 0") if takes or "seed" not in request else no(422, "Extra inputs are not permitted: seed")

        with served(reply) as (url, asked):
            assert run(tmp_path / str(takes), url, data, "--temperature=1") == 0
        seeds = {request.get("seed") for request in asked[-3:]}
        assert len(seeds) == 3 and None not in seeds if takes else seeds == {None}
        notes = json.loads((tmp_path / str(takes) / "results.json").read_text())["notes"]
        assert ("The endpoint takes no seed: the same command samples other answers." in notes) != takes


def test_a_rate_limit_at_the_first_question_says_nothing_of_how_to_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that the endpoint takes no seed, nor that it calls the limit of an answer by another name."""
    data = write(tmp_path / "sums.jsonl", sums(2))
    for busy in (1, 2, 4, 9) if os.environ.get("SKYRL_TEST_FULL") else (1, 9):
        seen = [0]

        def reply(request: dict[str, Any], busy: int = busy, seen: list[int] = seen) -> Raw:
            seen[0] += 1
            return no(429, "slow", "0") if seen[0] <= busy else said("#### 0")

        with served(reply) as (url, asked):
            assert run(tmp_path / str(busy), url, data, "--temperature=1") == 0
        asked = [request for request in asked if "messages" in request]
        assert len(asked) == busy + 1 + 2
        assert all("seed" in request and "max_completion_tokens" in request for request in asked), busy
        notes = json.loads((tmp_path / str(busy) / "results.json").read_text())["notes"]
        assert not any("takes no seed" in note for note in notes)
    monkeypatch.setattr(endpoint, "FIRST_SECONDS", 0.5)
    with served(lambda request: no(429, "slow", "0.2")) as (url, asked):
        assert run(tmp_path / "always", url, data, "--temperature=1") == NO_FIGURE
    assert f"--base-url {url}, --model m: HTTP 429: slow." in capsys.readouterr().err
    assert not (tmp_path / "always").exists() and all("seed" in request for request in asked if "messages" in request)


@pytest.mark.parametrize(
    ("status", "after", "busy", "pauses"),
    [
        (429, "300", 1800.0, [300, 300, 300]),
        (503, "600", 1800.0, [600, 600, 600]),
        (503, "300", 0.0, [60, 60, 60]),
        (429, "0", 1800.0, [0.1, 0.2, 0.4]),  # without a pause it would be asked as fast as it answers
        (503, "nan", 1800.0, [0.1, 0.2, 0.4]),
        (429, "inf", 1800.0, [1800, 1800, 1800]),  # the clock stands still here: at most what is left
    ],
)
def test_retry_after_is_kept_within_what_a_request_may_wait(
    status: int, after: str, busy: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(http, "asyncio", SimpleNamespace(sleep=sleep))

    async def ask(url: str) -> Any:
        async with http.HTTPClient(url) as client:
            return await client.ask("POST", "/chat/completions", {"messages": []}, 60.0, 6, busy)

    numbers = iter(range(9))
    with served(lambda r: no(status, "slow", after) if next(numbers) < 3 else said("Hello.")) as (url, _):
        assert asyncio.run(ask(url))["choices"]
    assert slept == pytest.approx(pauses, rel=0.05)


def test_a_date_after_which_to_ask_again_is_told_from_seconds() -> None:
    assert http.seconds_of("Wed, 21 Oct 2015 07:28:00 GMT", 5.0) == 0.0, "over"
    assert (http.seconds_of("17", 5.0), http.seconds_of("soon", 5.0), http.seconds_of("", 5.0)) == (17.0, 5.0, 5.0)


def test_a_key_with_a_line_break_in_it_is_a_sentence() -> None:
    async def ask(url: str) -> Any:
        async with http.HTTPClient(url, "sk-1\nsk-2") as client:
            return await client.ask("POST", "/chat/completions", {})

    with served(lambda r: said("Hello.")) as (url, _), pytest.raises(http.Refused, match=r"character .* in headers"):
        asyncio.run(ask(url))


def test_members_of_requests_and_a_choice_of_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [mmlu_pro(n, category="art \ud800" if n < 2 else "law") for n in range(6)]
    data, words = write(tmp_path / "rows.jsonl", rows), ['--request={"top_p": 0.9, "reasoning_effort": "high"}']
    with served(lambda r: said("The answer is (B).")) as (url, asked):
        assert run(tmp_path / "run", url, data, *words, "--only", "law", "0", bench="mmlu-pro") == 0
        assert run(tmp_path / "run", url, data, "--only", "law", "0", bench="mmlu-pro") == NO_FIGURE
        assert "was begun with request=" in capsys.readouterr().err
        for wrong, sentence in ((['--request={"n": 2}'], "cannot hold n"), (["--request=[1]"], "is not JSON such as"),
                                (["--only", "x"], "--only x is the id or the category of no item")):  # fmt: skip
            assert run(tmp_path / "run", url, data, *wrong, bench="mmlu-pro") == NO_FIGURE
            assert sentence in capsys.readouterr().err
    with_members = [request for request in asked if request.get("top_p") == 0.9]
    assert len(with_members) == 6 and {request["reasoning_effort"] for request in with_members} == {"high"}
    assert json.loads((tmp_path / "run" / "results.json").read_text())["title"].startswith(
        "mmlu-pro, 5 of 6 items, only 0, law"
    )


@pytest.mark.parametrize("words", [["--samples=0"], ["--concurrency=0"], ["--max-tokens=-1"]])
def test_numbers_that_make_no_run_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", "http://127.0.0.1:9/v1", "none.jsonl", *words) == NO_FIGURE
    option, _, value = words[0].partition("=")
    assert f"{option} is {value}, but should be 1 or more." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"answer": "42"}', "row 7, field"),
        pytest.param('{"question": "', "row 7 is not JSON", marks=pytest.mark.full),
        ("\udcff\udcfe", "row 7 is not JSON"),
    ],
)
def test_rows_that_cannot_be_read_are_left_out_and_the_headline_and_the_exit_code_say_so(
    bad: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps(row) for row in sums(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([*rows[:6], bad, *rows[7:]]), errors="surrogateescape")
    with served(answer_sums) as (url, _):
        assert run(tmp_path / "run", url, str(data), "--n=all") == WITH_CAVEAT
        assert main(["eval", "agent", "--grade-only", f"--out={tmp_path / 'run'}"]) == WITH_CAVEAT
    sentence = "1 rows of the data cannot be read and are left out"
    headlines = capsys.readouterr().out.splitlines()
    assert len(headlines) == 2 and all("19 of 19 items" in line and f"), {sentence}. " in line for line in headlines)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["caveat"], results["accuracy"]) == (sentence, 1)
    assert any(note.startswith("1 rows that cannot be read") and reason in note for note in results["notes"])


def test_a_comparison_carries_the_caveats_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, broken = write(tmp_path / "sums.jsonl", sums(4)), [True]

    def reply(request: dict[str, Any]) -> Raw:
        words = (request["messages"][-1]["content"] + " 0 0 0").split()
        return no(403, "not today") if words[2] == "1" and broken[0] else said(f"#### {2 * int(words[2])}")

    with served(reply) as (url, _):
        assert run(tmp_path / "a", url, data) == WITH_CAVEAT
        broken[0] = False
        assert run(tmp_path / "b", url, data) == 0
    capsys.readouterr()
    assert main(["eval", "agent", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert f"{tmp_path / 'a'}: of 4 tries 1 ungraded" in capsys.readouterr().out
