"""Runs that end before their last step: an engine or Ray that is gone, signals, a folder that is taken away."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import QUICK, Run, assert_nothing_left, kill_engine, processes_of


@pytest.mark.full  # the sentence is in test_engine_watch.py, that the run saves before it ends in the test below
def test_an_engine_that_cannot_be_restarted_ends_the_run_with_a_sentence_and_a_checkpoint(
    clone: Path, tmp_path: Path
) -> None:
    folder, policy = tmp_path / "run", tmp_path / "policy"
    shutil.copytree(clone, policy)
    run = Run(folder, trainer__policy__model__path=policy, trainer__max_steps=500, **QUICK)
    run.wait_for_step(1)
    shutil.rmtree(policy)
    kill_engine(folder)
    code, output = run.finish(120)
    assert code == 2 and "Engine 0 died and could not be restarted" in output and "Traceback" not in output, output
    assert list((folder / "checkpoints").glob("step_*"))
    assert_nothing_left(folder)


@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.full)])
def test_a_run_whose_ray_dies_saves_and_ends_with_a_sentence(clone: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    run = Run(folder, trainer__policy__model__path=clone, trainer__max_steps=500, trainer__ckpt_interval=0, **QUICK)
    run.wait_for_step(1)
    killed = [process for process in processes_of(folder) if process.cmdline()[0].endswith(name)]
    killed[0].kill()
    code, output = run.finish(90)
    assert code == 2 and f"Ray's {name} was killed, or ran out of memory" in output, output
    assert "Traceback" not in output and "state-dump" not in output, output
    assert list((folder / "checkpoints").glob("step_*")) and list((folder / "ray-logs").glob("gcs_server*"))
    assert_nothing_left(folder)


def test_a_signal_ends_a_run_that_starts_and_is_named(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run(folder, trainer__policy__model__path=clone, **QUICK)
    run.wait_for_lock()
    run.kill(signal.SIGTERM)
    code, output = run.finish(60)
    assert code == 128 + signal.SIGTERM and "stopped by SIGTERM." in output, output
    assert "Traceback" not in output
    assert_nothing_left(folder)


@pytest.mark.full  # Ctrl-C is in test_resume.py, and what makes one of the three into an exception is one line
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_other_signals_save_and_are_named(clone: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    settings = {"trainer__policy__model__path": clone, "trainer__ckpt_interval": 0, **QUICK}
    run = Run(folder, trainer__max_steps=500, **settings)
    run.wait_for_step(1)
    run.kill(signal.Signals[name])
    code, output = run.finish(60)
    assert code == 128 + signal.Signals[name] and f"stopped by {name}." in output, output
    assert "Traceback" not in output
    assert list((folder / "checkpoints").glob("step_*"))
    assert_nothing_left(folder)


@pytest.mark.full
def test_a_run_folder_that_is_deleted_ends_the_run_with_a_sentence(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run(folder, trainer__policy__model__path=clone, trainer__max_steps=500, **QUICK)
    run.wait_for_step(1)
    shutil.rmtree(folder)
    code, output = run.finish(90)
    assert code == 2 and f"The run folder {folder} was deleted or replaced" in output, output
    assert "Traceback" not in output and not folder.exists()


@pytest.mark.full
def test_weights_that_are_not_finite_are_not_saved(clone: Path, tmp_path: Path) -> None:
    """As the newest checkpoint, or as model/last; a step of float32's infinity makes them so."""
    folder = tmp_path / "run"
    settings = QUICK | {"trainer__learning_rate": 1e39, "trainer__max_steps": 3, "trainer__ckpt_interval": 1}
    code, output = Run(folder, trainer__policy__model__path=clone, **settings).finish()
    assert code == 2 and "After step 1" in output and "are not finite: nothing is saved" in output, output
    assert not (folder / "checkpoints").exists() and not (folder / "model").exists()
