"""tool_use: questions that tools answer (calculator, search, wiki, python_exec, or a user's own).

An action is text with tool calls (skyrl_gym.parsing.parse_tool_calls), or with an answer: the last complete
`<answer>...</answer>` outside of the calls. An answer ends the episode; calls beside it are not made. Every call gets
a `<tool_response>`, errors too. An action with neither gets a note on the grammar.

Reward, paid when the answer is given: `answer`, 1.0 when it is right, and `tool_calls`, 0.1 times the share of the
episode's calls that were well formed (known tool, right arguments; whether the tool then succeeded does not matter),
so that more calls never pay more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from skyrl_gym.core import SPLITS, Choices, Outcome, Task, TextEnv
from skyrl_gym.data import check_row
from skyrl_gym.envs.tool_use import tasks
from skyrl_gym.parsing import MAX_CALLS, ToolCall, format_tool_call, split_tool_calls
from skyrl_gym.tools.calculator import calculator
from skyrl_gym.tools.search import Corpus, corpus_tools
from skyrl_gym.tools.tool import Tool, ToolError, run_call, tool

ANSWER, TOOL_CALLS = 1.0, 0.1
LONGEST_ANSWER = 1000
BUILTIN = ("calculator", "search", "wiki", "python_exec")


@tool(external=True)
def python_exec(code: str) -> str:
    """Runs a Python program on its own and returns what it prints."""
    from skyrl_gym.tools.python_exec import shared_sandbox

    result = shared_sandbox().run(code)
    if result.error:
        raise ToolError(f"{result.output}\n{result.error}".strip())
    return result.output or "(The program printed nothing.)"


class ToolUseEnv(TextEnv):
    """Six difficulties: calculator; one article; two hops; facts and a sum; python; search, wiki and a computation.

    Args:
        tools: names of built-in tools, functions and `@tool`s.
        corpus: a jsonl file of {"title", "text"} rows for search and wiki; tasks then are rows, options["task"].
        render_mode, defaults: see TextEnv.
    """

    choices: ClassVar[Choices] = {"split": SPLITS, "difficulty": (1, 2, 3, 4, 5, 6), "lang": tasks.LANGS}

    def __init__(
        self,
        *,
        tools: Sequence[str | Tool | Callable[..., Any]] = BUILTIN,
        corpus: str | Path | None = None,
        render_mode: str | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(render_mode=render_mode, **defaults)
        own = None if corpus is None else Corpus.load(corpus)
        articles = corpus_tools(lambda: own or tasks.corpus(self.task.lang))
        builtin = {item.name: item for item in (calculator, *articles, python_exec)}
        self._tools: dict[str, Tool] = {}
        for given in tools:
            if isinstance(given, str) and given not in builtin:
                raise ValueError(f"There is no built-in tool {given!r}; valid ones are {', '.join(builtin)}.")
            item = builtin[given] if isinstance(given, str) else tool(given)
            if self._tools.setdefault(item.name, item) is not item:
                raise ValueError(f"Two of the tools have the name {item.name!r}; rename one.")
        self.tools = [item.schema for item in self._tools.values()]
        # What the tasks of the made-up world may use.
        self._usable = [name for name in self._tools if own is None or name not in ("search", "wiki")]
        listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in self.tools)
        self._instructions = {
            lang: text.format(tools=listed, limit=MAX_CALLS)
            for lang, text in zip(tasks.LANGS, tasks.texts()["texts"]["instructions"], strict=True)
        }
        self._calls = self._accepted = 0
        self._made: list[list[Any]] = []
        """The calls [tool, args] of the expert's plan that have succeeded."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As TextEnv's; `info["tools"]` holds the tools' schemas for a chat template."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"tools": self.tools}

    def count_tasks(self, options: Mapping[str, Any]) -> int:
        return tasks.count(options["difficulty"], options["split"])

    def make_task(self, options: Mapping[str, Any], index: int) -> Task:
        split, difficulty, lang = options["split"], options["difficulty"], options["lang"]
        text, plan, answer = tasks.draft(difficulty, split, tasks.LANGS.index(lang), index)
        lacking = [name for calls in plan for name, _ in calls if name not in self._usable]
        if lacking:
            raise ValueError(
                f"A task of difficulty {difficulty} needs the tool {lacking[0]!r} over the built-in corpus, which this "
                "environment was made without; choose another difficulty or give options['task']."
            )
        return Task(
            task_id=f"{split}:{difficulty}:{lang}:{index}",
            text=text,
            ground_truth=answer,
            difficulty=difficulty,
            lang=lang,
            split=split,
            instructions=self._instructions[lang],
            data={"plan": plan},
        )

    def task_from_row(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
        check_row(row, "options['task']")
        prompt, truth = row["prompt"], row["reward_spec"]["ground_truth"]
        if [message["role"] for message in prompt][-2:] not in (["user"], ["system", "user"]) or len(prompt) > 2:
            raise ValueError("options['task']: field 'prompt' must be one user message, after a system message or none.")
        if isinstance(truth, bool) or not isinstance(truth, str | int | float):
            raise ValueError(f"options['task']: field 'reward_spec.ground_truth' must be text or a number, got {truth!r}.")
        instructions = self._instructions[options["lang"]]
        return Task(
            task_id=f"row:{hashlib.blake2b(json.dumps(prompt).encode(), digest_size=6).hexdigest()}",
            text=prompt[-1]["content"],
            ground_truth=str(truth),
            difficulty=options["difficulty"],
            lang=options["lang"],
            split=options["split"],
            instructions=f"{prompt[0]['content']}\n\n{instructions}" if len(prompt) == 2 else instructions,
            data={"plan": []},
        )

    def begin(self, task: Task) -> str:
        self._calls = self._accepted = 0
        self._made = []
        return task.text

    def act(self, action: str) -> Outcome:
        calls, outside = split_tool_calls(action)
        answer = last_answer(outside)
        if answer is not None:
            return self._judge(answer)
        responses, record = [], []
        for call in calls:
            result = run_call(self._tools, call)
            self._calls += 1
            self._accepted += result.accepted
            made = [call.tool, call.args] if isinstance(call, ToolCall) else [None, None]
            if not result.failed and any(made in planned for planned in self.task.data["plan"]):
                self._made.append(made)
            responses.append(f"<tool_response>\n{'Error: ' * result.failed}{result.text}\n</tool_response>")
            # Arguments that fit no schema may be of any size and depth: not for traces.
            outcome = {"error" if result.failed else "result": result.text}
            record.append({"tool": made[0], "args": made[1] if result.accepted else None} | outcome)
        neither = tasks.texts()["texts"]["neither"][tasks.LANGS.index(self.task.lang)]
        return Outcome(
            observation="\n".join(responses) or neither,
            reward_parts={"answer": 0.0, "tool_calls": 0.0},
            valid_action=bool(calls) and all(item["args"] is not None for item in record),
            info={"tool_calls": record},
        )

    def _judge(self, answer: str) -> Outcome:
        from skyrl_gym.answers import same

        right = len(answer) <= LONGEST_ANSWER and same(answer, self.task.ground_truth)
        share = self._accepted / self._calls if self._calls else 0.0
        return Outcome(
            observation="",
            reward_parts={"answer": ANSWER * right, "tool_calls": TOOL_CALLS * share},
            valid_action=True,
            success=right,
            terminated=True,
            info={"tool_calls": []},
        )

    def expert_action(self) -> str:
        """The calls of the first round of the task's plan that is not complete, then the answer."""
        for calls in self.task.data["plan"]:
            missing = [call for call in calls if call not in self._made]
            if missing:
                return "\n".join(format_tool_call(*call) for call in missing)
        return f"<answer>{self.task.ground_truth}</answer>"

    def get_env_state(self) -> dict[str, Any]:
        return {"calls": self._calls, "accepted": self._accepted, "made": self._made}

    def set_env_state(self, state: dict[str, Any]) -> None:
        self._calls, self._accepted, self._made = state["calls"], state["accepted"], state["made"]


def last_answer(text: str) -> str | None:
    """What the last complete <answer>...</answer> holds, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None
