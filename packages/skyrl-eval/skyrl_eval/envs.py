"""The environment that asks a benchmark's question: one turn, or several where there are tools.

    reset(options={"task": {"instructions": "...", "question": "...", "tools": "corpus.jsonl"}})

`tools` names where search and open_page find pages (tools.py); without it the first message is the answer. With them a
message with tool calls, in the project's grammar, is answered by their results, and the first message without a call
ends the episode. Nothing here knows what the right answer is, so the reward is 0: graders read the attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_eval.benchmarks.common import final
from skyrl_eval.data import content_id
from skyrl_eval.prompts import fill
from skyrl_eval.tools import Pages
from skyrl_gym.core import Outcome, Task, TextEnv
from skyrl_gym.parsing import MAX_CALLS, parse_tool_calls
from skyrl_gym.tools.tool import run_call, tool


class QuestionEnv(TextEnv):
    """Every step's info has `tool_calls`, and `urls`: the addresses that were fetched in it."""

    def task_from_row(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
        if not isinstance(row.get("question"), str):
            raise ValueError(f"options['task']: field 'question' must be a string, got {row.get('question')!r:.80}.")
        self._bare = instructions = row.get("instructions", "")
        self._pages = Pages(row["tools"]) if row.get("tools") else None
        tools = (
            [tool(each, external=True) for each in (self._pages.search, self._pages.open_page)] if self._pages else []
        )
        self._tools = {each.name: each for each in tools}
        if tools:
            listed = "\n".join(json.dumps(each.schema["function"]) for each in tools)
            instructions = "\n\n".join(filter(None, (self._bare, fill("tools", tools=listed, limit=str(MAX_CALLS)))))
        return Task(content_id(row["question"]), row["question"], None, instructions=instructions)

    def make_task(self, options: Mapping[str, Any], index: int) -> Task:
        raise ValueError("skyrl/question-v0 has no questions of its own: give it one as options['task'].")

    def count_tasks(self, options: Mapping[str, Any]) -> int:
        return 1

    def reset_info(self) -> dict[str, Any]:
        """For a chat template that lists tools itself."""
        if not self._tools:
            return {}
        return {"tools": [each.schema for each in self._tools.values()], "instructions_without_tools": self._bare}

    def begin(self, task: Task) -> str:
        return task.text

    def act(self, action: str) -> Outcome:
        calls = parse_tool_calls(final(action)) if self._tools else []  # none in its thoughts
        made = [run_call(self._tools, call, self.recorded) for call in calls]
        said = [call["result"] if "result" in call else f"Error: {call['error']}" for call in made]
        return Outcome(
            observation="\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in said),
            reward_parts={},
            valid_action=all(call["args"] is not None for call in made),
            terminated=not made,
            info={"tool_calls": made, "urls": self._pages.take_fetched() if self._pages else []},
        )
