"""Evaluation through a real vLLM on the CPU, a tiny random policy in it: every benchmark, kills, training."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_eval import benchmarks
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.cli import main
from skyrl_trainer.engine.server_process import as_flag
from skyrl_trainer.engine.vllm_args import engine_env, vllm_kwargs
from skyrl_trainer.run.processes import ENGINE_START_SECONDS
from tests.e2e.runs import TRANSFORMERS, Run, metrics
from tests.eval.made_up import ROWS, items
from tests.eval.scripted_server import match, served
from tests.eval.test_command import answer_sums, lines, run, sums, write
from tests.eval.test_swe import make_instance

pytestmark = pytest.mark.usefixtures("one_ray")

RATING = json.dumps({"Answer Correctness": {"Correctness Details": {"x": False}, "Excessive Answers": []}})


@pytest.fixture(scope="module")
def policy(clone: Path) -> Path:
    """What the clone began as."""
    return clone.with_name("random")


@pytest.fixture(scope="module")
def server(policy: Path) -> Iterator[str]:
    """The address of vLLM's own server with the policy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {"port": port, "served_model_name": "tiny", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    kwargs = vllm_kwargs(str(policy), "float32", 4096, 64, 0, ours)
    for name in ("skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls"):
        del kwargs[name]
    flags = [as_flag(name, value) for name, value in kwargs.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=os.environ | engine_env(), stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        deadline = time.monotonic() + ENGINE_START_SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()


def judge(request: dict[str, Any]) -> tuple[int, str]:
    return 200, RATING if "Excessive Answers" in str(request) else match("no", 40)


SAMPLED = ("hle", "math", "livecodebench")
"""One with a judge, one without, one that runs code."""


@pytest.mark.parametrize(
    "bench",
    [
        pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.full)
        for name in (*benchmarks.names("agent"), "livecodebench")
    ],
)
def test_a_benchmark_runs_end_to_end(bench: str, server: str, policy: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / f"{bench}.jsonl", ROWS[bench]), tmp_path / "run"
    kind = benchmarks.find(bench).kind
    words = [f"--bench={bench}", f"--data={data}", f"--base-url={server}", f"--out={out}", "--max-tokens=24", "--n=all"]
    with served(judge) as (url, _):
        asked = [f"--judge-url={url}", "--judge-model=j"] if benchmarks.find(bench).judge else []
        assert main(["eval", kind, *words, "--samples=2", "--temperature=1", *asked]) == 0
    tasks = {item.item_id: item for item in items(bench) if not item.image}
    attempts = lines(out / "attempts.jsonl")
    assert sorted((line["item_id"], line["sample"]) for line in attempts) == [
        (name, s) for name in sorted(tasks) for s in (0, 1)
    ]
    assert json.loads((out / "manifest.json").read_text())["config"]["asked"] == "tokens"
    prompt = load_chat_prompt(str(policy))
    for line in attempts:
        task = benchmarks.find(bench).env(tasks[line["item_id"]]).options["task"]
        assert line["prompt_tokens"] == len(prompt.first(task["instructions"], task["question"])), "as in training"
        assert line["steps"] == 1 and 0 < line["completion_tokens"] <= 24 and line["stop"] in ("done", "length")
    counts = json.loads((out / "results.json").read_text())["counts"]
    assert counts["ungraded"] == counts["missing"] == 0 and sum(counts.values()) == len(attempts)


@pytest.mark.parametrize("bench", ["swe-verified", pytest.param("swe-multilingual", marks=pytest.mark.full)])
def test_a_code_agent_runs_end_to_end(bench: str, server: str, tmp_path: Path) -> None:
    """Its words are noise, so that nothing is changed and nothing resolved."""
    instance, out = make_instance(tmp_path), tmp_path / "run"
    data = write(tmp_path / "tasks.jsonl", [instance.row])
    words = [f"--bench={bench}", f"--data={data}", f"--repos={instance.repos}", "--executor=namespace"]
    assert main(["eval", "code", *words, f"--base-url={server}", f"--out={out}", "--max-tokens=24", "--n=all"]) == 0
    (attempt,) = lines(out / "attempts.jsonl")
    assert (attempt["answer"], attempt["error"]) == ("", None) and attempt["steps"] > 1
    assert "No tool call was found" in attempt["messages"][3]["content"]
    results = json.loads((out / "results.json").read_text())
    assert results["accuracy"] == results["own"]["resolved_guarded"] == 0 and results["counts"]["ungraded"] == 0
    assert (out / "report.html").stat().st_size < 300_000


@pytest.mark.parametrize("most", [24, pytest.param(16384, marks=pytest.mark.full)])
def test_the_same_server_asked_by_messages(most: int, server: str, tmp_path: Path) -> None:
    """Also where the default of --max-tokens is more than the server's context."""
    data = write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"])
    words = [f"--data={data}", f"--base-url={server}", "--bench=gsm8k", "--images", f"--max-tokens={most}"]
    assert main(["eval", "agent", *words, f"--out={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]["asked"] == "messages"
    assert all(
        line["stop"] in ("done", "length") and line["completion_tokens"]
        for line in lines(tmp_path / "run/attempts.jsonl")
    )


def test_tool_calls_that_the_same_server_reads(server: str, tmp_path: Path) -> None:
    """Its words are noise, so the server holds it to one call, until what is found has filled its context."""
    pages = [{"url": f"https://made.up/{n}", "title": "Glorp", "text": "Seven legs. " * 30} for n in range(8)]
    corpus, data = write(tmp_path / "corpus.jsonl", pages), write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"])
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "legs"}}\n</tool_call>'
    words = [f"--data={data}", f"--base-url={server}", "--bench=gsm8k", "--n=1", f"--tools={corpus}", "--native-tools"]
    held = json.dumps({"structured_outputs": {"choice": [call]}})
    assert main(["eval", "agent", *words, f"--request={held}", f"--out={tmp_path / 'run'}"]) == 0
    (attempt,) = lines(tmp_path / "run" / "attempts.jsonl")
    assert 0 < attempt["tool_calls"] <= attempt["steps"] and attempt["tool_errors"] == 0
    assert attempt["stop"] == "length" and "Seven legs." in attempt["messages"][2]["content"]


def test_a_model_folder_is_served_and_evaluated(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a question that is longer than the model's context: it is no wrong answer, and the reader is told."""
    long = {"question": "How much is 1 + 1? " * 2000, "answer": "#### 2"}
    data = write(tmp_path / "gsm8k.jsonl", [*ROWS["gsm8k"], long])
    words = [f"--data={data}", f"--checkpoint={policy}", "--bench=gsm8k", "--max-tokens=24"]
    assert main(["eval", "agent", *words, f"--out={tmp_path / 'run'}"]) == 3
    assert "tokens or more, too many for the context, generator.max_model_len=8192" in capsys.readouterr().err
    assert [line["stop"] for line in lines(tmp_path / "run/attempts.jsonl")].count("error") == 1
    config = json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]
    assert config["asked"] == "tokens" and len(config["weights"]) == 16


@pytest.mark.full  # tests/eval/test_training.py has all but the engine, which the tests above have
def test_benchmarks_while_a_policy_trains(policy: Path, tmp_path: Path) -> None:
    spec = f"skyrl_eval:gsm8k?data={write(tmp_path / 'gsm8k.jsonl', ROWS['gsm8k'])}&n=2"
    trained = Run(
        tmp_path / "run",
        trainer__policy__model__path=policy,
        trainer__max_steps=0,
        **TRANSFORMERS,
        generator__max_model_len=512,
        data__val_data=json.dumps(["text_math?split=val&difficulty=1", spec]),
    )
    code, output = trained.finish()
    assert code == 0, output
    row = metrics(tmp_path / "run")[0]
    assert 0 <= row["eval/gsm8k/accuracy"] <= 1 and row["eval/gsm8k/ungraded"] == 0 and "eval/success" in row


@pytest.mark.parametrize(
    ("ended_by", "code"), [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_ended_while_solving_and_started_again_nothing_is_lost_and_nothing_is_there_twice(
    ended_by: signal.Signals, code: int, tmp_path: Path
) -> None:
    data, out = write(tmp_path / "sums.jsonl", sums(60)), tmp_path / "run"
    answered: list[str] = []

    def slow(request: dict[str, Any]) -> tuple[int, str]:
        time.sleep(0.05)
        answered.append(request["messages"][-1]["content"])
        return answer_sums(request)

    with served(slow) as (url, _):
        words = ["eval", "agent", "--bench=gsm8k", f"--data={data}", f"--base-url={url}", "--model=m", f"--out={out}"]
        process = subprocess.Popen([sys.executable, "-m", "skyrl_trainer", *words, "--concurrency=4"])
        attempts = out / "attempts.jsonl"
        while not attempts.is_file() or attempts.read_text().count("\n") < 20:  # the last line may be torn
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(ended_by)
        assert process.wait(30) == code
        before = (out / "attempts.jsonl").read_bytes()
        before = before[: before.rfind(b"\n") + 1]
        with (out / "attempts.jsonl").open("ab") as file:
            file.write(b'{"bench": "gsm8k", "item')  # as a kill tears a line
        asked, kept = len(answered), len(before.splitlines())
        assert 20 <= kept < 60
        assert run(out, url, data) == 0
        asked = sum("What is" in words for words in answered[asked:])
    after = (out / "attempts.jsonl").read_bytes()
    assert after.startswith(before), "what was recorded is as it was"
    assert len({line["item_id"] for line in lines(out / "attempts.jsonl")}) == len(lines(out / "attempts.jsonl")) == 60
    assert asked <= 60 - kept + 4, "only what was missing is asked, and what was in flight at the kill"
    assert json.loads((out / "results.json").read_text())["accuracy"] == 1
