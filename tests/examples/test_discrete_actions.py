"""Environments for agents whose actions and observations are numbers."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from examples.discrete_actions import Column, DiscreteActions
from tests.gym.test_all_envs import IDS

ROOT = Path(__file__).parents[2]
LISTED = ["skyrl/alfworld_lite-v0", "skyrl/webshop_lite-v0"]
GAMES = ["skyrl/nim-v0", "skyrl/kuhn_poker-v0"]
CASES = [(env_id, {"lang": lang, "difficulty": d}) for env_id in LISTED for lang in ("en", "zh") for d in (1, 3)]
every_case = pytest.mark.parametrize(("env_id", "options"), CASES)


@every_case
def test_gymnasiums_checker_passes(env_id, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*different from the unwrapped version.*")
        check_env(DiscreteActions(gym.make(env_id, **options)))


@every_case
def test_an_index_plays_its_action(env_id, options):
    """Twins, one by index and one by text, also after actions that are not listed."""
    env, text = DiscreteActions(gym.make(env_id, **options)), gym.make(env_id, **options)
    rng = np.random.default_rng(0)
    for seed in range(3):
        _, info = env.reset(seed=seed)
        assert info == text.reset(seed=seed)[1]
        ended = False
        while not ended:
            there = np.flatnonzero(env.action_masks())
            assert env.actions == info["admissible_actions"] and there.tolist() == list(range(len(env.actions)))
            index = rng.choice(there)
            _, *outcome = text.step(env.actions[index])
            features, *by_index = env.step(index)
            assert by_index == outcome and features in env.observation_space and outcome[-1]["valid_action"]
            ended, info = outcome[1] or outcome[2], outcome[-1]


@every_case
def test_an_index_without_an_action_costs_a_step_and_changes_nothing(env_id, options):
    env = DiscreteActions(gym.make(env_id, max_episode_steps=3, **options))
    env.reset(seed=1)
    before, state = env.actions, env.unwrapped.get_env_state()
    for step, index in enumerate((len(env.actions), np.int64(63), -1), start=1):
        _, reward, terminated, truncated, info = env.step(index)
        assert (reward, terminated, info["valid_action"]) == (0.0, False, False)
        state |= {"turn": step} if "turn" in state else {}
        assert env.actions == before and env.unwrapped.get_env_state() == state
    assert truncated


def rows_by_action(env: DiscreteActions, features: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of the actions that there are; all others are empty."""
    rows = features.reshape(3 + env.action_space.n, -1)[3:]
    assert not rows[len(env.actions) :].any() and (rows[:, Column.THERE] == env.action_masks()).all()
    return dict(zip(env.actions, rows, strict=False))


def test_an_actions_row_says_what_is_asked_seen_and_done():
    """ "Your task: find two of the kind candle and leave both on the same sidetable." in a bathroom with a toilet 1,
    where candle 2 lies."""
    env = DiscreteActions(gym.make("skyrl/alfworld_lite-v0"), n=32, width=64)
    first, _ = env.reset(seed=1)
    features, *_ = env.step(env.actions.index("go to toilet 1"))
    rows = rows_by_action(env, features)
    numbers = {text: (4 * row[: len(Column)]).tolist() for text, row in rows.items()}
    # Asked: candle and toilet 1, which is listed. Seen: candle 2 and toilet 1.
    assert numbers["take candle 2 from toilet 1"] == [4, 2, 2, 0]
    # Asked: sidetable 1 and the kind, sidetable, which the task names. Seen: to, for "You walk to toilet 1".
    assert numbers["go to sidetable 1"] == [4, 2, 1, 0] and numbers["go to cart 1"] == [4, 1, 1, 0]
    places = {text: set(np.flatnonzero(row[len(Column) :])) for text, row in rows.items()}
    assert len(places["help"]) == 1 and len(places["go to cart 1"]) == 4  # go, to, cart, cart 1
    assert places["go to cart 1"] & places["go to sidetable 1"] >= places["go to cart 1"] & places["go to drawer 1"]
    env.step(env.actions.index("go to cart 1"))
    features, *_ = env.step(env.actions.index("go to toilet 1"))
    rows = features.reshape(35, 64)
    assert (rows[0] == first.reshape(35, 64)[0]).all() and not first.reshape(35, 64)[2].any()
    assert rows[2].sum() == 4 and rows_by_action(env, env.step(63)[0])["go to cart 1"][Column.TAKEN] == 0.25


DIGEST = """
import hashlib, gymnasium as gym, skyrl_gym
from examples.discrete_actions import DiscreteActions
env, digest = DiscreteActions(gym.make("skyrl/webshop_lite-v0", lang="zh")), hashlib.sha256()
digest.update(env.reset(seed=5)[0].tobytes())
for index in (0, 3, 2, 1, 40):
    digest.update(env.step(index)[0].tobytes())
print(digest.hexdigest())
"""


def test_features_are_the_same_bytes_in_every_process():
    def digest(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, check=True).stdout

    assert digest("1") == digest("2") != b""


def test_vectors_of_environments():
    envs = gym.make_vec(LISTED[0], 3, vectorization_mode="sync", wrappers=[DiscreteActions])
    features, _ = envs.reset(seed=1)
    assert features.shape == (3, 67 * 64) and envs.single_action_space.n == 64
    assert (envs.step(np.array([0, 1, 63]))[-1]["valid_action"] == [True, True, False]).all()
    again = gym.make(DiscreteActions(gym.make(LISTED[0]), n=40, width=16).spec)
    assert again.observation_space.shape == (43 * 16,)


@pytest.mark.parametrize("env_id", [each for each in IDS if each not in (*LISTED, *GAMES)])
def test_environments_without_a_list_of_actions_are_refused(env_id):
    with pytest.raises(ValueError, match="lists no admissible actions, as alfworld_lite does"):
        DiscreteActions(gym.make(env_id))


@pytest.mark.parametrize("env_id", GAMES)
def test_the_moves_of_a_game_are_actions(env_id):
    env = DiscreteActions(gym.make(env_id), n=16)
    env.reset(seed=1)
    assert env.actions == env.unwrapped.admissible_actions() and env.step(np.int64(0))[-1]["valid_action"]


def test_a_room_too_small_is_refused():
    env = gym.make("skyrl/alfworld_lite-v0")
    with pytest.raises(ValueError, match="n is 16, but this state has 17 actions; raise n"):
        DiscreteActions(env, n=16).reset(seed=1)
    for n, width in ((0, 64), (8, 4)):
        with pytest.raises(ValueError, match=f"n is {n}, width is {width}; expected at least 1 and 5"):
            DiscreteActions(env, n, width)
