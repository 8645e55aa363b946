r"""Worked solutions for text_math: the steps of a careful pupil in a compact notation, then the boxed answer.

47 + 38        7+8=15 write 5 carry 1; 4+3+1=8 write 8; \boxed{85}
52 - 38        12-8=4 write 4 borrow 1; 5-3-1=1 write 1; \boxed{14}
47 × 8         7×8=56 write 6 carry 5; 4×8+5=37 write 37; \boxed{376}
47 × 38        47×30=1410; 47×8=376; 1410+376=1786; \boxed{1786}
47 × 8 + 12    47×8=376; 376+12=388; \boxed{388}
47 + 38 + 12   47+38=85; 85+12=97; \boxed{97}
"""

from __future__ import annotations

from itertools import zip_longest

from skyrl_gym.envs.text_math.tasks import DIFFERENCE, PRODUCT, PRODUCT_SUM, SUM, Problem

_WORDS = {"en": (" write ", " carry ", " borrow 1"), "zh": ("写", "进", "借1")}


def boxed(answer: object) -> str:
    return f"\\boxed{{{answer}}}"


def worked_solution(problem: Problem, lang: str) -> str:
    """The steps and the boxed answer, separated by "; "."""
    return "; ".join([*_steps(problem, lang), boxed(problem.answer)])


def _steps(problem: Problem, lang: str) -> list[str]:
    first, second, *rest = problem.terms
    if problem.kind == SUM:
        return _chain(problem.terms) if rest else _column_sum(first, second, lang)
    if problem.kind == DIFFERENCE:
        return _column_difference(first, second, lang)
    if problem.kind == PRODUCT:
        return _column_product(first, second, lang) if second < 10 else _partial_products(first, second)
    sign = "+" if problem.kind == PRODUCT_SUM else "-"
    return [f"{first}×{second}={first * second}", f"{first * second}{sign}{rest[0]}={problem.answer}"]


def _chain(terms: tuple[int, ...]) -> list[str]:
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return steps


def _digits(number: int) -> list[int]:
    """Digits from the ones upwards."""
    return [int(digit) for digit in reversed(str(number))]


def _write(expression: str, value: int, last: bool, lang: str) -> tuple[str, int]:
    """A column's step and its carry; the last column is written whole."""
    write, carry_word, _ = _WORDS[lang]
    carry = 0 if last else value // 10
    step = f"{expression}={value}{write}{value if last else value % 10}"
    return (step + f"{carry_word}{carry}" if carry else step), carry


def _column_sum(first: int, second: int, lang: str) -> list[str]:
    steps, carry = [], 0
    columns = list(zip_longest(_digits(first), _digits(second), fillvalue=0))
    for number, (x, y) in enumerate(columns, start=1):
        expression = f"{x}+{y}+{carry}" if carry else f"{x}+{y}"
        step, carry = _write(expression, x + y + carry, number == len(columns), lang)
        steps.append(step)
    return steps


def _column_difference(first: int, second: int, lang: str) -> list[str]:
    """Needs first >= second."""
    write, _, borrow_word = _WORDS[lang]
    steps, borrow = [], 0
    for x, y in zip_longest(_digits(first), _digits(second), fillvalue=0):
        expression = f"{y}-{borrow}" if borrow else f"{y}"
        value = x - y - borrow
        borrow = int(value < 0)
        value += 10 * borrow
        steps.append(f"{x + 10 * borrow}-{expression}={value}{write}{value}{borrow_word if borrow else ''}")
    return steps


def _column_product(first: int, digit: int, lang: str) -> list[str]:
    steps, carry = [], 0
    digits = _digits(first)
    for number, x in enumerate(digits, start=1):
        expression = f"{x}×{digit}+{carry}" if carry else f"{x}×{digit}"
        step, carry = _write(expression, x * digit + carry, number == len(digits), lang)
        steps.append(step)
    return steps


def _partial_products(first: int, second: int) -> list[str]:
    parts = [digit * 10**place for place, digit in enumerate(_digits(second)) if digit][::-1]
    products = [first * part for part in parts]
    return [f"{first}×{part}={product}" for part, product in zip(parts, products, strict=True)] + _chain(
        tuple(products)
    )
