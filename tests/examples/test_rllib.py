"""RLlib's PPO, as a user runs the example, beats chance by five times on tasks that it has not trained on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/rllib_ppo.py"


@pytest.mark.full  # minutes of RLlib's own work; test_discrete_actions.py has what is ours in it
@pytest.mark.timeout(3600)
def test_ppo_beats_chance_by_five_times(tmp_path):
    command = [sys.executable, str(EXAMPLE)]
    environment = os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert list(results) == ["webshop_lite", "alfworld_lite"]
    for name, result in results.items():
        assert result["ppo"] >= max(5 * result["random"], 0.05), (name, result)
        assert result["random"] < 0.03  # chance has not been helped, either
    assert not list((tmp_path / "ray_results").iterdir())
