"""text_math: its tasks, splits, rewards, expert, and what a Gymnasium env owes."""

import functools
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
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
from skyrl_gym.envs.text_math import logic, words
from skyrl_gym.envs.text_math.arithmetic import LEVELS, Problem, table, worked_steps

ENV = "skyrl/text_math-v0"
SPLITS, LANGS = ("train", "val", "test"), ("en", "zh")
FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
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
        "print(json.dumps([episode(d, s, l) for d in (1, 2, 3, 5, 6, 7, 8) for s in range(20) for l in ('en', 'zh')]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=environment(PYTHONHASHSEED=hash_seed)
    )
    env, episodes = make(), []
    for difficulty, seed, lang in itertools.product((1, 2, 3, 5, 6, 7, 8), range(20), LANGS):
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
    for difficulty, split in itertools.product(set(LEVELS) - {4}, SPLITS):
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
    key, small = canonical(problem), difficulty in (1, 2, 3, 6)
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
    assert sizes[1] == (6496, 828, 776) and sizes[2] == (9800, 1229, 1166) and sizes[3] == (572, 75, 73)
    assert sum(sizes[1]) == 90 * 90 and sum(sizes[4]) == 900 * 900 + 900 * 901 // 2
    assert make().reset(options={"task_id": "val:arithmetic:1:en:0"})[0] == "49 + 60 = ? Answer in \\boxed{}."


@pytest.mark.parametrize("difficulty", [1, 2, 4, 5, 6, 7, 8])
def test_five_hundred_validation_texts_are_distinct_and_unknown_to_training(difficulty):
    env = make(difficulty=difficulty)
    texts = {env.reset(options={"task_id": f"val:arithmetic:{difficulty}:en:{i}"})[0] for i in range(500)}
    train = {env.reset(seed=seed)[0] for seed in range(500)}
    assert len(texts) == 500 and not texts & train


def test_levels_hold_what_the_documentation_says():
    patterns = {
        1: r"\d\d \+ \d\d",
        2: r"\d\d [+-] \d\d",
        3: r"\d\d × [2-9]",
        4: r"\d{3} [+-] \d{3}",
        5: r"\d\d × [2-9] [+-] \d\d",
        6: r"\d\d × \d\d",
        7: r"\d{3} × \d\d",
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
    examples = [line for line in worked_steps.__doc__.splitlines() if "=" in line]
    assert len(examples) == 6
    for line in examples:
        expression, worked = re.split(r"\s{3,}", line.strip())
        terms = tuple(map(int, re.findall(r"\d+", expression)))
        signs = re.sub(r"[\d ]", "", expression)
        kind = {"+": 1, "++": 1, "-": 2, "×": 3, "×+": 4}[signs]
        assert "; ".join(worked_steps(Problem(kind, terms), "en")) == worked


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
        ("\\boxed{１０９}", (1.0, 0.1)),
        ("\\boxed {{109}}", (1.0, 0.1)),
        ("\\boxed{109元}", (1.0, 0.1)),
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
    pieces = [
        "9",
        "1/",
        "1,",
        "(",
        "{",
        "1 ",
        "\\frac{",
        "\\text{",
        "1,111",
        "(),",
        "x+",
        "2x",
        "x*",
        "x^{2}",
        "\\boxed{",
        "\\boxed{{}",
        "\\boxed{{",
    ]
    pieces += ["<answer>", "</answer>", "\\boxed{<answer>", "####", "#\n", "{}", "\x00\ud800\u202e"]
    env = gym.make("skyrl/gsm8k-v0")
    spec = {"ground_truth": 1}
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "?"}], "reward_spec": spec}
    for piece, tail in itertools.product(pieces, ("", "x", "}", "</answer>")):
        for action in (piece * (10**6 // len(piece)) + tail, "\\boxed{" + piece * (990 // len(piece)) + tail + "}"):
            env.reset(options={"task": row})
            start = time.process_time()
            env.step(action)
            assert time.process_time() - start < 0.1, action[:40]


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
        (
            {"task": {"prompt": "x"}},
            "options\\['task'\\]: field 'reward_spec.ground_truth' must be .* got None. With env_class: prompt, or "
            "environment.env_class=prompt, none is needed.$",
        ),
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
            "field 'prompt' must hold messages of the system and the user alone",
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


def test_arithmetic_is_what_it_was_when_its_levels_were_published():
    env, lines = make(), []
    for seed in range(240):
        d, split, lang = (1, 2, 6, 8)[seed % 4], SPLITS[seed % 3], LANGS[seed // 12 % 2]
        options = {"difficulty": d, "split": split, "lang": lang, "solution": ("short", "worked")[seed // 24 % 2]}
        text, info = env.reset(seed=seed, options=options)
        count = env.unwrapped.num_tasks({"difficulty": d, "split": split})
        index = info["task_id"].split(":")[-1]
        lines.append(f"{text}|{env.unwrapped.task.ground_truth}|{env.unwrapped.expert_action()}|{count}|{index}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "de2011644a6664a681987edf8972995372a186f39199f4955f4036164916d10b"


def written(first: int, sign: str, second: int) -> int:
    """How many sums, differences and products of two digits it takes on paper; a carry is one more, a borrow two."""
    steps = carry = total = 0
    if sign == "×":
        for place, digit in enumerate(map(int, reversed(str(second)))):
            for other in map(int, reversed(str(first))) if digit else ():
                steps += 1 + (carry > 0)
                carry = (digit * other + carry) // 10
            carry = 0
            steps += written(total // 10**place, "+", first * digit) if total and digit else 0
            total += first * digit * 10**place
        return steps
    for x, y in itertools.zip_longest(map(int, reversed(str(first))), map(int, reversed(str(second)))):
        if x is not None and y is not None:
            steps += 1
        if sign == "+":
            steps += carry > 0
            carry = ((x or 0) + (y or 0) + carry) // 10
        else:
            borrows = x < (y or 0) + carry
            steps, carry = steps + 2 * borrows, int(borrows)
    return steps


def test_a_higher_level_takes_more_work_on_paper():
    """The mean over a level, as the page of text_math lists it."""
    page = (Path(__file__).parents[2] / "docs/environments/text_math.md").read_text()
    listed = [
        float(row) for row in re.findall(r"^\| [1-8] \| .* \| [\d,]+ / [\d,]+ / [\d,]+ \| ([\d.]+) \|$", page, re.M)
    ]
    for difficulty, mean in enumerate(listed, start=1):
        problems, steps = table(difficulty), 0
        for index in range(count := min(problems.count("train"), 3000)):
            first, *rest = re.split(" ([+×-]) ", problems.problem("train", index).expression)
            value = int(first)
            for sign, term in zip(rest[::2], map(int, rest[1::2]), strict=True):
                steps += written(value, sign, term)
                value = {"+": value + term, "-": value - term, "×": value * term}[sign]
        assert abs(steps / count - mean) < 0.06, steps / count
    assert len(listed) == len(LEVELS) and listed == sorted(set(listed))


@pytest.mark.parametrize("difficulty", LEVELS)
def test_no_constant_is_right_more_often_than_three_times_in_a_hundred(difficulty):
    problems = table(difficulty)
    answers = Counter(problems.problem("val", index).answer for index in range(min(problems.count("val"), 200)))
    assert answers.most_common(1)[0][1] <= 0.03 * answers.total()


STORIES = """
bakery (a*b-a*b/4-c)*p        orchard (a*b-c+d)*p-e           savings (a*b+c-d)*(1+e/100)   drive (a*b+c)*4*d/100
pencils (a*b/12*p-c)/2        library (a*b-c+d)*p-e           garden ((a*b-c)*d-e)/2        cakes ((q*a+c)*120+d)/4
rope (c-a*q)/2/d+e            concert (a*b+c*d-e)*(1-f/100)   factory (a*b*c-d)*p-e         phone (a*b+c-d)/2*4/100
wall (a*b-c)*2*p+e            novels (c-a*b-d)/2+e            hens (a*b-c-d)*p-e            theatre ((a*b-c)*d-e)/4
pool (a*b-c+d)*(1-e/100)      stickers a*b*2/3+c-d            wages (a*b+c*d)*(1-e/100)-f   courier (a*b*c-d)/4-e
buses (a*b-c)*d*(1-e/100)     chocolates (a*b+c*d-e)*12.5+f
"""
"""Written from the English texts: title and answer at the last difficulty."""


def test_stories_mean_what_their_texts_say_in_both_languages():
    stories = words.wording("words.yaml")["stories"]
    formulas = STORIES.split()[1::2]
    assert [story["title"] for story in stories] == STORIES.split()[::2]
    for difficulty, index in itertools.product(words.LEVELS, range(len(stories) * (300 if FULL else 15))):
        (text, answer, steps), (zh, same, _) = (words.make("train", difficulty, lang, index) for lang in LANGS)
        assert answer == same and difficulty <= len(steps) <= difficulty + 1
        assert sorted(re.findall(r"[\d./]*\d", text)) == sorted(re.findall(r"[\d./]*\d", zh))
        told = " ".join(step["en"].split(" | ")[0] for step in stories[index % 22]["steps"][:difficulty])
        pattern = re.sub(r"{(\w)}", r"(?P<\1>[\\d./]*\\d)", re.sub(r"{(name|other)}", r"\\w+", told))
        values = {name: Fraction(number) for name, number in re.match(pattern, text).groupdict().items()}
        if difficulty == 5:
            assert eval(formulas[index % 22], values) == Fraction(answer), text
        for step in steps:  # every equation of the worked solution holds, and no amount is negative
            left, right = re.sub(r"(\d+)%", r"(\1/100)", step).replace("×", "*").replace("÷", "/").split("=")
            assert eval(re.sub(r"[\d.]+", r"Fraction('\g<0>')", left)) == Fraction(right) > 0, step


RULES = {
    r"(\w+) says: (\w+) is a knight\.": lambda w, i, x: w[i] == w[x],
    r"(\w+) says: (\w+) is a knave\.": lambda w, i, x: w[i] != w[x],
    r"(\w+) says: both (\w+) and (\w+) are knights\.": lambda w, i, x, y: w[i] == (w[x] and w[y]),
    r"(\w+) says: at least one of (\w+) and (\w+) is a knight\.": lambda w, i, x, y: w[i] == (w[x] or w[y]),
    r"(\w+) says: (\w+) and (\w+) are of the same kind\.": lambda w, i, x, y: w[i] == (w[x] == w[y]),
    r"(\w+) says: (\w+) and (\w+) are of different kinds\.": lambda w, i, x, y: w[i] == (w[x] != w[y]),
    r"(\w+) arrived before (\w+)\.": lambda w, x, y: w[x] < w[y],
    r"(\w+) arrived right before (\w+)\.": lambda w, x, y: w[y] - w[x] == 1,
    r"(\w+) and (\w+) did not arrive one right after the other\.": lambda w, x, y: w[y] - w[x] not in (1, -1),
    r"(\w+) arrived between (\w+) and (\w+)\.": lambda w, x, y, z: w[y] < w[x] < w[z] or w[z] < w[x] < w[y],
    r"(\w+) was not first\.": lambda w, x: w[x] != 0,
    r"If (\w+) comes, (\w+) comes too\.": lambda w, x, y: w[y] or not w[x],
    r"If (\w+) comes, (\w+) does not come\.": lambda w, x, y: not (w[x] and w[y]),
    r"If (\w+) does not come, (\w+) comes\.": lambda w, x, y: w[x] or w[y],
    r"Exactly one of (\w+) and (\w+) comes\.": lambda w, x, y: w[x] != w[y],
    r"If both (\w+) and (\w+) come, (\w+) comes too\.": lambda w, x, y, z: w[z] or not (w[x] and w[y]),
}


def solutions(text: str) -> list[str]:
    """Every answer that the English text allows, by trying all."""
    people = re.split(", | and ", re.match(r"(?:Each of )?(.+?) (?:is either|ran a|are invited)", text)[1])
    sentences = re.split(r"(?<=[.?]) ", text)
    clues = [(holds, found) for s in sentences for p, holds in RULES.items() if (found := re.fullmatch(p, s))]
    assert len(sentences) - len(clues) == (4 if "party" in text else 3)
    race = "race" in text
    worlds = itertools.permutations(range(len(people))) if race else itertools.product((0, 1), repeat=len(people))
    answers = []
    for world in (dict(zip(people, values, strict=True)) for values in worlds):
        if all(holds(world, *found.groups()) for holds, found in clues):
            facts = ("knave", "knight") if "knave" in text else ("no", "yes")
            answers.append(", ".join(sorted(people, key=world.get) if race else (facts[world[x]] for x in people)))
    return answers


@pytest.mark.parametrize("difficulty", logic.LEVELS)
def test_logic_puzzles_have_one_solution_by_another_solver(difficulty):
    for split, index in itertools.product(SPLITS, range(300 if FULL else 6 if difficulty > 3 else 30)):
        text, answer, _ = logic.make(split, difficulty, "en", index)
        assert solutions(text) == [answer], text


def test_clues_can_tell_every_world():
    for kind, people in itertools.product(("knights", "orders", "guests"), range(3, 8)):
        worlds, clues = logic.solver(kind, people)
        for world in range(len(worlds)):
            assert functools.reduce(int.__and__, [mask for *_, mask in clues if mask >> world & 1]) == 1 << world


@pytest.mark.parametrize(("family", "size"), [("words", 2000), ("logic", 240)])
def test_tasks_of_a_family_are_distinct_in_and_across_splits(family, size):
    module, texts, tasks = {"words": words, "logic": logic}[family], set(), 0
    for split, difficulty in itertools.product(SPLITS, module.LEVELS):
        count = module.count(split, difficulty)
        for index in sorted({*range(size), *range(count - 9, count)}):
            texts.add(module.make(split, difficulty, "en", index)[0])
            tasks += 1
    assert len(texts) == tasks


def as_under_any_names(kind, people, masks):
    """The test's own canonical form: the least of the puzzle's masks under every relabelling of the people."""
    worlds = logic.solver(kind, people)[0]
    number, forms = {world: place for place, world in enumerate(worlds)}, []
    for who in itertools.permutations(range(people)):
        to = [number[tuple(world[who[i]] for i in range(people))] for world in worlds]
        turned = [sum(1 << to[place] for place in range(len(worlds)) if mask >> place & 1) for mask in masks]
        forms.append(tuple(sorted(turned)))
    return kind, people, min(forms)


def test_no_logic_puzzle_of_one_split_is_in_another_under_other_names_or_with_people_changed_round():
    homes: dict[tuple, str] = {}
    kinds = ("knights", "orders", "guests")
    for kind, people, split in itertools.product(kinds, (3, 4), SPLITS):
        for seed in range(2000 if FULL else 150):
            _, clues = logic.puzzle(kind, people, split, random.Random(seed))
            form = as_under_any_names(kind, people, [mask for *_, mask in clues])
            assert homes.setdefault(form, split) == split


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_of_the_small_puzzles_is_right_more_often_than_by_chance(split):
    for kind, most in (("knights", 1 / 8), ("orders", 1 / 6), ("guests", 1 / 8)):
        found = Counter(logic.puzzle(kind, 3, split, random.Random(seed))[0] for seed in range(400))
        assert found.most_common(1)[0][1] < 400 * (most + 0.07)  # four standard deviations


def test_the_numbers_of_a_story_are_of_one_split_whichever_way_round():
    homes: dict[tuple, str] = {}
    for split, difficulty in itertools.product(SPLITS, words.LEVELS):
        for index in range(min(words.count(split, difficulty), 20_000 if FULL else 2_000)):
            text, _, steps = words.make(split, difficulty, "en", index)
            pair = tuple(sorted(re.split("[×=]", steps[0])[:2]))
            assert len(pair) == 2 and homes.setdefault((index % 22, pair), split) == split, text


@pytest.mark.parametrize("solution", ["short", "worked"])
@pytest.mark.parametrize("family", ["words", "logic"])
def test_expert_solves_every_difficulty_split_and_language(family, solution):
    env = make(family=family, solution=solution)
    for difficulty, split, lang in itertools.product((1, 2, 3, 4, 5), SPLITS, LANGS):
        for seed in range(1000 if FULL else 12):
            options = {"difficulty": difficulty, "split": split, "lang": lang}
            text, info = env.reset(seed=seed, options=options)
            truth, action = env.unwrapped.task.ground_truth, env.unwrapped.expert_action()
            assert set(info) == {"instructions", "task_id"} and (solution == "worked") == ("; " in action)
            assert family == "words" or truth not in text
            assert env.reset(options={"task_id": info["task_id"]})[0] == text
            assert env.step(action)[1] == 1.1


def test_rows_with_any_exact_answer():
    with pytest.raises(ValueError, match=r"plays rows of a dataset: .* env.reset\(options={'task': row}\)"):
        gym.make(skyrl_gym.resolve_env_id("gsm8k")).reset(seed=1)
    truths = [18, 0.5, "18", "$1,234.50", "3/4", "\\frac{3}{4}", "1, 2", "{1, 2}", "\\{1, 2\\}", "B", "Paris"]
    rows = (("text_math", "mine"), ("gsm8k", "openai/gsm8k"), ("text_math", "math_dapo"))
    for truth, (name, source) in itertools.product(truths, rows):
        env = gym.make(f"skyrl/{name}-v0", solution="worked")
        prompt = [{"role": role, "content": role[0]} for role in ("system", "user", "user")]
        spec = {"method": "rule", "ground_truth": truth}
        row = {"data_source": source, "prompt": prompt, "env_class": name, "reward_spec": spec, "extra_info": None}
        text, info = env.reset(options={"task": row})
        assert (text, info["instructions"]) == ("u\n\nu", "s")
        assert env.step(env.unwrapped.expert_action())[1] == 1.1
        for said, read_in in {"####": "openai/gsm8k", "Answer:": "math_dapo"}.items():
            env.reset(options={"task": row})
            assert env.step(f"So\n{said} {truth}\n")[1] == (1.1 if source == read_in else 0.0)


def expression_row(truth, field="reward_spec", name="method"):
    return {"prompt": "Expand (x + 1)^2.", field: {name: "math_verify", "ground_truth": truth}}


def test_a_row_may_ask_for_math_verify():
    env = make()
    for truth, answer, right in (
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x+1", "(x+1)^3", False),
        ("0.5", "\\frac{1}{2}", True),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        (4, "5", False),
    ):
        for row in (expression_row(truth), expression_row(truth, "reward_model", "style")):
            env.reset(options={"task": row})
            assert env.step(env.unwrapped.expert_action())[4]["success"]
            env.reset(options={"task": row})
            parts = env.step(f"So \\boxed{{{answer}}}")[4]["reward_parts"]
            assert parts == {"correct": float(right), "format": 0.1}
    env.reset(options={"task": expression_row("x")})
    assert env.step("x")[1] == 0.0
    env.reset(options={"task": expression_row("x")})
    assert env.step("\\boxed{" + "x" * 1001 + "}")[1] == 0.0
    env.reset(options={"task": expression_row("x")})
    start = time.monotonic()
    assert env.step("\\boxed{9^{9^{9^{9}}}}")[1] == 0.1 and time.monotonic() - start < 20


def test_math_verify_leaves_an_alarm_that_was_set_and_works_in_threads():
    env, rang = make(), []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    env.reset(options={"task": expression_row("x+y")})
    assert env.step("\\boxed{y+x}")[1] == 1.1
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    env.reset(options={"task": expression_row("x+y")})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(env.step, "\\boxed{y+x}").result()[1] == 1.1
    assert not rang


def test_without_math_verify_a_row_that_asks_for_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="asks for 'math_verify': `pip install math-verify`"):
        make().reset(options={"task": expression_row("x")})
