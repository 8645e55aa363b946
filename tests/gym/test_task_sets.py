"""Others' task sets: the data's own answers earn all, and what a model wrote is never evaluated outside the sandbox."""

import inspect
import json
import os
import re
import subprocess
import sys
import time

import gymnasium as gym
import pytest
from reasoning_gym.factory import DATASETS

from skyrl_eval import sandbox
from skyrl_gym.adapters.reasoning_gym import INDICES, LEFT_OUT
from skyrl_trainer.data import load_samples
from skyrl_trainer.errors import UserError

MODULE = "skyrl_gym.adapters.reasoning_gym"
FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
OFFERED = sorted(DATASETS.keys() - LEFT_OUT.keys())
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rush_hour"}


@pytest.mark.parametrize("name", OFFERED if FULL else OFFERED[::6])
def test_a_data_sets_own_answers_earn_all(name):
    env, twin = gym.make(f"{MODULE}:{name}"), gym.make(f"{MODULE}:{name}")
    for seed, split in enumerate(("train", "val", "test")):
        question, info = env.reset(seed=seed, options={"split": split})
        assert twin.reset(options={"task_id": info["task_id"]})[0] == question
        assert env.step("I do not know.")[1] == 0
        for answer in ("nan", "inf", "R99999999", "1e99999999", "{}"):  # that no scorer takes for right, or for long
            env.reset(options={"task_id": info["task_id"]})
            begun = time.process_time()
            assert not env.step(f"<answer>{answer}</answer>")[4]["success"] and time.process_time() - begun < 5.0
        env.reset(options={"task_id": info["task_id"]})
        assert not env.step("<answer>blah</answer>")[4]["success"]
        if name in UNANSWERED:
            with pytest.raises(NotImplementedError, match=f"{name} gives no answers"):
                twin.unwrapped.expert_action()
            continue
        _, reward, terminated, _, info = twin.step(f"Let me see: {twin.unwrapped.expert_action()}")
        assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_no_scorer_evaluates_what_the_model_wrote():
    evaluates = re.compile(r"\b(eval|exec|parse_expr|sympify|S)\((?!.*entry\[)")
    found = {name for name, (cls, _) in DATASETS.items() if evaluates.search(inspect.getsource(cls.score_answer))}
    unsafe = {name for name, why in LEFT_OUT.items() if why == "its scorer runs the answer as Python code"}
    assert found - {"propositional_logic"} == unsafe
    for name, why in LEFT_OUT.items():  # also by an argument
        for given in ({"id": f"{MODULE}:{name}"}, {"id": f"{MODULE}:leg_counting", "dataset": name}):
            with pytest.raises(ValueError, match=f"The data set '{name}' is left out: {why}"):
                gym.make(**given)
    # Its own small parser has this name.
    assert "sympy" not in inspect.getsource(inspect.getmodule(DATASETS["propositional_logic"][0]))


TASKS = """
import sys, hashlib, gymnasium as gym
for name in sys.argv[1:]:
    env, digest = gym.make(f"skyrl_gym.adapters.reasoning_gym:{name}"), hashlib.sha256()
    for index in (0, 2, 26):  # at which the sets differed that are left out for it
        shown = env.reset(options={"task_id": f"train:{index}"})[0]
        digest.update(f"{shown} {env.unwrapped.task.ground_truth}".encode())
    print(name, digest.hexdigest())
"""


def test_a_task_id_names_the_same_task_in_every_process():
    command = [sys.executable, "-c", TASKS, *(OFFERED if FULL else OFFERED[::6])]
    runs = [
        subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    one, two = (set(run.communicate(timeout=1200)[0].splitlines()) for run in runs)
    assert len(one) >= 15 and one == two


def test_splits_do_not_meet_and_a_configuration_is_the_data_sets():
    places = [set(places) for places in INDICES.values()]
    assert len(set.union(*places)) == sum(map(len, places))
    env = gym.make(f"{MODULE}:chain_sum", config={"min_terms": 9, "max_terms": 9})
    assert all(len(re.findall(r"\d+", env.reset(seed=seed)[0].rpartition(":")[2])) == 9 for seed in range(5))
    for wrong in ({"terms": 3}, {"min_terms": 9, "max_terms": 3}, {"min_terms": {1}}):
        with pytest.raises(ValueError, match="The data set 'chain_sum' does not take config="):
            gym.make(f"{MODULE}:chain_sum", config=wrong)


def test_a_data_set_is_a_source_of_samples():
    samples = load_samples([f"{MODULE}:leg_counting?split=val&size=7&seed=3"], "text_math")
    env = gym.make(samples[0].env_id)
    questions = {env.reset(seed=sample.seed, options=sample.options)[0] for sample in samples}
    assert len(samples) == 7 and len(questions) == 7 and all("legs" in question for question in questions)
    with pytest.raises(UserError, match=r"countdown cannot begin an episode: The data set 'countdown' is left out"):
        load_samples([f"{MODULE}:countdown"], "text_math")


def test_without_the_package_there_is_a_sentence():
    code = f"import sys; sys.modules['reasoning_gym'] = None; import gymnasium; gymnasium.make('{MODULE}:leg_counting')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "reasoning-gym is not here: pip install 'skyrl-gym[reasoning-gym]'" in done.stderr


# Harbor's folders. The tasks are made up here.

TEST = (
    "#!/bin/bash\ngrep -qx 12 total.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
)
SOLVE = "#!/bin/bash\nawk '{ sum += $1 } END { print sum }' numbers.txt > total.txt\n"
HARBOR = "skyrl_eval:skyrl/harbor-v0"


def written(tool, **args):
    return f"<tool_call>{json.dumps({'tool': tool, 'args': args})}</tool_call>"


@pytest.fixture
def make(tmp_path):
    """Writes a task's folder: its files by path, and those that it has by default."""

    def make(name="sum", **files):
        default = {"instruction.md": "Write the sum of numbers.txt into total.txt.", "tests/test.sh": TEST}
        default |= {"environment/numbers.txt": "5\n7\n", "solution/solve.sh": SOLVE}
        default |= {"environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app/data\nCOPY numbers.txt .\n"}
        for path, text in (default | files).items():
            place = tmp_path / "tasks" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return str(tmp_path / "tasks")

    return make


@pytest.fixture(autouse=True, scope="module")
def namespaces():
    sandbox.check("namespace")


def test_a_tasks_own_solution_earns_its_reward(make):
    env = gym.make(HARBOR, tasks=make())
    question, info = env.reset(seed=1)
    assert question == "Write the sum of numbers.txt into total.txt." and "in /app/data" in info["instructions"]
    _, reward, terminated, _, info = env.step(env.unwrapped.expert_action())
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.reset(seed=1)
    env.step(written("bash", command="echo 13 > total.txt"))
    assert env.step(written("submit"))[1] == 0
    env.close()


def test_a_long_outputs_end_is_shown(make):
    env = gym.make(HARBOR, tasks=make())
    env.reset(seed=1)
    observation = env.step(written("bash", command="seq 9000; echo the end"))[0]
    assert "bytes left out" in observation and "the end" in observation and len(observation) < 17_000
    env.close()


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ('echo \'{"reward": 0.25, "other": 1}\' > /logs/verifier/reward.json', 0.25),
        (f"echo '{{\"reward\": 1{'0' * 400}}}' > /logs/verifier/reward.json", 0.0),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", 0.5),
        ("exit 0", 0.0),
        ("echo nan > /logs/verifier/reward.txt", 0.0),
        ("echo 1e30 > /logs/verifier/reward.txt", 1.0),
        ("echo -2 > /logs/verifier/reward.txt", 0.0),
        ("echo much > /logs/verifier/reward.txt", 0.0),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", 0.0),
    ],
)
def test_the_reward_is_what_the_tests_write(make, test, reward):
    env = gym.make(HARBOR, tasks=make(**{"tests/test.sh": test}))
    env.reset()
    _, given, terminated, _, info = env.step(written("submit"))
    assert (given, terminated, info["reward_parts"]) == (reward, True, {"tests": reward})


def test_the_agent_reaches_neither_tests_nor_reward_and_leaves_nothing_running(make):
    env = gym.make(HARBOR, tasks=make(), max_episode_steps=4, steps=4)
    env.reset(seed=1)
    commands = [
        "ls / ; ls /tests /logs /app",
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo true > /tests/test.sh",
        "(while true; do echo 12 > total.txt; done) & sleep 0.2; rm total.txt; echo cleared",
    ]
    seen = [env.step(written("bash", command=command))[0] for command in commands]
    assert "data" in seen[0] and "/tests': No such" in seen[0] and "test.sh" not in seen[0]
    env.step(written("bash", command="rm -f total.txt"))
    env.reset(seed=1)
    for command in commands[1:]:
        env.step(written("bash", command=command))
    env.step(written("bash", command="rm -f total.txt; timeout 2 bash -c '</dev/tcp/1.1.1.1/53' || echo no network"))
    observation, reward, _, truncated, _ = env.step("What now?")  # the last step: judged as it stands
    assert truncated and reward == 0 and "No tool call" in observation
    env.close()


def test_a_saved_state_does_its_work_again(make):
    one, other = (gym.make(HARBOR, tasks=make()).unwrapped for _ in range(2))
    one.reset(seed=1)
    one.step(written("bash", command="echo 12 > total.txt"))
    other.set_state(json.loads(json.dumps(one.get_state())))
    assert other.step(written("submit")) == one.step(written("submit")) and one.get_state() == other.get_state()
    one.close(), other.close()


def test_folders_are_a_source_of_samples_and_what_is_wrong_is_said(make, tmp_path):
    tasks = make("a")
    make("b", **{"environment/Dockerfile": "FROM debian\nRUN apt-get install -y cowsay\nWORKDIR /srv/x\n"})
    env = gym.make(HARBOR)
    with pytest.raises(
        ValueError,
        match=r"has 'RUN apt-get install -y cowsay', and no image is built: see to it, and give image=ignored",
    ):
        env.reset(options={"tasks": tasks, "task_id": "1"})
    info = env.reset(options={"tasks": tasks, "task_id": "1", "image": "ignored"})[1]
    assert "in /srv/x" in info["instructions"]
    for line in (
        "COPY numbers.txt /data/",
        "COPY sub/x .",
        "COPY . .\nWORKDIR /b",
        "WORKDIR /usr/src",
        "ENV A=1",
        "RUN a \\\n  b",
    ):
        folder = make("b", **{"environment/Dockerfile": f"FROM debian\n# Fine.\n{line}\n"})
        with pytest.raises(ValueError, match="and no image is built"):
            env.reset(options={"tasks": folder, "task_id": "1"})
    samples = load_samples([f"{HARBOR}?tasks={tasks}&image=ignored&size=5"], "text_math")
    assert len(samples) == 5 and samples[0].options == {"tasks": tasks, "image": "ignored"}
    for wrong in ({}, {"tasks": str(tmp_path / "none")}):
        with pytest.raises(ValueError, match="expected a folder of Harbor's tasks"):
            env.reset(options=wrong)
    env.close()
