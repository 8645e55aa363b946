"""TextArena's games by examples/textarena_games.py; in a full run, which installs TextArena."""

from __future__ import annotations

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.e2e.runs import Run, metrics

pytestmark = pytest.mark.full
FILE = Path(__file__).parents[2] / "examples/textarena_games.py"


@pytest.fixture(scope="module")
def games() -> list[str]:
    from examples import textarena_games

    return textarena_games.GAMES


def play(env: Any, seed: int, between: Any = None) -> list[Any]:
    said: list[Any] = [env.reset(seed=seed)[0]]
    for action in ("[1]", "nothing", "[2]", "[3]", "[left]"):
        said.append(env.step(action)[:3])
        if between is not None:
            between()
        if said[-1][2]:
            break
    return said


def test_an_episode_is_a_function_of_its_seed_whatever_else_plays(games: list[str]) -> None:
    random.seed(0)
    before = random.getstate()
    for game in games:
        one, other, third = (gymnasium.make(f"textarena/{game}-v0") for _ in range(3))
        alone = play(one, 3)
        assert play(other, 3, lambda third=third: third.reset(seed=4)) == alone, game
    assert random.getstate() == before


def test_a_state_goes_on_where_it_was(games: list[str]) -> None:
    for game in games:
        env = gymnasium.make(f"textarena/{game}-v0").unwrapped
        env.reset(seed=3)
        if env.step("[1]")[2]:
            continue
        copies = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
        copies[0].set_state(json.loads(json.dumps(env.get_state())))
        assert copies[0].step("[2]") == copies[1].step("[2]") == env.step("[2]"), game


@pytest.mark.usefixtures("games")
def test_who_halves_what_is_left_finds_the_number() -> None:
    env = gymnasium.make("textarena/GuessTheNumber-v0", split="val")
    for seed in range(50):
        text, _ = env.reset(seed=seed)
        assert "between 1 and 20" in text
        low, high, over = 1, 20, False
        while not over:
            guess = (low + high) // 2
            text, reward, over, _, info = env.step(f"[{guess}]")
            assert over or text.startswith("[Player] ")  # what is new, and no more
            low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
        assert info["success"] and reward == 1


def test_a_policy_plays_one_in_training(tmp_path: Path) -> None:
    settings = {
        "environment__env_file": FILE,
        "data__train_data": "textarena/GuessTheNumber-v0",
        "data__val_data": "textarena/GuessTheNumber-v0?split=val",
        "trainer__policy__model__warmstart": "{num_demonstrations: 0}",
        "trainer__max_steps": 1,
        "generator__max_turns": 3,
        "generator__max_model_len": 1024,
    }
    code, output = Run(tmp_path / "run", **settings).finish()
    assert code == 0, output
    row = metrics(tmp_path / "run")[-1]
    assert row["failed"] == 0 and row["turns/mean"] > 1
