"""Tools: plain functions with a JSON schema made from their signature.

    @tool
    def add(x: int, y: int = 1) -> int:
        '''Adds two numbers.'''
        return x + y

A call's arguments are checked against the schema. Whatever goes wrong is a sentence for the model; no call raises.
"""

import contextlib
import difflib
import inspect
import json
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_gym.parsing import ParseError, ToolCall

MAX_OUTPUT = 4000
"""Characters of a call's result that the model sees."""
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class ToolError(Exception):
    """A tool's failure, in one sentence for the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    """In the form of OpenAI's chat API, which chat templates take too."""
    external: bool
    """Its results depend on more than the arguments, for example on a process; a replay feeds the recorded ones."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """ToolError for arguments that do not fit. None: `tool` has made the schema, which says it all."""

    def __reduce__(self) -> Any:
        # The name of a decorated function stands for its Tool, so that pickle would not find the function by it.
        place = f"{self.function.__module__}:{getattr(self.function, '__qualname__', '')}"
        with contextlib.suppress(ValueError, AttributeError):  # a function within another has no such name
            if pkgutil.resolve_name(place) is self:
                return pkgutil.resolve_name, (place,)
        return Tool, (self.name, self.function, self.schema, self.external, self.check)


def tool(function: Callable[..., Any], *, external: bool = False) -> Tool:
    """A decorator: a Tool of a function with type hints (or TypeError), which its docstring describes to the model.
    A parameter with a default is optional."""
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"Tool {function.__name__!r} is async, and nobody would await it: give a plain function.")
    hints, properties, required = typing.get_type_hints(function, localns=vars(typing)), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"Tool {function.__name__!r}: parameter {name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where} must be one to give by name, got {parameter}.")
        properties[name] = _schema(hints.get(name), where)
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return Tool(function.__name__, function, {"type": "function", "function": described}, external)


def listed(tools: Mapping[str, Tool]) -> str:
    """As a prompt lists them: a line of JSON for each."""
    return "\n".join(json.dumps(each.schema["function"], ensure_ascii=False) for each in tools.values())


def run_call(
    tools: Mapping[str, Tool],
    call: ToolCall | ParseError,
    recorded: list[Mapping[str, Any]] | None = None,
    longest: int = MAX_OUTPUT,
) -> dict[str, Any]:
    """Runs a call and returns {"tool", "args", "result" or "error"}; args is None unless they fit a tool's schema.
    recorded: earlier returns, from which external tools answer instead of running; each answers once.
    """
    done: dict[str, Any] = {"tool": None, "args": None}
    try:
        if isinstance(call, ParseError):
            raise ToolError(call.message)
        done["tool"] = call.tool[:40]
        _check(tools, call)
        done["args"] = call.args
        if recorded is not None and tools[call.tool].external:
            past = [one for one in recorded if (one.get("tool"), one.get("args")) == (done["tool"], done["args"])]
            if past:
                recorded.remove(past[0])
                return {**done, **past[0]}
            raise ToolError(f"The record holds no answer to this call of {done['tool']}.")
        key, value = "result", tools[call.tool].function(**call.args)
    except ToolError as error:
        key, value = "error", str(error)
    except Exception as error:  # a user's tool may raise anything
        key, value = "error", f"{done['tool']} failed: {type(error).__name__}: {error}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    if len(text) > longest:
        half, left_out = longest // 2, len(text) - longest  # an error is told at the end
        text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
    # A lone surrogate, which Python strings may hold, could not be written to a file.
    return done | {key: text.encode("utf-8", "replace").decode()}


# A set's order is another in each process.
def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def responses(calls: Sequence[Mapping[str, Any]], *notes: str) -> str:
    """What the model reads of calls that `run_call` ran, and of notes: in tags, as in Qwen's templates.
    Example: responses([{"tool": "add", "args": {"x": 1}, "result": "2"}]) == "<tool_response>\\n2\\n</tool_response>"
    """
    texts = [call["result"] if "result" in call else f"Error: {call['error']}" for call in calls]
    # A text that holds the tags could pass for the end of its response and the beginning of another.
    safe = [re.sub("<(?=/?tool_response>)", "&lt;", text) for text in (*texts, *notes)]
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in safe)


def _check(tools: Mapping[str, Tool], call: ToolCall) -> None:
    if call.tool not in tools:
        near = difflib.get_close_matches(call.tool[:40], tools, cutoff=0.4) or tools
        raise ToolError(f"There is no tool {call.tool[:40]!r}; did you mean {' or '.join(near)}?")
    if (check := tools[call.tool].check) is not None:
        return check(call.args)
    parameters = tools[call.tool].schema["function"]["parameters"]
    known = parameters["properties"]
    for name, value in call.args.items():
        if name not in known:
            raise ToolError(f"{call.tool} takes no argument {name[:40]!r}, only {', '.join(known) or 'none'}.")
        if not _fits(value, known[name]):
            raise ToolError(f"{call.tool}: argument {name!r} must be {json.dumps(known[name], ensure_ascii=False)}.")
    for name in parameters["required"]:
        if name not in call.args:
            raise ToolError(f"{call.tool}: argument {name!r} is missing.")


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin is list and args:
        return {"type": "array", "items": _schema(args[0], where)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(arg, where) for arg in args]}
    if hint not in _JSON_TYPES:
        raise TypeError(f"{where} needs a hint of str, int, float, bool, list[...], Literal[...] or X | Y, got {hint}.")
    return {"type": _JSON_TYPES[hint]}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    if schema["type"] == "array":
        return isinstance(value, list) and all(_fits(item, schema["items"]) for item in value)
    if schema["type"] == "number":  # JSON readers let NaN and 1e999 through
        return type(value) in (int, float) and abs(value) < math.inf
    return _JSON_TYPES.get(type(value)) == schema["type"]
