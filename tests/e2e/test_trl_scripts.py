"""Scripts written for TRL run on our trainers: only the import of the trainer, and sizes, are others."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.e2e.runs import assert_nothing_left, metrics

SCRIPTS = Path(__file__).parent / "trl_scripts"


def run(script: Path, model: Path, folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps of a script that has come to its end and left no process."""
    done = subprocess.run(
        [sys.executable, script, model, folder],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "SKYRL_TEST_RUN": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_nothing_left(folder)
    rows = [row for row in metrics(folder) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2] and all(row["failed"] == 0 for row in rows)
    assert all(math.isfinite(row["loss"]) and row["sync/max_logprob_diff"] < 5e-4 for row in rows)
    return rows


@pytest.mark.full
def test_the_example_of_the_page(clone: Path, tmp_path: Path) -> None:
    """As it stands there, with another model, fewer steps and tokens."""
    page = (Path(__file__).parents[2] / "docs/agents/your-script.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Counter" in block)
    smaller = {
        "Qwen/Qwen2.5-0.5B-Instruct": str(clone),
        "runs/counter": str(tmp_path / "run"),
        '"counter"': repr(str(tmp_path / "saved")),
        "=256": "=32",
        "max_steps=100": "max_steps=2",
    }
    for text, other in smaller.items():
        assert text in example
        example = example.replace(text, other)
    (tmp_path / "script.py").write_text(example)
    rows = run(tmp_path / "script.py", clone, tmp_path / "run")
    assert all(row["reward/brief"] < 0 for row in rows) and (tmp_path / "saved/config.json").is_file()
    goals = {each["sample"]["options"]["task"]["columns"]["goal"] for each in trajectories(tmp_path / "run")}
    assert len(goals) == 2


def trajectories(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trajectories/step_000002.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file][1:]


@pytest.mark.full
def test_the_shortest_script(clone: Path, tmp_path: Path) -> None:
    rows = run(SCRIPTS / "short_answers.py", clone, tmp_path / "run")
    assert all(row["reward/few_letters"] < 0 for row in rows) and rows[0]["grad_norm"] > 0
    assert (tmp_path / "run/saved/model.safetensors").is_file()
    assert len(trajectories(tmp_path / "run")) == 8


@pytest.mark.full
def test_columns_weights_evaluation_and_callbacks(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows = run(SCRIPTS / "columns.py", clone, folder)
    for row in rows:  # two prompts a rollout; brief judges those of even numbers
        assert row["reward/total"] == pytest.approx(
            row["reward/right"] + 0.5 * row["reward/brief"] * (1 - row["reward/brief/none"] / 8)
        )
    diary = json.loads((folder / "diary.json").read_text())
    assert diary[0] == ["begin", 0, 4] and diary[-1] == ["end", 4, True]
    assert [entry for entry in diary if entry[0] == "step"] == [["step", 2, 4], ["step", 4, 4]]
    assert [entry[1] for entry in diary if entry[0] == "evaluate"] == [2, 4]
    assert ["save", 4, True] in diary and ["log", 4, True] in diary


@pytest.mark.full
def test_adapters_of_a_model_object_with_gspo(clone: Path, tmp_path: Path) -> None:
    done = [SCRIPTS / "adapters.py", clone, tmp_path / "run"]
    rows = run(*done)
    assert rows[0]["grad_norm"] > 0
    assert (tmp_path / "run/model/last/adapter/adapter_config.json").is_file()
    assert "name: gspo" in (tmp_path / "run/config.yaml").read_text()
    again = subprocess.run([sys.executable, *done], capture_output=True, text=True, check=True)
    assert "history [0, 1, 2, 3]" in again.stdout, "it goes on, and knows what was before"


@pytest.mark.full
def test_functions_as_tools(clone: Path, tmp_path: Path) -> None:
    run(SCRIPTS / "tools.py", clone, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(clone)
    for each in trajectories(tmp_path / "run"):
        read = tokenizer.decode(each["turns"][0]["prompt_ids"])
        assert '"name": "multiply"' in read and '"name": "weather"' in read


@pytest.mark.full
def test_environments_that_own_their_reward(clone: Path, tmp_path: Path) -> None:
    run(SCRIPTS / "environments.py", clone, tmp_path / "run")
    for each in trajectories(tmp_path / "run"):
        task = each["sample"]["options"]["task"]["columns"]
        assert each["prompt"][-1]["content"].startswith("Go. Count to" if task["environment"] == "counter" else "Go.")
