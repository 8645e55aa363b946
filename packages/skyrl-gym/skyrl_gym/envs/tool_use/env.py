"""tool_use (docs/environments/tool_use.md): a calculator, search and wiki over a made-up world, python, your tools."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_gym.answers import canonical, same, written
from skyrl_gym.core import Info, Options, Outcome, Row, Task, TextEnv
from skyrl_gym.data import ground_truth, read_row, require, row_id
from skyrl_gym.envs.tool_use import tasks
from skyrl_gym.parsing import MAX_CALLS, parse_tool_calls
from skyrl_gym.tools.calculator import calculator
from skyrl_gym.tools.mcp import FORM, McpServer
from skyrl_gym.tools.search import Corpus
from skyrl_gym.tools.tool import Tool, ToolError, listed, responses, run_call, tool

BUILTIN = ("calculator", "search", "wiki", "python_exec")


def python_exec(code: str) -> str:
    """Runs a Python program on its own and returns what it prints."""
    return _run({}, code)


def _run(limits: Mapping[str, Any], code: str) -> str:
    from skyrl_gym.tools.python_exec import Limits, shared_sandbox

    result = shared_sandbox(Limits(**limits)).run(code)
    if result.error:
        raise ToolError(f"{result.output}\n{result.error}".strip())
    return result.output.rstrip("\n") or "(The program printed nothing.)"


class ToolUseEnv(TextEnv):
    """Difficulties: 1 calculator, 2 one article, 3 two hops, 4 facts and a sum, 5 python, 6 search, wiki and 1 or 5.
    tools: names of built-in ones, functions or Tools of your own, {"python_exec": {...}} with Limits, {"mcp": {...}}
    with the settings of a McpServer, which has a session an episode. corpus: a jsonl file of {"title", "text"} rows for
    search and wiki; questions about it are options["task"].
    """

    choices = TextEnv.choices | {"difficulty": (1, 2, 3, 4, 5, 6)}
    kept = ("calls", "accepted", "made")
    calls = accepted = 0
    made: list[list[Any]]
    """The planned calls [tool, args] that have succeeded."""

    def __init__(self, *, tools: Sequence[Any] = BUILTIN, corpus: str | Path | None = None, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._own_corpus = None if corpus is None else Corpus.load(corpus)
        tools = [tools] if isinstance(tools, str) else tools
        self._given = [_made(item) if isinstance(item, Mapping) else item for item in tools]
        self._servers = [item for item in self._given if isinstance(item, McpServer)]
        waits = self._servers or any(isinstance(item, Tool) and item.external for item in tools)
        self.metadata = self.metadata | ({"waits": True} if waits else {})
        self._tools: dict[str, Tool] = {}
        if not self._servers:
            self._offer()

    @classmethod
    def preload(cls, options: Options) -> None:
        if tasks.chains(options["difficulty"], options["split"]):
            tasks.corpus(options["lang"], options["split"]).search("")

    def _offer(self) -> None:
        """Finds the tools."""
        found = ((item.tools() if isinstance(item, McpServer) else [item]) for item in self._given)
        self._chosen = [item for items in found for item in items]
        self._toolboxes: dict[tuple[str, str], dict[str, Tool]] = {}
        self._tools = self._toolbox(self.defaults)
        self._listed = listed(self._tools)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Their schemas. MCP servers are asked, in a session, where there was no `reset` yet."""
        if not self._tools:
            self._offer()
        return [item.schema for item in self._tools.values()]

    def _toolbox(self, options: Options) -> dict[str, Tool]:
        world = options["lang"], options["split"]
        if world not in self._toolboxes:
            self._toolboxes[world] = toolbox(self._chosen, self._own_corpus or tasks.corpus(*world))
        return self._toolboxes[world]

    def reset(self, **kwargs: Any) -> tuple[str, Info]:
        if self._servers:
            self.close()
            self._offer()
        return super().reset(**kwargs)

    def close(self) -> None:
        """Ends the episode's sessions with MCP servers."""
        for server in self._servers:
            server.close()

    def _told(self, lang: str, name: str = "instructions") -> str:
        text = tasks.data()["texts"][name][tasks.LANGS.index(lang)]
        return str(text.format(tools=self._listed, limit=MAX_CALLS))

    def reset_info(self) -> Info:
        """For a chat template that lists tools itself: their schemas, and the instructions without them."""
        told, bare = self._told(self.task.lang), self._told(self.task.lang, "instructions_without_tools")
        return {"tools": self.tools, "instructions_without_tools": self.task.instructions.replace(told, bare)}

    def count_tasks(self, options: Options) -> int:
        return tasks.count(options["difficulty"], options["split"])

    def make_task(self, options: Options, index: int) -> Task:
        split, difficulty, lang = (options[name] for name in self.id_options)
        text, plan, answer = tasks.draft(difficulty, split, tasks.LANGS.index(lang), index)
        for name in [name for calls in plan for name, _ in calls]:
            if name not in self._tools or (self._own_corpus and name in ("search", "wiki")):
                but = "this environment has other tools or another corpus"
                raise ValueError(f"Difficulty {difficulty} needs the tool {name!r} over the built-in corpus; {but}.")
        task_id, instructions = self.task_id(options, index), self._told(lang)
        return Task(task_id, text, answer, instructions=instructions, data={"plan": plan})

    def task_from_row(self, row: Row, options: Options) -> Task:
        row = read_row(row, "options['task']")
        prompt, truth = row["prompt"], ground_truth(row)
        if prompt[-1]["role"] != "user" or any(each["role"] != "system" for each in prompt[:-1]):
            raise ValueError("options['task']: field 'prompt' must be system messages, or none, and one user message.")
        truth = truth["target"] if isinstance(truth, dict) and "target" in truth else truth  # Search-R1's
        known = isinstance(truth, str | int | float) and not isinstance(truth, bool)
        if isinstance(truth, list):
            known = bool(truth) and all(isinstance(each, str) and plain(each) for each in truth)
        known = known and (isinstance(truth, list) or canonical(written(truth)) is not None)
        what = "a number, a word, a list or a set in a text (skyrl_gym.answers), or a list of texts"
        require(known, "options['task']", "reward_spec.ground_truth", what, truth)
        *said, text = (each["content"] for each in prompt)
        instructions = "\n\n".join([*said, self._told(options["lang"])])
        truth = truth if isinstance(truth, list) else written(truth)
        return Task(row_id(prompt), text, truth, instructions=instructions, data={"plan": []})

    def begin(self, task: Task) -> str:
        self.set_env_state({"calls": 0, "accepted": 0, "made": []})
        return task.text

    def act(self, action: str) -> Outcome:
        if (answer := last_answer(action)) is not None:
            return self._judge(answer)
        made = [run_call(self._tools, call, self.recorded) for call in parse_tool_calls(action)]
        accepted = sum(call["args"] is not None for call in made)
        self.calls += len(made)
        self.accepted += accepted
        planned = [call for calls in self.task.data["plan"] for call in calls]
        self.made += [x for call in made if "result" in call and (x := [call["tool"], call["args"]]) in planned]
        neither = tasks.data()["texts"]["neither"][tasks.LANGS.index(self.task.lang)]
        parts, valid = {"answer": 0.0, "tool_calls": 0.0}, 0 < len(made) == accepted
        return Outcome(responses(made) or neither, parts, valid, info={"tool_calls": made})

    def _judge(self, answer: str) -> Outcome:
        self.close()
        truth = self.task.ground_truth
        right = same(answer, truth) if isinstance(truth, str) else plain(answer) in map(plain, truth)
        parts = {"answer": 1.0 * right, "tool_calls": 0.1 * self.accepted / max(self.calls, 1)}
        return Outcome("", parts, valid_action=True, success=right, terminated=True, info={"tool_calls": []})

    def expert_action(self) -> str:
        for calls in self.task.data["plan"]:
            if missing := [call for call in calls if call not in self.made]:
                objects = [json.dumps({"tool": name, "args": args}, ensure_ascii=False) for name, args in missing]
                return "\n".join(f"<tool_call>{text}</tool_call>" for text in objects)
        truth = self.task.ground_truth
        return f"<answer>{truth if isinstance(truth, str) else truth[0]}</answer>"

    def set_env_state(self, state: dict[str, Any]) -> None:
        if not self._tools:  # a state of an instance that knew the servers' tools
            self._offer()
        self._tools = self._toolbox(self.options)
        super().set_env_state(state)


def plain(text: str) -> str:
    """As SQuAD's exact match compares: without case, punctuation and articles."""
    words = re.sub(r"[^\w\s]", "", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _made(item: Mapping[str, Any]) -> McpServer | Tool:
    kind, settings = next(iter(item.items()), ("nothing", None))
    if len(item) != 1 or kind not in ("mcp", "python_exec") or not (isinstance(settings, Mapping) and settings):
        forms = f"{{mcp: {{{FORM}}}}} or {{python_exec: {{wall_seconds: 10}}}}"
        raise ValueError(f"A tool that has {', '.join(map(str, item)) or 'nothing'} is not {forms}.")
    if kind == "mcp":
        return McpServer(settings)
    from skyrl_gym.tools.python_exec import Limits, shared_sandbox

    if unknown := settings.keys() - Limits.__slots__:
        raise ValueError(f"python_exec has no limit {unknown.pop()!r}; valid ones are {', '.join(Limits.__slots__)}.")
    shared_sandbox(Limits(**settings)).start()  # no code may run within them
    told = f"{python_exec.__doc__} Limits: {', '.join(f'{name} {value}' for name, value in settings.items())}."
    made = tool(python_exec, external=True)
    schema = {**made.schema, "function": made.schema["function"] | {"description": told}}
    return replace(made, function=partial(_run, dict(settings)), schema=schema)


def toolbox(tools: Sequence[Any], corpus: Corpus) -> dict[str, Tool]:
    makers = (calculator, tool(corpus.search), tool(corpus.wiki), tool(python_exec, external=True))
    builtin, chosen = dict(zip(BUILTIN, makers, strict=True)), {}
    for item in tools:
        if isinstance(item, str) and item not in builtin:
            raise ValueError(f"There is no built-in tool {item!r}; valid ones are {', '.join(builtin)}.")
        made = builtin[item] if isinstance(item, str) else item if isinstance(item, Tool) else tool(item)
        if made.name in chosen:
            raise ValueError(f"Two tools are called {made.name!r}; leave one of them out.")
        chosen[made.name] = made
    return chosen


def last_answer(text: str, call_end: str = "</tool_call>") -> str | None:
    """What the last complete <answer>...</answer> after all calls holds, or None."""
    start = text.rfind("<answer>", text.rfind(call_end) + 1, max(text.rfind("</answer>"), 0))
    return text[start + len("<answer>") : text.find("</answer>", start)].strip() if start >= 0 else None
