"""tool_use: its world agrees with itself, its expert solves every task, its answers do not leak."""

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import types

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import skyrl_gym
from skyrl_gym.envs.tool_use import tasks
from skyrl_gym.envs.tool_use.env import last_answer

ID, LANGS = "skyrl/tool_use-v0", ("en", "zh")
SAMPLE = 1000 if os.environ.get("SKYRL_TEST_FULL") == "1" else 40
LEVELS = [(d, lang, split) for d in range(1, 7) for lang in LANGS for split in ("train", "val", "test")]


def run_here(code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return types.SimpleNamespace(output=printed.getvalue(), error=None)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """A sandbox that runs the expert's programs here; where `answers` is not there yet, a simple comparison."""
    sandbox = types.SimpleNamespace(shared_sandbox=lambda: types.SimpleNamespace(run=run_here))
    monkeypatch.setitem(sys.modules, "skyrl_gym.tools.python_exec", sandbox)
    if importlib.util.find_spec("skyrl_gym.answers") is None:
        plain = types.SimpleNamespace(same=lambda given, truth: given.casefold() == truth.casefold())
        monkeypatch.setitem(sys.modules, "skyrl_gym.answers", plain)


def facts_in_articles(lang):
    """{title: {fact: value}} as the sentences say, each article read by its kind's templates alone."""
    number, found = LANGS.index(lang), {}
    kinds, articles = tasks.data()["kinds"], dict(tasks.corpus(lang).articles)
    for entity in tasks.world():
        title, facts = entity.names[number], {}
        for name, rule in kinds[entity.kind]["fields"].items():
            pattern = re.escape(rule["says"][number].replace("{name}", title)).replace(r"\{value\}", "([^.。“”]+?)")
            values = re.findall(rf"(?:^|[.。] ?){pattern}", articles[title])
            assert len(values) == 1, (title, name, values)
            facts[name] = values[0]
        found[title] = facts
    return found


@pytest.mark.parametrize("lang", LANGS)
class TestWorld:
    def test_articles_agree(self, lang):
        number, facts, articles = LANGS.index(lang), facts_in_articles(lang), dict(tasks.corpus(lang).articles)
        assert len(articles) == len(tasks.world()) >= 500
        nicknames = [known["nick"] for known in facts.values() if "nick" in known]
        assert len(set(nicknames)) == len(nicknames) and not set(nicknames) & set(articles)
        sentences = 0
        for entity in tasks.world():
            for name, value in entity.facts.items():
                told, back = (
                    facts[entity.names[number]][name],
                    tasks.data()["kinds"][entity.kind]["fields"][name].get("back"),
                )
                assert told == tasks._shown(value, number)
                sentences += 1 + bool(back)
                assert not back or back[number].format(value=entity.names[number]) in articles[told]
        assert sentences == sum(len(text) for entity in tasks.world() for text in [entity.says[number]])
        for country in (entity for entity in tasks.world() if entity.kind == "country"):
            assert country.facts["capital"].facts["country"] is country

    @pytest.mark.parametrize("difficulty", [2, 3, 4, 6])
    def test_chains_have_one_answer_in_the_articles(self, lang, difficulty):
        number, facts, seen = LANGS.index(lang), facts_in_articles(lang), set()
        for chain in (chain for split in tasks.chains(difficulty).values() for chain in split):
            phrase, plan, value = tasks.walk(chain, number)
            title = chain[0].names[number]
            for name in chain[1]:
                title = facts[title][name]
            assert title == tasks._shown(value, number) and title not in phrase and phrase not in seen
            seen.add(phrase)
            if chain[2]:  # the search finds the article, first of all
                assert tasks.corpus(lang).search(plan[0][0][1]["query"]).startswith(chain[0].names[number])


@pytest.mark.parametrize(("difficulty", "lang", "split"), LEVELS)
def test_expert_solves_and_nothing_leaks(difficulty, lang, split):
    env = gym.make(ID, difficulty=difficulty, lang=lang, split=split)
    used = set()
    for seed in range(SAMPLE):
        observation, info = env.reset(seed=seed)
        truth, total, done = env.unwrapped.task.ground_truth, 0.0, False
        assert truth not in observation and truth not in info["instructions"] and truth not in str(info["task_id"])
        while not done:
            observation, reward, done, truncated, info = env.step(env.unwrapped.expert_action())
            assert not truncated and info["valid_action"] and reward == sum(info["reward_parts"].values())
            used |= {call["tool"] for call in info["tool_calls"]}
            total += reward
        assert info["success"] and total == pytest.approx(1.1)
    python, found = {"python_exec"}, {"wiki"}
    expected = {1: {"calculator"}, 2: found, 3: {"search"} | found, 4: {"calculator"} | found, 5: python}
    assert used == expected.get(difficulty, {"search", "calculator"} | found | python)


def test_tasks_differ_and_splits_share_none():
    env = gym.make(ID).unwrapped
    for difficulty in range(1, 7):
        texts = []
        for split in ("train", "val", "test"):
            options = env.defaults | {"difficulty": difficulty, "split": split}
            texts += [env.make_task(options, index).text for index in range(min(env.count_tasks(options), 5 * SAMPLE))]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("lang", LANGS)
def test_env(lang):
    check_env(gym.make(ID, difficulty=3, lang=lang).unwrapped, skip_render_check=True)
    env = gym.make(ID, difficulty=3, lang=lang)
    _, info = env.reset(seed=1)
    assert [tool["function"]["name"] for tool in info["tools"]] == ["calculator", "search", "wiki", "python_exec"]
    observation, reward, done, _, info = env.step("hm")
    assert "<tool_call>" in observation and not info["valid_action"] and (reward, done) == (0.0, False)
    calls = [
        {"tool": "calculator", "args": {"expression": "1/0"}},
        {"tool": "wiki", "args": {"name": "x"}},
        {"tool": "wikki"},
    ]
    observation, _, done, _, info = env.step("".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls))
    assert observation.count("<tool_response>\nError: ") == 3 and not done and not info["valid_action"]
    assert [call["args"] for call in info["tool_calls"]] == [{"expression": "1/0"}, None, None]
    state = json.loads(json.dumps(env.unwrapped.get_state()))
    other = gym.make(ID).unwrapped
    other.set_state(state)
    action = env.unwrapped.expert_action()
    assert env.step(action)[:2] == other.step(action)[:2]
    assert other.expert_action() == env.unwrapped.expert_action() != action
    _, reward, done, _, info = env.step(f"{action}<answer>wrong</answer>")
    assert done and info["tool_calls"] == [] and info["reward_parts"] == {"answer": 0.0, "tool_calls": 0.1 * 2 / 4}


def test_last_answer():
    for text, answer in [
        ("<answer> 5\n</answer>", "5"),
        ("<answer>1</answer> <answer>2</answer><answer>3", "2"),
        ("<tool_call></tool_call><answer>1</answer>", "1"),
        ("<answer>1</answer><tool_call></tool_call>", None),
        ("</answer><answer>", None),
    ]:
        assert last_answer(text) == answer


def shout(word: str) -> str:
    """Shouts."""
    return word.upper()


def test_own_tools_corpus_and_rows(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"title": "Zog", "text": "Zog is 7 years old."}')
    env = gym.make(ID, tools=["wiki", shout], corpus=str(path))
    for difficulty, name in ((1, "calculator"), (2, "wiki")):
        with pytest.raises(ValueError, match=f"needs the tool '{name}' over the built-in corpus"):
            env.reset(options={"difficulty": difficulty})
    row = {"prompt": [{"role": "user", "content": "How old is Zog?"}], "reward_spec": {"ground_truth": 7}}
    assert env.reset(options={"task": row})[0] == "How old is Zog?"
    calls = ({"tool": "wiki", "args": {"title": "zog"}}, {"tool": "shout", "args": {"word": "hi"}})
    observation = env.step("".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls))[0]
    assert "Zog is 7 years old." in observation and "\nHI\n" in observation
    assert env.step(env.unwrapped.expert_action())[1] == pytest.approx(1.1)
    with pytest.raises(ValueError, match="no built-in tool 'wikki'; valid ones are calculator"):
        gym.make(ID, tools=["wikki"])
    with pytest.raises(ValueError, match=r"own.jsonl:1: field 'text'"):
        path.write_text('{"title": "Zog"}')
        gym.make(ID, corpus=str(path))
    assert skyrl_gym.expert_trajectory(ID, 3, {"difficulty": 2})[-1]["role"] == "assistant"
