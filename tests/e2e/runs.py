"""Starts `skyrl-trainer train` as a user would, in a process of its own, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

TRANSFORMERS = {
    "generator__backend": "transformers",
    "trainer__algorithm__plugin_file": Path(__file__).parents[2] / "examples/transformers_engine.py",
}
"""Settings of a run whose engine is the example's."""

SMALL = {
    "trainer.deterministic": True,
    "trainer.train_batch_size": 8,
    "trainer.learning_rate": 5e-4,
    "trainer.micro_batch_tokens": 4096,
    "data.val_size": 20,
    "trainer.eval_interval": 3,
    "trainer.ckpt_interval": 2,
    "generator.num_generations": 4,
    "generator.max_completion_length": 48,
    "generator.max_model_len": 256,
    "data.train_data": "['text_math?split=train&difficulty=1']",
    "data.val_data": "['text_math?split=val&difficulty=1']",
}


# One turn and many, history that is rewritten, and every token in the gradient (the clone solves no household task).
MIXED = {
    "data__train_data": "['text_math?split=train&difficulty=1', 'alfworld_lite?split=train']",
    "generator__max_model_len": 2048,
    "generator__max_turns": 3,
    "generator__agent": "{memory: 'window:1'}",
    "trainer__algorithm__options__entropy_coef": 0.001,
    "trainer__max_steps": 6,
    "trainer__train_batch_size": 4,
}

QUICK = {"trainer__eval_before_train": False, "trainer__eval_interval": 0, **TRANSFORMERS}
"""For runs that are ended after a step or two."""


def train(folder: Path, **settings: object) -> list[str]:
    """The words of the command."""
    chosen = {**SMALL, "trainer.run_dir": folder, **{k.replace("__", "."): v for k, v in settings.items()}}
    return ["train", *(f"{k}={v}" for k, v in chosen.items())]


class Run:
    """One process of `skyrl-trainer train` in `folder`."""

    def __init__(self, folder: Path, *options: str, cwd: Path | None = None, **settings: object) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_trainer", *train(folder, **settings), *options],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SKYRL_TEST_RUN": str(folder)},
        )

    def finish(self, timeout: float = 600) -> tuple[int, str]:
        """The exit code, and everything that was printed."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def wait_for_step(self, step: int, timeout: float = 400) -> None:
        """Until the metrics of `step` are written."""
        deadline = time.monotonic() + timeout
        while not any(row["step"] >= step for row in metrics(self.folder)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"step {step} was not reached:\n{self.finish(10)[1]}")
            time.sleep(0.05)

    def wait_for_lock(self, timeout: float = 60) -> None:
        """Until the run has its folder to itself."""
        deadline = time.monotonic() + timeout
        while not (self.folder / ".lock").exists() or not (self.folder / ".lock").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def processes_of(folder: Path) -> list[psutil.Process]:
    """Whatever still runs that the run in `folder` started, its guardian included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SKYRL_TEST_RUN") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(folder: Path, within: float = 30) -> None:
    deadline = time.monotonic() + within
    while left := processes_of(folder):
        assert time.monotonic() < deadline, [(process.pid, process.cmdline()) for process in left]
        time.sleep(0.2)


def kill_engine(folder: Path) -> None:
    """Of a server, the process that answers."""
    kill_one(folder, r".*openai\.api_server", r"ray::\w+Engine")


def kill_one(folder: Path, *patterns: str) -> None:
    """The first process of the run whose command line begins as the first of the patterns that fits any."""
    lines = {process.pid: " ".join(process.cmdline()) for process in processes_of(folder)}
    fitting = [pid for pattern in patterns for pid, line in lines.items() if re.match(pattern, line)]
    os.kill(fitting[0], signal.SIGKILL)
