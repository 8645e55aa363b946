"""The wrappers, the replay of recorded episodes, and demonstrations."""

import datetime
import json
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import skyrl_gym
from skyrl_gym import HistoryWindow, InvalidActionBudget, RecordEpisodes, replay
from skyrl_gym.__main__ import main
from skyrl_gym.adapters import gem
from skyrl_gym.adapters.trl import environment_factory
from skyrl_gym.spaces import UnicodeText
from tests.gym.test_all_envs import GUESS, IDS, ROWS, good_action
from tests.gym.test_parts import Plain


def test_history_is_the_task_and_the_last_turns():
    env = HistoryWindow(gym.make(GUESS), turns=2)
    first, _ = env.reset(options={"task_id": "val:1:en:0"})
    assert env.step("1")[0] == f"{first}\n> 1\nHigher."
    assert env.step("9999")[0] == f"{first}\n> 1\nHigher.\n> 9999\nLower."
    assert env.step("\ud800")[0] == f"{first}\n[...]\n> 9999\nLower.\n> \ud800\nThat is no number."
    assert env.reset(seed=1)[0] == gym.make(GUESS).reset(seed=1)[0] and env.step("1")[0].count(">") == 1
    with pytest.raises(ValueError, match="turns is 0"):
        HistoryWindow(gym.make(GUESS), turns=0)


def test_invalid_actions_end_the_episode():
    env = InvalidActionBudget(gym.make(GUESS), budget=2)
    assert env.reset(seed=1)[1]["invalid_actions"] == 0
    outcomes = [env.step(action) for action in ("x", "1", "")]
    assert [(*outcome[2:4], outcome[4]["invalid_actions"]) for outcome in outcomes] == [
        (False, False, 1),
        (False, False, 1),
        (False, True, 2),
    ]


def test_a_reset_that_is_refused_changes_nothing_of_the_episode(tmp_path):
    """Neither the rules of the environment nor what wrappers count."""
    wrong = [{"lang": "zh", "task_id": "val:9:en:0"}, {"lang": "zh", "task": {"prompt": 3}}, {"lang": "xx"}]
    env = RecordEpisodes(InvalidActionBudget(HistoryWindow(gym.make(GUESS), turns=2), budget=2), tmp_path / "a.jsonl")
    for refused in wrong:
        first, _ = env.reset(options={"task_id": "val:1:en:0"})
        before = env.unwrapped.options, env.unwrapped.task
        env.step("x")
        with pytest.raises(ValueError):
            env.reset(options=refused)
        assert (env.unwrapped.options, env.unwrapped.task) == before
        observation, _, _, truncated, info = env.step("x")
        assert observation == f"{first}\n> x\nThat is no number.\n> x\nThat is no number."
        assert truncated and info["invalid_actions"] == 2
    env.close()
    assert replay(tmp_path / "a.jsonl") == len(wrong)
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace('"steps": [', '"steps": [1, '))
    with pytest.raises(ValueError, match=r"a.jsonl:1: not an episode of RecordEpisodes \(TypeError"):
        replay(tmp_path / "a.jsonl")


def test_a_reset_that_is_refused_draws_nothing(tmp_path):
    """Opponents that draw their moves go on as if nobody had asked."""
    for seed in range(8):
        env = RecordEpisodes(gym.make("skyrl/nim-v0"), tmp_path / f"{seed}.jsonl")
        env.reset(seed=seed, options={"opponent": "random"})
        done = False
        while not done:
            before = env.unwrapped.np_random.bit_generator.state
            for refused in ({"opponent": "bogus"}, {"task": {"prompt": 3}}, {"task_id": "val:77:en:0"}):
                with pytest.raises(ValueError):
                    env.reset(seed=seed + 100, options=refused)
            assert env.unwrapped.np_random.bit_generator.state == before
            done = env.step(env.unwrapped.expert_action())[2]
        env.close()
        assert replay(tmp_path / f"{seed}.jsonl") == 1


def test_an_environment_that_does_not_say_which_actions_are_valid_has_no_invalid_ones():
    gym.register("mine/silent-v0", Plain)
    try:
        env = InvalidActionBudget(gym.make("mine/silent-v0"), budget=1)
        env.reset(seed=0)
        assert env.step("x")[2:] == (True, False, {"invalid_actions": 0})
        assert gem.make("mine/silent-v0").reset()[0] == "Say hi."
        assert "Say hi." in environment_factory("mine/silent-v0")().reset()
    finally:
        del gym.registry["mine/silent-v0"]


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ROWS])
def test_wrapped_environments_pass_the_checker(env_id, tmp_path):
    env = RecordEpisodes(InvalidActionBudget(HistoryWindow(gym.make(env_id), turns=3), budget=4), tmp_path / "a.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*different from the unwrapped version.*")
        check_env(env)


def test_an_episode_whose_options_are_numpys_is_recorded(tmp_path):
    """Environments take its numbers."""
    env = RecordEpisodes(gym.make(GUESS), tmp_path / "episodes.jsonl")
    for _ in range(2):
        env.reset(seed=3, options={"difficulty": np.int64(2)})
        env.step("1")
    env.close()
    assert replay(tmp_path / "episodes.jsonl") == 2


def test_a_replay_answers_calls_of_tools_by_the_record(tmp_path):
    """And a row may hold what JSON cannot, as a date of a parquet file."""
    env = RecordEpisodes(gym.make("skyrl/tool_use-v0"), tmp_path / "episodes.jsonl")
    more = {"asked": datetime.date(2026, 1, 2), "levels": np.arange(3)}
    question = {"prompt": "Now?", "ground_truth": "1", **more}
    code = {"tool": "python_exec", "args": {"code": "import time; print(time.time_ns())"}}
    for _ in range(2):
        env.reset(options={"task": question})
        env.step(f"<tool_call>{json.dumps(code)}</tool_call>")
    env.close()
    assert replay(tmp_path / "episodes.jsonl") == 2


class Telling(gym.Env):
    """An environment of a user's own that tells of calls, and cannot be fed."""

    observation_space = action_space = UnicodeText(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        return "", 1.0, True, False, {"tool_calls": [{"tool": "look", "args": {}, "result": "?"}]}


def test_an_environment_that_cannot_be_fed_is_replayed(tmp_path):
    gym.register("test/Telling-v0", f"{__name__}:Telling")
    try:
        env = RecordEpisodes(gym.make("test/Telling-v0"), tmp_path / "episodes.jsonl")
        env.reset(seed=0)
        env.step("a")
        assert replay(tmp_path / "episodes.jsonl") == 1
    finally:
        del gym.registry["test/Telling-v0"]


def test_an_argument_that_no_record_can_hold_is_a_sentence(tmp_path):
    def shout(word: str) -> str:
        """Shouts."""
        return word.upper()

    with pytest.raises(ValueError, match=r"RecordEpisodes writes the arguments .* as JSON: .* function is not"):
        RecordEpisodes(gym.make("skyrl/tool_use-v0", tools=[shout]), tmp_path / "episodes.jsonl")


@pytest.mark.parametrize("env_id", IDS)
def test_recorded_episodes_replay_until_something_differs(env_id, tmp_path):
    path = tmp_path / "episodes.jsonl"
    env = RecordEpisodes(InvalidActionBudget(gym.make(env_id), budget=3), path)
    for seed in (3, None, None):
        env.reset(seed=seed, options=ROWS.get(env_id))
        env.step("\ud800 你好")
    env.reset(options=ROWS.get(env_id))
    while not any(env.step(good_action(env))[2:4]):
        pass
    env.close()
    assert replay(path) == 4
    *episodes, last = path.read_text().splitlines()
    changed = json.loads(last)
    changed["steps"][-1][2] += 1  # its reward
    path.write_text("\n".join([*episodes, json.dumps(changed)]))
    with pytest.raises(ValueError, match=rf"episodes.jsonl:4, step {len(changed['steps']) - 1}: reward is .* recorded"):
        replay(path)
    for wrong, why in ((b"{}\n", "not an episode"), (b'{"env": 1}\n', "not an episode"), (b"\xff\n", "not UTF-8 text")):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"episodes.jsonl:1: {why}"):
            replay(path)


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ROWS])
def test_demonstrations_are_chats_of_solved_tasks(env_id, tmp_path, capsys):
    out = tmp_path / "demos.jsonl"
    assert main(["demos", env_id, "--n", "10", "--split", "val", "--lang", "zh", "--out", str(out)]) == 0
    demos = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [demo["task_id"].split(":")[-1] for demo in demos] == [str(index) for index in range(10)]
    for demo in demos:
        roles = [message["role"] for message in demo["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert demo["env_id"] == env_id and demo["task_id"].startswith("val:")
        assert demo["reward"] > 0 or env_id == "skyrl/kuhn_poker-v0"  # its cards decide who wins
    assert all(demo["success"] for demo in demos) and demos == list(
        skyrl_gym.demonstrations(env_id, 10, {"split": "val", "lang": "zh"})
    )
    assert main(["demos", env_id, "--n", "0", "--out", str(out)]) == main(["demos", "nothing", "--out", str(out)]) == 2
    assert "n is 0, expected 1 to " in capsys.readouterr().err


def test_a_file_of_demonstrations_that_cannot_be_written_is_named_before_they_are_played(tmp_path, capsys):
    assert main(["demos", "text_math", "--n", "10", "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in (said := capsys.readouterr().err) and "of 10 demonstrations" not in said


@pytest.mark.parametrize(
    "env_id, options",
    [
        ("webshop_lite", ["expert=hasty", "codes=numbered"]),
        ("alfworld_lite", ["expert=searches", "difficulty=3"]),
    ],
)
def test_demonstrations_of_an_expert_that_may_fail_are_written_and_are_always_the_same(
    env_id, options, tmp_path, capsys
):
    written, given = [], [part for option in options for part in ("--option", option)]
    for name in ("one.jsonl", "two.jsonl"):
        assert main(["demos", env_id, "--n", "24", "--out", str(tmp_path / name), *given]) == 0
        written.append((tmp_path / name).read_text(encoding="utf-8"))
    demos = [json.loads(line) for line in written[0].splitlines()]
    failed = sum(not demo["success"] for demo in demos)
    assert written[0] == written[1] and len(demos) == 24 and 0 < failed < 24
    assert f"The expert failed in {failed} of them" in capsys.readouterr().err


def test_an_episode_that_the_environment_ends_is_not_cut_off_by_the_budget():
    """Answers that cannot be read are invalid, and end a question."""
    env = InvalidActionBudget(gym.make("skyrl/text_math-v0"), budget=1)
    env.reset(seed=1)
    _, _, terminated, truncated, info = env.step("I do not know.")
    assert (terminated, truncated, info["invalid_actions"]) == (True, False, 1)
