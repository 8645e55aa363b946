"""What a real run has stored: it replays, its own weights agree with the engine, another run learns from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.e2e.runs import Run, metrics

MIXED = "['text_math?split=train&difficulty=1', 'alfworld_lite?split=train']"
SETTINGS: dict[str, object] = {
    "trainer__max_steps": 2,
    "trainer__eval_before_train": False,
    "trainer__eval_interval": 0,
    "generator__max_turns": 3,
    "generator__max_model_len": 2048,
}


@pytest.fixture(scope="module")
def run(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two families, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trajectories") / "run"
    model = {"trainer__policy__model__path": clone, "trainer__ckpt_interval": 1, "data__train_data": MIXED}
    code, output = Run(folder, **SETTINGS, **model).finish()
    assert code == 0, output
    return folder


def command(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_trainer", *map(str, words)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_all_of_a_run_replays_and_its_own_weights_agree(run: Path) -> None:
    assert command("replay", run) == (0, "step 1: 32 of 32\nstep 2: 32 of 32\n64 of 64 identical\n")
    weights = run / "checkpoints" / "step_000001"  # they sampled step 2
    code, output = command("replay", run, "--step", "2", "--recompute", weights)
    assert code == 0, output
    moved = re.findall(r"tokens: max \|diff\| (\S+), mean", output)
    assert len(moved) == 1 and float(moved[0]) < 5e-4
    code, output = command("replay", run, "--step", "2", "--recompute", run / "model" / "last")
    assert code == 0 and float(re.findall(r"tokens: max \|diff\| (\S+), mean", output)[0]) > 10 * float(moved[0])


@pytest.mark.full
def test_another_run_learns_from_it(run: Path, clone: Path, tmp_path: Path) -> None:
    source = {"data__train_data": f"['{run / 'trajectories'}']", "trainer__policy__model__path": clone}
    code, output = Run(tmp_path / "refused", **SETTINGS, **source).finish()
    assert code == 2 and "trainer.algorithm.options.correction=tis" in output, output
    code, output = Run(tmp_path / "run", **SETTINGS, **source, trainer__algorithm__options__correction="tis").finish()
    assert code == 0, output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert sum(row["grad_norm"] for row in rows[1:]) > 0
    learned = JsonlTrajectoryStore(tmp_path / "run" / "trajectories").read(2).trajectories
    assert all(trajectory.sample.sample_id.startswith(str(run)) for trajectory in learned)
    assert command("replay", tmp_path / "run")[1].endswith("64 of 64 identical\n")


def test_chats_are_learned_from_and_reinforcement_goes_on_from_there(run: Path, tmp_path: Path) -> None:
    chats, learned = tmp_path / "chats.jsonl", tmp_path / "sft"
    assert command("export", run, "--trajectories", chats)[0] == 0
    settings = [
        f"data.train_data={chats}",
        f"trainer.run_dir={learned}",
        f"trainer.policy.model.path={run / 'model/last'}",
    ]
    rate = ["trainer.learning_rate=2e-3", "trainer.warmup_steps=8", "trainer.num_iterations=20"]
    code, output = command("sft", "sft", *settings, *rate, "trainer.train_batch_size=16")
    assert code == 0, output
    losses = [row["loss"] for row in metrics(learned)]
    assert mean(losses[-4:]) < 0.8 * losses[0], "the last epoch, of four batches"
    model = {"trainer__policy__model__path": learned / "model/last", "trainer__max_steps": 1}
    code, output = Run(tmp_path / "run", **SETTINGS | model, data__train_data=MIXED).finish()
    assert code == 0, output
    assert metrics(tmp_path / "run")[-1]["kl/engine_learner"] < 1e-6
