"""What a real run has stored: it replays, its own weights agree with the engine, another run learns from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from transformers import AutoModelForCausalLM

from skyrl_trainer.cli import main
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.e2e.runs import MIXED, QUICK, Run, metrics

SETTINGS = MIXED | QUICK | {"trainer__max_steps": 2}


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """`command("replay", folder)`: the exit code and the standard output of `skyrl-trainer replay folder`."""

    def run(*words: str | Path) -> tuple[int, str]:
        capfd.readouterr()
        return main([*map(str, words)]), capfd.readouterr().out

    return run


@pytest.mark.full  # tests/trainer/replay, test_stored.py and test_rollout.py have its parts
def test_all_of_a_run_replays_and_its_own_weights_agree(finished: Path, command: Command) -> None:
    steps = "".join(f"step {step}: 16 of 16\n" for step in range(1, 7))
    assert command("replay", finished) == (0, f"{steps}96 of 96 identical\n")
    weights = finished / "checkpoints" / "step_000004"  # they sampled step 5
    code, output = command("replay", finished, "--step", "5", "--recompute", weights)
    assert code == 0, output
    moved = re.findall(r"tokens: max \|diff\| (\S+), mean", output)
    assert len(moved) == 1 and float(moved[0]) < 5e-4
    code, output = command("replay", finished, "--step", "5", "--recompute", finished / "model" / "last")
    assert code == 0 and float(re.findall(r"tokens: max \|diff\| (\S+), mean", output)[0]) > 10 * float(moved[0])


@pytest.mark.full
def test_another_run_learns_from_it(finished: Path, clone: Path, tmp_path: Path, command: Command) -> None:
    settings = SETTINGS | {"data__train_data": f"['{finished / 'trajectories'}']"}
    settings["trainer__policy__model__path"] = clone
    code, output = Run(tmp_path / "refused", **settings).finish()
    assert code == 2 and "trainer.algorithm.options.correction=tis" in output, output
    code, output = Run(tmp_path / "run", **settings, trainer__algorithm__options__correction="tis").finish()
    assert code == 0, output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert sum(row["grad_norm"] for row in rows[1:]) > 0
    learned = JsonlTrajectoryStore(tmp_path / "run" / "trajectories").read(2).trajectories
    assert all(trajectory.sample.sample_id.startswith(str(finished)) for trajectory in learned)
    assert command("replay", tmp_path / "run")[1].endswith("32 of 32 identical\n")


@pytest.fixture
def learned(finished: Path, tmp_path: Path, command: Command) -> Path:
    """What fine-tuning on the run's own trajectories has made of its policy."""
    chats, folder = tmp_path / "chats.jsonl", tmp_path / "sft"
    assert command("export", finished, "--trajectories", chats)[0] == 0
    settings = [
        f"data.train_data={chats}",
        f"trainer.run_dir={folder}",
        f"trainer.policy.model.path={finished / 'model/last'}",
    ]
    rate = ["trainer.learning_rate=2e-3", "trainer.warmup_steps=4", "trainer.num_iterations=3"]
    code, output = command("sft", "sft", *settings, *rate, "trainer.train_batch_size=16")
    assert code == 0, output
    return folder


@pytest.mark.full  # tests/trainer/run/test_sft.py learns from chats
def test_a_policy_learns_from_what_a_run_has_exported(learned: Path) -> None:
    losses = [row["loss"] for row in metrics(learned)]
    assert mean(losses[-6:]) < 0.8 * losses[0], "the last epoch, of six batches"
    AutoModelForCausalLM.from_pretrained(learned / "model/last")


@pytest.mark.full
def test_reinforcement_goes_on_from_there(learned: Path, tmp_path: Path) -> None:
    model = {"trainer__policy__model__path": learned / "model/last", "trainer__max_steps": 1}
    code, output = Run(tmp_path / "run", **SETTINGS | model).finish()
    assert code == 0, output
    assert metrics(tmp_path / "run")[-1]["kl/engine_learner"] < 1e-6
