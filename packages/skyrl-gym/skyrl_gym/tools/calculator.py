"""An exact calculator: Python's syntax for arithmetic, evaluated over fractions by a walk over a whitelist of nodes."""

import ast
import functools
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from skyrl_gym.tools.tool import ToolError, tool

MAX_LENGTH, MAX_BITS = 300, 2000
Number = int | Fraction
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**", "（": "(", "）": ")"})
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


@functools.lru_cache(4096)
def calculate(expression: str) -> str:
    """The value as a whole number, a finite decimal or a fraction "a/b"; ToolError says what is wrong."""
    source = " ".join(expression.translate(_SPELLINGS).split())  # one line, so that columns are places in it
    if len(expression) > MAX_LENGTH or not source.isascii():
        raise ToolError(f"An expression has at most {MAX_LENGTH} characters, all of them ASCII or × ÷ −.")
    try:
        return _written(_value(ast.parse(source, mode="eval").body, source))
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        raise ToolError("That is no arithmetic expression; write for example (12 + 3.5) * 4.") from None


@tool
def calculator(expression: str) -> str:
    """Computes exactly: + - * / // % **, parentheses, abs, min, max, floor, ceil, sqrt, round (half to even), gcd."""
    return calculate(expression)


def _value(node: ast.expr, source: str) -> Number:
    match node:
        case ast.Constant() if _NUMBER.fullmatch(literal := source[node.col_offset : node.end_col_offset]):
            # From the text, because a float would round it. Whole numbers stay int, which is several times faster.
            result = int(literal) if literal.isdigit() else Fraction(literal)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            operand = _value(node.operand, source)
            result = -operand if isinstance(node.op, ast.USub) else operand
        case ast.BinOp() if type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](_value(node.left, source), _value(node.right, source))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*[_value(each, source) for each in node.args])
        case _:
            raise ToolError(f"Only numbers, + - * / // % **, parentheses and {', '.join(_FUNCTIONS)} are known.")
    return _short(result)


def _short(value: Number, power: int = 1) -> Number:
    if abs(power) * (max(value.numerator.bit_length(), value.denominator.bit_length()) - 1) >= MAX_BITS:
        raise ToolError(f"The numbers grow beyond {MAX_BITS} bits.")
    return value


def _whole(value: Number) -> int:
    if value.denominator != 1:
        raise ToolError("An exponent and the arguments of gcd must be whole numbers.")
    return value.numerator


def _root(value: Number) -> Number:
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    if root * root != value:
        raise ToolError("sqrt has no exact value here.")
    return root


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: Fraction,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: Fraction(_short(base, _whole(exponent))) ** _whole(exponent),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = dict(
    abs=abs, min=min, max=max, floor=math.floor, ceil=math.ceil, sqrt=_root
)
_FUNCTIONS |= {"round": lambda value: round(value), "gcd": lambda *values: math.gcd(*map(_whole, values))}


def _written(value: Number) -> str:
    places = value.denominator.bit_length()  # enough for the digits of a finite decimal
    if value.denominator == 1 or 10**places % value.denominator:
        return str(value)
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}}"
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:].rstrip('0')}"
