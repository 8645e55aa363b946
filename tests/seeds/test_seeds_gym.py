"""What the documents that the project began from print about environments, typed as it is printed."""

import json
import random
import re
from pathlib import Path

import gymnasium as gym
import pytest

import skyrl_gym
from skyrl_gym.data import load_rows
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from tests.docs.blocks import blocks

DATASET, ENVIRONMENT = (block.text for block in blocks(Path(__file__).parent / "skyrl_overview.md", "python"))
assert "\n     data = {" in DATASET and "\n   def step" in ENVIRONMENT, "a formatter has changed what is printed"


@pytest.fixture(scope="module")
def rows():
    """What the dataset block makes."""
    rng = random.Random(0)

    def generate_multiplication_problem(num_digits):
        one, other = (rng.randrange(10 ** (num_digits - 1), 10**num_digits) for _ in range(2))
        return f"{one} * {other}", str(one * other)

    names = {
        "num_examples": 5,
        "num_digits": 2,
        "split_name": "train",
        "system_prompt": {"role": "system", "content": "Put the product in \\boxed{answer}."},
        "examples": [],
        "generate_multiplication_problem": generate_multiplication_problem,
    }
    exec(DATASET, names)
    assert len(names["examples"]) == 5
    return names["examples"]


@pytest.fixture(autouse=True)
def multiply():
    """The environment block's class, under the name that the rows' `env_class` has."""
    names = {"re": re, "BaseTextEnv": BaseTextEnv, "BaseTextEnvStepOutput": BaseTextEnvStepOutput}
    exec(ENVIRONMENT, names)
    skyrl_gym.register(id="multiply", entry_point=names["MultiplyEnv"])
    yield
    del gym.registry["multiply"]


def played(row, action, default="none"):
    """The first observation, and what one step gives, in the environment that the row names, or else `default`."""
    env = gym.make(skyrl_gym.resolve_env_id(row.get("env_class") or default))
    observation, info = env.reset(options={"task": row})
    return observation, info["instructions"], env.step(action)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_environment_plays_the_rows(rows, tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_rows(path) == rows
    for row in load_rows(path):
        question, truth = row["prompt"][1]["content"], row["reward_spec"]["ground_truth"]
        assert eval(question) == int(truth)
        for action, reward, parsed in (
            (f"So \\boxed{{ {truth} }}", 1.0, f" {truth} "),
            (f"\\boxed{{{int(truth) + 1}}}", 0.0, str(int(truth) + 1)),
            (truth, 0.0, None),
        ):
            observation, instructions, step = played(row, action)
            assert (observation, instructions) == (question, "Put the product in \\boxed{answer}.")
            assert step[:4] == ("", reward, True, False)
            assert step[4]["metadata"] == {"parsed_answer": parsed} and step[4]["success"] == (reward == 1.0)


def test_the_environment_as_skyrl_itself_plays_it(rows):
    for row in rows:
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        env = skyrl_gym.make(row["env_class"], env_config={}, extras=extras)
        assert env.init(row["prompt"]) == (row["prompt"], {})
        step = env.step(f"\\boxed{{{env.ground_truth}}}")
        assert step == {
            "observations": [],
            "reward": 1.0,
            "done": True,
            "metadata": {"parsed_answer": row["reward_spec"]["ground_truth"]},
        }
        env.close()


def test_samples_of_a_prompt_and_a_ground_truth(tmp_path):
    """A dataset is a jsonl file, and a sample has `prompt` and `ground_truth`; the caller names the environment."""
    path = tmp_path / "samples.jsonl"
    samples = [{"prompt": "6 * 7", "ground_truth": 42}, {"prompt": [{"role": "user", "content": "2 * 3"}]}]
    samples[1]["ground_truth"] = "6"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for row, question, truth in zip(load_rows(path), ("6 * 7", "2 * 3"), (42, 6), strict=True):
        for answer, reward in ((truth, 1.0), (truth + 1, 0.0)):
            observation, instructions, step = played(row, f"\\boxed{{{answer}}}", default="multiply")
            assert (observation, instructions, step[1]) == (question, "", reward)
        assert played(row, f"\\boxed{{{truth}}}", default="text_math")[2][1] == 1.1
    path.write_text(json.dumps(samples[0]) + '\n{"prompt": "2 * 3", "groundtruth": 6}\n')
    with pytest.raises(ValueError, match=r"samples.jsonl:2: field 'reward_spec.ground_truth' is missing.*ground_truth"):
        load_rows(path)


def test_the_designs_environments_and_its_form_of_an_action():
    for name in ("text_math", "tool_use", "webshop_lite", "alfworld_lite"):
        env = gym.make(skyrl_gym.resolve_env_id(name))
        env.reset(seed=0)
        assert isinstance(env.step(env.unwrapped.expert_action())[0], str)
    env = gym.make("skyrl/tool_use-v0")
    env.reset(seed=0)
    for tool, args in (
        ("calculator", {"expression": "6 * 7"}),
        ("search", {"query": "river"}),
        ("wiki", {"title": "river"}),
        ("python_exec", {"code": "print(6 * 7)"}),
    ):
        form = '<tool_call>{"tool":..., "args":...}</tool_call>'
        action = form.replace("...", json.dumps(tool), 1).replace("...", json.dumps(args), 1)
        info = env.step(action)[4]
        assert info["valid_action"] and [(call["tool"], call["args"]) for call in info["tool_calls"]] == [(tool, args)]
