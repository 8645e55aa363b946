"""The grammar of tool calls, schemas from signatures, the calculator, search and wiki."""

import json
import math
import re
import time
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.parsing import MAX_CALLS, ParseError, ToolCall, parse_tool_calls
from skyrl_gym.tools.calculator import calculate
from skyrl_gym.tools.search import Corpus
from skyrl_gym.tools.tool import ToolError, run_call, tool


def wrap(text):
    return f"<tool_call>{text}</tool_call>"


GOOD = '{"tool": "f", "args": {"x": 1}}'
F1 = ToolCall("f", {"x": 1})
CUT, BAD = "cut off", "expected {"
GRAMMAR = [
    ("", []),
    ("just words, </tool_call> and <tool_cal", []),
    (wrap(GOOD), [F1]),
    (f"I think. {wrap(GOOD)} and then {wrap(GOOD)} done", [F1, F1]),
    (wrap(f"\n  {GOOD}\n"), [F1]),
    (wrap(f"```json\n{GOOD}\n```"), [F1]),
    (wrap(f"```{GOOD}```"), [F1]),
    (wrap('{"name": "f", "arguments": {"x": 1}}'), [F1]),
    (wrap('{"args": {"x": 1}, "tool": "f"}'), [F1]),
    (wrap('{"tool": "f"}'), [ToolCall("f", {})]),
    (wrap('{"tool": "f", "args": {"x": {"y": [{"z": {}}]}}}'), [ToolCall("f", {"x": {"y": [{"z": {}}]}})]),
    (
        wrap('{"tool": "f", "args": {"x": "}{</tool_call><tool_call>"}}'),
        [ToolCall("f", {"x": "}{</tool_call><tool_call>"})],
    ),
    (wrap('{"tool": "查", "args": {"词": "你好 😀"}}'), [ToolCall("查", {"词": "你好 😀"})]),
    (wrap('{"tool": "f", "args": {"x": "\\u4f60\\n"}}'), [ToolCall("f", {"x": "你\n"})]),
    (wrap('{"tool": "f", "args": {"x": "a\nb\tc"}}'), [ToolCall("f", {"x": "a\nb\tc"})]),
    ("<tool_call>", [CUT]),
    ("<tool_call>" + GOOD, [CUT]),
    ("<tool_call>" + GOOD[:-5], [CUT]),
    (f"<tool_call>{GOOD[:-5]} {wrap(GOOD)}", [CUT, F1]),
    (f"<tool_call>{GOOD}{wrap(GOOD)}", [CUT, F1]),
    (f"{wrap(GOOD[:-5])}{wrap(GOOD)}", ["not valid JSON", F1]),
    (wrap(GOOD + GOOD), ["other than </tool_call>"]),
    (wrap(GOOD + " please"), ["other than </tool_call>"]),
    (wrap(""), ["not valid JSON"]),
    (wrap("{'tool': 'f'}"), ["not valid JSON"]),
    (wrap("[1]"), [BAD]),
    (wrap('"f"'), [BAD]),
    (wrap('{"args": {}}'), [BAD]),
    (wrap('{"tool": 5}'), [BAD]),
    (wrap('{"tool": "f", "args": [1]}'), [BAD]),
    (wrap('{"tool": "f", "arg": {"x": 1}}'), [BAD]),
    (wrap(json.dumps({"tool": "f", "args": {"x": "y" * 20_000}})), ["at most 20000 characters"]),
    (wrap("[" * 9000 + "]" * 9000), ["nested"]),
    (wrap('{"tool": "f", "args": {"x": ' + "9" * 5000 + "}}"), ["not valid JSON"]),
    (wrap(GOOD) * 10, [F1] * MAX_CALLS + [f"first {MAX_CALLS}"]),
]


@pytest.mark.parametrize(("text", "expected"), GRAMMAR, ids=range(len(GRAMMAR)))
def test_grammar(text, expected):
    found = parse_tool_calls(text)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert other in one.message if isinstance(other, str) else one == other


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    max_leaves=8,
)


@given(st.text(), st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_a_call_survives_and_none_of_its_prefixes_is_one(name, args, ascii_only):
    text = wrap(json.dumps({"tool": name, "args": args}, ensure_ascii=ascii_only))
    assert parse_tool_calls(f"so {text} then") == [ToolCall(name, args)]
    for end in range(len(text)):
        found = parse_tool_calls(text[:end])
        assert bool(found) == (end >= len("<tool_call>"))
        assert all(isinstance(one, ParseError) for one in found)


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", '<tool_call>{"a":"', "<tool_call>[", '<tool_call>{"":["', "<tool_call>```", "<tool_call> \n"],
)
def test_time_is_linear(piece):
    start = time.process_time()
    parse_tool_calls(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 0.05


@tool
def order(
    item: str, count: int, price: float = 1, tags: list[str] = (), size: Literal["S", 1] = 1, note: str | None = ""
):
    """Orders things."""
    if item == "long":
        return "x" * 9999
    if item in ("\ud800", "deep"):
        raise ToolError(f"so {item}") if item == "\ud800" else RecursionError(item)
    return {"item": item, "total": count * price}


class TestTool:
    def test_schema(self):
        kinds = {"item": "string", "count": "integer", "price": "number"}
        properties = {name: {"type": kind} for name, kind in kinds.items()}
        properties |= {"tags": {"type": "array", "items": {"type": "string"}}, "size": {"enum": ["S", 1]}}
        properties |= {"note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
        parameters = {"type": "object", "properties": properties, "required": ["item", "count"]}
        described = {"name": "order", "description": "Orders things.", "parameters": parameters}
        assert order.schema == {"type": "function", "function": described} and not order.external
        with pytest.raises(TypeError, match="parameter 'x' needs a hint"):
            tool(lambda x: x)

    def test_arguments(self):
        for args, problem in [
            ({"item": "a", "count": 2, "price": 3, "tags": ["b"], "size": 1, "note": None}, None),
            ({"item": "a"}, "'count' is missing"),
            ({"item": "a", "count": 2, "colour": 1}, "no argument 'colour', only item, count"),
            ({"item": 5, "count": 2}, "'item' must be"),
            ({"item": "a", "count": True}, "'count' must be"),
            ({"item": "a", "count": 2.0}, "'count' must be"),
            ({"item": "a", "count": 2, "price": math.inf}, "'price' must be"),
            ({"item": "a", "count": 2, "tags": [1]}, "'tags' must be"),
            ({"item": "a", "count": 2, "size": True}, '"enum": ["S", 1]'),
        ]:
            done = run_call({"order": order}, ToolCall("order", args))
            assert done["args"] == (args if problem is None else None)
            assert problem in done["error"] if problem else json.loads(done["result"]) == {"item": "a", "total": 6}

    def test_failures_are_text(self):
        def run(item, name="order"):
            return run_call({"order": order}, ToolCall(name, {"item": item, "count": 1}))

        assert run("\ud800")["error"] == "so ?" and run("\ud800")["args"] is not None
        assert run("deep")["error"] == "order failed: RecursionError: deep"
        assert "did you mean order?" in run("a", "ordr")["error"]
        assert (
            run("long")["result"].endswith("x... (cut: 9999 characters in all)") and len(run("long")["result"]) < 4100
        )


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str) | st.decimals(0, 50, places=2).map(str),
    lambda x: (
        st.tuples(x, st.sampled_from(["+", "-", "*", "/", "//", "%"]), x).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | x.map(lambda s: f"-{s}")
        | st.tuples(x, st.integers(0, 3)).map(lambda t: f"({t[0]}) ** {t[1]}")
    ),
    max_leaves=8,
)
VALUES = """0.1 + 0.2 = 0.3; 10 / 4 = 2.5; 1 / 3 = 1/3; -1 / 8 = -0.125; 7 × 6 ÷ 4 − 1 = 9.5; 2 ^ 10 = 1024; 2 ** -2 = 0.25
; -7 // 2 = -4; -7 % 3 = 2; 1.5e3 = 1500; sqrt(9/4) = 1.5; gcd(12, 18) = 6; round(2.5) + floor(-0.5) + ceil(0.1) = 2
; max(1, 2/3, abs(-3)) = 3; 12+(\r\n34) = 46; 0.12345678901234567890123 * 10 = 1.2345678901234567890123"""
REFUSED = """; 1 +; 1 / 0; 0 ** -1; 2 ** 0.5; sqrt(2); sqrt(-1); 9 ** 9 ** 9; 1e999999; x; min(5); abs(); True; 'a'; 1_000
; 0x10; 1j; __import__('os'); (1).real; [1]; 1 < 2; 1 if 1 else 2; lambda: 1; 1\0; ٣; round(2, 10); gcd(1.5, 2)"""


class TestCalculator:
    @given(EXPRESSIONS)
    def test_agrees_with_fractions(self, expression):
        oracle = re.sub(r"(?<!\*\* )\b\d+(\.\d+)?", lambda number: f"Fraction('{number[0]}')", expression)
        try:
            value = eval(oracle, {"Fraction": Fraction})
        except ZeroDivisionError:
            value = None
        try:
            assert Fraction(calculate(expression)) == value
        except ToolError as error:
            assert value is None or "bits" in str(error) or len(expression) > 300

    def test_values(self):
        for case in VALUES.split(";"):
            expression, value = case.split(" = ")
            assert calculate(expression) == value.strip(), case

    @pytest.mark.parametrize("expression", [*REFUSED.split(";"), "(" * 250, "-" * 300 + "1", "1+" * 9999 + "1"])
    def test_refusals_are_quick_sentences(self, expression):
        start = time.process_time()
        with pytest.raises(ToolError, match=r"\.$"):
            calculate(expression)
        assert time.process_time() - start < 0.02


class TestCorpus:
    ROWS = (
        '{"title": "Red Shoe", "text": "A shoe. It is red and costs 5."}',
        '{"title": "运动鞋", "text": "红色的鞋子。价格是七。"}',
    )

    def corpus(self, tmp_path, *rows):
        path = tmp_path / "corpus.jsonl"
        path.write_text("\n".join(rows), encoding="utf-8")
        return Corpus.load(path)

    def test_search_and_wiki(self, tmp_path):
        corpus = self.corpus(tmp_path, *self.ROWS)
        assert corpus.search("what costs", 3) == "Red Shoe: It is red and costs 5."
        assert corpus.search("价格", 1) == "运动鞋: 价格是七。"
        assert corpus.wiki(" red shoe") == "Red Shoe\nA shoe. It is red and costs 5."
        with pytest.raises(ToolError, match="nearest titles are: Red Shoe"):
            corpus.wiki("Rde Shoes")
        with pytest.raises(ToolError, match="k must be from 1 to 10"):
            corpus.search("red", 0)

    def test_bad_rows(self, tmp_path):
        for row, problem in [
            ("5", "field 'title'"),
            ('{"title": "a"}', "field 'text'"),
            ('{"title": " ", "text": "a"}', "field 'title'"),
            ("{", "not one JSON object"),
            (self.ROWS[0], "field 'title': 'Red Shoe' is the title of an earlier row"),
        ]:
            with pytest.raises(ValueError, match=f"corpus.jsonl:2: {problem}"):
                self.corpus(tmp_path, self.ROWS[0], row)
