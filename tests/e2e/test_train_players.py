"""Two roles, trained by the real stack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from skyrl_trainer.cli import main
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.types import Turn
from tests.e2e.runs import QUICK, Run, assert_nothing_left, metrics

ROOT = Path(__file__).parents[2]


def sampled(turns: list[Turn]) -> list[Turn]:
    return sorted(turns, key=lambda turn: turn.info.get("skyrl/call", len(turns)))


@pytest.mark.full  # tests/gym/test_players.py and tests/trainer/algorithms/test_roles.py have its parts
def test_self_play_learns_from_both_roles(tmp_path: Path) -> None:
    """Two updates of a policy that has just begun to know the words: a context and an advantage for each role."""
    folder = tmp_path / "run"
    settings = {"trainer__max_steps": 2, **QUICK, "data__train_data": "kuhn_poker?opponent=self&expert=random"}
    settings |= {"trainer__policy__model__warmstart": "{num_demonstrations: 800, epochs: 1, batch_size: 8}"}
    settings |= {"trainer__policy__model__tiny": "{config_kwargs: {num_hidden_layers: 2}}", "generator__max_turns": 3}
    settings |= {"generator__num_generations": 8, "trainer__algorithm__options": "{scale_rewards: none}"}
    code, output = Run(folder, **settings).finish()
    assert code == 0 and "Traceback" not in output, output
    assert_nothing_left(folder)
    rows = metrics(folder)[1:]
    assert sum(row["failed"] for row in rows) == 0 and min(row["grad_norm"] for row in rows) > 0
    assert max(row["kl/engine_learner"] for row in rows) < 1e-3
    learned = Counter()
    for trajectory in JsonlTrajectoryStore(folder / "trajectories").read(1).trajectories:
        turns = sampled(trajectory.turns)
        assert [turn.info["role"] for turn in turns] == [f"player_{number % 2}" for number in range(len(turns))]
        assert len(trajectory.segments()) == min(2, len(turns))
        learned.update(turn.info["role"] for turn in turns if any(turn.advantages))
    assert learned["player_0"] > 5 and learned["player_1"] > 5, learned
    assert main(["replay", str(folder), "--step", "1"]) == 0


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("game", ["kuhn_poker", "nim"])
def test_the_recipes_reach_their_figures(game: str, tmp_path: Path) -> None:
    """Kuhn: exploitability falls to a fifth of the start's; Nim: 0.95 of the 64 positions that can be won."""
    folder = tmp_path / "run"
    assert main(["train", game, f"trainer.run_dir={folder}", "trainer.logger=none"]) == 0
    command = [sys.executable, "benchmarks/players.py", game, str(folder)]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(run.stdout.splitlines()[-1])
    if game == "nim":
        won, played = map(sum, zip(*found["last"].values(), strict=True))
        assert played == 64 and won >= 0.95 * played, found
        return
    assert found["last"]["exploitability"] <= found["start"]["exploitability"] / 5, found
    turns = [t for each in JsonlTrajectoryStore(folder / "trajectories").read(1).trajectories for t in each.turns]
    assert len(Counter(turn.info["role"] for turn in turns)) == 2
