"""What the shell offers after `skyrl-trainer`, asked as bash asks it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def offered(line: str, tmp_path: Path) -> list[str]:
    """The completions of the line's last word."""
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    asked |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = "import sys; sys.argv[0] = 'skyrl-trainer'; from skyrl_trainer.cli import main; main()"
    subprocess.run([sys.executable, "-c", script], env=os.environ | asked, check=True, timeout=60)
    return answer.read_text().split("\n")


@pytest.mark.parametrize(
    "line,expected",
    [
        ("skyrl-trainer wa", {"warmstart"}),
        ("skyrl-trainer export runs/a --p", {"--push"}),
        ("skyrl-trainer export runs/a --out o --which ", {"last", "best"}),
        ("skyrl-trainer train qui", {"quickstart"}),
        ("skyrl-trainer train quickstart trainer.learning_", {"trainer.learning_rate="}),
    ],
)
def test_commands_recipes_and_settings_are_offered(line: str, expected: set[str], tmp_path: Path) -> None:
    assert set(offered(line, tmp_path)) >= expected
    assert len(offered(line, tmp_path)) < 10
