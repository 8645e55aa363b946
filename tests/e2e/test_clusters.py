"""A cluster of several Ray nodes, each a `ray start` on this machine: nodes die, join, or are not like the driver's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cluster import Nodes
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.e2e.runs import TRANSFORMERS, Run, assert_nothing_left, metrics

DRILL = Path(__file__).parents[2] / "benchmarks" / "cluster.py"
LIVELY = {"trainer__deterministic": False, "trainer__eval_interval": 0, "trainer__eval_before_train": False}
"""Not deterministic: others may play what an engine that died had."""


@pytest.fixture
def four() -> Iterator[Nodes]:
    """Nodes with a core each: an engine fits on every one."""
    with Nodes([1, 1, 1, 1]) as nodes:
        yield nodes


def doctor(nodes: Nodes, *settings: object) -> tuple[int, str]:
    """Exit code, and what it said, once all nodes have joined."""
    command = [sys.executable, "-m", "skyrl_trainer", "doctor", "--cluster", f"ray.address={nodes.address}"]
    deadline = time.monotonic() + 240
    while True:
        done = subprocess.run([*command, *map(str, settings)], capture_output=True, text=True, timeout=240)
        said = done.stdout + done.stderr
        if said.count("would run") == nodes.joined or time.monotonic() > deadline:
            return done.returncode, said


@pytest.mark.full  # test_elastic.py, test_cluster_units.py and test_machines.py have its parts
def test_a_node_that_dies_in_a_run_costs_no_episode_and_one_that_joins_is_used(
    four: Nodes, clone: Path, tmp_path: Path
) -> None:
    code, said = doctor(four, "generator.num_inference_engines=4", f"trainer.run_dir={tmp_path}")
    assert code == 0 and said.count("would run 1 engines") == 4, said
    folder = tmp_path / "run"
    settings = {"generator__num_inference_engines": 4, "environment__num_workers": 4, **TRANSFORMERS, **LIVELY}
    settings |= {"ray__address": four.address, "trainer__max_steps": 9999, "trainer__ckpt_interval": 0}
    run = Run(folder, trainer__policy__model__path=clone, **settings)
    run.wait_for_step(1)
    four.kill(2)
    run.wait_for_step(4)
    away = until(folder, lambda engines: len(engines) == 3)
    four.join()
    back = until(folder, lambda engines: len(engines) == 4, after=away)
    run.kill(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(len(rows))) and len(rows) > back > away
    assert all(row["sync/max_logprob_diff"] < 5e-4 for row in rows), "the canary compares checksums, too"
    store = JsonlTrajectoryStore(folder / "trajectories")
    for step in range(1, back):
        played = store.read(step).trajectories
        assert len({each.trajectory_id for each in played}) == len(played) >= 32, "each came back once"
        assert not any(each.stop_reason.failed for each in played)
    assert_nothing_left(folder)


def until(folder: Path, enough: Callable[[set[str]], bool], after: int = 0, seconds: float = 240) -> int:
    """The first step after `after` in which enough engines worked."""
    deadline = time.monotonic() + seconds
    while True:
        for line in (folder / "timeline.jsonl").read_text().splitlines(keepends=True):
            row = json.loads(line) if line.endswith("\n") else {"step": 0}
            worked = {name for name, spans in row.items() if name.startswith("engine") and spans}
            if row["step"] > after and enough(worked):
                return int(row["step"])
        assert time.monotonic() < deadline, f"not {enough} within {seconds:.0f} s"
        time.sleep(0.5)


@pytest.mark.full  # the sentences are in test_cluster_units.py
def test_a_node_with_another_version_of_a_package_is_refused_by_name(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "gymnasium-0.1.dist-info").mkdir(parents=True)
    (tmp_path / "old" / "gymnasium-0.1.dist-info" / "METADATA").write_text("Name: gymnasium\nVersion: 0.1\n")
    with Nodes([1]) as nodes:
        nodes.join(before_path=str(tmp_path / "old"))
        code, said = doctor(nodes, f"trainer.run_dir={tmp_path}")
        assert code == 1 and "FAIL  n2 (" in said and "has gymnasium 0.1, and the driver 1." in said, said
        settings = {"ray__address": nodes.address, **TRANSFORMERS}
        code, output = Run(tmp_path / "run", trainer__policy__model__path=clone, **settings).finish()
    assert code == 2 and "Traceback" not in output, output
    assert "This cluster cannot take the run: node n2 (" in output and "gymnasium 0.1" in output
    assert not metrics(tmp_path / "run")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_episode_comes_back_while_nodes_die_and_join() -> None:
    done = subprocess.run([sys.executable, str(DRILL)], capture_output=True, text=True, timeout=1800)
    assert done.stdout.strip(), done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dispatched"] == found["returned"] > 0 and found["nodes_killed"] >= 10
    assert found["duplicated"] == found["lost"] == found["wrong"] == found["failed"] == 0
    assert found["equal"] and found["sent"] <= 1.2
    assert done.returncode == 0
