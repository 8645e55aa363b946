"""`python -m skyrl_gym baseline`: figures of simple agents and of models behind endpoints; a mistake is a sentence."""

import json
import os
import re

import gymnasium as gym
import pytest

import skyrl_gym
from skyrl_gym.__main__ import main
from skyrl_gym.baseline import episodes, expert, figures, make_agent
from skyrl_trainer.agent.chat_api import message_of
from tests.eval.scripted_server import Raw, no, served


def said(capsys, *words):
    assert main(["baseline", *words]) == 0
    return capsys.readouterr().out


def test_intervals_are_wilsons_and_the_normal_one():
    found = figures([(k < 40, float(k < 40) + 0.1, 1 + k % 2) for k in range(200)])
    assert found["success_95"] == pytest.approx([0.1505, 0.2609], abs=1e-4)  # the textbook's, of 40 in 200
    assert found["reward"] == pytest.approx(0.3)
    assert found["reward_95"] == pytest.approx([0.2444, 0.3556], abs=1e-4)  # 1.96 x 0.401 / sqrt(200)
    assert (found["episodes"], found["success"], found["steps"]) == (200, 0.2, 1.5)


@pytest.mark.parametrize("env", ["text_math", "tool_use", "webshop_lite", "alfworld_lite", "code_lite", "sql_lite"])
def test_the_expert_solves_all_and_who_does_not_read_next_to_nothing(capsys, env):
    assert "success 1.000, 95 %: 0.722 to 1.000" in said(capsys, env, "--episodes", "10", "--split", "val")
    for agent in ("random", "first"):
        words = [env, "--episodes", "4", "--agent", agent, "--difficulty", "2", "--lang", "zh"]
        out = said(capsys, *words)
        assert float(out.partition("success ")[2].partition(",")[0]) <= 0.25
        assert said(capsys, *words) == out


def test_first_and_random_take_what_is_admissible_and_else_follow_the_expert_of_another_task():
    env = gym.make("skyrl/alfworld_lite-v0")
    history = [env.reset(seed=1)]
    actions = history[0][1]["admissible_actions"]
    assert make_agent("first", None, env.spec.id, {})(env, history) == actions[0]
    random = make_agent("random", None, env.spec.id, {})
    drawn = {random(env, history) for _ in range(300)}
    assert drawn == set(actions)
    env = gym.make("skyrl/text_math-v0", difficulty=3)
    seen = {name: set() for name in ("first", "random")}
    for name, answers in seen.items():
        agent = make_agent(name, None, env.spec.id, {"difficulty": 3, "task_id": "train:arithmetic:3:en:5"})
        for seed in range(20):
            action = agent(env, [env.reset(seed=seed)])
            answers.add(action)
            assert env.step(action)[4]["reward_parts"]["format"] == 0.1
    env.reset(options={"task_id": "train:arithmetic:3:en:0"})
    assert seen["first"] == {expert(env, [])} and len(seen["random"]) > 15


def test_a_model_behind_an_endpoint_sees_the_whole_episode_and_earns_what_it_should(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    env = gym.make(skyrl_gym.resolve_env_id("tool_use"))

    def model(request):
        talk = request["messages"]
        if len(talk) == 2:
            model.seed += 1
            assert env.reset(seed=model.seed)[0] == talk[1]["content"] and talk[0]["role"] == "system"
        else:
            assert [each["role"] for each in talk[1:]] == ["user", "assistant"] * (len(talk) // 2 - 1) + ["user"]
            assert env.step(talk[-2]["content"])[0] == talk[-1]["content"]
        return 200, env.unwrapped.expert_action() if model.seed < 3 else "I do not know."

    model.seed = -1
    with served(model) as (url, asked):
        out = said(capsys, "tool_use", "--agent", url, "--model", "m", "--episodes", "4")
    assert "4 episodes" in out and "success 0.750, 95 %: 0.301 to 0.954" in out
    assert {request["model"] for request in asked} == {"m"}


def along(answered):
    """A model that plays tool_use's seeds 0, 1, ... as the expert; it answers `answered(seed, turn, action)`."""
    env, seed = gym.make(skyrl_gym.resolve_env_id("tool_use")), -1

    def model(request):
        nonlocal seed
        if (turn := len(request["messages"]) // 2 - 1) == 0:
            seed += 1
            env.reset(seed=seed)
        action = env.unwrapped.expert_action()
        env.step(action)
        return answered(seed, turn, action)

    return model


def test_calls_in_the_form_of_the_api_are_written_in_the_envs_grammar(capsys):
    """As `skyrl-trainer serve` answers, and all servers that parse a model's calls."""

    def answered(seed, turn, action):
        message = message_of(action)
        if message["content"] is None and seed % 2:  # which is as good as null
            del message["content"]
        return Raw(json.dumps({"choices": [{"message": message}]}))

    with served(along(answered)) as (url, asked):
        out = said(capsys, "tool_use", "--agent", url, "--model", "m", "--episodes", "4")
    assert "success 1.000" in out and max(len(request["messages"]) for request in asked) > 2


def test_what_was_played_before_an_endpoint_fails_is_said(capsys):
    answers = iter([(200, "\\boxed{1}")] * 3)
    with served(lambda _: next(answers, no(429, "too many"))) as (url, _):
        assert main(["baseline", "text_math", "--agent", f"{url}/", "--model", "m"]) == 2
    out, err = capsys.readouterr()
    assert "3 episodes" in out
    told = '{"error": {"message": "too many"}}'
    what = f"gave no answer of OpenAI's API (HTTPError: HTTP Error 429: Too Many Requests: {told})"
    assert err == f"{url}/chat/completions {what}\n"


def test_an_episode_that_an_endpoint_refuses_on_the_way_has_failed_and_the_others_go_on(capsys):
    """Say, for a context that is full."""

    def answered(seed, turn, action):
        return no(400, "too long") if (seed, turn) == (1, 1) else (200, action)

    with served(along(answered)) as (url, _):
        assert main(["baseline", "tool_use", "--agent", url, "--model", "m", "--episodes", "4"]) == 0
    out, err = capsys.readouterr()
    assert "4 episodes" in out and "success 0.750" in out
    assert err.count("\n") == 1 and err.startswith("Seed 1, after 1 steps: ") and "too long" in err


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["text_math", "--agent", "rnd"], "--agent is 'rnd', expected random, first, expert, or an endpoint's address"),
        (["text_math", "--agent", "http://127.0.0.1:9"], "An endpoint and a model go together"),
        (["text_math", "--model", "m"], "An endpoint and a model go together"),
        (
            ["text_math", "--agent", "http://127.0.0.1:9", "--model", "m"],
            r"no answer of OpenAI's API \(URLError: .*refused",
        ),
        (["text_math", "--agent", "http://a b", "--model", "m"], "http://a b/chat/completions gave no answer"),
        (["kuhn_poker", "--option", "opponent=http://a:b/v1"], "opponent http://a:b/v1: .*InvalidURL.*serve a policy"),
        (["text_math", "--episodes", "1"], "--episodes is 1, expected 2 or more"),
        (["text_math", "--difficulty", "99"], "valid values are 1, 2"),
        (["text_maths"], "no environment 'text_maths'. Did you mean text_math"),
        (["gsm8k", "--agent", "first"], "plays rows of a dataset"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    assert main(["baseline", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(sentence, err), err


def test_an_environment_without_an_expert_is_named(capsys, monkeypatch):
    class Silent(gym.Env):
        action_space = observation_space = gym.spaces.Text(9)

        def reset(self, *, seed=None, options=None):
            return "", {}

        def step(self, action):
            return "", 0.0, True, False, {}

    gym.register("Silent-v0", Silent, disable_env_checker=True)
    try:
        for agent in ("expert", "first", "random"):
            assert main(["baseline", "Silent-v0", "--agent", agent]) == 2
            assert capsys.readouterr().err.startswith("Silent-v0 has no expert")
        env = gym.make("Silent-v0")
        assert list(episodes(env, lambda *_: "x", range(2))) == [(False, 0.0, 1)] * 2
    finally:
        del gym.registry["Silent-v0"]


def test_in_self_play_each_role_is_asked_without_the_others_card(capsys):
    def model(request):
        talk = request["messages"]
        assert [each["role"] for each in talk].count("system") == 1
        cards = {word for each in talk for word in re.findall(r"card: ([JQK])", each["content"])}
        assert len(cards) == 1, talk
        return 200, "check"

    with served(model) as (url, asked):
        said(capsys, "kuhn_poker", "--agent", url, "--model", "m", "--episodes", "6", "--option", "opponent=self")
    assert len(asked) >= 12


@pytest.mark.parametrize("command", [[], *([each] for each in ("play", "demos", "serve", "baseline"))])
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["play", "text_math", "--option", "x=[1"], "'x=[1' has no value of YAML: put it in quotes"),
        (["play", "text_math", "--seed", "-1"], "seed"),
    ],
)
def test_a_wrong_word_is_no_traceback(capsys, words, sentence):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and sentence.lower() in capsys.readouterr().err.lower()


def test_this_machines_own_endpoint_is_asked_past_a_proxy(capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "mine.example")
    monkeypatch.delenv("no_proxy", raising=False)
    with served(lambda _: (200, "\\boxed{1}")) as (url, _):
        assert "2 episodes" in said(capsys, "text_math", "--agent", url, "--model", "m", "--episodes", "2")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "mine.example,127.0.0.1,localhost"
