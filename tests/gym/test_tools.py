"""The grammar of tool calls, schemas from signatures, the calculator, search and wiki."""

import json
import math
import re
import time
from datetime import date
from fractions import Fraction
from typing import List, Literal  # noqa: UP035

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym.parsing import MAX_CALLS, ParseError, ToolCall, parse_tool_calls
from skyrl_gym.tools.calculator import calculate
from skyrl_gym.tools.search import Corpus
from skyrl_gym.tools.tool import ToolError, run_call, tool


def wrap(text):
    return f"<tool_call>{text}</tool_call>"


GOOD, HALF = '{"tool": "f", "args": {"x": 1}}', '{"tool": "f", "args": {"x"'
F1, CUT, BAD, JUNK, JSON = ToolCall("f", {"x": 1}), "cut off", "expected {", "other than </tool_call>", "not valid JSON"
GRAMMAR = [
    ("just words, </tool_call> and <tool_cal", []),
    (f"I think. {wrap(GOOD)} and then {wrap(GOOD)} done", [F1, F1]),
    (wrap(f"\n  {GOOD}\n"), [F1]),
    (wrap(f"```json\n{GOOD}\n```"), [F1]),
    (wrap(f"```{GOOD}```"), [F1]),
    (wrap('{"arguments": {"x": 1}, "name": "f"}'), [F1]),
    (wrap('{"name": "f", "arguments": "{\\"x\\": 1}"}'), [F1]),
    (wrap('{"name": "f", "arguments": ""}'), [ToolCall("f", {})]),
    (wrap('{"name": "f", "arguments": "x=1"}'), [BAD]),
    (wrap('{"name": "f", "arguments": "' + "[" * 9000 + '"}'), ["nested"]),
    (wrap('{"name": "f", "arguments": "[1]"}'), [BAD]),
    (wrap('{"tool": "f"}'), [ToolCall("f", {})]),
    (wrap('{"tool": "f", "args": {"x": {"y": [{"z": {}}]}}}'), [ToolCall("f", {"x": {"y": [{"z": {}}]}})]),
    (
        wrap('{"tool": "f", "args": {"x": "}{</tool_call><tool_call>"}}'),
        [ToolCall("f", {"x": "}{</tool_call><tool_call>"})],
    ),
    (wrap('{"tool": "查", "args": {"词": "你好 😀 \\u4f60"}}'), [ToolCall("查", {"词": "你好 😀 你"})]),
    (wrap('{"tool": "f", "args": {"x": "a\nb\tc"}}'), [ToolCall("f", {"x": "a\nb\tc"})]),
    ("<tool_call>", [CUT]),
    ("<tool_call>" + GOOD, [CUT]),
    (f"<tool_call>{HALF} {wrap(GOOD)}", [CUT, F1]),
    (f"<tool_call>{GOOD}{wrap(GOOD)}", [CUT, F1]),
    (f"{wrap(HALF)}{wrap(GOOD)}", [JSON, F1]),
    (wrap(GOOD + GOOD), [JUNK]),
    (wrap(GOOD + " please"), [JUNK]),
    (wrap(""), [JSON]),
    (wrap("{'tool': 'f'}"), [JSON]),
    (wrap("[1]"), [BAD]),
    (wrap('"f"'), [BAD]),
    (wrap('{"args": {}}'), [BAD]),
    (wrap('{"tool": 5}'), [BAD]),
    (wrap('{"tool": "f", "name": "g"}'), [BAD]),
    (wrap('{"tool": "f", "args": [1]}'), [BAD]),
    (wrap('{"tool": "f", "arg": {"x": 1}}'), [BAD]),
    (wrap(json.dumps({"tool": "f", "args": {"x": "y" * 20_000}})), ["at most 20000 characters"]),
    (wrap("[" * 9000 + "]" * 9000), ["nested"]),
    (wrap('{"tool": "f", "args": {"x": ' + "9" * 5000 + "}}"), [JSON]),
    (wrap(GOOD) * 10, [F1] * MAX_CALLS + [f"first {MAX_CALLS}"]),
]


@pytest.mark.parametrize(("text", "expected"), GRAMMAR, ids=range(len(GRAMMAR)))
def test_grammar(text, expected):
    for one, other in zip(parse_tool_calls(text), expected, strict=True):
        assert other in one.message if isinstance(other, str) else one == other


VALUE = st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=4)


@settings(deadline=None)
@given(st.text(), st.dictionaries(st.text(), VALUE, max_size=4), st.booleans())
def test_a_call_survives_and_none_of_its_prefixes_is_one(name, args, ascii_only):
    text = wrap(json.dumps({"tool": name, "args": args}, ensure_ascii=ascii_only))
    assert parse_tool_calls(f"so {text} then") == [ToolCall(name, args)]
    for end in range(len(text)):
        found = parse_tool_calls(text[:end])
        assert bool(found) == (end >= len("<tool_call>")) and all(isinstance(one, ParseError) for one in found)


@pytest.mark.parametrize("piece", ["", '{"a":"', "[", '{"":["', "```", " \n"])
def test_time_is_linear(piece):
    start, text = time.process_time(), f"<tool_call>{piece}"
    parse_tool_calls(text * (1_000_000 // len(text)))
    assert time.process_time() - start < 0.05


@tool
def order(
    item: str, count: int, price: float = 1, tags: list[str] = (), size: Literal["S", 1] = 1, note: str | None = ""
):
    """Orders things."""
    if item in ("\ud800", "deep"):
        raise ToolError(f"so {item}") if item == "\ud800" else RecursionError(item)
    return "x" * 9999 if item == "long" else {"item": item, "total": count * price}


def call_order(name="order", **args):
    return run_call({"order": order}, ToolCall(name, args))


def test_schema_of_a_signature():
    properties = {"item": {"type": "string"}, "count": {"type": "integer"}, "price": {"type": "number"}}
    properties |= {"tags": {"type": "array", "items": {"type": "string"}}, "size": {"enum": ["S", 1]}}
    properties |= {"note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    parameters = {"type": "object", "properties": properties, "required": ["item", "count"]}
    described = {"name": "order", "description": "Orders things.", "parameters": parameters}
    assert order.schema == {"type": "function", "function": described} and not order.external
    with pytest.raises(TypeError, match="parameter 'x' needs a hint"):
        tool(lambda x: x)
    with pytest.raises(TypeError, match=r"Tool 'bare': parameter 'x' needs a hint of .* got typing.List"):
        tool(bare)
    with pytest.raises(TypeError, match="Tool 'later' is async, and nobody would await it: give a plain function"):
        tool(later)


def bare(x: List):  # noqa: UP006
    """Does things."""


async def later(x: str) -> str:
    """Does things."""
    return x


def varied(x: str, *more: int):
    """Does things."""


def named(**x: int):
    """Does things."""


def placed(x: int, /):
    """Does things."""


@pytest.mark.parametrize(("function", "shown"), [(varied, r"\*more: int"), (named, r"\*\*x: int"), (placed, "x: int")])
def test_a_parameter_that_a_call_cannot_give_by_name_is_refused(function, shown):
    with pytest.raises(TypeError, match=f"Tool '{function.__name__}': parameter .* by name, got {shown}"):
        tool(function)


def test_hints_that_stand_as_text_are_read_without_the_modules_names():
    """As of a function that has gone to another process, of a module with `from __future__ import annotations`."""
    names = {}
    exec("def pick(which: 'Literal[1, 2]', more: 'List[int]', no: 'Optional[str]' = None):\n    'Picks.'", names)
    properties = tool(names["pick"]).schema["function"]["parameters"]["properties"]
    assert properties["which"] == {"enum": [1, 2]} and properties["more"]["items"] == {"type": "integer"}
    assert properties["no"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}


def test_a_union_is_any_of_its_parts():
    def either(x: int | str):
        """Does things."""

    parameters = tool(either).schema["function"]["parameters"]
    assert parameters["properties"] == {"x": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}


def test_arguments_are_checked():
    done = call_order(item="a", count=2, price=3, tags=["b"], size=1, note=None)
    assert json.loads(done["result"]) == {"item": "a", "total": 6} and done["args"]["tags"] == ["b"]
    wrong = {"colour": 1, "item": 5, "price": math.inf, "tags": [1], "size": True, "note": 1}
    for args in [{name: value} for name, value in wrong.items()] + [{"count": True}, {"count": 2.0}]:
        done = call_order(**({"item": "a", "count": 2} | args))
        assert repr(next(iter(args))) in done["error"] and done["args"] is None
    assert call_order(item="a")["error"] == "order: argument 'count' is missing."
    assert "did you mean order?" in call_order("ordr")["error"]


def test_a_set_has_the_same_text_in_every_process():
    def colours():
        """Lists colours."""
        return {"colours": {"red", "green", "blue"}, "sizes": frozenset({3, 10}), "day": date(2026, 1, 2)}

    listed = tool(colours)
    done = run_call({"colours": listed}, ToolCall("colours", {}))
    assert done["result"] == '{"colours": ["blue", "green", "red"], "sizes": [10, 3], "day": "2026-01-02"}'


def test_failures_are_text():
    assert call_order(item="\ud800", count=1)["error"] == "so ?"
    assert call_order(item="deep", count=1)["error"] == "order failed: RecursionError: deep"
    long = call_order(item="long", count=1)["result"]
    assert re.fullmatch(r"x{2000}\n\[\.\.\. 5999 characters left out \.\.\.\]\nx{2000}", long)


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str) | st.decimals(0, 50, places=2).map(str),
    lambda x: (
        st.tuples(x, st.sampled_from(["+", "-", "*", "/", "//", "%"]), x).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | x.map(lambda s: f"-{s}")
        | st.tuples(x, st.integers(0, 3)).map(lambda t: f"({t[0]}) ** {t[1]}")
    ),
    max_leaves=8,
)
VALUES = """0.1 + 0.2 = 0.3; 10 / 4 = 2.5; 1 / 3 = 1/3; -1 / 8 = -0.125; 7 × 6 ÷ 4 − 1 = 9.5; 2 ^ 10 = 1024
; 2 ** -2 = 0.25; -7 // 2 = -4; -7 % 3 = 2; 1.5e3 = 1500; sqrt(9/4) = 1.5; gcd(12, 18) = 6; 12+(\r\n34) = 46
; round(2.5) + floor(-0.5) + ceil(0.1) = 2; max(1, 2/3, abs(-3)) = 3; 0.12345678901234567 * 10 = 1.2345678901234567"""
REFUSED = """; 1 +; 1 / 0; 0 ** -1; 2 ** 0.5; sqrt(2); sqrt(-1); 9 ** 9 ** 9; 1e999999; x; min(5); abs(); True; 'a'
; 1_000; 0x10; 1j; __import__('os'); (1).real; [1]; 1 < 2; 1 if 1 else 2; lambda: 1; 1\0; ٣
; round(2, 10); gcd(1.5, 2)"""


@settings(deadline=None)
@given(EXPRESSIONS)
def test_calculator_agrees_with_fractions(expression):
    oracle = re.sub(r"(?<!\*\* )\b\d+(\.\d+)?", lambda number: f"Fraction('{number[0]}')", expression)
    try:
        value = eval(oracle, {"Fraction": Fraction})
    except ZeroDivisionError:
        value = None
    try:
        assert Fraction(calculate(expression)) == value
    except ToolError as error:
        assert value is None or "bits" in str(error) or len(expression) > 300


def test_calculator_values():
    for case in VALUES.split(";"):
        expression, value = case.split(" = ")
        assert calculate(expression) == value.strip(), case


@pytest.mark.parametrize("expression", [*REFUSED.split(";"), "(" * 250, "-" * 300 + "1", "1+" * 9999 + "1"])
def test_calculator_refuses_in_a_quick_sentence(expression):
    start = time.process_time()
    with pytest.raises(ToolError, match=r"\.$"):
        calculate(expression)
    assert time.process_time() - start < 0.02


ROW = '{"title": "Red Shoe", "text": "A shoe. It is red and costs 5."}\n'


def test_search_and_wiki(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(ROW + '{"title": " 运动鞋 ", "text": "红色的鞋子。价格是七。"}', encoding="utf-8")
    corpus = Corpus.load(path)
    assert corpus.search("what costs", 3) == "Red Shoe: It is red and costs 5."
    assert corpus.search("价格", 1) == "运动鞋: 价格是七。"
    assert corpus.wiki(" red shoe") == "Red Shoe\nA shoe. It is red and costs 5."
    for call, problem in ((corpus.wiki, "titles are: Red Shoe"), (corpus.search, "at most 120")):
        with pytest.raises(ToolError, match=problem):
            call("Rde Shoes" if call == corpus.wiki else "a" * 121)


def test_bad_rows_of_a_corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    for row, problem in (("5", "'title'"), ('{"title": "a"}', "'text'"), ("{", "not one JSON"), (ROW, "'title': 'Red")):
        path.write_text(ROW + row)
        with pytest.raises(ValueError, match=f"corpus.jsonl:2: .*{problem}"):
            Corpus.load(path)


def test_external_tools_answer_from_a_record_each_entry_once():
    runs = []

    def roll(sides: int) -> str:
        """Rolls a die."""
        runs.append(sides)
        return str(len(runs))

    tools = {"roll": tool(roll, external=True), "order": order}
    six, two = ToolCall("roll", {"sides": 6}), ToolCall("roll", {"sides": 2})
    said = [run_call(tools, call) for call in (six, two, six, ToolCall("roll", {}))]
    assert runs == [6, 2, 6] and "missing" in said[3]["error"]
    record = list(said)
    assert [run_call(tools, call, record) for call in (six, two, six, ToolCall("roll", {}))] == said
    assert "holds no answer" in run_call(tools, six, record)["error"]
    assert run_call(tools, ToolCall("order", {"item": "a", "count": 1}), [])["result"], "only external ones"
    assert runs == [6, 2, 6]
