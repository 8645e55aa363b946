"""One episode of a user's agent, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_trainer.agent.agent_env import AgentEnv
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
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def test_no_two_calls_of_an_episode_have_one_id_and_each_has_nine_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's Agents SDK ends at an id that an earlier call had; Mistral's templates take no other length."""
    for dialect in ("OPENAI", "ANTHROPIC"):  # which the episode sets
        for name in ("BASE_URL", "API_KEY", "MODEL"):
            monkeypatch.setenv(f"{dialect}_{name}", "")
    monkeypatch.setenv("SKYRL_TASK", "")
    (tmp_path / "mine.py").write_text(AGENT)
    env = AgentEnv(Sample("look#0", "skyrl/text_math-v0", 0, {}, agent=f"{tmp_path}/mine.py:agent"))
    try:
        env.reset()
        replies = [env.step(CALL + CALL) for _ in range(3)]
    finally:
        env.close()
    assert replies[-1][1:3] == (6, True) and replies[-1][4]["success"]
