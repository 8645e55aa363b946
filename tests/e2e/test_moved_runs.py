"""A run of many turns that is killed, and goes on where its folder was moved, has the bytes of one left alone."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_trainer.files import local_folder
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.e2e.runs import QUICK, Run, assert_nothing_left, metrics

KILLS, STEPS = 20, 6
TOOLS = {
    "data__train_data": "['tool_use?split=train&difficulty=1']",
    "data__val_data": "['tool_use?split=val&difficulty=1']",
    "trainer__policy__model__tiny": "{induction: true, config_kwargs: {vocab_size: 512, num_hidden_layers: 3}}",
    "trainer__policy__model__warmstart": "{num_demonstrations: 400, batch_size: 8, epochs: 2}",
    "trainer__algorithm__options__entropy_coef": 0.001,
    "trainer__max_steps": STEPS,
    "trainer__train_batch_size": 4,
    "generator__max_turns": 3,
    "generator__max_model_len": 640,
    **QUICK,
}
"""The policy is made and cloned in the run folder, which moves with it. Every token is in the gradient."""


def checksum(folder: Path) -> str:
    """Of weights, optimizer, the policy as it is published, and the tokens of all steps."""
    found = hashlib.sha256()
    for name in (f"checkpoints/step_{STEPS:06d}/learner.safetensors", "model/last/model.safetensors"):
        found.update((folder / name).read_bytes())
    store = JsonlTrajectoryStore(folder / "trajectories")
    for each in (each for step in range(1, STEPS + 1) for each in store.read(step).trajectories):
        found.update(repr([turn.output_ids for turn in each.turns]).encode())
    return found.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    def make(folder: Path) -> None:
        code, output = Run(folder, **TOOLS).finish(900)
        assert code == 0, output

    return once("tools", make)


@pytest.mark.full  # 20 runs, each started twice
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_run_goes_on_to_the_same_bytes_wherever_its_folder_is_moved(
    undisturbed: Path, tmp_path: Path, kill: int
) -> None:
    """Kill points are spread over the steps; within its step each is random."""
    rows, chance = metrics(undisturbed), random.Random(kill)
    assert any(len(each.turns) > 1 for each in JsonlTrajectoryStore(undisturbed / "trajectories").read(1).trajectories)
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "other"
    for place in (here, there):
        place.mkdir(parents=True)
    step = kill * STEPS // KILLS
    run = Run(here, cwd=here.parent, **TOOLS)
    if step:
        run.wait_for_step(step)
    else:
        run.wait_for_lock()
    time.sleep(chance.uniform(0.0, rows[step]["time/step"] if step else 15.0))
    run.kill()
    run.finish()
    assert run.process.returncode == -9, "the kill came before the end"
    assert_nothing_left(here)
    there.rmdir()
    here.rename(there)
    code, output = Run(there, cwd=there.parent, **TOOLS).finish()
    assert code == 0, output
    assert not here.exists() and checksum(there) == checksum(undisturbed)
    assert_nothing_left(there)


@pytest.mark.full  # a run that is started twice
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_on_a_store_goes_on_from_there_on_a_machine_that_never_saw_it(
    undisturbed: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{tmp_path}/bucket/run"

    def start(machine: str) -> Run:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        settings = TOOLS | {"trainer__run_dir": address, "trainer__ckpt_interval": 2}
        return Run(local_folder(address), cwd=tmp_path, **settings)

    first = start("one")
    first.wait_for_step(3, 600)
    first.kill(number)
    code, output = first.finish()
    assert code == (143 if number == signal.SIGTERM else -9), output
    assert_nothing_left(first.folder)
    shutil.rmtree(tmp_path / "one")  # what is left is in the store
    last = start("two")
    code, output = last.finish()
    assert code == 0 and (re.search("step [24]", output) or number == signal.SIGTERM), output
    assert f"{address}: the run works in {last.folder}" in output
    assert checksum(last.folder) == checksum(tmp_path / "bucket" / "run") == checksum(undisturbed)
    assert_nothing_left(last.folder)
