"""Environments written for SkyRL: tool groups, metrics, closing, and SkyRL's names over Gymnasium's registry."""

import contextlib
import dataclasses
import re
import sqlite3
from typing import ClassVar

import gymnasium as gym
import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.tools.core import ToolGroup, tool
from skyrl_gym.tools.search import Corpus


class Articles(ToolGroup):
    """A search tool in the manner of SkyRL's, over articles here instead of a server's."""

    def __init__(self, topk):
        self.topk = topk
        self.corpus = Corpus([("Rome", "The capital of Italy."), ("Paris", "The capital of France.")])
        super().__init__(name="Articles")

    @tool
    def search(self, query):
        return self.corpus.search(query.strip(), self.topk)

    def not_a_tool(self):
        raise AssertionError


@dataclasses.dataclass
class SearchConfig:
    topk: int = 1


class SearchEnv(BaseTextEnv):
    """Written as SkyRL's own search environment is: a group, a parser, `_execute_tool` that wraps what comes back."""

    closed: ClassVar[list[int]] = []

    def __init__(self, env_config, extras={}):  # noqa: B006 (SkyRL's signature)
        super().__init__()
        self.ground_truth, self.max_turns = extras["reward_spec"]["ground_truth"], extras.get("max_turns", 2)
        self.tool_group = Articles(topk=env_config.topk)
        self.init_tool_groups([self.tool_group])
        self.chat_history: ConversationType = []

    def _execute_tool(self, tool_group_name, tool_name, tool_input):
        return f"<information>{super()._execute_tool(tool_group_name, tool_name, tool_input)}</information>"

    def step(self, action):
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or "<answer>" in action:
            reward = float(f"<answer>{self.ground_truth}</answer>" in action)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        query = re.search(r"<search>(.*?)</search>", action, re.DOTALL)
        text = self._execute_tool("Articles", "search", [query.group(1)]) if query else "Search first."
        shown = {"role": "user", "content": text}
        cut = action[: query.end()] if query else None
        return BaseTextEnvStepOutput(observations=[shown], reward=0, done=False, postprocessed_action=cut)

    def get_metrics(self):
        return {"searches": self.turns - 1, "found": bool(self.turns), "last": self.chat_history[-1]["content"]}

    def close(self):
        self.closed.append(self.turns)


class Database(ToolGroup):
    def __init__(self, path):
        self.path = path
        super().__init__("Database")

    @tool
    def sql(self, statement, turns_left):
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            rows = connection.execute(statement).fetchall()
        return f"{rows}, {turns_left} turns left"


class SQLEnv(BaseTextEnv):
    """Written as SkyRL's own: the tool's name is looked up, its arguments are a tuple, a failure is an observation."""

    def __init__(self, env_config, extras={}):  # noqa: B006
        super().__init__()
        self.gold, self.max_turns = extras["reward_spec"]["ground_truth"], 3
        self.database = Database(env_config["db_path"])
        self.init_tool_groups([self.database])

    def step(self, action):
        self.turns += 1
        group, name = self.database.get_name(), self.database.get_tool_names()[0]
        assert self.tool_to_toolgroup == {name: group}
        if "<solution>" in action:
            statement = action.removeprefix("<solution>").removesuffix("</solution>")
            rows = [self._execute_tool(group, name, (text, 0)) for text in (statement, self.gold)]
            return BaseTextEnvStepOutput(observations=[], reward=float(rows[0] == rows[1]), done=True, metadata={})
        try:
            observation = self._execute_tool(group, name, (action, self.max_turns - self.turns))
        except Exception as error:
            observation = str(error)
        metadata = {"tool_group": group, "tool_name": name}
        observations = [{"role": "user", "content": observation}]
        return BaseTextEnvStepOutput(observations=observations, reward=0, done=False, metadata=metadata)


@pytest.fixture
def search():
    skyrl_gym.register("search", entry_point=SearchEnv, kwargs={"env_config": SearchConfig()})
    SearchEnv.closed.clear()
    yield "search"
    del gym.registry["search"]


QUESTION = {"prompt": "Capital of Italy?", "ground_truth": "Rome", "env_class": "search"}
CALL = "<search>Italy</search> and then"


def test_a_search_environment_written_for_skyrl(search):
    env = gym.make(search, extras={"max_turns": 5})
    assert env.reset(options={"task": QUESTION})[0] == "Capital of Italy?"
    observation, reward, terminated, _, info = env.step(CALL)
    assert (reward, terminated) == (0.0, False)
    assert observation == "<information>Rome: The capital of Italy.</information>"
    assert info["postprocessed_action"] == "<search>Italy</search>" and info["metadata"] == {}
    assert info["metrics"] == {"searches": 0, "found": True, "last": CALL}
    assert env.step("Rome?")[0] == "Search first."
    _, reward, terminated, _, info = env.step("<answer>Rome</answer>")
    assert (reward, terminated, info["success"], info["metrics"]["searches"]) == (1.0, True, True, 2)
    assert "postprocessed_action" not in info


def test_what_its_tools_said_is_recorded_and_a_replay_does_not_ask_again(search, monkeypatch):
    monkeypatch.setattr(SearchEnv, "metadata", {"waits": True}, raising=False)
    env = gym.make(search, extras={"max_turns": 5})
    env.reset(options={"task": QUESTION})
    asked = [env.step(f"<search>{word}</search>") for word in ("Italy", "France")]
    calls = [info["tool_calls"] for *_, info in asked]
    assert calls[0] == [{"tool": "Articles.search", "args": ["Italy"], "result": "Rome: The capital of Italy."}]
    assert env.step("Rome?")[4]["tool_calls"] == []
    monkeypatch.setattr(Corpus, "search", lambda *_: "The server says something else today.")
    env.reset(options={"task": QUESTION})
    for (observation, *_), recorded in zip(asked, calls, strict=True):
        env.unwrapped.feed_external(recorded)
        assert env.step(f"<search>{recorded[0]['args'][0]}</search>")[0] == observation
    assert "today" in env.step("<search>Italy</search>")[0]  # the record is of one step
    env.unwrapped.feed_external(calls[0])
    assert "today" in env.step("<search>Spain</search>")[0]  # and answers its own calls alone


def test_tools_of_a_class_that_does_not_wait_are_called_in_a_replay_for_they_may_keep_a_state():
    class Cart(ToolGroup):
        def __init__(self):
            self.things = []
            super().__init__("Cart")

        @tool
        def add(self, thing):
            self.things.append(thing)
            return self.things

    class Shop(BaseTextEnv):
        def __init__(self, env_config=None, extras=None):
            super().__init__()
            self.cart = Cart()
            self.init_tool_groups([self.cart])

        def step(self, action):
            said = self._execute_tool("Cart", "add", iter([action]))
            text = f"{len(said)} things, {len(self.cart.things)} in the cart"
            said.append("changed by the environment")
            said.pop()
            return BaseTextEnvStepOutput(observations=[{"role": "user", "content": text}], reward=0.0, done=False)

    skyrl_gym.register("shop", Shop)
    env = gym.make("shop")
    for _ in range(2):
        env.reset(options={"task": QUESTION})
        for number, thing in enumerate(("tea", "cup", "milk"), 1):
            env.unwrapped.feed_external([{"tool": "Cart.add", "args": [thing], "result": ["something", "else"]}])
            text, *_, info = env.step(thing)
            assert text == f"{number} things, {number} in the cart"
            assert info["tool_calls"][0]["args"] == [thing] and len(info["tool_calls"][0]["result"]) == number
    del gym.registry["shop"]


def test_a_record_is_of_what_the_tool_returned_and_not_of_what_the_environment_made_of_it(monkeypatch):
    class Words(ToolGroup):
        @tool
        def get(self):
            return ["a", "b"]

    class Changing(BaseTextEnv):
        metadata: ClassVar[dict] = {"waits": True}

        def __init__(self, env_config=None, extras=None):
            super().__init__()
            self.init_tool_groups([Words("Words")])

        def step(self, action):
            said = self._execute_tool("Words", "get", [])
            text = ", ".join(said)
            said.append("seen")
            return BaseTextEnvStepOutput(observations=[{"role": "user", "content": text}], reward=0.0, done=False)

    skyrl_gym.register("changing", Changing)
    env = gym.make("changing")
    env.reset(options={"task": QUESTION})
    calls = env.step("x")[4]["tool_calls"]
    env.reset(options={"task": QUESTION})
    env.unwrapped.feed_external(calls)
    assert env.step("x")[0] == "a, b"
    assert calls == [{"tool": "Words.get", "args": [], "result": ["a", "b"]}]
    del gym.registry["changing"]


def test_what_a_tool_returns_is_not_recorded_where_json_would_change_it():
    class Things(ToolGroup):
        @tool
        def get(self, what):
            return {"rows": [(1, "a")], "object": object(), "number": float("nan"), "text": "a"}[what]

    class Bare(BaseTextEnv):
        def __init__(self, env_config=None, extras=None):  # without the constructor that it extends
            self.init_tool_groups([Things("Things")])

        def step(self, action):
            said = [{"role": "user", "content": repr(self._execute_tool("Things", "get", [action]))}]
            return BaseTextEnvStepOutput(observations=said, reward=0.0, done=False)

    skyrl_gym.register("things", Bare)
    env = gym.make("things")
    env.reset(options={"task": QUESTION})
    kept = [env.step(what)[4]["tool_calls"] for what in ("rows", "object", "number", "text")]
    assert kept == [[], [], [], [{"tool": "Things.get", "args": ["text"], "result": "a"}]]
    assert Bare()._execute_tool("Things", "get", ["text"]) == "a"
    del gym.registry["things"]


def test_an_sql_environment_written_for_skyrl(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "towns.sqlite")) as connection:
        connection.executescript("create table town (name text); insert into town values ('Rome'), ('Paris')")
    skyrl_gym.register("text2sql", f"{__name__}:SQLEnv")
    env = gym.make("text2sql", env_config={"db_path": tmp_path / "towns.sqlite"})
    env.reset(options={"task": {"prompt": "How many towns?", "ground_truth": "select count(*) from town"}})
    assert env.step("select count(*) from town")[0] == "[(2,)], 2 turns left"
    assert env.step("select * from river")[0] == "no such table: river"
    assert env.step("<solution>select 1 + 1</solution>")[1:3] == (1.0, True)
    del gym.registry["text2sql"]


def test_a_tool_group_names_what_it_has_not():
    group = Articles(1)
    assert (group.name, group.get_tool_names()) == ("Articles", ["search"])
    assert group.get_tool_to_group_mapping() == {"search": "Articles"}
    assert group.get_tool("search")("Italy") == group.execute_tool("search", query="Italy")
    assert group.get_tool("not_a_tool") is None
    with pytest.raises(ValueError, match="'Articles' has no tool 'not_a_tool', only search"):
        group.execute_tool("not_a_tool")
    env = BaseTextEnv()
    with pytest.raises(ValueError, match="no tool group 'Articles', only none"):
        env._execute_tool("Articles", "search", ["Italy"])


def test_a_class_may_be_registered_with_what_every_episode_gets_beside_its_row():
    """As `max_turns`, which SkyRL's trainer puts there."""

    class Turns(BaseTextEnv):
        def __init__(self, env_config=None, extras=None):
            super().__init__()
            self.max_turns = extras.get("max_turns", 2)

        def step(self, action):
            self.turns += 1
            said = [{"role": "system", "content": f"turn {self.turns}"}, {"role": "tool", "content": None}]
            over = self.turns == self.max_turns
            return BaseTextEnvStepOutput(observations=said, reward=0.0, done=over, metadata={})

    try:
        for name, kwargs, turns in (("two", {}, 2), ("five", {"extras": {"max_turns": 5}}, 5)):
            skyrl_gym.register(name, entry_point=Turns, kwargs=kwargs)
            env, over, count = gym.make(name), False, 0
            env.reset(options={"task": {**QUESTION, "env_class": name}})
            while not over:
                text, _, over, *_ = env.step("x")
                count += 1
                assert text == f"system: turn {count}\n\ntool: "  # a rule of the game is heard when it is made
            assert count == turns
    finally:
        for name in ("two", "five"):
            gym.registry.pop(name, None)


def test_every_episode_is_closed_once_however_it_goes_on(search):
    env = gym.make(search, max_episode_steps=2, extras={"max_turns": 3})
    for actions in ([CALL], [CALL, CALL], ["<answer>"], []):  # abandoned, truncated, ended, abandoned at once
        env.reset(options={"task": QUESTION})
        for action in actions:
            env.step(action)
    assert SearchEnv.closed == [1, 2, 1]
    env.reset(options={"task": QUESTION})
    env.step(CALL)
    *_, truncated, info = env.step(CALL)
    assert truncated and info["metrics"]["searches"] == 1  # the episode's, though nobody tells it that it is over
    env.close()
    env.close()
    assert SearchEnv.closed == [1, 2, 1, 0, 2]


def test_rows_as_an_argument_and_prompts_of_several_roles(search):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of Italy?"}]
    shown = [{"role": "assistant", "content": "Rome"}, {"role": "user", "content": "And of France?"}]
    env = gym.make(search, rows=[QUESTION | {"prompt": chat + shown}])
    observation, info = env.reset(seed=0)
    assert observation == "user: Capital of Italy?\n\nassistant: Rome\n\nuser: And of France?"
    assert info["instructions"] == "Be brief."
    envs = skyrl_gym.make_vec(search, 2, rows=[QUESTION], autoreset_mode="SameStep")
    assert list(envs.reset(seed=0)[0]) == list(envs.step(("<answer>", "<answer>"))[0]) == ["Capital of Italy?"] * 2


class Waiting(BaseTextEnv):
    """Asks another machine, and says where an answer ends."""

    metadata: ClassVar = {"waits": True}

    def init(self, prompt):
        return prompt, {"stop": ["</search>"]}

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})


def test_a_class_says_that_it_waits_and_where_an_answer_ends():
    for number, entry_point in enumerate((Waiting, f"{__name__}:Waiting")):
        skyrl_gym.register(id=f"waiting-{number}", entry_point=entry_point)
        env = gym.make(f"waiting-{number}")
        assert env.metadata["waits"] and "render_modes" in env.metadata
        _, info = env.reset(options={"task": {"prompt": "?", "ground_truth": "1"}})
        assert info["stop"] == ["</search>"]
        del gym.registry[f"waiting-{number}"]
    assert "waits" not in skyrl_gym.core.TextEnv.metadata


def test_skyrls_registry_is_gymnasiums(search, capsys):
    assert skyrl_gym.spec(search) is gym.spec(search) and skyrl_gym.spec("text_math") is gym.spec("skyrl/text_math-v0")
    assert skyrl_gym.spec("skyrl_gym:skyrl/text_math-v0").id == "skyrl/text_math-v0"
    with pytest.raises(ValueError, match=r"no environment 'serch'. Did you mean search"):
        skyrl_gym.spec("serch")
    skyrl_gym.pprint_registry()
    assert {"search", "skyrl/text_math-v0"} <= set(capsys.readouterr().out.split())
    extras = {"reward_spec": {"ground_truth": "Rome"}}
    with skyrl_gym.make(search, extras=extras) as env:
        assert isinstance(env, skyrl_gym.Env) and env.tool_group.topk == 1
    assert SearchEnv.closed == [0]
    assert skyrl_gym.make(skyrl_gym.spec(search), env_config=SearchConfig(topk=2), extras=extras).tool_group.topk == 2
    skyrl_gym.register("mine", gym.spec("skyrl/text_math-v0").entry_point)
    with pytest.raises(TypeError, match=r"BaseTextEnv classes; skyrl_gym.envs.text_math.env:TextMathEnv made a TextMa"):
        skyrl_gym.make("mine")
    del gym.registry["mine"]
