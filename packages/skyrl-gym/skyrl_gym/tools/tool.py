"""Tools: plain functions with a JSON schema made from their signature.

    @tool
    def add(x: int, y: int = 1) -> int:
        '''Adds two numbers.'''
        return x + y

A tool's arguments are checked against its schema before it runs. Whatever goes wrong in a call is a sentence that the
model reads; no call raises. What a tool returns is shown as text (JSON unless it is a str), cut at MAX_OUTPUT.
"""

from __future__ import annotations

import difflib
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.parsing import ParseError, ToolCall

MAX_OUTPUT = 4000
"""Characters of a call's result that the model sees."""
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_GOT = _JSON_TYPES | {list: "array", dict: "object"}


class ToolError(Exception):
    """A tool's failure, in one sentence for the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with its name, description and parameters (a JSON schema). Calling it calls the function."""

    function: Callable[..., Any]
    name: str
    description: str
    parameters: dict[str, Any]
    external: bool = False
    """Its results depend on more than its arguments (other processes, time); a replay feeds the recorded ones."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> dict[str, Any]:
        """In the form of OpenAI's chat API, which chat templates take too."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    def check(self, args: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments, or None."""
        properties = self.parameters["properties"]
        for name, value in args.items():
            if name not in properties:
                return f"{self.name}: there is no argument {name[:40]!r}; it takes {', '.join(properties) or 'none'}."
            if not _fits(value, properties[name]):
                got = _GOT[type(value)]
                return f"{self.name}: argument {name!r} must be {_describe(properties[name])}, got {got}."
        missing = [name for name in self.parameters["required"] if name not in args]
        return f"{self.name}: argument {missing[0]!r} is missing." if missing else None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a call."""

    text: str
    failed: bool = False
    """The text is an error."""
    accepted: bool = True
    """The call was well formed: it named a tool and had the arguments which that takes."""


def tool(function: Callable[..., Any] | None = None, *, external: bool = False) -> Any:
    """Decorator, with or without arguments: makes a Tool of a function with type hints and a docstring.

    Hints may be str, int, float, bool, list[...], Literal[...] and X | None; a parameter with a default is optional.

    Raises:
        TypeError: a parameter without a hint, with another one, or of a kind that cannot be passed by name.
    """
    if function is None:
        return lambda wrapped: tool(wrapped, external=external)
    if isinstance(function, Tool):
        return function
    hints, properties, required = typing.get_type_hints(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"Parameter {name!r} of tool {function.__name__!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise TypeError(f"{where} needs a type hint and a name to pass it by; write for example {name}: str.")
        properties[name] = _schema_of(hints[name], where)
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = parameter.default
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(function, function.__name__, inspect.getdoc(function) or "", parameters, external)


def run_call(tools: Mapping[str, Tool], call: ToolCall | ParseError) -> Result:
    """Runs a call; never raises (but for KeyboardInterrupt and its like)."""
    if isinstance(call, ParseError):
        return Result(call.message, failed=True, accepted=False)
    used = tools.get(call.tool)
    if used is None:
        near = difflib.get_close_matches(call.tool[:40], tools, n=2, cutoff=0.4) or tools
        problem = f"There is no tool {call.tool[:40]!r}; did you mean {' or '.join(near)}?"
    else:
        problem = used.check(call.args) or ""
    if used is None or problem:
        return Result(problem, failed=True, accepted=False)
    try:
        value = used.function(**call.args)
        return Result(_shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)))
    except ToolError as error:
        return Result(_shown(str(error)), failed=True)
    except Exception as error:  # a user's tool may raise anything
        return Result(_shown(f"{used.name} failed: {type(error).__name__}: {error}"), failed=True)


def _shown(text: str) -> str:
    if len(text) > MAX_OUTPUT:
        text = f"{text[:MAX_OUTPUT]}... (cut: {len(text)} characters in all)"
    # A lone surrogate, which Python strings may hold, could not be written to a file or socket.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is typing.Literal and all(type(value) in _JSON_TYPES for value in args):
        return {"enum": list(args)}
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0], where)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(arg, where) for arg in args]}
    raise TypeError(f"{where} has the hint {hint!r}; valid ones are str, int, float, bool, list, Literal and unions.")


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    if schema["type"] == "array":
        return isinstance(value, list) and all(_fits(item, schema["items"]) for item in value)
    return _GOT[type(value)] == schema["type"] or (schema["type"] == "number" and type(value) is int)


def _describe(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_describe, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(json.dumps, schema['enum']))}"
    return f"array of {_describe(schema['items'])}" if schema["type"] == "array" else str(schema["type"])
