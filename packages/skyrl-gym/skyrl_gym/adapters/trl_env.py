"""TRL's dataset rows, tools and environments as a TextEnv.

The reward of a step is what `get_reward` rises by, so that an episode's sum is its last value, however it ends.
"""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_gym.adapters.skyrl import Repeated, contents
from skyrl_gym.core import Info, Outcome, Task
from skyrl_gym.openenv import result_of
from skyrl_gym.parsing import MAX_CALLS, parse_tool_calls
from skyrl_gym.tools.tool import listed, responses, run_call, tool

TELLS = """You may call tools, {most} in a message at most; a message without a call ends the task. A call is
<tool_call>{{"tool": "<name>", "args": {{<arguments as JSON>}}}}</tool_call>
The tools:
{tools}"""


class TRLEnv(Repeated):
    """given: a file with the pickle of (factory, tools), or None. The factory makes environments, or is None; of
    several, a dictionary, a row chooses one by its field `environment`. Tools are functions."""

    def __init__(self, *, given: str | None = None, rows: Any = None, render_mode: Any = None) -> None:
        super().__init__(rows=rows, render_mode=render_mode)
        pair: Any = pickle.loads(Path(given).read_bytes()) if given else (None, ())
        self._factory, self._functions = pair

    def begin(self, task: Task) -> str:
        row, self.actions, factory = columns(task.data), list[str](), self._factory
        if isinstance(factory, dict):
            name = row.pop("environment", None)
            if name not in factory:
                there = ", ".join(map(repr, factory))
                raise ValueError(f"A row's environment is {name!r}; environment_factory has {there}.")
            factory = factory[name]
        environment = factory() if factory else None
        made = [tool(waited(each)) for each in (*self._functions, *methods(environment))]
        self._tools = {each.name: each for each in made}
        self._score = getattr(environment, "get_reward", float)
        self._paid = 0.0
        said = waited(environment.reset)(**row) if environment else None
        if not isinstance(said, str | None):
            name = type(environment).__name__
            raise ValueError(f"{name}.reset returned {said!r:.60}; expected a text or None.")
        return contents(task.data["prompt"]) + (said or "")

    def reset_info(self) -> Info:
        system = contents(self.task.data["prompt"], system=True)
        if not self._tools:
            return {"instructions": system}
        schemas = [each.schema for each in self._tools.values()]
        told = TELLS.format(most=MAX_CALLS, tools=listed(self._tools))
        return {"instructions": f"{system}\n\n{told}".lstrip(), "instructions_without_tools": system, "tools": schemas}

    def act(self, action: str) -> Outcome:
        self.actions.append(action)
        calls = parse_tool_calls(action) if self._tools else []
        made = [run_call(self._tools, call) for call in calls]
        score = float(waited(self._score)())
        parts = {"environment": score - self._paid}
        self._paid, over = score, not made
        valid = all(call["args"] is not None for call in made)
        success, info = over and score >= 1, {"tool_calls": made}
        return Outcome(responses(made), parts, valid, success, over, info)


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the data set had it: `columns` of those that the trainer writes, all but `reward_spec` of others."""
    given = row.get("columns") or {name: row[name] for name in row if name != "reward_spec"}
    return copy.deepcopy(given)


def methods(environment: Any) -> list[Callable[..., Any]]:
    members = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in members if name[0] != "_"]
    return [getattr(environment, name) for name in names if name not in ("reset", "get_reward")]


def waited(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, waiting for what an `async` one returns."""

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        value = function(*positional, **named)
        return result_of(value) if inspect.iscoroutine(value) else value

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # without self
    return call
