"""Our environments as TRL's: the tools of each, the expert through them, and TRL's own trainer; and TRL's as ours."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import pickle
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import gymnasium as gym
import pytest
from transformers.utils import get_json_schema

import skyrl_gym
from skyrl_gym import resolve_env_id
from skyrl_gym.adapters.trl import environment_factory
from skyrl_gym.adapters.trl_env import TRLEnv, methods
from skyrl_gym.parsing import ToolCall, parse_tool_calls
from tests.gym.test_all_envs import GUESS, IDS, PROMPT, ROWS

TOOLS = {
    "skyrl/text_math-v0": {"answer"},
    "skyrl/gsm8k-v0": {"answer"},
    PROMPT: {"act"},
    "skyrl/alfworld_lite-v0": {
        *("go_to", "open", "close", "take", "put", "heat", "cool", "clean"),
        *("use", "examine", "inventory", "look"),
    },
    "skyrl/webshop_lite-v0": {"search", "click"},
    "skyrl/tool_use-v0": {"calculator", "search", "wiki", "python_exec", "answer"},
    "skyrl/code_lite-v0": {"submit"},
    "skyrl/code_rows-v0": {"submit"},
    "skyrl/sql_lite-v0": {"sql", "answer"},
    "skyrl/nim-v0": {"act"},
    "skyrl/kuhn_poker-v0": {"act"},
    GUESS: {"act"},
}
ACTIONS = [
    (r"go to (.+)", "go_to", ("receptacle",)),
    (r"(open|close) (.+)", None, ("receptacle",)),
    (r"take (.+) from (.+)", "take", ("object", "receptacle")),
    (r"move (.+) to (.+)", "put", ("object", "receptacle")),
    (r"(heat|cool|clean) (.+) with (.+)", None, ("object", "receptacle")),
    (r"use (.+)", "use", ("lamp",)),
    (r"examine (.+)", "examine", ("thing",)),
    (r"search\[(.+)\]", "search", ("keywords",)),
    (r"click\[(.+)\]", "click", ("text",)),
    (r"```python\n(.+)\n```", "submit", ("code",)),
    (r"\\boxed\{(.+)\}", "answer", ("answer",)),
    (r"([A-E] \d|[JQK] (?:check|bet|call|fold))", "act", ("action",)),
]
"""What experts write, and the call that stands for it; without a name the first word is it."""


def calls(env_id: str, action: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tool calls that do what the expert's action does."""
    for call in parse_tool_calls(action):
        assert isinstance(call, ToolCall)
        yield call.tool, call.args
    tags = re.findall(r"<(sql|answer)>(.+?)</\1>", action, re.DOTALL)
    for tag, text in tags:
        yield tag, {"query" if "sql" in env_id else "answer": text}
    for pattern, name, arguments in () if tags else ACTIONS:
        if "<tool_call>" not in action and (found := re.fullmatch(pattern, action, re.DOTALL)):
            values = list(found.groups())
            yield name or values.pop(0), dict(zip(arguments, values, strict=True))
            return


def named(env_id: str, seed: int) -> dict[str, Any]:
    """A dataset row for an episode."""
    if env_id in ROWS:
        rows: Any = ROWS
        task = rows[env_id]["task"]
        return {
            "reward_spec": {},
            **task,
            "prompt": task.get("prompt", [{"role": "user", "content": task.get("text")}]),
        }
    return {"prompt": [], "seed": seed}


@pytest.mark.parametrize("env_id", IDS)
def test_every_tool_has_the_schema_that_trl_asks_for(env_id: str) -> None:
    environment: Any = environment_factory(env_id)()
    schemas = {tool.__name__: get_json_schema(tool)["function"] for tool in methods(environment)}
    assert schemas.keys() == TOOLS[env_id]
    for schema in schemas.values():
        properties = schema["parameters"]["properties"]
        assert schema["description"] and all(each["description"] for each in properties.values())
        optional = properties.keys() - set(schema["parameters"].get("required", ()))
        assert optional == ({"k"} if schema["name"] == "search" and "tool_use" in env_id else set())


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in (GUESS, PROMPT)])
def test_the_expert_solves_tasks_through_the_tools(env_id: str) -> None:
    environment: Any = environment_factory(env_id)()
    best = 0.999 if "alfworld" in env_id or "webshop" in env_id else 1.1
    best = 1.0 if "nim" in env_id else best
    for seed in range(1 if env_id in ROWS else 3):
        environment.reset(**named(env_id, seed))
        while not environment.done:
            for name, arguments in calls(env_id, environment.env.unwrapped.expert_action()):
                assert getattr(environment, name)(**arguments)
        env = environment.env.unwrapped
        if "kuhn" in env_id:  # the cards decide who wins
            assert env.game.well_played(env.role) and environment.get_reward() == env.game.payoffs()[env.role]
        else:
            assert environment.get_reward() >= best
        with pytest.raises(ValueError, match="episode is over"):
            getattr(environment, name)(**arguments)


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ROWS])
def test_a_row_that_says_nothing_gets_a_task_of_its_split(env_id: str) -> None:
    """The tries of a row, each an instance's, meet one task; the next time it is another."""
    kind: Any = environment_factory(env_id)
    one, other = kind(), kind()
    first, second = ([each.reset(prompt=[]) for each in (one, other)] for _ in range(2))  # as TRL: once a batch
    assert first[0] == first[1] != second[0] == second[1]
    assert one.reset(prompt=[], split="val") and one.env.unwrapped.task.split == "val"


def test_tries_meet_one_task_after_a_batch_that_was_smaller_than_the_pool() -> None:
    """Of the pool TRL resets the first so many, as in an evaluation between two steps."""
    kind: Any = environment_factory("text_math")
    pool = [kind() for _ in range(4)]
    batches = [{each.reset(prompt=[]) for each in pool[:size]} for size in (4, 2, 4)]
    assert [len(batch) for batch in batches] == [1, 1, 1] and len(set.union(*batches)) == 3


def test_rows_name_their_task() -> None:
    environment: Any = environment_factory(GUESS)()
    assert environment.reset(prompt=[], seed=3, lang="zh", split=None).startswith("请只用数字回答一个整数。\n\n")
    with pytest.raises(ValueError, match="episode is over"):
        environment_factory(GUESS)()._act("1")
    with pytest.raises(ValueError, match="There is no task"):
        environment.reset(task_id="val:1:en:99999999")
    environment = environment_factory("gsm8k")()
    assert environment.reset(**named("skyrl/gsm8k-v0", 0)) is None  # the prompt holds everything
    assert environment.answer("4800") == "The episode is over." and environment.get_reward() == 1.1


def test_rows_of_environments_without_tasks_of_their_own_are_the_tasks(tmp_path: Path) -> None:
    """MBPP's have a `task_id`, which is not one of ours; Spider's name a database."""
    environment: Any = environment_factory("code_rows")()
    mbpp = {"task_id": 601, "text": "Double a number.", "code": "def f(x):\n    return 2 * x"}
    assert environment.reset(prompt="Double.", **mbpp, test_list=["assert f(2) == 4"], test_setup_code="") is None
    environment.submit("```python\ndef f(x):\n    return 2 * x\n```")
    assert environment.get_reward() >= 1
    prompts: Any = environment_factory("prompt")()
    assert prompts.reset(prompt=[{"role": "user", "content": "Write."}], level=2) is None
    (tmp_path / "pets").mkdir()
    with sqlite3.connect(tmp_path / "pets" / "pets.sqlite") as database:
        database.execute("create table pets (name text)")
        database.execute("insert into pets values ('Rex')")
    spider: Any = environment_factory("sql_lite", databases=str(tmp_path))()
    row = {"db_id": "pets", "question": "Which pets are there?", "query": "select name from pets"}
    assert spider.reset(**row) is None
    assert spider.env.unwrapped.task.data["db_id"] == "pets"


@pytest.mark.parametrize("row", [{"ground_truth": "4"}, {"reward_model": {"ground_truth": "4"}}])
def test_a_row_with_a_truth_is_its_own_task_in_whichever_form(row: dict[str, Any]) -> None:
    """Else the environment would ask, and pay for, a task of its own."""
    environment: Any = environment_factory("text_math")()
    assert environment.reset(prompt=[{"role": "user", "content": "2 + 2 = ?"}], **row) is None
    environment.answer("4")
    assert environment.get_reward() == 1.1
    assert environment.reset(prompt=[{"role": "user", "content": "?"}], seed=3, **row), "a seed names a task of ours"


def test_tool_use_may_have_tools_of_your_own() -> None:
    def add(x: int, y: int = 1) -> int:
        """Adds two numbers."""
        return x + y

    environment: Any = environment_factory("tool_use", tools=["calculator", add])()
    assert {tool.__name__ for tool in methods(environment)} == {"calculator", "add", "answer"}
    properties = get_json_schema(environment.add)["function"]["parameters"]["properties"]
    assert {name: each["type"] for name, each in properties.items()} == {"x": "integer", "y": "integer"}
    environment.reset(prompt=[])
    assert (environment.add(2, 3), environment.add(x=2), environment.calculator("2 * 3")) == ("5", "3", "6")
    assert "argument 'x' must be" in environment.add("two") and inspect.signature(environment.add).parameters["y"]


def test_hints_say_what_a_tools_schema_says_and_the_order_is_pythons(tmp_path: Path) -> None:
    def pick(way: Literal["up", "down"], steps: list[int], limit: int | None = None) -> str:
        """Picks."""
        return f"{way} {steps} {limit}"

    environment: Any = environment_factory("tool_use", tools=["calculator", pick])()
    parameters = get_json_schema(environment.pick)["function"]["parameters"]
    told = {name: {**each, "description": None} for name, each in parameters["properties"].items()}
    assert told["way"] == {"type": "string", "enum": ["up", "down"], "description": None}
    assert told["steps"] == {"type": "array", "items": {"type": "integer"}, "description": None}
    assert told["limit"] == {"type": "integer", "nullable": True, "description": None}
    environment.reset(prompt=[])
    assert environment.pick("up", [1, 2]) == "up [1, 2] None"
    # A list of an MCP server's tools, which is read without the server: no `required`, and the optional one first.
    schemas = [
        {"properties": {"k": {"type": "integer"}, "query": {"type": "string", "description": "What\n to find."}}},
        {"properties": {}},
        {},
    ]
    schemas[0]["required"] = ["query"]
    names = ("find", "none", "bare")
    listed = [{"name": n, "description": "Does.", "inputSchema": s} for n, s in zip(names, schemas, strict=True)]
    (tmp_path / "tools.json").write_text(json.dumps(listed))
    server = {"mcp": {"command": ["no-such-program"], "tools": str(tmp_path / "tools.json")}}
    environment = environment_factory("tool_use", tools=["calculator", server])()
    assert {tool.__name__ for tool in methods(environment)} == {*names, "calculator", "answer"}
    parameters = get_json_schema(environment.find)["function"]["parameters"]
    assert [*parameters["properties"]] == ["query", "k"] and parameters["required"] == ["query"]
    assert parameters["properties"]["query"] == {"type": "string", "description": "What to find."}
    environment.reset(prompt=[])
    assert "no program 'no-such-program'" in environment.find("x")


# TRL's own trainer, on a tiny random model.


@pytest.fixture
def own_accelerate_state() -> Iterator[None]:
    """What accelerate keeps for the whole process, such as TRL's bfloat16, must not reach other tests."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def byte_tokenizer() -> Any:
    """A token per byte, and Qwen3's chat template as TRL ships it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    origin = importlib.util.find_spec("trl")
    assert origin is not None and origin.origin is not None
    tokenizer.chat_template = (Path(origin.origin).parent / "chat_templates/qwen3.jinja").read_text()
    return tokenizer


def trls_trainer(folder: Path, kind: type[Any], env_id: str, steps: int) -> Any:
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig

    tokenizer = byte_tokenizer()
    sizes = {name: 16 for name in ("hidden_size", "intermediate_size", "head_dim")}
    heads = {name: 1 for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    settings = {"report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    lengths = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 16384}
    row = named(env_id, 1)
    row["prompt"] = row["prompt"] or [{"role": "user", "content": ""}]
    return kind(
        model=Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)),
        args=GRPOConfig(str(folder), max_steps=steps, **settings, **lengths),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([row] * 2),
        environment_factory=environment_factory(env_id),
    )


def expert_trainer(env_id: str) -> type[Any]:
    """GRPOTrainer itself; only the sampled text is the expert's instead of the model's."""
    from trl import GRPOTrainer

    class ExpertTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            texts = []
            for environment in self.environments[: len(prompt_ids)]:
                action = "" if environment.done else environment.env.unwrapped.expert_action()
                made = [{"name": name, "arguments": given} for name, given in calls(env_id, action)]
                text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made) or "I am done."
                texts.append(self.processing_class(f"{text}<|im_end|>")["input_ids"])
            return texts, None

    return ExpertTrainer


OURS = [env_id for env_id in IDS if env_id != GUESS]


@pytest.mark.usefixtures("own_accelerate_state")
@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(each, marks=() if each == "skyrl/tool_use-v0" else pytest.mark.full)
        for each in OURS
        if "kuhn" not in each and each != PROMPT  # the cards decide who wins; there is no expert
    ],
)
def test_trls_trainer_plays_and_is_rewarded(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = trls_trainer(tmp_path, expert_trainer(env_id), env_id, steps=1)
    trainer.train()
    metrics = trainer.state.log_history[0]
    assert metrics[f"rewards/{type(trainer.environments[0]).__name__}/mean"] >= 0.999
    assert metrics["tools/failure_frequency"] == 0.0 and metrics["tools/call_frequency"] >= 1


@pytest.mark.full
@pytest.mark.usefixtures("own_accelerate_state")
@pytest.mark.parametrize("env_id", OURS)
def test_trls_trainer_trains_two_steps(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model says by itself, shorter; nothing is ours but the environment."""
    from trl import GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = trls_trainer(tmp_path, GRPOTrainer, env_id, steps=2)
    trainer.generation_config.max_new_tokens = trainer.max_completion_length = 16
    trainer.train()
    rewarded = f"rewards/{type(trainer.environments[0]).__name__}/mean"
    assert [rewarded in logs for logs in trainer.state.log_history] == [True, True, False]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("task", ["text_math", "tool_use"])
def test_a_policy_learns_by_the_tools_in_trls_trainer(task: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/trl_environments.py", task, "--clone", str(tmp_path / "clone")]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["before"] > 0.1 and found["after"] > found["before"] + 0.1, found


# TRL's environments here.


class Counter:
    """As TRL documents its environments."""

    def reset(self, goal: int, **columns: Any) -> str:
        self.count, self.goal = 0, goal
        return f" Count to {goal}."

    async def add(self, step: int) -> int:
        """Raises the counter.

        Args:
            step: By how much.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return self.count / self.goal

    def _hidden(self) -> None: ...


class Connected(Counter):
    """With a client that belongs to the loop of its first call."""

    async def add(self, step: int) -> int:
        """Raises the counter.

        Args:
            step: By how much.
        """
        self.loop = getattr(self, "loop", asyncio.get_running_loop())
        assert self.loop is asyncio.get_running_loop(), "Event loop is closed"
        return await super().add(step)


def double(x: int) -> int:
    """Doubles a number."""
    return 2 * x


def trl_env(folder: Path, factory: Any, *tools: Any) -> TRLEnv:
    (folder / "given.pkl").write_bytes(pickle.dumps((factory, list(tools))))
    return TRLEnv(given=str(folder / "given.pkl"))


def trl_row(**columns: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Go."}]
    return {"task": {"prompt": prompt, "columns": {"prompt": prompt, **columns}}}


def called(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def test_what_an_async_tool_has_opened_serves_its_next_call(tmp_path: Path) -> None:
    env = trl_env(tmp_path, Connected)
    env.reset(options=trl_row(goal=4))
    for count in ("1", "2"):
        assert f"\n{count}\n" in env.step(called("add", step=1))[0]


def test_an_environment_of_trls_is_played_by_its_tools(tmp_path: Path) -> None:
    env = trl_env(tmp_path, Counter, double)
    observation, info = env.reset(options=trl_row(goal=4))
    assert observation == "Go. Count to 4." and info["instructions_without_tools"] == "Be quick."
    assert [tool["function"]["name"] for tool in info["tools"]] == ["double", "add"]
    assert info["instructions"].startswith("Be quick.\n\nYou may call tools, 8")
    observation, reward, terminated, _, info = env.step(called("add", step=1) + called("double", x=4))
    assert "\n1\n" in observation and "\n8\n" in observation
    assert (reward, terminated, info["valid_action"]) == (0.25, False, True)
    state = json.loads(json.dumps(env.get_state()))
    assert env.step(called("add", step="one"))[4]["valid_action"] is False
    env.set_state(state)
    assert env.step(called("add", step=3))[1] == 0.75
    observation, reward, terminated, _, info = env.step("I am there.")
    assert (observation, reward, terminated, info["success"]) == ("", 0.0, True, True)


def test_a_row_chooses_among_several_environments(tmp_path: Path) -> None:
    env = trl_env(tmp_path, {"counter": Counter, "other": Counter})
    assert env.reset(options=trl_row(goal=2, environment="counter"))[0] == "Go. Count to 2."
    with pytest.raises(ValueError, match="environment is 'chess'; environment_factory has 'counter', 'other'"):
        env.reset(options=trl_row(goal=2, environment="chess"))


def test_a_row_alone_is_one_answer_without_a_reward(tmp_path: Path) -> None:
    env = trl_env(tmp_path, None)
    observation, info = env.reset(options=trl_row())
    assert (observation, info["instructions"], "tools" in info) == ("Go.", "Be quick.", False)
    assert env.step(called("add", step=1))[:3] == ("", 0.0, True)


PROMPTS = [
    {"prompt": "Write a sentence with two numbers.", "level": 2, "columns": ["level"]},
    {"prompt": trl_row()["task"]["prompt"], "ground_truth": "Gone.", "environment": "none", "extra_info": {"a": 1}},
]


def test_a_prompt_is_an_episode_of_one_answer_that_reward_functions_judge() -> None:
    env: Any = gym.make(resolve_env_id("prompt"))
    for row, asked, told in zip(PROMPTS, ("Write a sentence with two numbers.", "Go."), ("", "Be quick."), strict=True):
        observation, info = env.reset(options={"task": row})
        assert (observation, info["instructions"], "tools" in info) == (asked, told, False)
        assert all(env.unwrapped.task.data[name] == row[name] for name in row if name != "prompt")
        observation, reward, terminated, truncated, info = env.step(called("add", step=1) + "Gone.")
        assert (observation, reward, terminated, truncated) == ("", 0.0, True, False)
        assert (info["valid_action"], info["success"], info["reward_parts"]) == (True, False, {"environment": 0.0})
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    observation, info = env.reset(options={"task": {"prompt": talk}})
    assert (observation, info["instructions"]) == ("user: user\n\nassistant: assistant\n\nuser: user", "system")
    with pytest.raises(NotImplementedError, match=r"TRLEnv has no expert\."):
        env.unwrapped.expert_action()


def test_prompts_come_from_the_argument_rows_and_a_state_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps({'prompt': f'Say {n}.'})}\n" for n in range(3)))
    env: Any = gym.make("skyrl/prompt-v0", rows=tmp_path / "rows.jsonl").unwrapped
    asked = [env.reset(options={"task_id": str(n)})[0] for n in range(3)]
    assert asked == ["Say 0.", "Say 1.", "Say 2."] and {env.reset(seed=n)[0] for n in range(20)} == {*asked}
    (tmp_path / "others.jsonl").write_text(json.dumps({"prompt": "Sing."}))
    others = {"rows": tmp_path / "others.jsonl"}
    assert env.num_tasks(others) == 1 and env.reset(options=others)[0] == "Sing."
    assert env.num_tasks() == 3 and env.reset(seed=1)[0] in asked, "an option is of its episode alone"
    others["rows"].write_text(json.dumps({"prompt": "Dance."}))
    os.utime(others["rows"], (1, 1))
    assert env.reset(options=others)[0] == "Dance."
    twin, states = TRLEnv(given=None), [env.get_state()]
    env.step("One.")
    states.append(env.get_state())
    for state in map(json.loads, map(json.dumps, states)):
        twin.set_state(state)
        assert twin.get_state() == state and twin.task == env.task
    assert twin.actions == ["One."]
    envs = skyrl_gym.make_vec("prompt", 2, rows=tmp_path / "rows.jsonl", autoreset_mode="SameStep")
    assert {*envs.reset(seed=0)[0], *envs.step(("a", "b"))[0]} <= {*asked}
    for wrong in ("3", "val:1:en:0", "x"):
        with pytest.raises(ValueError, match=r"'<index>', for example '17'|no task '3': its index must be below 3"):
            env.reset(options={"task_id": wrong})
    with pytest.raises(ValueError, match="plays rows of a dataset"):
        gym.make("skyrl/prompt-v0").reset(seed=1)


def test_what_is_no_text_or_has_no_hints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Tool 'nothing': parameter 'x' needs a hint"):
        trl_env(tmp_path, None, nothing).reset(options=trl_row())
    with pytest.raises(ValueError, match=r"Pictures.reset returned \['a picture'\]; expected a text or None"):
        trl_env(tmp_path, Pictures).reset(options=trl_row())


def nothing(x): ...  # type: ignore[no-untyped-def]


class Pictures:
    def reset(self, **columns: Any) -> list[str]:
        return ["a picture"]


def test_an_environment_of_ours_can_be_played_as_one_of_trls(tmp_path: Path) -> None:
    """Both ways at once: as a class for TRL, and that as a TextEnv."""
    (tmp_path / "given.pkl").write_bytes(cloudpickle.dumps((environment_factory("text_math"), [])))
    env = TRLEnv(given=str(tmp_path / "given.pkl"))
    observation, _ = env.reset(options=trl_row(task_id="val:arithmetic:1:en:3"))
    question: Any = gym.make("skyrl/text_math-v0")
    assert observation.endswith(question.reset(options={"task_id": "val:arithmetic:1:en:3"})[0])
    answer = str(question.unwrapped.task.ground_truth)
    assert env.step(called("answer", answer=answer))[1] == 1.1 and env.step("Done.")[4]["success"]
