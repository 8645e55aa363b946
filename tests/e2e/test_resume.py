"""A run that is disturbed in every way and resumed has the bytes of one that nobody disturbed."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path

import pytest

from skyrl_trainer.cli import main
from tests.e2e.runs import MIXED, Run, assert_nothing_left, kill_engine, metrics, train

FULL = bool(os.environ.get("SKYRL_TEST_FULL"))
TIMED = ("time/", "idle/", "tokens/per_second", "memory/", "engine_restarts")
"""Exempt from the same-bytes promise."""
FROM_ENGINE = ("kl/engine_learner", "kl/behaviour", "sync/", "logprobs/max_diff")
"""Made from the engine's logprobs: equal within 1e-5."""


def same_run(one: Path, other: Path) -> None:
    """The same bytes of weights, optimizer, sampled tokens and learner-computed metrics."""
    for name in ("checkpoints/step_000006/learner.safetensors", "model/last/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for step in range(1, 7):
        tokens = [sampled(folder, step) for folder in (one, other)]
        assert tokens[0] == tokens[1], f"step {step}"
    with gzip.open(one / "trajectories" / "step_000006.jsonl.gz", "rt") as file:
        assert '"new_segment":true' in file.read()
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if key.startswith(FROM_ENGINE):
                assert a[key] == pytest.approx(b[key], abs=1e-5), (a["step"], key)
            elif not key.startswith(TIMED):
                assert a[key] == b[key], (a["step"], key)


def sampled(folder: Path, step: int) -> list[list[int]]:
    with gzip.open(folder / "trajectories" / f"step_{step:06d}.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file][1:]
    return [turn["output_ids"] for line in lines for turn in line["turns"]]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.timeout(1200)  # four starts of a run's engine, each of which may be slow
@pytest.mark.parametrize("backend", ["vllm", "openai_server"] if FULL else ["vllm"])
def test_a_killed_engine_ctrl_c_and_a_killed_run_change_nothing(
    finished: Path, clone: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled without the Ctrl-C, which test_asynchronous.py has."""
    folder = tmp_path / "run"
    settings = {"trainer__policy__model__path": clone, "generator__backend": backend, **MIXED}
    settings["trainer__ckpt_interval"] = 4
    run = Run(folder, **settings)
    run.wait_for_step(1)
    assert main(train(folder, **settings)) == 2
    assert f"in use by process {run.process.pid}" in capsys.readouterr().err
    kill_engine(folder)
    if FULL:
        run.wait_for_step(3)
        run.kill(signal.SIGINT)
        code, output = run.finish(60)
        assert code == 130, output
        assert "Traceback" not in output
        assert_nothing_left(folder)
        last = metrics(folder)[-1]["step"]
        assert checkpoints(folder) == [last], "saved by the signal"
        run = Run(folder, **settings)

    run.wait_for_step(5, 400)  # with an engine that starts again in between
    run.kill(signal.SIGKILL)
    output = run.finish()[1]
    assert not FULL or f"step {last}" in output, "the checkpoint that it went on from"
    rows = metrics(folder)
    assert sum(row["engine_restarts"] for row in rows) == 1
    assert all(row["failed"] == 0 for row in rows[1:])
    assert_nothing_left(folder)
    assert main(train(folder, **settings | {"trainer__learning_rate": 1e-3})) == 2
    assert "trainer.learning_rate" in capsys.readouterr().err
    code, output = Run(folder, **settings).finish()
    assert code == 0 and "step 4" in output, output
    same_run(finished, folder)
    assert_nothing_left(folder)
