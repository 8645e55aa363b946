"""The environment that asks a benchmark's question: one turn, or several where there are tools.

    reset(options={"task": {"instructions": "...", "question": "...", "tools": "corpus.jsonl"}})

`tools` says where search and open_page find pages (tools.py); the first message without a call ends the episode.
Nothing here knows what the right answer is, so the reward is 0: graders read the attempt.
"""

from typing import Any

from skyrl_eval.benchmarks.common import final
from skyrl_eval.data import content_id
from skyrl_eval.prompts import fill
from skyrl_eval.tools import Pages
from skyrl_gym.core import Info, Options, Outcome, Row, Task, TextEnv
from skyrl_gym.parsing import MAX_CALLS, parse_tool_calls
from skyrl_gym.tools.tool import listed, responses, run_call, tool


class QuestionEnv(TextEnv):
    """Every step's info has `tool_calls`, and `urls`: the addresses that were opened in it."""

    def task_from_row(self, row: Row, options: Options) -> Task:
        if not isinstance(row.get("question"), str):
            raise ValueError(f"options['task']: field 'question' must be a string, got {row.get('question')!r:.80}.")
        self._pages = pages = Pages(row.get("tools") or "")
        functions = (pages.search, pages.open_page) if row.get("tools") else ()
        self._tools = {each.__name__: tool(each, external=True) for each in functions}
        self.metadata = self.metadata | {"waits": bool(functions)}  # read by EnvWorkers: their pages are far away
        how = fill("tools", tools=listed(self._tools), limit=str(MAX_CALLS)) if functions else ""
        self._bare = row.get("instructions") or ""
        instructions = "\n\n".join(filter(None, (self._bare, how)))
        data = {name: row.get(name) for name in ("question", "tools", "instructions")}
        return Task(content_id(row["question"]), row["question"], None, data=data, instructions=instructions)

    def set_env_state(self, state: dict[str, Any]) -> None:
        self.task_from_row(self.task.data, self.options)

    def reset_info(self) -> Info:
        return {"tools": [each.schema for each in self._tools.values()], "instructions_without_tools": self._bare}

    def count_tasks(self, options: Options) -> int:
        raise ValueError("skyrl/question-v0 has no questions of its own: give one as options['task'].")

    def act(self, action: str) -> Outcome:
        calls = parse_tool_calls(final(action)) if self._tools else []  # none in its thoughts
        made = [run_call(self._tools, call, self.recorded) for call in calls]
        urls, self._pages.fetched = self._pages.fetched, []
        valid = all(call["args"] is not None for call in made)
        return Outcome(responses(made), {}, valid, terminated=not made, info={"tool_calls": made, "urls": urls})
