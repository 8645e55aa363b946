"""The fault drill of benchmarks/faults.py: a small one, and with `make test FULL=1` the one that it is named for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[2] / "benchmarks" / "faults.py"
SMALL = ["--episodes", "60", "--env-kills", "3", "--engine-kills", "1", "--every", "0.7"]


@pytest.mark.timeout(1800)
def test_every_episode_comes_back_exactly_once_while_processes_are_killed() -> None:
    full = bool(os.environ.get("SKYRL_TEST_FULL"))
    arguments, limit = ([], 1800) if full else (SMALL, 300)
    done = subprocess.run([sys.executable, str(DRILL), *arguments], capture_output=True, text=True, timeout=limit)
    assert done.stdout.strip(), done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dispatched"] == found["returned"] == (1000 if full else 60)
    assert found["duplicated"] == found["lost"] == found["wrong"] == 0
    assert found["kills"] == ({"EnvWorker": 20, "VLLMEngine": 3} if full else {"EnvWorker": 3, "VLLMEngine": 1})
    assert found["replays"] > 0 and found["longest_wait"] <= found["limit"]
    assert done.returncode == 0
