"""The fault drill of benchmarks/faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.full  # a killed EnvWorker is in test_env_processes.py, a killed engine in test_engine.py
@pytest.mark.timeout(1800)
def test_every_episode_comes_back_exactly_once_while_processes_are_killed() -> None:
    done = subprocess.run([sys.executable, str(DRILL)], capture_output=True, text=True, timeout=1800)
    assert done.stdout.strip(), done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dispatched"] == found["returned"] == 1000
    assert found["duplicated"] == found["lost"] == found["wrong"] == 0
    assert found["kills"] == {"EnvWorker": 20, "VLLMEngine": 3, "RolloutWorker": 2}
    assert found["replays"] > 0 and found["longest_wait"] <= found["limit"]
    assert done.returncode == 0
