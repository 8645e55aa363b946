"""One episode of a user's agent, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_trainer.agent import agent_env
from skyrl_trainer.agent.agent_env import AgentEnv, _checked
from skyrl_trainer.agent.task import Play
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample

AGENT = """
from openai import OpenAI


def agent(task):
    ids, tools = [], [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for _ in range(3):
            asked = {"model": task.model, "messages": [{"role": "user", "content": "Look."}], "tools": tools}
            calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
            ids += [call.id for call in calls]
    return {"reward": len(set(ids)), "success": {len(each) for each in ids} == {9}}
"""
IMPATIENT = """
import asyncio
import os

from openai import AsyncOpenAI


async def agent(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        async def ask(text, **more):
            asked = {"model": task.model, "messages": [{"role": "user", "content": text}], **more}
            told = await client.chat.completions.create(**asked)
            choice = (await anext(aiter(told))).choices[0].delta if more else told.choices[0].message
            return choice.content

        one = asyncio.create_task(ask("one", **STREAM))
        while "ONE_IS_ASKED" not in os.environ:
            await asyncio.sleep(0.01)
        two = asyncio.create_task(ask("two"))
        await asyncio.wait([two], timeout=0.5)
        two.cancel()
        one.cancel()
        return {"reward": float(await ask("one", **STREAM)) + 10 * float(await ask("three", **STREAM))}
"""
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def test_no_two_calls_of_an_episode_have_one_id_and_each_has_nine_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's Agents SDK ends at an id that an earlier call had; Mistral's templates take no other length."""
    with playing(AGENT, tmp_path, monkeypatch) as env:
        env.reset()
        replies = [env.step(CALL + CALL) for _ in range(3)]
    assert replies[-1][1:3] == (6, True) and replies[-1][4]["success"]


@pytest.mark.parametrize("stream", [{}, {"stream": True}])
def test_an_answer_that_a_client_did_not_wait_for_is_that_of_the_same_request_asked_again(
    stream: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn once, and what had not been asked of the policy yet is not asked."""
    with playing(IMPATIENT.replace("STREAM", str(stream)), tmp_path, monkeypatch) as env:
        assert env.reset()[0] == "one"
        monkeypatch.setenv("ONE_IS_ASKED", "1")
        deadline = time.monotonic() + 60
        while not env._future.cancelled():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        replies = [env.step(answer) for answer in "12"]
    assert replies[0][0] == "three"
    assert replies[1][1:3] == (21.0, True)


SWALLOWS = """
from contextlib import suppress

from openai import APIError, OpenAI


def agent(task):
    with suppress(APIError), OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        client.chat.completions.create(model="MODEL", messages=[{"role": "ROLE", "content": "Look."}])
"""


@pytest.mark.parametrize(
    ("model", "role", "why"),
    [
        ("gpt-5", "user", "The model 'gpt-5' is not served here; 'policy' is."),
        ("policy", "oracle", "messages.0 has the role 'oracle', expected one of system, developer, "),
    ],
)
def test_what_was_refused_is_told_where_an_agent_keeps_it_to_itself(
    model: str, role: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SWALLOWS.replace("MODEL", model).replace("ROLE", role)
    with playing(agent, tmp_path, monkeypatch) as env, pytest.raises(UserError) as raised:
        env.reset()
    said = "The agent ended before it asked the model anything; its last request was refused: "
    assert str(raised.value).startswith(said + why)


def test_what_was_earned_around_a_refusal_is_one_sum_in_one_order() -> None:
    """0.1 + (0.2 + 0.3) is another number than a replay's."""
    plays = [Play(Sample("text_math#0", "skyrl/text_math-v0", 0)) for _ in range(2)]
    for play in plays:
        rewards = iter((0.1, 0.2, 0.3))
        info = {"reward_parts": {"a": 0.1}, "tool_calls": [{"tool": "look"}]}
        step = partial(lambda rewards, info, action: ("", next(rewards), False, False, info), rewards, info)
        play._env = SimpleNamespace(step=step, unwrapped=None)  # type: ignore[assignment]
    live, replayed = plays
    live.step("a")
    assert live.earned()[0] == 0.1
    live.recall()
    for _ in range(2):
        live.step("a")
    for _ in range(3):
        replayed.step("a")
    assert live.earned() == replayed.earned() != (0.1 + (0.2 + 0.3), {})


@pytest.mark.parametrize("text", ["{}", '{"refused": []}', '{"refused": 5}', "[]", "5", '{"choice": 1}'])
def test_any_text_is_an_action(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(SAYS, tmp_path, monkeypatch) as env:
        env.reset()
        assert env.step(text)[1:3] == (float(len(text)), True)


SAYS = """
from openai import OpenAI


def agent(task):
    with OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        asked = {"model": task.model, "messages": [{"role": "user", "content": "Look."}]}
        return len(client.chat.completions.create(**asked).choices[0].message.content)
"""


@contextmanager
def playing(agent: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentEnv]:
    for dialect in ("OPENAI", "ANTHROPIC"):  # which the episode sets
        for name in ("BASE_URL", "API_KEY", "MODEL"):
            monkeypatch.setenv(f"{dialect}_{name}", "")
    monkeypatch.setenv("SKYRL_TASK", "")
    (folder / "mine.py").write_text(agent)
    env = AgentEnv(Sample("look#0", "skyrl/text_math-v0", 0, {}, agent=f"{folder}/mine.py:agent"))
    try:
        yield env
    finally:
        env.close()


@pytest.mark.parametrize("number", [np.float32(0.5), torch.tensor(0.5), {"reward": np.float64(0.5)}, 0.5])
def test_an_agent_may_return_any_kind_of_number(number: Any) -> None:
    assert _checked(number) == {"reward": 0.5} and _checked(None) == {"reward": None}
    assert _checked({"success": True}) == {"success": True, "reward": None}


@pytest.mark.parametrize("number", [float("nan"), np.float32("inf"), "1.0", {"reward": 1.0, "solved": True}])
def test_what_is_no_number_is_the_agents_mistake(number: Any) -> None:
    with pytest.raises(UserError, match=r"The agent returned .*: return a number"):
        _checked(number)


@pytest.mark.parametrize("said", [("a", 1.0, True, {}), ("a", None, True, False, {}), ("a", "1.0", True, False, {})])
def test_what_its_env_gives_wrongly_is_not_the_agents_mistake(said: Any) -> None:
    """Its line, which unpacks five values, is right."""
    play = Play(Sample("text_math#0", "skyrl/text_math-v0", 0))
    play._env = SimpleNamespace(step=lambda action: said, unwrapped=None)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"the task's env gave .* in step, not observation, reward and so on"):
        play.step("b")


def test_requests_that_were_answered_wait_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_env, "MOST_WAITING", 1)
    with playing(AGENT, tmp_path, monkeypatch) as env:
        env.reset()
        assert [env.step(CALL)[2] for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("reward", "success"), [(0.0, False), (-1.0, False), (None, False), (0.5, True)])
def test_an_agent_that_earned_nothing_and_says_nothing_had_no_success(
    reward: float | None, success: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SAYS.replace("return len(", "len(") + f"    return {reward}\n"
    with playing(agent, tmp_path, monkeypatch) as env:
        env.reset()
        assert env.step("5")[4]["success"] is success
