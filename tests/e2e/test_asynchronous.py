"""Rollouts that go on while the learner learns, on the real stack."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from skyrl_trainer.report.history import read_spans
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from tests.e2e.runs import TRANSFORMERS, Run, assert_nothing_left, kill_engine, kill_one, metrics
from tests.e2e.test_resume import sampled

FULL = bool(os.environ.get("SKYRL_TEST_FULL"))
STALE = {
    "trainer__max_staleness": 2,
    "trainer__deterministic": False,
    "trainer__eval_before_train": False,
    "trainer__eval_interval": 0,
    "trainer__ckpt_interval": 2,
    "trainer__algorithm__options": "{sampler: dynamic, max_draws: 3}",
}


def assert_each_task_once(folder: Path) -> None:
    """None lost and none twice; those that were refused have their number, too."""
    store = JsonlTrajectoryStore(folder / "trajectories")
    groups = [group for step in store.steps() for group in store.read(step).groups]
    names = sorted(tuple(map(int, group[0].trajectory_id.split("/")[:2])) for group in groups)
    last = len(names) - 1
    assert names == [(number // 8 + 1, number % 8) for number in range(last + 1)], "none lost, none twice"
    assert max(Counter(group[0].sample.sample_id for group in groups).values()) == 1
    assert not list((folder / "trajectories" / "waiting").glob("*.gz"))


@pytest.mark.timeout(1200)  # four starts of a run's engine, each of which may be slow
def test_what_is_killed_or_stopped_in_flight_costs_no_task_and_repeats_none(clone: Path, tmp_path: Path) -> None:
    """An engine, a Ctrl-C and the whole run, with refused groups, while episodes play and the learner learns; vLLM's
    engine in a full run."""
    folder, settings = tmp_path / "run", {"trainer__policy__model__path": clone, "trainer__max_steps": 9, **STALE}
    settings |= {} if FULL else TRANSFORMERS
    run = Run(folder, **settings)
    run.wait_for_step(1)
    kill_engine(folder)
    run.wait_for_step(3)
    run.kill(signal.SIGINT)
    code, output = run.finish(90)
    assert code == 130 and "Traceback" not in output, output
    assert_nothing_left(folder)
    run = Run(folder, **settings)
    run.wait_for_step(6)
    run.kill(signal.SIGKILL)
    run.finish()
    code, output = Run(folder, **settings).finish()
    assert code == 0 and "Traceback" not in output and " age idle " in output, output
    assert any(step.get("engine 0") for step in read_spans(folder))
    assert "Who worked when" in (folder / "report.html").read_text()
    rows = metrics(folder)[1:]
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert max(row["flow/playing"] for row in rows) > 0, "it learned while others played"
    learned_from = [row for row in rows if row["groups/missing"] < 8]  # others: neither age nor KL
    assert all(0 <= row["staleness/mean"] <= row["staleness/max"] for row in learned_from)
    ages = [row["staleness/max"] for row in learned_from]
    assert 1 <= max(ages) <= 2 and all(row["groups/drawn"] > 0 for row in rows), "refusals starve no later batch"
    assert sum(row["failed"] for row in rows) == 0 and sum(row["engine_restarts"] for row in rows) >= 1
    assert all(row["kl/engine_learner"] < 1e-6 for row in rows if "kl/engine_learner" in row)
    assert max(row["kl/behaviour"] for row in learned_from) > 1e-6, "older weights are another policy"
    assert_each_task_once(folder)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["vllm", "openai_server"])
def test_a_rollout_worker_a_learner_an_engine_and_a_second_ctrl_c_in_flight(
    clone: Path, tmp_path: Path, backend: str
) -> None:
    """With two learners in processes of their own."""
    folder = tmp_path / "run"
    settings = {"trainer__policy__model__path": clone, "trainer__max_steps": 12, "generator__backend": backend, **STALE}
    settings["trainer__placement__policy_num_nodes"] = 2
    run = Run(folder, **settings)
    run.wait_for_step(1)
    kill_one(folder, "ray::RolloutWorker")
    run.wait_for_step(3)
    kill_engine(folder)
    run.wait_for_step(5)
    kill_one(folder, "ray::LearnerProcess")
    code, output = run.finish(90)
    assert code == 2 and re.search(r"Learner \d of 2 died during", output) and "Traceback" not in output, output
    assert_nothing_left(folder)
    run = Run(folder, **settings)
    run.wait_for_step(8)
    run.kill(signal.SIGINT)
    time.sleep(0.3)
    run.kill(signal.SIGINT)
    code, output = run.finish(90)
    assert code == 130 and "Traceback" not in output, output
    assert_nothing_left(folder)
    code, output = Run(folder, **settings).finish()
    assert code == 0 and "Traceback" not in output, output
    rows = metrics(folder)[1:]
    assert [row["step"] for row in rows] == list(range(1, 13)) and sum(row["failed"] for row in rows) == 0
    assert max(row.get("staleness/max", 0) for row in rows) <= 2
    assert_each_task_once(folder)


BOTH = """
from skyrl_trainer.algorithms.rewards import differ
from skyrl_trainer.algorithms.curriculum import CurriculumSampler
from skyrl_trainer.plugins import register_sampler


@register_sampler("both")
class Both(CurriculumSampler):
    def accept(self, group, returns):
        return super().accept(group, returns) and differ(returns)
"""


STEPS = 140
"""Twenty kills, each after two steps and up to three seconds more, in which a step takes half a second."""


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_kills_cost_no_task_and_repeat_none(clone: Path, tmp_path: Path) -> None:
    """At random points of a run with a curriculum and dynamic sampling."""
    folder, plugin, draw = tmp_path / "run", tmp_path / "both.py", random.Random(0)
    plugin.write_text(BOTH)
    settings = {"trainer__policy__model__path": clone, "trainer__max_steps": STEPS, **STALE}
    settings["trainer__algorithm__plugin_file"] = plugin
    settings["trainer__algorithm__options"] = "{sampler: both, max_draws: 3}"
    settings["data__train_data"] = [f"text_math?split=train&difficulty={level}&weight=1" for level in (1, 2)]
    for _ in range(20):
        reached = max((row["step"] for row in metrics(folder)), default=0)
        run = Run(folder, **settings)
        run.wait_for_step(reached + 2)
        time.sleep(3 * draw.random())
        run.kill()
        run.finish()
        assert_nothing_left(folder)
    code, output = Run(folder, **settings).finish()
    assert code == 0 and "Traceback" not in output, output
    rows = metrics(folder)[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row.get("staleness/max", 0) for row in rows) <= 2
    assert_each_task_once(folder)


@pytest.mark.full  # tests/trainer/run/test_tries.py has the loop's book-keeping under kills, on fakes
@pytest.mark.timeout(1800)
def test_in_lock_step_a_killed_run_has_the_same_bytes(clone: Path, tmp_path: Path) -> None:
    settings = {"trainer__policy__model__path": clone, "trainer__max_steps": 6, **STALE}
    settings |= {"trainer__max_staleness": 1, "trainer__deterministic": True}
    code, output = Run(tmp_path / "alone", **settings).finish()
    assert code == 0, output
    assert max(row["staleness/max"] for row in metrics(tmp_path / "alone")[1:]) == 1
    for step in range(1, 6):
        folder = tmp_path / f"killed-{step}"
        run = Run(folder, **settings)
        run.wait_for_step(step)
        run.kill(signal.SIGKILL)
        run.finish()
        code, output = Run(folder, **settings).finish()
        assert code == 0, output
        for name in ("checkpoints/step_000006/learner.safetensors", "model/last/model.safetensors"):
            assert (folder / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), (step, name)
        for each in range(1, 7):
            assert sampled(folder, each) == sampled(tmp_path / "alone", each), (step, each)
