"""One environment in the words of the OpenEnv protocol. What is wrong with a request: ValueError."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from skyrl_gym.core import TextEnv
from skyrl_gym.data import beside
from skyrl_gym.openenv import TERMINATED, TRUNCATED

Said = dict[str, Any]
SCHEMA = beside(__file__, "schema.json")
_ACT = {"name": "act", "description": "Takes one action; returns what it led to."}


class Episode:
    def __init__(self, env_id: str) -> None:
        self._env = gymnasium.make(env_id)
        space = self._env.action_space
        if not isinstance(space, Text):
            raise ValueError(f"{env_id} acts by {space}, and only text can be served.")
        self.waits = bool((self._env.metadata or {}).get("waits"))
        self._state: Said = {"episode_id": None, "step_count": 0}
        self._over = False

    @property
    def tools(self) -> list[Said]:
        """As MCP lists them: the environment's own, and `act`, which takes any action."""
        own = [dict(schema["function"]) for schema in getattr(self._env.unwrapped, "tools", ())]
        listed = [each | {"inputSchema": each.pop("parameters")} for each in own]
        return [*listed, _ACT | {"inputSchema": SCHEMA["action"]}]

    def reset(self, request: Mapping[str, Any]) -> Said:
        """request: seed, episode_id, task_id (or a task's number), and the environment's options."""
        options = {name: value for name, value in request.items() if value is not None}
        seed, named = options.pop("seed", None), options.pop("episode_id", None)
        if seed is not None and (type(seed) is not int or seed < 0):
            raise ValueError(f"seed is {seed!r}, and must be a whole number of at least 0.")
        places = [value for value in options.values() if isinstance(value, str) and "://" in value]
        if places or {"rows", "tasks"} & options.keys():
            told = "An option names an address or files"
            raise ValueError(f"{told}: a server does not ask others, or open files, for those who ask it.")
        env, number = self._env.unwrapped, options.get("task_id")
        if type(number) is int and number >= 0 and isinstance(env, TextEnv):
            with suppress(Exception):  # `reset` says why
                options["task_id"] = env.task_id(env.defaults | options, number)
        text, info = self._env.reset(seed=seed, options=options)
        self._state = {"episode_id": named, "step_count": 0, "task_id": info.get("task_id")}
        self._over = False
        return self._said(text, info, None)

    def step(self, action: Any) -> Said:
        """action: {"text": ...}, or one of the two that OpenEnv's tool client takes."""
        match action:
            case {"type": "list_tools"}:
                return {"observation": {"tools": self.tools}, "reward": None, "done": False}
            case {"type": "call_tool"}:
                name = action.get("tool_name")
                done = self.call_tool(name, action.get("arguments", {}))
                done["observation"] |= {"tool_name": name, "result": done["observation"].pop("text")}
                return done
            case {"text": str(text), **more} if more.keys() <= {"metadata"}:
                return self._acted(text)
        raise ValueError('An action is {"text": "..."} and nothing else.')

    def _acted(self, action: str) -> Said:
        if self._over:
            raise ValueError("The episode is over: reset begins another.")
        text, reward, terminated, truncated, info = self._env.step(action)
        self._over = bool(terminated or truncated)
        self._state["step_count"] += 1
        limit = {TRUNCATED: True, TERMINATED: bool(terminated)} if truncated else {}
        return self._said(text, info | limit, float(reward))

    def _said(self, text: str, info: Said, reward: float | None) -> Said:
        return {"observation": {"text": text, "metadata": dict(info)}, "reward": reward, "done": self._over}

    def call_tool(self, name: Any, arguments: Any) -> Said:
        """A step by `act`, or by a tool of the environment's, called in its own grammar."""
        names = [tool["name"] for tool in self.tools]
        if name not in names or not isinstance(arguments, dict):
            raise ValueError(f"A call names one of the tools {', '.join(names)}, and has an object of arguments.")
        if name == "act":
            return self.step(arguments)
        call = json.dumps({"tool": name, "args": arguments}, ensure_ascii=False)
        return self._acted(f"<tool_call>{call}</tool_call>")

    def state(self, request: Mapping[str, Any]) -> Said:
        """Where the episode stands, and how many tasks its options have where that is known."""
        env, state = self._env.unwrapped, dict(self._state)
        if isinstance(env, TextEnv):
            with suppress(ValueError):  # it plays rows only
                state["num_tasks"] = env.count_tasks(env.options)
        return state

    def close(self) -> None:
        self._env.close()
