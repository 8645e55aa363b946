"""The command that an overview of SkyRL prints, through our command line: every setting is taken as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from skyrl_trainer import GRPOTrainer
from skyrl_trainer.cli import main
from skyrl_trainer.data import load_samples
from tests.docs.blocks import blocks, commands

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).parent / "skyrl_overview.md"
THEIRS = "uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base"
ROWS = [{"question": f"Ann has {n} pears and eats one. How many?", "answer": f"{n} - 1\n#### {n - 1}"} for n in (3, 5)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which scripts/gsm8k.py has put the files that the command names, of two made-up rows."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    command = [sys.executable, ROOT / "scripts" / "gsm8k.py", "--out", tmp_path / "data/gsm8k", "--from", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path


def test_the_printed_command_is_a_run_of_ours(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(PAGE, "bash")
    (said,) = commands(block.text)
    length = len(THEIRS.split())
    assert " ".join(said[:length]) == THEIRS and len(said) == length + 19
    assert main(["train", *said[length:], "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "shared_memory: learner and engines share their GPUs" in text
    stops = text[text.index("Would stop a new run here") :].splitlines()[1:]
    assert all("GPU" in line or "wandb" in line for line in stops), stops


def test_the_rows_of_the_script_are_played_by_the_env_that_they_name(home: Path) -> None:
    samples = load_samples([str(home / "data/gsm8k/train.parquet")])
    assert [sample.env_id for sample in samples] == ["skyrl/gsm8k-v0"] * 2
    assert [sample.ground_truth for sample in samples] == ["2", "4"]


def test_a_dataset_is_taken_where_data_is(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": f"{n} + 1 = ?", "ground_truth": str(n + 1)} for n in range(3)])
    from skyrl_trainer import load_config

    trainer = GRPOTrainer(args=load_config(None, [f"trainer.run_dir={tmp_path}"]), train_dataset=rows)
    samples = load_samples(trainer.config.data.train_data)
    assert [sample.ground_truth for sample in samples] == ["1", "2", "3"]
