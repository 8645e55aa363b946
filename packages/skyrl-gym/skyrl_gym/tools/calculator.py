"""An exact calculator: Python's syntax for arithmetic, evaluated over fractions by a walk over a whitelist of nodes.

Numbers such as 12, 0.5 and 1.5e3; + - * / // % **, also written × ÷ − ^; parentheses; the functions below. Every value
is a fraction of at most MAX_BITS bits above and below the line, so that no expression takes more than milliseconds.
"""

from __future__ import annotations

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
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**", "（": "(", "）": ")", "\n": " ", "\r": " "})
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


@tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly: + - * / // % **, parentheses, abs, min, max, round (half to even), floor, ceil, sqrt, gcd, lcm."""  # noqa: E501
    return calculate(expression)


@functools.lru_cache(4096)
def calculate(expression: str) -> str:
    """The value as a whole number, a finite decimal or a fraction "a/b"; ToolError says what is wrong."""
    source = expression.translate(_SPELLINGS).strip()
    if len(source) > MAX_LENGTH:
        raise ToolError(f"The expression is longer than {MAX_LENGTH} characters.")
    if not source.isascii() or "_" in source:
        raise ToolError("The expression may hold numbers, operators, parentheses and functions only.")
    try:
        return _written(_value(ast.parse(source, mode="eval").body, source))
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("The expression cannot be read; write for example (12 + 3.5) * 4.") from None


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant():
            literal = source[node.col_offset : node.end_col_offset]
            if _NUMBER.fullmatch(literal) is None:
                raise ToolError(f"{literal[:20]!r} is not a number.")
            result = Fraction(literal)  # from the text: a float would round it
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign):
            operand = _value(node.operand, source)
            result = operand if isinstance(sign, ast.UAdd) else -operand
        case ast.BinOp() if type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](_value(node.left, source), _value(node.right, source))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            function, least, most = _FUNCTIONS[name]
            if not least <= len(node.args) <= most:
                raise ToolError(f"{name} takes {least} to {most} arguments, got {len(node.args)}.")
            result = Fraction(function(*(_value(argument, source) for argument in node.args)))
        case ast.Name() | ast.Call():
            raise ToolError(f"Only numbers and the functions {', '.join(_FUNCTIONS)} are known.")
        case _:
            raise ToolError("Only the operators + - * / // % ** and parentheses are known.")
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
        raise ToolError(f"The numbers grow beyond about {MAX_BITS * 3 // 10} digits.")
    return result


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    times = _whole(exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(times) * (bits - 1) > MAX_BITS:  # (bits - 1) * times is the least that the result can have
        raise ToolError(f"The numbers grow beyond about {MAX_BITS * 3 // 10} digits.")
    return Fraction(base**times)


def _root(value: Fraction) -> Fraction:
    if value >= 0:
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    raise ToolError("sqrt has no exact value here.")


def _rounded(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if abs(digits) > 100:
        raise ToolError("round takes at most 100 digits.")
    return Fraction(round(value, _whole(digits)))


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise ToolError("An exponent, a number of digits and the arguments of gcd and lcm must be whole numbers.")
    return value.numerator


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda x, y: Fraction(x // y),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "min": (lambda *values: min(values), 1, 50),
    "max": (lambda *values: max(values), 1, 50),
    "round": (_rounded, 1, 2),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "sqrt": (_root, 1, 1),
    "gcd": (lambda *values: math.gcd(*map(_whole, values)), 2, 50),
    "lcm": (lambda x, y: math.lcm(_whole(x), _whole(y)), 2, 2),
}


def _written(value: Fraction) -> str:
    numerator, rest = value.numerator, value.denominator
    if rest == 1:
        return str(numerator)
    places = {2: 0, 5: 0}
    for prime in places:
        while rest % prime == 0:
            rest //= prime
            places[prime] += 1
    if rest != 1:
        return f"{numerator}/{value.denominator}"
    after = max(places.values())
    digits = str(abs(numerator) * 10**after // value.denominator).rjust(after + 1, "0")
    return f"{'-' if numerator < 0 else ''}{digits[:-after]}.{digits[-after:]}"
