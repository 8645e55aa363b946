"""What is read out of a model's text: answers as docs/environments/text_math.md says, calls as tool_use.md does."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_OPEN, _BRACE = re.compile(r"\\boxed\s*{"), re.compile("[{}]")
_LONGEST = 10_000
_READ = 100_000  # bounds the time that a hostile text takes to some milliseconds


def last_answer(text: str, *, mark: str = "") -> str | None:
    r"""The content of the last complete `\boxed{...}` or `<answer>...</answer>`, or what follows `mark` on its line."""
    text = text[-_READ:] + "\n"
    found = [_last_box(text), _last_between(text, "<answer>", "</answer>")]
    if mark:
        found.append(_last_between(text, mark, "\n"))
    begin, end = max(found)
    return text[begin:end] if begin >= 0 else None


def _last_between(text: str, opening: str, closing: str) -> tuple[int, int]:
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    return (start + len(opening), text.find(closing, start)) if start >= 0 else (-1, -1)


def _last_box(text: str) -> tuple[int, int]:
    end = len(text)
    while (start := text.rfind("\\boxed", 0, end)) >= 0:
        opened = _OPEN.match(text, start)
        begin, depth = opened.end() if opened else end, 1
        for brace in _BRACE.finditer(text, begin, min(end, begin + _LONGEST + 1)):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return begin, brace.start()
        # This box is never closed, so an earlier one must close before it: each character is scanned once.
        end = start
    return -1, -1


def last_code(text: str) -> str | None:
    """What the last complete block holds between a line ```python (or ```py, or ``` alone) and the next line ```."""
    # Blocks in other languages do not count, nor does one that is cut off.
    found, opened, language = None, -1, ""
    lines = text[-_READ:].split("\n")
    for place, line in enumerate(lines):
        said = line.strip()
        if opened >= 0 and said == "```":
            found = "\n".join(lines[opened:place]) if language in ("", "python", "py") else found
            opened = -1
        elif said.startswith("```") and "`" not in said[3:]:
            opened, language = place + 1, said[3:].strip().lower()
    return found


MAX_CALLS, LONGEST_CALL = 8, 20_000
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_BEFORE_JSON = re.compile(r"\s*+(?:```\w*+\s*+)?")
_AFTER_JSON = re.compile(r"\s*+(?:```\s*+)?</tool_call>")
_OTHER_NAMES = {"name": "tool", "arguments": "args"}
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Example: ToolCall("wiki", {"title": "Velmora"})"""

    tool: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParseError:
    """What is wrong with a call, in a sentence for the model."""

    message: str


def said(message: dict[str, Any]) -> str:
    """What a message of OpenAI's API says; its `tool_calls` are written in our grammar, as the env reads them."""
    calls = [_written(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [message.get("content") if calls else message["content"], *calls]))


# Arguments that are no JSON are left so: the env says what is wrong with them.
def _written(function: dict[str, Any]) -> str:
    name, arguments = json.dumps(function["name"]), function.get("arguments") or {}
    args = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>{{"tool": {name}, "args": {args}}}</tool_call>'


def parse_tool_calls(text: str) -> list[ToolCall | ParseError]:
    """The calls in a text (docs/environments/tool_use.md), malformed ones as errors, in time linear in its length."""
    found: list[ToolCall | ParseError] = []
    position = 0
    while (start := text.find(_CALL, position)) >= 0:
        if len(found) == MAX_CALLS:
            return [*found, ParseError(f"Only the first {MAX_CALLS} tool calls of a message are read.")]
        call, position = _read_call(text, start + len(_CALL))
        found.append(call)
    return found


def _read_call(text: str, start: int) -> tuple[ToolCall | ParseError, int]:
    fence = _BEFORE_JSON.match(text, start)
    begin = fence.end() if fence else start
    try:
        value, length = _DECODER.raw_decode(text[begin : begin + LONGEST_CALL])
        after = _AFTER_JSON.match(text, begin + length)
        if after is not None:
            return _to_call(value), after.end()
        problem = "something other than </tool_call> follows the JSON object"
    except RecursionError:
        problem = "its JSON is nested too deeply"
    except ValueError as error:
        problem = f"not valid JSON of at most {LONGEST_CALL} characters ({str(error)[:100]})"
    following = text.find(_CALL, start)
    close = text.find(_CALL_END, start, following if following >= 0 else len(text))
    if close < 0:
        return ParseError("Malformed tool call: it is cut off before </tool_call>."), start
    return ParseError(f"Malformed tool call: {problem}."), close + len(_CALL_END)


def _to_call(value: Any) -> ToolCall | ParseError:
    given = value if isinstance(value, dict) else {}
    members = {_OTHER_NAMES.get(key, key): part for key, part in given.items()}
    tool, args = members.get("tool"), members.get("args", {})
    known = members.keys() <= {"tool", "args"} and len(members) == len(given)  # not both names of one member
    with suppress(ValueError):
        args = _DECODER.decode(args or "{}") if isinstance(args, str) else args  # as OpenAI's API has them
    if not known or not isinstance(tool, str) or not isinstance(args, dict):
        return ParseError('Malformed tool call: expected {"tool": "<name>", "args": {...}} and no other members.')
    return ToolCall(tool, args)
