"""Tasksets of verifiers by examples/verifiers_tasksets.py, served from an environment with verifiers' own versions."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.e2e.runs import Run, metrics
from tests.packaging.test_packaging import checked, empty_environment, run

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, task: SumData, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= len(task.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
        return float(len(trace.last_reply))

class SumConfig(vf.TasksetConfig):
    most: int = 20

class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.most):
            data = SumData(prompt=f"{n} + {2 * n} = ?", system_prompt="Only the number.", answer=str(3 * n))
            yield SumTask(data, self.config.task)

__all__ = ["Sums"]
"""
ENDLESS = SUMS.replace("range(self.config.most)", "itertools.count()").replace(
    "    def load", "    INFINITE = True\n\n    def load"
)
CONFINED = SUMS.replace(
    "trace: vf.Trace) -> float:\n        return float(trace",
    "trace: vf.Trace, runtime: vf.Runtime) -> float:\n        return float(trace",
)
SILENT = SUMS.replace("prompt=f", "description=f")
MINE = 'from verifiers_tasksets import register\n\nregister("sums", most=1000)\n'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = empty_environment(tmp_path_factory.mktemp("verifiers") / "venv")
    script = f'python="{sys.executable}"; source scripts/pip_settings.sh; "$@"'
    packages = ("verifiers==0.4.0", f"{ROOT}/packages/skyrl-gym[server]")
    install = (sys.executable, "-m", "uv", "pip", "install", "--python", python, *packages)
    checked("bash", "-euo", "pipefail", "-c", script, "bash", *install)
    return python


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasksets")
    text = (ROOT / "examples/verifiers_tasksets.py").read_text()
    files = {"verifiers_tasksets": text, "my_tasksets": MINE, "sums": SUMS, "endless": "import itertools\n" + ENDLESS}
    for name, content in (files | {"confined": CONFINED, "silent": SILENT}).items():
        (folder / f"{name}.py").write_text(content)
    return folder


@pytest.fixture(scope="module")
def address(python: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "skyrl_gym", "serve", "my_tasksets:verifiers/sums-v0", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, "the server does not listen"
                time.sleep(0.2)
        yield f"ws://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_the_datas_own_answers_are_paid_by_the_tasksets_own_rewards(address: str) -> None:
    env = gymnasium.make("skyrl_gym:skyrl/openenv-v0", url=address)
    seen = set()
    for split, count in {"train": 800, "val": 100, "test": 100}.items():
        for number in range(0, count, 10):
            question, info = env.reset(options={"split": split, "task_id": number})
            assert info["instructions"] == "Only the number."
            answer = str(3 * int(question.split()[0]))
            _, reward, terminated, _, info = env.step(answer)
            assert terminated and info["success"] and reward == 1.5
            assert info["reward_parts"] == {"exact": 1.0, "brief": 0.5}
            assert info["metrics"] == {"length": len(answer)}
            env.reset(options={"split": split, "task_id": number})
            assert env.step("It is " + answer)[1] == 0
            seen.add(question)
    assert len(seen) == 100
    env.close()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ('register("endless")', "The taskset 'endless' has no end: give a limit."),
        ('register("endless", limit=5)', "The taskset 'endless' has 5 tasks, and 10 are needed for three splits."),
        (
            'register("silent")',
            "The taskset 'silent' needs a prompt of one text: only tasks of one turn are played here.",
        ),
        ('register("confined")', "The taskset 'confined' needs a runtime: only tasks of one turn are played here."),
    ],
)
def test_what_cannot_be_played_is_refused(python: Path, folder: Path, call: str, sentence: str) -> None:
    done = run(python, "-c", f"from verifiers_tasksets import register; {call}", cwd=folder)
    assert done.stderr.splitlines()[-1] == f"ValueError: {sentence}"
    checked(python, "-c", "from verifiers_tasksets import register; register('endless', limit=10)", cwd=folder)


def test_a_policy_is_trained_on_one(address: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "data__train_data": f"openenv:{address}?split=train",
        "data__val_data": f"openenv:{address}?split=val",
        "trainer__policy__model__warmstart": "{num_demonstrations: 0}",
        "trainer__max_steps": 1,
    }
    code, output = Run(tmp_path / "run", **settings).finish()
    assert code == 0, output
    assert metrics(tmp_path / "run")[-1]["failed"] == 0
