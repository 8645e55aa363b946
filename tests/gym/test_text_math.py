"""text_math: its tasks, splits, rewards, expert, and what a Gymnasium env owes."""

import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import skyrl_gym
from skyrl_gym.data import ROLES
from skyrl_gym.envs.text_math.tasks import LEVELS, Problem, table

ENV = "skyrl/text_math-v0"
SPLITS, LANGS = ("train", "val", "test"), ("en", "zh")
GYM_SOURCES = str(Path(skyrl_gym.__file__).parent.parent)


def make(**kwargs):
    return gym.make(ENV, **kwargs)


def canonical(problem: Problem) -> tuple:
    """The test's own notion of "the same problem": first terms sorted where they may change places."""
    free = {1: len(problem.terms), 2: 0, 3: 2, 4: 2, 5: 2}[problem.kind]
    return problem.kind, tuple(sorted(problem.terms[:free])), problem.terms[free:]


def evaluate(text: str) -> int:
    """The answer by Python's own arithmetic, from the text that the agent reads."""
    expression = re.split(" = ", text)[0].replace("×", "*")
    assert re.fullmatch(r"[0-9 +*-]+", expression)
    return eval(expression)


@pytest.mark.parametrize("lang", LANGS)
def test_check_env_and_passive_checker_without_a_warning(lang):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(lang=lang).unwrapped)
        env = make(lang=lang, render_mode="ansi")
        observation, _ = env.reset(seed=1)
        assert env.render() == observation
        env.step("\\boxed{1}")
        assert env.render().startswith("> \\boxed{1}")
        env.close()


def test_both_spellings_make_it():
    code = f"import gymnasium as g; print(g.make('skyrl_gym:{ENV}').reset(seed=5)[0])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert out.stdout.strip() == make().reset(seed=5)[0]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": GYM_SOURCES, **extra}


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_the_same_bytes_in_other_processes_whatever_the_hash_seed(hash_seed):
    code = (
        "import gymnasium as g, skyrl_gym, json\n"
        f"e = g.make('{ENV}')\n"
        "def episode(d, s, l):\n"
        "    obs, info = e.reset(seed=s, options={'difficulty': d, 'lang': l})\n"
        "    return [obs, info, e.step(e.unwrapped.expert_action())]\n"
        "print(json.dumps([episode(d, s, l) for d in (1, 2, 4, 5, 6, 7, 8) for s in range(20) for l in ('en', 'zh')]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=environment(PYTHONHASHSEED=hash_seed)
    )
    env, episodes = make(), []
    for difficulty, seed, lang in itertools.product((1, 2, 4, 5, 6, 7, 8), range(20), LANGS):
        observation, info = env.reset(seed=seed, options={"difficulty": difficulty, "lang": lang})
        episodes.append([observation, info, env.step(env.unwrapped.expert_action())])
    assert run.stdout.decode().strip() == json.dumps(episodes)


def test_interleaved_envs_do_not_disturb_each_other():
    alone = [make().reset(seed=seed)[0] for seed in range(30)]
    envs = [make() for _ in range(30)]
    np.random.seed(0)
    interleaved = [env.reset(seed=seed)[0] for seed, env in enumerate(envs)]
    assert interleaved == alone
    followers = [env.reset()[0] for env in reversed(envs)][::-1]
    assert followers == [env.reset(seed=seed) and env.reset()[0] for seed, env in enumerate(envs)]


def test_no_problem_of_one_split_is_in_another_in_any_difficulty():
    owner: dict[tuple, str] = {}
    for difficulty, split in itertools.product(set(LEVELS) - {3}, SPLITS):
        problems = table(difficulty)
        for index in range(problems.count(split)):
            key = canonical(problems.problem(split, index))
            assert owner.setdefault(key, split) == split, key
    assert len(owner) > 100_000


@settings(deadline=None)
@given(st.sampled_from(sorted(LEVELS)), st.data())
def test_splits_by_hypothesis(difficulty, data):
    """A task and its commuted twin lie in the same split: the twin is found there, and in no other."""
    problems = table(difficulty)
    split = data.draw(st.sampled_from(SPLITS))
    problem = problems.problem(split, data.draw(st.integers(0, problems.count(split) - 1)))
    key, small = canonical(problem), difficulty in (1, 2, 4, 5, 6)
    homes = {s for s in SPLITS if small and key in keys(difficulty, s)}
    assert not small or homes == {split}


def keys(difficulty: int, split: str, memory: dict = {}) -> set:  # noqa: B006 (a cache)
    if (difficulty, split) not in memory:
        problems = table(difficulty)
        memory[difficulty, split] = {canonical(problems.problem(split, i)) for i in range(problems.count(split))}
    return memory[difficulty, split]


def test_split_sizes_are_fixed():
    """A change here changes every published figure: it needs a new version of the env."""
    sizes = {d: tuple(skyrl_gym.num_tasks("text_math", {"difficulty": d, "split": s}) for s in SPLITS) for d in LEVELS}
    assert sizes[1] == (6496, 828, 776) and sizes[2] == (9800, 1229, 1166) and sizes[4] == (53, 4, 7)
    assert sum(sizes[1]) == 90 * 90 and sum(sizes[3]) == 900 * 900 + 900 * 901 // 2
    assert make().reset(options={"task_id": "val:arithmetic:1:en:0"})[0] == "49 + 60 = ? Answer in \\boxed{}."


@pytest.mark.parametrize("difficulty", [1, 2, 3, 6, 7, 8])
def test_five_hundred_validation_texts_are_distinct_and_unknown_to_training(difficulty):
    env = make(difficulty=difficulty)
    texts = {env.reset(options={"task_id": f"val:arithmetic:{difficulty}:en:{i}"})[0] for i in range(500)}
    train = {env.reset(seed=seed)[0] for seed in range(500)}
    assert len(texts) == 500 and not texts & train


def test_levels_hold_what_the_documentation_says():
    patterns = {
        1: r"\d\d \+ \d\d",
        2: r"\d\d [+-] \d\d",
        3: r"\d{3} [+-] \d{3}",
        4: r"[2-9] × [2-9]",
        5: r"\d\d × [2-9]",
        6: r"\d\d × \d\d",
        7: r"\d\d × [2-9] [+-] \d\d",
        8: r"\d\d( \+ \d\d){2,39}",
    }
    env = make()
    for difficulty, pattern in patterns.items():
        for seed in range(200):
            text, _ = env.reset(seed=seed, options={"difficulty": difficulty})
            assert re.fullmatch(pattern + re.escape(" = ? Answer in \\boxed{}."), text), text
            assert env.unwrapped.task.ground_truth >= 0


@pytest.mark.parametrize("solution", ["short", "worked"])
@pytest.mark.parametrize("lang", LANGS)
def test_expert_solves_every_difficulty_and_split(solution, lang):
    env = make(solution=solution, lang=lang)
    for difficulty, split in itertools.product(LEVELS, SPLITS):
        for seed in range(40):
            text, _ = env.reset(seed=seed, options={"difficulty": difficulty, "split": split})
            task, action = env.unwrapped.task, env.unwrapped.expert_action()
            assert task.ground_truth == evaluate(text)
            *steps, answer = action.split("; ")
            assert answer == f"\\boxed{{{task.ground_truth}}}" and bool(steps) == (solution == "worked")
            for step in steps:  # every equation of a worked solution holds
                left, right = re.match(r"([\d×+-]+)=(\d+)", step).groups()
                assert eval(left.replace("×", "*")) == int(right), step
            _, reward, terminated, truncated, info = env.step(action)
            assert (reward, terminated, truncated, info["success"]) == (1.1, True, False, True)


def test_worked_solutions_as_documented():
    from skyrl_gym.envs.text_math import expert

    for line in expert.__doc__.splitlines():
        if "boxed" in line and line.startswith("    "):
            expression, worked = re.split(r"\s{3,}", line.strip())
            terms = tuple(map(int, re.findall(r"\d+", expression)))
            signs = re.sub(r"[\d ]", "", expression)
            kind = {"+": 1, "++": 1, "-": 2, "×": 3, "×+": 4}[signs]
            assert expert.worked_solution(Problem(kind, terms), "en") == worked


def test_chains_are_long_tailed():
    env = make(difficulty=8, solution="worked")
    lengths = []
    for index in range(4000):
        env.reset(options={"task_id": f"train:arithmetic:8:en:{index}"})
        lengths.append(len(env.unwrapped.expert_action().replace("; ", ";").replace("\\boxed", "")))
    assert 50 < np.mean(lengths) < 75 and np.median(lengths) < 45 and max(lengths) > 400


@pytest.mark.parametrize(
    ("action", "parts"),
    [
        ("\\boxed{109}", (1.0, 0.1)),
        ("\\boxed{1} no, \\boxed{ +0109 }", (1.0, 0.1)),
        ("\\boxed{109} \\boxed{110", (1.0, 0.1)),
        ("\\boxed{109} \\boxed{110}", (0.0, 0.1)),
        ("\\boxed{-109}", (0.0, 0.1)),
        ("\\boxed{109.0}", (1.0, 0.1)),
        ("\\boxed{109} <answer>$109$</answer>", (1.0, 0.1)),
        ("<answer>109</answer> \\boxed{110}", (0.0, 0.1)),
        ("<answer>109", (0.0, 0.0)),
        ("#### 109", (0.0, 0.0)),
        ("\\boxed{one hundred nine}", (0.0, 0.0)),
        ("\\boxed{109} \\boxed{}", (0.0, 0.0)),
        ("\\boxed{１０９}", (0.0, 0.0)),
        ("109", (0.0, 0.0)),
        ("", (0.0, 0.0)),
    ],
)
def test_rewards_come_in_parts(action, parts):
    env = make()
    assert env.reset(options={"task_id": "val:arithmetic:1:en:0"})[0].startswith("49 + 60")
    observation, reward, terminated, truncated, info = env.step(action)
    assert (info["reward_parts"]["correct"], info["reward_parts"]["format"]) == parts
    assert reward == sum(parts) and info["success"] == bool(parts[0]) and info["valid_action"] == bool(parts[1])
    assert (observation, terminated, truncated) == ("", True, False)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=())) | st.text("\\boxed{}0123456789 -+", max_size=60))
def test_any_text_is_an_action(action):
    env = make().unwrapped
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step(action)
    assert terminated and reward in (0.0, 0.1, 1.1) and reward == sum(info["reward_parts"].values())


def test_hostile_actions_are_quick():
    import time

    million = 1_000_000
    hostile = [
        "\\boxed{" * (million // 7),
        "{" * million,
        "\\boxed{" + "{}" * (million // 2),
        "\\boxed{{{}" * (million // 10),
        "\\boxed{" + "9" * million + "}",
        "\\boxed{" + "0" * 9000 + "x}",
        "\\boxed{" + " " * 9000 + "1 1}",
        "\x00\ud800\u202e" * 1000,
    ]
    env = make()
    for action in hostile:
        env.reset(seed=1)
        start = time.process_time()
        env.step(action)
        assert time.process_time() - start < 0.5


def test_only_the_task_knows_the_ground_truth():
    """Rows that differ in nothing but the ground truth look alike, until the right answer has earned the difference."""
    seen = []
    for truth in (1234567, "7654321"):
        env = make(render_mode="ansi")
        row = {"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"ground_truth": truth}}
        seen.append([env.reset(seed=1, options={"task": row}), env.render(), env.step("\\boxed{5}"), env.render()])
        assert repr(truth) not in repr(env.unwrapped.task)
    assert seen[0] == seen[1]


def test_observation_is_the_question_and_nothing_else():
    env = make()
    for difficulty, lang, seed in itertools.product(LEVELS, LANGS, range(20)):
        observation, info = env.reset(seed=seed, options={"difficulty": difficulty, "lang": lang})
        task = env.unwrapped.task
        assert observation == task.text and info == {"instructions": "", "task_id": task.task_id}
        numbers = tuple(map(int, re.findall(r"\d+", observation)))
        assert numbers == tuple(task.data["terms"])
        _, _, _, _, info = env.step("no idea")
        assert set(info) == {"reward_parts", "valid_action", "success"}


def test_a_dataset_row_is_played():
    env = make(solution="worked")
    row = {
        "data_source": "mine",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}],
        "env_class": "text_math",
        "reward_spec": {"method": "rule", "ground_truth": "42"},
        "extra_info": None,
    }
    observation, info = env.reset(options={"task": row})
    assert (observation, info["instructions"]) == ("6 * 7?", "Be brief.")
    assert env.unwrapped.expert_action() == "\\boxed{42}"
    assert env.step("\\boxed{42}")[1] == 1.1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dificulty": 1}, "no option 'dificulty'; valid ones are task_id, task, split, family, difficulty, lang, sol"),
        ({"difficulty": 9}, "'difficulty' is 9; valid values are 1, 2, 3"),
        ({"difficulty": True}, "'difficulty' is True"),
        ({"difficulty": "1"}, "'difficulty' is '1'"),
        ({"lang": ["en"]}, "'lang' is"),
        ({"task_id": "val:1:en:0"}, "is not '<split>:<family>:<difficulty>:<lang>:<index>', for example 'train:arithm"),
        ({"task_id": 7}, "is not '<split>"),
        ({"task_id": "dev:arithmetic:1:en:0"}, "'split' is 'dev'; valid values are 'train', 'val', 'test'"),
        ({"task_id": "val:arithmetic:01:en:0"}, "'difficulty' is '01'; valid values are 1, 2"),
        ({"task_id": "val:words:6:en:0"}, "family 'words' has no difficulty 6; valid ones are 1, 2, 3, 4, 5"),
        ({"family": "logic", "difficulty": 8}, "family 'logic' has no difficulty 8; valid ones are 1, 2, 3, 4, 5"),
        ({"task_id": "val:arithmetic:1:en:828"}, "its index must be below 828"),
        ({"task_id": "val:arithmetic:1:en:-1"}, "is not '<split>"),
        ({"task_id": "val:arithmetic:1:en:1", "split": "train"}, "contradicts option 'split'"),
        ({"task": {"prompt": "x"}}, "options\\['task'\\]: field 'reward_spec' is missing"),
        ({"task": 3}, "options\\['task'\\]: expected an object"),
        (
            {"task": {"prompt": [{"role": "user", "content": "x"}], "reward_spec": {"ground_truth": "3/0"}}},
            "'reward_spec.ground_truth' must be a number, a word, a list or a set, .* got '3/0'",
        ),
        (
            {"task": {"prompt": [{"role": "user", "content": "x"}], "reward_spec": {"ground_truth": True}}},
            "'reward_spec.ground_truth' must be a number",
        ),
        (
            {"task": {"prompt": [{"role": r, "content": "x"} for r in ROLES], "reward_spec": {"ground_truth": "3"}}},
            "takes a prompt of system and user messages; field 'prompt' has others",
        ),
        ({"task": {}, "task_id": "val:arithmetic:1:en:1"}, "not both"),
    ],
)
def test_wrong_options_are_refused_with_the_valid_ones(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make().reset(options=options)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="valid ones are"):
        make(levels=2)
    with pytest.raises(TypeError, match="An action is a str, got int"):
        env = make().unwrapped
        env.reset()
        env.step(5)


def test_numpy_integers_are_integers():
    assert make().reset(options={"difficulty": np.int64(4)})[1]["task_id"].startswith("train:arithmetic:4:")


def test_stepping_before_the_start_and_after_the_end():
    env = make().unwrapped
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset(seed=1)
    env.step("x")
    with pytest.warns(UserWarning, match="after the episode had ended"):
        assert env.step(env.expert_action())[:4] == ("", 0.0, True, False)


def test_state_is_saved_and_restored_through_json():
    env, other = make().unwrapped, make().unwrapped
    env.reset(seed=3, options={"solution": "worked"})
    state = json.loads(json.dumps(env.get_state()))
    other.set_state(state)
    assert other.expert_action() == env.expert_action() and other.task == env.task
    assert env.step("\\boxed{7}") == other.step("\\boxed{7}")
    assert [env.reset()[0] for _ in range(5)] == [other.reset()[0] for _ in range(5)]


def test_expert_trajectory_is_a_chat():
    chat = skyrl_gym.expert_trajectory("text_math", seed=3, options={"solution": "worked", "lang": "zh"})
    assert [message["role"] for message in chat] == ["user", "assistant"]
    assert chat == skyrl_gym.expert_trajectory(ENV, 3, {"solution": "worked", "lang": "zh"})
