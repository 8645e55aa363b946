"""The agent for code through the command line: cloned, rewarded by a repository's tests, trained, replayed (FULL)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from skyrl_eval import benchmarks, data
from tests.e2e.runs import Run, metrics
from tests.eval.test_swe import Instance, instance

__all__ = ["instance"]
EXPERT = """
import json
import gymnasium
from skyrl_eval.swe_env import SWEEnv

def call(name, **args):
    return f'<tool_call>{json.dumps({"tool": name, "args": args})}</tool_call>'

class Shown(SWEEnv):
    def expert_action(self):
        fix = call("replace", path="calc.py", old="n + 2", new="2 * n")
        return [call("view", path="calc.py"), fix, call("submit")][self.steps]

gymnasium.register("mine/swe-v0", Shown, max_episode_steps=100)
"""


if os.environ.get("SKYRL_TEST_FULL"):

    def test_a_policy_that_resolves_a_made_up_issue_is_trained_on_it(instance: Instance, tmp_path: Path) -> None:
        tasks, rows, expert = (tmp_path / name for name in ("tasks.jsonl", "rows.jsonl", "expert.py"))
        tasks.write_text(json.dumps(instance.row))
        bench = benchmarks.find("swe-verified")
        (item,) = data.load(bench, str(tasks)).items
        task = bench.env(item).options["task"] | {"repos": str(instance.repos), "tests": item.gold}
        row = {"prompt": [{"role": "user", "content": task["question"]}], "reward_spec": {"ground_truth": "tests"}}
        rows.write_text(f"{json.dumps(row | task)}\n" * 2)
        expert.write_text(EXPERT)
        cloning = {"num_demonstrations": 2, "batch_size": 2, "epochs": 200, "target_exact_match": 1.0}
        settings = {
            "data.train_data": [str(rows)],
            "data.val_data": [str(rows)],
            "environment.env_class": "mine/swe-v0",
            "environment.env_file": expert,
            "environment.step_timeout": 60,
            "trainer.policy.model.warmstart": json.dumps(cloning),
            "trainer.train_batch_size": 2,
            "trainer.max_steps": 2,
            "data.val_size": 1,
            "generator.max_turns": 4,
            "generator.temperature": 0.5,
            "generator.max_model_len": 3072,
        }
        run = Run(tmp_path / "run", **settings)
        code, output = run.finish()
        assert code == 0, output
        start, *steps = metrics(run.folder)
        assert start["eval/success"] == 1.0, "the greedy clone does what it was shown"
        for row in steps:
            assert row["stop/env_error"] == 0 and row["tools/errors"] < row["tools/calls"]
            assert row["success"] > 0 and row["reward/resolved"] == row["success"]
        replay = [sys.executable, "-m", "skyrl_trainer", "replay", str(run.folder)]
        done = subprocess.run(replay, capture_output=True, text=True)
        assert done.returncode == 0 and "16 of 16 identical" in done.stdout, done.stdout
