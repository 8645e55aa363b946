r"""What is read out of a model's text.

Grammar of a boxed answer: `\boxed{`, then text in which braces are balanced, then `}`. Of several boxes the one that
opens last counts, among those that are closed: `\boxed{1} or \boxed{2}` answers 2, a box cut off by the end of the
text is not an answer, nor is one of more than 10,000 characters, and of nested boxes the innermost opens last. A
backslash does not escape a brace.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

_OPEN = "\\boxed{"
_LONGEST = 10_000


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` of `text`, or None. Takes time linear in the text's length."""
    end = len(text)
    while (start := text.rfind(_OPEN, 0, end)) >= 0:
        begin = start + len(_OPEN)
        close = _closing_brace(text, begin, min(end, begin + _LONGEST + 1))
        if close is not None:
            return text[begin:close]
        # This box is never closed, so an earlier one must close before it: each character is scanned once.
        end = start
    return None


def _closing_brace(text: str, begin: int, end: int) -> int | None:
    """Where the brace that was opened just before `begin` is closed in text[begin:end], or None."""
    depth = 1
    position = begin
    while (close := text.find("}", position, end)) >= 0:
        depth += text.count("{", position, close) - 1
        if depth == 0:
            return close
        position = close + 1
    return None


# Tool calls.

MAX_CALLS = 8
"""Calls that are read in one text."""
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_LONGEST_CALL, _DEEPEST_CALL = 20_000, 50
_BEFORE_JSON = re.compile(r"\s*+(?:```\w*+\s*+)?")
_AFTER_JSON = re.compile(r"\s*+(?:```\s*+)?</tool_call>")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Example: ToolCall("wiki", {"title": "Velmora"})"""

    tool: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParseError:
    """What is wrong with a call, in a sentence for the model."""

    message: str


def format_tool_call(tool: str, args: dict[str, Any]) -> str:
    """A call as the grammar wants it."""
    return f"{_CALL}{json.dumps({'tool': tool, 'args': args}, ensure_ascii=False)}{_CALL_END}"


def parse_tool_calls(text: str) -> list[ToolCall | ParseError]:
    """The calls of a text, in order, malformed ones as errors.

        text   = { junk | call } ;                            (* junk: anything without "<tool_call>" *)
        call   = "<tool_call>" , ws , [ "```" , [ word ] , ws ] , object , ws , [ "```" , ws ] , "</tool_call>" ;
        object = a JSON object (RFC 8259) with no other members than
                     "tool" or "name": string ;               (* required *)
                     "args" or "arguments": object ;          (* {} when left out *)

    JSON decides where the object ends, so its strings may hold braces and the tags themselves. They may hold line
    breaks unescaped; NaN and infinities are errors. The object has at most 20,000 characters and 50 levels. A malformed
    call reaches to its "</tool_call>", or, when "<tool_call>" or the end of the text comes first, is only its opening
    tag. After 8 calls the rest of the text is reported as one error. Takes time linear in the text's length.
    """
    return split_tool_calls(text)[0]


def split_tool_calls(text: str) -> tuple[list[ToolCall | ParseError], str]:
    """The calls as by `parse_tool_calls`, and the text outside of them."""
    found: list[ToolCall | ParseError] = []
    outside, position = [], 0
    while (start := text.find(_CALL, position)) >= 0:
        if len(found) == MAX_CALLS:
            found.append(ParseError(f"Only the first {MAX_CALLS} tool calls of a message are read; drop the others."))
            break
        outside.append(text[position:start])
        call, position = _read_call(text, start + len(_CALL))
        found.append(call)
    return found, "".join([*outside, text[position:]]) if found else text


def _read_call(text: str, start: int) -> tuple[ToolCall | ParseError, int]:
    """The call whose opening tag ends at `start`, and where to read on."""
    begin = _BEFORE_JSON.match(text, start).end()  # type: ignore[union-attr]  (it matches the empty string)
    try:
        value, length = _DECODER.raw_decode(text[begin : begin + _LONGEST_CALL])
        after = _AFTER_JSON.match(text, begin + length)
        if after is not None:
            return _to_call(value), after.end()
        problem = "after the JSON object comes something other than </tool_call>."
    except RecursionError:
        problem = _TOO_DEEP
    except ValueError as error:
        problem = f"not valid JSON ({str(error)[:100]})."
    following = text.find(_CALL, start)
    close = text.find(_CALL_END, start, following if following >= 0 else len(text))
    if close < 0:
        return ParseError("Malformed tool call: it is cut off; </tool_call> is missing."), start
    if close - begin > _LONGEST_CALL:
        problem = f"it is longer than {_LONGEST_CALL} characters."
    return ParseError(f"Malformed tool call: {problem}"), close + len(_CALL_END)


def _to_call(value: Any) -> ToolCall | ParseError:
    expected = 'Malformed tool call: expected {"tool": "<name>", "args": {...}}, '
    if not isinstance(value, dict):
        return ParseError(f"{expected}got {type(value).__name__}.")
    if _deeper(value, _DEEPEST_CALL):
        return ParseError(f"Malformed tool call: {_TOO_DEEP}")
    tools = [value[key] for key in ("tool", "name") if key in value]
    args = [value[key] for key in ("args", "arguments") if key in value] or [{}]
    if len(tools) != 1 or not isinstance(tools[0], str):
        return ParseError(f'{expected}and "tool" is not one string.')
    if len(args) != 1 or not isinstance(args[0], dict):
        return ParseError(f'{expected}and "args" is not one object.')
    for key in value:
        if key not in ("tool", "name", "args", "arguments"):
            return ParseError(f"{expected}and {key[:40]!r} is neither of these; arguments go inside \"args\".")
    return ToolCall(tools[0], args[0])


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is not None and (levels == 0 or any(_deeper(part, levels - 1) for part in parts))


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:20]} is not a finite number")
    return value


_TOO_DEEP = f"its JSON is nested more than {_DEEPEST_CALL} deep."
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
