"""What every environment promises, for all ids of the registry and for the one that write-your-own.md describes.

Run as a script, it prints the digests of the cases' episodes as JSON.
"""

import copy
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.error import ResetNeeded

import skyrl_gym
from skyrl_gym import TextEnv

FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
SEEDS = 1000 if FULL else 10
ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs/environments" / name).read_text() for name in ("write-your-own.md", "write-your-own.zh.md")]

FOLDER = tempfile.TemporaryDirectory(prefix="skyrl-gym-example-")  # as long as this module is there
EXAMPLE, GUESS = Path(FOLDER.name), "mine/guess-v0"
for language, name in (("python", "guess_the_number.py"), ("yaml", "guess.yaml")):
    blocks = [re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)[1] for page in PAGES]
    assert language != "python" or blocks[0] == blocks[1], "the two pages differ in their example"
    (EXAMPLE / name).write_text(blocks[0])
sys.path.insert(0, str(EXAMPLE))
skyrl_gym.load_registry(EXAMPLE / "guess.yaml")

ROW = {
    "prompt": [{"role": "user", "content": "A crate holds 1200 eggs. How many do 4 crates hold?"}],
    "reward_spec": {"method": "rule", "ground_truth": "4800"},
}
PROGRAM = {
    "text": "Write a function that doubles every number of a list.",
    "code": "def doubled(numbers):\n    return [2 * n for n in numbers]",
    "test_list": ["assert doubled([1, 2]) == [2, 4]", "assert sum(doubled([5])) == 10", "assert not doubled([])"],
}
PROMPT = "skyrl/prompt-v0"  # has no expert, for it does not know what an answer is worth
# What environments need that are played from rows only.
ROWS = {"skyrl/gsm8k-v0": {"task": ROW}, PROMPT: {"task": ROW}, "skyrl/code_rows-v0": {"task": PROGRAM}}
IDS = [e.id for e in skyrl_gym.list_envs() if e.entry_point.startswith("skyrl_gym.") or e.id == GUESS]
CASES = [
    (env_id, ({"lang": lang} if lang else {}) | ROWS.get(env_id, {}))
    for env_id in IDS
    for lang in gym.make(env_id).unwrapped.choices.get("lang", (None,))
]


def each_of(cases: list[tuple[str, dict]]) -> pytest.MarkDecorator:
    ids = [f"{env_id}-{options.get('lang', 'any')}" for env_id, options in cases]
    return pytest.mark.parametrize(("env_id", "options"), cases, ids=ids)


every_case = each_of(CASES)
every_case_with_an_expert = each_of([case for case in CASES if case[0] != PROMPT])


def good_action(env: gym.Env) -> str:
    """The expert's, or any where there is none."""
    return "Two and 3." if env.unwrapped.spec.id == PROMPT else env.unwrapped.expert_action()


def varied(env: gym.Env, options: dict, seed: int) -> dict:
    """The options with one of the environment's difficulties and splits."""
    axes = {name: values for name, values in env.unwrapped.choices.items() if name in ("split", "difficulty")}
    return options | {name: values[seed % len(values)] for name, values in axes.items()}


def environment(**variables: str) -> dict[str, str]:
    paths = [str(Path(skyrl_gym.__file__).parents[1]), str(EXAMPLE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} | variables


def bad_actions(rng: random.Random, valid: str) -> Iterator[str]:
    """An endless mixture: half are the prefixes of a valid action, one in a hundred is a megabyte long."""
    pieces = [
        valid,
        *"{}[]()<>\"'\\:,/=+-*^0179 \n\t\x00\x1b\ud800\udfff\u202e你😀９é",
        "\\boxed{",
        "<tool_call>",
        "```",
    ]
    pieces += ["</tool_call>", '{"tool": "', '"args": {', "search[", "click[", "go to ", "<answer>", "1e999"]
    prefixes = itertools.cycle(range(len(valid) + 1))
    while True:
        kind, place = rng.randrange(100), rng.randrange(len(valid) + 1)
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        if kind < 50:
            yield valid[: next(prefixes)]
        elif kind < 70:
            yield valid[:place] + rng.choice(pieces) + valid[place + rng.randrange(3) :]
        else:
            yield text if kind < 99 else (text or "\x00") * (1_000_000 // max(1, len(text)))


def episode(env_id: str, options: dict, seed: int) -> Iterator[bytes]:
    """The bytes of every result of an episode of expert, random and bad actions."""
    env, rng = gym.make(env_id), random.Random(f"{env_id}:{seed}")
    result = env.reset(seed=seed, options=varied(env, options, seed))
    junk = bad_actions(rng, good_action(env))
    for _ in range(60):
        yield json.dumps(result).encode()
        if len(result) == 5 and (result[2] or result[3]):
            return
        draw, admissible = rng.random(), result[-1].get("admissible_actions")
        if draw < 0.6:
            action = good_action(env)
        elif admissible and draw < 0.8:
            action = rng.choice(admissible)
        else:
            action = next(junk)
        result = env.step(action)


def digest(env_id: str, options: dict, seed: int) -> str:
    return hashlib.sha256(b"".join(episode(env_id, options, seed))).hexdigest()


@pytest.fixture(scope="module")
def elsewhere() -> list[list[str]]:
    """The digests of each case's episodes in a process with other hashes."""
    command, variables = [sys.executable, __file__], environment(PYTHONHASHSEED="1")
    return json.loads(subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout)


@every_case
def test_episodes_are_the_same_in_any_surroundings(env_id, options, elsewhere):
    alone = [digest(env_id, options, seed) for seed in range(SEEDS)]
    assert len(set(alone)) > 1 or env_id == PROMPT  # which says the same to whatever is answered
    interleaved = itertools.zip_longest(*(episode(env_id, options, seed) for seed in range(SEEDS)), fillvalue=b"")
    assert [hashlib.sha256(b"".join(steps)).hexdigest() for steps in zip(*interleaved, strict=True)] == alone
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda seed: digest(env_id, options, seed), range(SEEDS))) == alone
    assert elsewhere[CASES.index((env_id, options))] == alone


CHECK = """
import json, sys, warnings
import gymnasium as gym
from gymnasium.utils.env_checker import check_env
import skyrl_gym

warnings.simplefilter("error")
rows, ids = json.loads(sys.argv[1]), [entry.id for entry in skyrl_gym.list_envs()]
for env_id in ids:
    env_class = type(gym.make(env_id).unwrapped)
    if env_id in rows:  # check_env knows no options
        def reset(self, *, seed=None, options=None, plain=env_class.reset, row=rows[env_id]):
            return plain(self, seed=seed, options=row | (options or {}))
        env_class.reset = reset
    for lang in env_class.choices.get("lang", (None,)):
        env = gym.make(env_id, **({"lang": lang} if lang else {}))
        check_env(env.unwrapped)
        env.reset(seed=1)
        while not any(env.step("3" if env_id == sys.argv[2] else env.unwrapped.expert_action())[2:4]):
            pass
print(gym.__version__, *sorted(ids))
"""


@pytest.mark.parametrize("gymnasium", ["installed", *(["gymnasium==1.2.2", "gymnasium"] if FULL else [])])
def test_gymnasiums_checkers_are_silent(gymnasium, tmp_path):
    python, variables = sys.executable, environment(SKYRL_ENVS_REGISTRY=str(EXAMPLE / "guess.yaml"))
    if gymnasium != "installed":
        from tests.packaging.test_packaging import checked, empty_environment

        python, variables["PYTHONPATH"] = empty_environment(tmp_path / "venv"), str(EXAMPLE)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", python, ROOT / "packages/skyrl-gym", gymnasium]
        script = f'python="{sys.executable}"; source scripts/pip_settings.sh; "$@"'
        checked("bash", "-euo", "pipefail", "-c", script, "bash", *uv)
    command = [python, "-c", CHECK, json.dumps(ROWS), PROMPT]
    run = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    version, *done = run.stdout.split()
    assert done == sorted(IDS) and gymnasium in ("installed", "gymnasium", f"gymnasium=={version}")


@every_case
def test_a_saved_state_goes_on_alike(env_id, options):
    for seed in range(SEEDS):
        one, other, rng = gym.make(env_id).unwrapped, gym.make(env_id).unwrapped, random.Random(seed)
        one.reset(seed=seed, options=varied(one, options, seed))
        for step in range(20):
            if step <= seed % 4:
                other.set_state(json.loads(json.dumps(one.get_state())))
            action = good_action(one) if rng.random() < 0.7 else "nothing"
            results = one.step(action), other.step(action)
            assert results[0] == results[1] and one.get_state() == other.get_state()
            if results[0][2]:
                break


@every_case
def test_a_copy_and_a_pickle_go_on_alike_and_hold_no_shared_data(env_id, options):
    """At any point of an episode, and with the wrappers of gymnasium.make."""
    env, rng = gym.make(env_id), random.Random(env_id)
    for seed in range(SEEDS // 4):
        env.reset(seed=seed, options=varied(env, options, seed))
        while True:
            packed = pickle.dumps(env)
            twins = [copy.deepcopy(env), pickle.loads(packed)]
            assert len(packed) < 64 << 10 and len(json.dumps(env.unwrapped.get_state())) < 64 << 10
            action = good_action(env) if rng.random() < 0.7 else "nothing"
            result, before = env.step(action), env.unwrapped.get_state()
            for twin in twins:
                assert twin.step(action) == result and twin.unwrapped.get_state() == before
                twin.step("nothing"), twin.unwrapped.reset(seed=1, options=options)  # which leaves the first alone
            assert env.unwrapped.get_state() == before
            if result[2] or result[3]:
                break


@every_case_with_an_expert
def test_to_ask_the_expert_changes_nothing(env_id, options):
    for expert in gym.make(env_id).unwrapped.choices.get("expert", (None,)):
        one, other = (gym.make(env_id, **({"expert": expert} if expert else {})).unwrapped for _ in range(2))
        for seed in range(SEEDS // 4):
            for env in (one, other):
                env.reset(seed=seed, options=varied(env, options, seed))
            asked = [one.expert_action() for _ in range(30)]
            assert len(set(asked)) == 1 and one.get_state() == other.get_state()


@every_case_with_an_expert
def test_the_expert_solves_every_task(env_id, options):
    env = gym.make(env_id)
    names = [name for name in ("split", "difficulty") if name in env.unwrapped.choices]
    for values in itertools.product(*(env.unwrapped.choices[name] for name in names)):
        for seed in range(SEEDS // 2 if FULL else 2):  # in each of two languages
            env.reset(seed=seed, options=options | dict(zip(names, values, strict=True)))
            while not any((result := env.step(env.unwrapped.expert_action()))[2:4]):
                assert result[-1]["valid_action"]
            assert result[-1]["success"], (values, seed)


@every_case
def test_any_string_is_an_action_and_quick(env_id, options):
    """A string that is slow is slow each time; a step in which all tests' garbage is collected is so once."""
    env, rng, seconds, ended = gym.make(env_id), random.Random(env_id), [], True
    for number in range(50_000 if FULL else 200):  # in each of two languages
        if ended:
            env.reset(seed=number, options=varied(env, options, number))
            junk = bad_actions(rng, good_action(env))
        action, before, tries = next(junk), env.unwrapped.get_state(), []
        while not tries or (min(tries) >= 0.05 and len(tries) < 3):
            env.unwrapped.set_state(before)
            start = time.thread_time()
            observation, reward, terminated, truncated, info = env.step(action)
            tries.append(time.thread_time() - start)
        seconds.append(min(tries))
        ended, parts = terminated or truncated, info["reward_parts"].values()
        assert observation in env.observation_space and type(reward) is float and sum(parts) == reward
        # Vector environments make an array of the first value's type, so that 0 would make integers of all.
        assert {type(part) for part in parts} <= {float}
        assert type(info["valid_action"]) is bool and type(info["success"]) is bool
    assert sorted(seconds)[int(0.999 * len(seconds))] < 0.05, max(seconds)


def secrets(env: skyrl_gym.TextEnv, actions: list[str]) -> list[str]:
    """What nothing shown so far may contain, after these actions.

    Of a product to buy, its asin, until there has been a search; of things to find, their numbered names, until there
    has been an action that names their place; else a ground truth of some length that the question does not name, as
    the answers of a choice are.
    """
    truth, said = env.task.ground_truth, "\n".join(actions).lower()
    if isinstance(truth, dict) and "asin" in truth:
        return [] if "search[" in said or "click[" in said else [truth["asin"]]
    if isinstance(truth, dict):
        return [name for name, place in truth.items() if place not in said]
    return [str(truth)] if len(str(truth)) >= 4 and str(truth) not in env.task.text else []


@every_case
def test_the_ground_truth_is_not_shown_before_it_is_earned(env_id, options):
    """Without the expert's help, no secret is shown, and episodes that differ in the ground truth alone look alike."""
    searched = 0
    for seed in range(SEEDS):
        env, twin, rng = gym.make(env_id).unwrapped, gym.make(env_id).unwrapped, random.Random(seed)
        constant = twin.reset(seed=seed + 1, options=varied(env, options, seed))[1]["instructions"]
        observation, info = env.reset(seed=seed, options=varied(env, options, seed))
        del info["task_id"]  # its index may be any number
        if info["instructions"] == constant:  # says nothing of the task; its examples may look like an answer
            del info["instructions"]
        state, junk = env.get_state(), bad_actions(rng, "no idea")
        truth, other = state["task"]["ground_truth"], None
        if type(truth) is int or (isinstance(truth, str) and truth.isdigit()):
            other = state["task"]["ground_truth"] = type(truth)(int(truth) + 1_000_003)
        twin.set_state(state)
        actions: list[str] = []
        for _ in range(10):
            for secret in secrets(env, actions):
                found = re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", f"{observation}\n{info}", re.IGNORECASE)
                assert not found, (seed, secret)
                searched += 1
            admissible = info.get("admissible_actions")
            action = rng.choice(admissible) if admissible and rng.random() < 0.8 else next(junk)
            if str(truth) in action or str(other) in action:
                continue
            actions.append(action)
            observation, _, ended, _, info = result = env.step(action)
            assert twin.step(action) == result
            if ended:
                break
    assert searched or env_id == "skyrl/text_math-v0", "the search looked for nothing"  # its answers here are short


@every_case
def test_misuse_is_refused(env_id, options):
    env = gym.make(env_id)
    methods = ("expert_action", "admissible_actions") if env_id.startswith("skyrl/") else ()
    own = [each for each in methods if getattr(type(env.unwrapped), each) is not getattr(TextEnv, each)]
    for ask in (partial(env.step, "x"), env.unwrapped.get_state, *(getattr(env.unwrapped, each) for each in own)):
        with pytest.raises(ResetNeeded):
            ask()
    with pytest.raises(ValueError, match="no option 'colour'; valid ones are task_id, task"):
        env.reset(options={"colour": "red"})
    for task_id in ("nonsense", "moon:1:en:0", "train:1:en:999999999", 7):
        with pytest.raises(ValueError, match=r"train|<split>|rows|task_id"):
            env.reset(options={"task_id": task_id})
    env.reset(seed=1, options=options)
    while not any(env.step(good_action(env))[2:4]):
        pass
    with pytest.warns(UserWarning, match="after the episode had ended"):
        assert env.unwrapped.step("x")[:4] == ("", 0.0, True, False)


def test_the_import_is_light():
    """Nothing of an environment, nothing from outside; in full also the time, median of 7."""
    script = """if 1:
        import sys, time, gymnasium, yaml
        before, start = set(sys.modules), time.perf_counter()
        import skyrl_gym
        print(time.perf_counter() - start, *(set(sys.modules) - before))"""
    command, seconds = [sys.executable, "-c", script if not FULL else script.replace(", yaml", "")], []
    for _ in range(7 if FULL else 1):
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        took, *names = run.stdout.split()
        seconds.append(float(took))
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert FULL or (foreign == {"skyrl_gym"} and not re.search(r"envs\.\w+\.", run.stdout))
    assert not FULL or statistics.median(seconds) < 0.1


if __name__ == "__main__":
    print(json.dumps([[digest(*case, seed) for seed in range(SEEDS)] for case in CASES]))
