"""A stock `openai` client against a policy while it trains, against a finished run, and servers that we are given."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from skyrl_trainer.run.processes import ENGINE_START_SECONDS
from tests.e2e.runs import QUICK, Run, assert_nothing_left, metrics

FULL = bool(os.environ.get("SKYRL_TEST_FULL"))
QUESTION = [{"role": "user", "content": "12 + 34 = ?"}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


def ask_until_over(run: Run, port: int) -> list[list[int]]:
    """The weight versions of each reply's tokens, one reply after the other, as long as the run lives."""
    client, seen = client_of(port), []
    while run.process.poll() is None:
        try:
            reply = client.chat.completions.create(model="run", messages=QUESTION, max_tokens=40)
        except openai.APIError:  # not yet, or no longer
            time.sleep(0.05)
            continue
        spans = reply.model_extra["weight_versions"][0]
        assert reply.system_fingerprint == f"weights-{spans[-1]['version']}"
        seen.append([span["version"] for span in spans])
        time.sleep(0.1)
    return seen


def test_a_stock_client_asks_a_policy_while_it_trains(clone: Path, tmp_path: Path) -> None:
    """On vLLM in a full run."""
    folder, port = tmp_path / "served", free_port()
    quick = {} if FULL else QUICK
    run = Run(folder, f"--serve={port}", trainer__policy__model__path=clone, trainer__max_steps=6, **quick)
    seen = ask_until_over(run, port)
    code, output = run.finish()
    assert code == 0 and f"127.0.0.1:{port}" in output, output
    versions = [version for reply in seen for version in reply]
    assert versions == sorted(versions), "a reply never has older tokens than the one before"
    assert len({*versions}) >= 4, "asked between the updates"
    assert {*versions} <= {*range(7)} and all(row["failed"] == 0 for row in metrics(folder)[1:])
    assert_nothing_left(folder)


@pytest.mark.full  # tests/trainer/serve has all but the engine, which test_eval.py starts for a folder in the same way
def test_a_stock_client_asks_the_policy_of_a_run_that_is_over(finished: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "skyrl_trainer", "serve", str(finished), f"--port={port}"]
    env = {**os.environ, "SKYRL_TEST_RUN": str(finished)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line == f"{finished.name} is served at http://127.0.0.1:{port}/v1\n", line
        reply = client_of(port).chat.completions.create(model=finished.name, messages=QUESTION, temperature=0)
        assert reply.choices[0].message.content and reply.system_fingerprint == "weights-0"
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
    assert_nothing_left(finished)


if FULL:

    def test_training_on_a_server_that_runs_already(clone: Path, tmp_path: Path) -> None:
        """Started as docs/agents/serving.md says; it gets the weights of every step and is left as it was: running."""
        port, folder = free_port(), tmp_path / "run"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={clone}", f"--port={port}"),
            *("--host=127.0.0.1", "--enable-scale-out", "--logprobs-mode=processed_logprobs", "--max-logprobs=32"),
            "--worker-extension-cls=skyrl_trainer.weight_sync.vllm_backend.WorkerExtension",
            '--weight-transfer-config={"backend": "skyrl_shared_memory"}',
            *("--dtype=float32", "--max-model-len=256", "--enforce-eager", "--kv-cache-memory-bytes=134217728"),
            *("--max-num-batched-tokens=65536", "--generation-config=vllm", "--disable-uvicorn-access-log"),
        ]
        quick = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **quick, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                client, deadline = client_of(port), time.monotonic() + ENGINE_START_SECONDS
                while not answers(client):
                    assert server.poll() is None and time.monotonic() < deadline
                    time.sleep(0.3)
                settings = {
                    "generator__backend": "openai_server",
                    "generator__engine_kwargs": f"{{urls: ['http://127.0.0.1:{port}']}}",
                }
                run = Run(folder, trainer__policy__model__path=clone, trainer__max_steps=2, **settings)
                code, output = run.finish()
                assert code == 0, output
                assert all(row["sync/max_logprob_diff"] < 5e-4 for row in metrics(folder))
                assert answers(client)
            finally:
                server.terminate()
                server.wait(30)


def answers(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIError:
        return False
