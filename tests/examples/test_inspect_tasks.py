"""Tasks of inspect by examples/inspect_tasks.py, played in an environment with inspect's own versions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.e2e.runs import Run, metrics
from tests.packaging.test_packaging import checked, empty_environment, run

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/inspect_tasks.py"
TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Target, mean, pattern, scorer
from inspect_ai.solver import generate, user_message

def data(first, last):
    asked = "{0} + {0} = ? Answer in \\\\boxed{{}}."
    return MemoryDataset([Sample(asked.format(n), target=str(2 * n)) for n in range(first, last)])

@scorer(metrics=[mean()])
def length():
    async def score(state, target: Target):
        return Score(value=len(state.output.completion))
    return score

@task
def sums():
    return Task(data(10, 40), solver=generate(), scorer=[pattern(r"boxed.(\\d+)"), length()])

@task
def twice():
    return Task(data(40, 50), solver=[generate(), user_message("Again."), generate()], scorer=length())

@task
def same():
    return Task([Sample("one", id=1), Sample("two", id=1)])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = empty_environment(tmp_path_factory.mktemp("inspect") / "venv")
    script = f'python="{sys.executable}"; source scripts/pip_settings.sh; "$@"'
    install = (sys.executable, "-m", "uv", "pip", "install", "--python", python, "inspect-ai==0.3.285", "openai")
    checked("bash", "-euo", "pipefail", "-c", script, "bash", *install)
    return python


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks.py").write_text(TASKS)
    return folder


@pytest.fixture(scope="module")
def port(python: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [str(python), str(EXAMPLE), "tasks:sums", "sums.jsonl", "tasks:twice", "twice.jsonl"]
    env = os.environ | {"INSPECT_PORT": port}
    server = subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    try:
        said = [server.stdout.readline() for _ in range(3)]
        assert said[0] == "tasks:sums: 30 samples, in sums.jsonl\n" and said[2] == f"They are played at port {port}.\n"
        yield port
    finally:
        server.kill()
        server.wait()


def test_solvers_are_the_agent_and_scorers_the_reward(
    port: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_PORT", port)
    [first, *_] = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    assert first["prompt"] == "10 + 10 = ? Answer in \\boxed{}." and first["ground_truth"] == "20"
    settings: dict[str, Any] = {
        "data__train_data": [str(folder / "sums.jsonl")],
        "data__val_data": [str(folder / "twice.jsonl")],
        "trainer__policy__model__warmstart": "{num_demonstrations: 0}",
        "generator__agent__run": f"{EXAMPLE}:agent",
        "generator__max_concurrency": 8,
        "generator__max_turns": 2,
        "environment__step_timeout": 300,
        "trainer__max_steps": 1,
    }
    code, output = Run(tmp_path / "run", **settings).finish()
    assert code == 0, output
    assert metrics(tmp_path / "run")[-1]["failed"] == 0
    learned = [each for _, each in JsonlTrajectoryStore(tmp_path / "run/trajectories").trajectories(1)]
    assert len(learned) == 32
    for each in learned:  # of the answer 0, and half of its length
        assert len(each.turns) == 1 and each.env_reward == len(each.turns[0].action) / 2
    held_out = [each for _, each in JsonlTrajectoryStore(tmp_path / "run/held_out").trajectories(1)]
    assert len(held_out) == 10 and all(len(each.turns) == 2 for each in held_out)


def test_what_is_wrong_is_said(python: Path, folder: Path) -> None:
    done = run(python, EXAMPLE, "tasks:same", "same.jsonl", cwd=folder)
    assert done.stderr.splitlines()[-1].startswith("inspect: tasks:same: The dataset contains duplicate sample ids")
    done = run(python, "-c", ASKS, cwd=EXAMPLE.parent)
    sentence = "RuntimeError: inspect_tasks.py does not play samples at port 1 ([Errno 111] Connection refused)"
    assert done.stderr.splitlines()[-1] == sentence


ASKS = """
from types import SimpleNamespace as Object

import inspect_tasks

inspect_tasks.PORT = 1
row = {"extra_info": {"task": "tasks:sums", "index": 0}}
inspect_tasks.agent(Object(options={"task": row}, base_url="", api_key="", model=""))
"""
