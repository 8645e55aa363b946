"""Our environments for TRL: `GRPOTrainer(environment_factory=environment_factory("webshop_lite"), ...)`.

Each action is a method, as trl_tools.yaml says, or else `act`. The reward is the episode's sum. A row names its task by
`task_id` or `seed`, with `split` and the like, or is one in SkyRL's format; else a task of the split is drawn.
"""

import inspect
import json
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, Literal
from zlib import crc32

from gymnasium import make

from skyrl_gym.core import RowsOnly
from skyrl_gym.data import beside, ground_truth
from skyrl_gym.registry import resolve_env_id

KINDS = {"integer": int, "number": float, "boolean": bool, "object": dict, "null": type(None)}
NOTE = "Here every action is a tool: call it, in place of writing the action."


class TextEnvironment:
    """What TRL asks for; a subclass has `env_id`, `arguments` of gymnasium.make, and the tools."""

    env_id: str
    arguments: dict[str, Any]
    round = 0  # of the class

    def __init__(self) -> None:
        self.env = make(self.env_id, **self.arguments)
        self.reward, self.done, self._round = 0.0, True, -1

    def reset(self, **row: Any) -> str | None:
        kind = type(self)
        kind.round += self._round == kind.round
        self._round = kind.round
        names = ("task_id", *getattr(self.env.unwrapped, "choices", ("split", "difficulty", "lang")))
        options = {name: row[name] for name in names if row.get(name) is not None}
        seed, rows_only = row.get("seed"), isinstance(self.env.unwrapped, RowsOnly) and "rows" not in self.arguments
        given = rows_only or row.get("reward_spec") is not None or "db_id" in row  # Spider's
        if given or (seed is None and "task_id" not in options and ground_truth(row) is not None):
            options = {"task": row}
        if seed is None and not {"task", "task_id"} & options.keys():
            # The tries of a row, each an instance's, must meet one task. A small batch resets the first ones alone.
            seed = crc32(json.dumps(row, sort_keys=True, default=str).encode()) + kind.round
        observation, info = self.env.reset(seed=seed, options=options)
        self.reward, self.done = 0.0, False
        if "task" in options:  # the prompt holds instructions and question
            return None
        told = info.get("instructions_without_tools", info.get("instructions", ""))
        return f"{told}\n\n{NOTE}\n\n{observation}".lstrip()

    def get_reward(self) -> float:
        return self.reward

    def _act(self, action: str) -> str:
        if self.done:
            raise ValueError("The episode is over.")
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.reward += float(reward)
        self.done = terminated or truncated
        # TRL's chat templates put tags around what a tool returns.
        bare = observation.removeprefix("<tool_response>\n")
        return bare.removesuffix("\n</tool_response>") or "The episode is over."


def environment_factory(env_id: str, **arguments: Any) -> type[TextEnvironment]:
    """A class of environments with their tools as methods; arguments are gymnasium.make's."""
    env_id = resolve_env_id(env_id)
    env = make(env_id, **arguments).unwrapped
    known = beside(__file__, "trl_tools.yaml")
    told = known[next((base.__name__ for base in type(env).__mro__ if base.__name__ in known), "TextEnv")]
    own = {tool["function"]["name"]: tool["function"] for tool in getattr(env, "tools", ())}
    env.close()
    names = {*own, *(name for name in told if "action" in told[name])}
    methods = {name: _method(name, told.get(name, {}), own.get(name)) for name in names}
    return type(type(env).__name__, (TextEnvironment,), {**methods, "env_id": env_id, "arguments": arguments})


# What TRL makes this JSON schema of again. What has no such hint is text.
def _hint(schema: dict[str, Any]) -> Any:
    if "anyOf" in schema:
        return reduce(or_, map(_hint, schema["anyOf"]))
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if schema.get("type") == "array":
        return list[_hint(schema.get("items", {}))]  # type: ignore[misc]
    return KINDS.get(str(schema.get("type")), str)


# told: by trl_tools.yaml. own: the schema of a tool that the environment has itself, called in its grammar.
def _method(name: str, told: dict[str, Any], own: dict[str, Any] | None) -> Callable[..., str]:
    own = own or {"description": told["does"], "parameters": {"required": told.get("arguments", ())}}
    schema, action = own["parameters"], told.get("action")
    known, required = schema.get("properties", {}), schema.get("required", ())
    told_of = {each: " ".join(known[each].get("description", "As above.").split()) for each in known}
    says = told.get("arguments") or dict(sorted(told_of.items(), key=lambda each: each[0] not in required))
    place = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [place]
    for each in says:
        hint = _hint(known.get(each, {}))
        default = place.empty if each in required else None
        parameters.append(place.replace(name=each, annotation=hint, default=default))
    signature = inspect.Signature(parameters)

    def method(*positional: Any, **named: Any) -> str:
        given = signature.bind(*positional, **named).arguments
        environment = given.pop("self")
        if action is not None:
            return str(environment._act(action.format(**given)))
        call = json.dumps({"tool": name, "args": given}, ensure_ascii=False)
        return str(environment._act(f"<tool_call>{call}</tool_call>"))

    lines = [f"    {each}: {text}" for each, text in says.items()]
    doc = "\n".join([own["description"], "", "Args:", *lines] if lines else [own["description"]])
    method.__name__, method.__doc__ = name, doc
    method.__annotations__ = {each.name: each.annotation for each in parameters[1:]}
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method
