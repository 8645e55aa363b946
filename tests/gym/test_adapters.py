"""Other projects' interfaces: SkyRL's tutorial, GEM's style. TRL's: test_trl_tools.py."""

import json
import warnings

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import skyrl_gym
from skyrl_gym.adapters import gem
from skyrl_gym.adapters.skyrl import SkyRLEnv
from skyrl_gym.data import load_rows
from skyrl_gym.parsing import last_answer
from tests.gym.test_all_envs import IDS, ROWS


def multiply_env() -> type:
    """The environment that SkyRL's tutorial builds, over the same interface, in our own words."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class MultiplyEnv(BaseTextEnv):
        def __init__(self, env_config={}, extras={}):  # noqa: B006 (the tutorial's signature)
            super().__init__()
            self.ground_truth = extras["reward_spec"]["ground_truth"]
            self.max_turns = extras.get("max_turns", 5)

        def step(self, action: str) -> BaseTextEnvStepOutput:
            self.turns += 1
            answer = last_answer(action)
            right = answer is not None and answer.strip() == str(self.ground_truth).strip()
            done, metadata = right or self.turns >= self.max_turns, {"parsed_answer": answer}
            if done:
                reward = 1.0 if right else 0.5 if answer is not None else 0.0
                return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
            again = {"role": "user", "content": f"{answer} is not it." if answer else "Use \\boxed{...}."}
            return BaseTextEnvStepOutput(observations=[again], reward=0.0, done=False, metadata=metadata)

    return MultiplyEnv


MULTIPLY = {
    "data_source": "synthetic_multiply",
    "prompt": [{"role": "system", "content": "Box the product."}, {"role": "user", "content": "12 * 34"}],
    "env_class": "multiply",
    "reward_spec": {"method": "rule", "ground_truth": "408"},
    "extra_info": {"num_digits": 2, "split": "train"},
}


@pytest.fixture
def multiply():
    skyrl_gym.envs.register(id="multiply", entry_point=multiply_env())
    yield "multiply"
    del gym.registry["multiply"]


def test_skyrls_tutorial_as_skyrl_runs_it(multiply):
    extras = {name: value for name, value in MULTIPLY.items() if name not in ("prompt", "env_class")}
    env = skyrl_gym.make(multiply, env_config={}, extras=extras | {"max_turns": 2})
    assert env.init(MULTIPLY["prompt"]) == (MULTIPLY["prompt"], {})
    first, last = env.step("\\boxed{5}"), env.step("\\boxed{6}")
    assert first["observations"] == [{"role": "user", "content": "5 is not it."}] and not first["done"]
    assert (last["observations"], last["reward"], last["done"]) == ([], 0.5, True)
    assert last["metadata"] == {"parsed_answer": "6"}
    with pytest.raises(ValueError, match=r"knows \['multiply'\], not 'skyrl/text_math-v0'"):
        skyrl_gym.make("skyrl/text_math-v0")
    with pytest.raises(ValueError, match="'multiply' is already registered"):
        skyrl_gym.envs.register(id="multiply", entry_point="other:Env")


def test_skyrls_tutorial_as_a_gymnasium_environment(multiply, tmp_path, monkeypatch):
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([MULTIPLY]), tmp_path / "rows.parquet")
    (row,) = load_rows(tmp_path / "rows.parquet")
    env, twin = gym.make(multiply), gym.make(multiply).unwrapped
    observation, info = env.reset(options={"task": row})
    assert (observation, info["instructions"]) == ("12 * 34", "Box the product.")
    assert env.step("5")[0] == "Use \\boxed{...}."
    twin.set_state(json.loads(json.dumps(env.unwrapped.get_state())))
    assert env.step("\\boxed{5}") == twin.step("\\boxed{5}")
    observation, reward, terminated, truncated, info = env.step("\\boxed{408}")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert (info["success"], info["valid_action"], info["reward_parts"]) == (True, True, {"reward": 1.0})
    with pytest.raises(ValueError, match="This environment plays rows of a dataset"):
        env.reset()
    plain = SkyRLEnv.reset
    monkeypatch.setattr(
        SkyRLEnv, "reset", lambda self, *, seed=None, options=None: plain(self, seed=seed, options={"task": row})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(multiply, extras={"max_turns": 3}).unwrapped)


def test_gems_random_actions_are_the_seeds_after_any_number_of_resets():
    drawn = []
    for _ in range(2):
        env = gem.make("alfworld_lite", seed=3)
        for _ in range(3):
            env.reset()
        drawn.append([env.sample_random_action() for _ in range(5)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ROWS])
def test_gems_loop(env_id):
    env, other = gem.make(env_id), gem.make(env_id)
    observation, info = env.reset(seed=4)
    assert observation == other.reset(4)[0] and observation.startswith(info["instructions"])
    for _ in range(5):
        action = env.sample_random_action()
        assert action == other.sample_random_action()
        observation, reward, terminated, truncated, info = env.step(action)
        assert isinstance(observation, str) and isinstance(reward, float)
        if terminated or truncated:
            break
        other.step(action)
