"""Vector environments give what single ones give, in both modes and every way of resetting."""

import json

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode

import skyrl_gym
from skyrl_gym.spaces import UnicodeText
from skyrl_gym.vector import single_info
from tests.gym.test_all_envs import FULL, GUESS, IDS, ROWS

NUM = 3


def policy(env_id: str, step: int, index: int) -> str:
    return ["", "\\boxed{85}", str(1000 + 7 * step), "你好 look \ud800"][(step + index) % 4]


def singles(env_id: str, mode: AutoresetMode, steps: int):
    """What single environments give under the same seeds, reset as `mode` says."""
    envs = [gym.make(env_id) for _ in range(NUM)]
    yield [(*env.reset(seed=5 + index), None) for index, env in enumerate(envs)]
    ended = [False] * NUM
    for step in range(steps):
        results = []
        for index, env in enumerate(envs):
            if ended[index] and mode is not AutoresetMode.SAME_STEP:
                ended[index], (observation, info) = False, env.reset()
                results.append((observation, 0.0, False, False, info))
                continue
            observation, reward, terminated, truncated, info = env.step(policy(env_id, step, index))
            ended[index] = terminated or truncated
            if ended[index] and mode is AutoresetMode.SAME_STEP:
                final = {"final_obs": observation, "final_info": info}
                observation, info = env.reset()
                info = final | info
            results.append((observation, reward, terminated, truncated, info))
        yield results


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ROWS])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("vectorization", ["sync", "async", "entry point"])
def test_results_are_those_of_single_environments(env_id, mode, vectorization):
    if vectorization == "entry point":
        envs = gym.make_vec(env_id, num_envs=NUM, autoreset_mode=mode)
    else:
        envs = skyrl_gym.make_vec(env_id, NUM, vectorization, autoreset_mode=mode)
    steps = 100 if FULL else 12
    expected = singles(env_id, mode, steps)
    observations, infos = envs.reset(seed=5)
    for index, (observation, info, _) in enumerate(next(expected)):
        assert (observations[index], single_info(infos, index)) == (observation, info)
    for step, results in enumerate(expected):
        batch = envs.step(tuple(policy(env_id, step, index) for index in range(NUM)))
        for index, (*outcome, info) in enumerate(results):
            assert [values[index] for values in batch[:4]] == outcome
            assert single_info(batch[4], index) == info
    assert envs.metadata["autoreset_mode"] is mode
    envs.close()


def test_gymnasiums_own_names_of_modes_are_taken():
    envs = skyrl_gym.make_vec(GUESS, 2, gym.VectorizeMode.SYNC, autoreset_mode=AutoresetMode.DISABLED)
    assert isinstance(envs, gym.vector.SyncVectorEnv) and len(envs.reset(seed=1)[0]) == 2
    with pytest.raises(
        ValueError, match="vectorization_mode is 'vector_entry_point'; valid ones are 'sync' and 'async'"
    ):
        skyrl_gym.make_vec(GUESS, 2, gym.VectorizeMode.VECTOR_ENTRY_POINT)


def test_arguments_reach_every_episode():
    envs = gym.make_vec(GUESS, num_envs=2, lang="zh", difficulty=2, max_episode_steps=1, autoreset_mode="SameStep")
    assert "整数" in envs.reset(seed=1)[0][1] and envs.spec.to_json()
    assert envs.step(("x", "x"))[3].tolist() == [True, True] and "整数" in envs.step(("x", "x"))[0][0]


class Telling(gym.Env):
    """Each copy's info has values of another type."""

    observation_space = action_space = UnicodeText(10)
    made = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, Telling.made = Telling.made, Telling.made + 1
        values = [{"x": 1, "parts": {"y": 1}}, {"x": None, "parts": {"y": 0.5}}, {"x": 2**70, "parts": {"y": 2}}]
        self.info = values[self.number % 3]
        return "", dict(self.info)

    def step(self, action):
        return "", 0.0, False, False, dict(self.info)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_infos_of_several_types_are_those_that_each_environment_gave(order):
    gym.register("mine/Telling-v0", Telling, disable_env_checker=True)
    try:
        envs = skyrl_gym.make_vec("mine/Telling-v0", 3)
        Telling.made = order[0]
        infos = envs.reset(seed=1)[1]
        for number, env in enumerate(envs.envs):
            assert single_info(infos, number) == env.unwrapped.info
        infos = envs.step(("", "", ""))[4]
        assert [single_info(infos, n) for n in range(3)] == [env.unwrapped.info for env in envs.envs]
    finally:
        del gym.registry["mine/Telling-v0"]


def test_what_one_environment_tells_is_in_no_others_info():
    """Of three games one ends at a text that is no move, and is reset at once."""
    envs = skyrl_gym.make_vec("nim", 3, autoreset_mode="SameStep")
    envs.reset(seed=5)
    infos = envs.step(("A 1", "pass", "A 1"))[4]
    assert ["final_info" in single_info(infos, number) for number in range(3)] == [False, True, False]
    assert ["reward_parts" in single_info(infos, number) for number in range(3)] == [True, False, True]


def test_two_vector_environments_keep_each_its_own_way_of_resetting():
    modes = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
    made = [skyrl_gym.make_vec(GUESS, 2, autoreset_mode=mode) for mode in modes]
    assert [envs.metadata["autoreset_mode"] for envs in made] == modes


def test_shared_memory_is_refused():
    with pytest.raises(ValueError, match="shared_memory=False"):
        gym.make_vec(GUESS, num_envs=2, vectorization_mode="async")
    with pytest.raises(ValueError, match="valid ones are 'sync' and 'async'"):
        skyrl_gym.make_vec(GUESS, 2, "threads")
    with pytest.raises(ValueError, match="num_envs is 0, expected at least 1"):
        skyrl_gym.make_vec(GUESS, 0)


def test_an_environment_of_rows_goes_on_with_its_rows_where_nobody_gives_options(tmp_path):
    rows = [{"prompt": f"{n} + 1 = ?", "ground_truth": n + 1} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for given in (rows, str(tmp_path / "rows.jsonl")):
        envs = skyrl_gym.make_vec("gsm8k", 2, rows=given, autoreset_mode="SameStep")
        questions, asked = envs.reset(seed=0)[0], set()
        for _ in range(12):
            asked |= set(questions)
            questions, rewards, *_ = envs.step(tuple(f"\\boxed{{{int(x.split()[0]) + 1}}}" for x in questions))
            assert rewards.tolist() == [1.1, 1.1]
        assert len(asked) > 5
    with pytest.raises(ValueError, match=r"rows='train.jsonl'.*options=\{'task': row\}"):
        skyrl_gym.make_vec("gsm8k", 2).reset(seed=0)
