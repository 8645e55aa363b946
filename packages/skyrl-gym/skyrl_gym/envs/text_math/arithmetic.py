"""The arithmetic problems of text_math: what each difficulty holds, how the splits are cut, and worked solutions.

Every difficulty is a finite list of distinct problems. A hash of a problem with its factors and summands sorted decides
the split: "47 + 38" and "38 + 47" lie in one, everywhere. A hash of it as it is written decides the order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, zip_longest

import numpy as np
from numpy.typing import NDArray

SUM, DIFFERENCE, PRODUCT, PRODUCT_SUM, PRODUCT_DIFFERENCE = range(1, 6)
_CHAIN_TERMS, _CHAIN_CANDIDATES = 40, 50_000
_COMMUTING = {SUM: _CHAIN_TERMS, DIFFERENCE: 0, PRODUCT: 2, PRODUCT_SUM: 2, PRODUCT_DIFFERENCE: 2}
"""How many of the leading terms may change places; of a sum all, so long as it may be."""
_SHARES = {"val": (0,), "test": (1,), "train": tuple(range(2, 10))}
"""Tenths of the hash range."""
_FORMS = {DIFFERENCE: "{} - {}", PRODUCT: "{} × {}", PRODUCT_SUM: "{} × {} + {}", PRODUCT_DIFFERENCE: "{} × {} - {}"}
_TEMPLATES = {"en": "{} = ? Answer in \\boxed{{}}.", "zh": "{} = ？把答案写进 \\boxed{{}}。"}
Terms = NDArray[np.int64]
"""A problem per row, filled up with zeros, which no problem has among its terms."""
Block = tuple[int, Terms]


@dataclass(frozen=True, slots=True)
class Problem:
    """One of the five kinds, with its terms. Example: Problem(PRODUCT_SUM, (47, 8, 12)) is 47 × 8 + 12."""

    kind: int
    terms: tuple[int, ...]

    @property
    def expression(self) -> str:
        return " + ".join(map(str, self.terms)) if self.kind == SUM else _FORMS[self.kind].format(*self.terms)

    @property
    def answer(self) -> int:
        if self.kind == SUM:
            return sum(self.terms)
        first, second, *third = self.terms
        if self.kind == DIFFERENCE:
            return first - second
        return first * second + sum(third) * (-1 if self.kind == PRODUCT_DIFFERENCE else 1)

    def text(self, lang: str) -> str:
        return _TEMPLATES[lang].format(self.expression)


class ProblemTable:
    """The problems of one difficulty, by split and index."""

    def __init__(self, difficulty: int) -> None:
        blocks = LEVELS[difficulty]()
        problems = [np.insert(terms, 0, kind, axis=1).astype(np.int16) for kind, terms in blocks]
        self._problems = np.concatenate(problems)  # the blocks of a difficulty are equally wide
        order = np.concatenate([_hash(kind, terms) for kind, terms in blocks])
        split = np.concatenate([_hash(kind, _canonical(kind, terms)) for kind, terms in blocks]) % 10
        # Sorted by hash, which is the shuffled order, and without the second copies that random chains may hold.
        _, shuffled = np.unique(order, return_index=True)
        tenths = split[shuffled]
        self._rows = {name: shuffled[np.isin(tenths, shares)].astype(np.int32) for name, shares in _SHARES.items()}

    def count(self, split: str) -> int:
        return len(self._rows[split])

    def problem(self, split: str, index: int) -> Problem:
        kind, *terms = self._problems[self._rows[split][index]].tolist()
        return Problem(kind, tuple(filter(None, terms)))


table = cache(ProblemTable)


def count(split: str, difficulty: int) -> int:
    return table(difficulty).count(split)


# splitmix64's step (Steele, Lea and Flood, 2014): a bijection of 64-bit words that looks random.
def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> np.uint64(30))) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> np.uint64(27))) * 0x94D049BB133111EB
    return x ^ (x >> np.uint64(31))


# A hash per row. Zeros are skipped: the block's width does not matter.
def _hash(kind: int, terms: Terms) -> NDArray[np.uint64]:
    state = _mix(np.full(len(terms), kind, dtype=np.uint64))
    for column in terms.T.astype(np.uint64):
        state = np.where(column > 0, _mix(state ^ column), state)
    return state


def _canonical(kind: int, terms: Terms) -> Terms:
    free = _COMMUTING[kind]
    return np.concatenate([np.sort(terms[:, :free], axis=1), terms[:, free:]], axis=1)


# Every combination of whole numbers from inclusive ranges, one a row.
def _grid(*ranges: tuple[int, int]) -> Terms:
    axes = np.meshgrid(*(np.arange(low, high + 1) for low, high in ranges), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)


def _differences(kind: int, *ranges: tuple[int, int]) -> Block:
    """Those that are not below 0."""
    terms = _grid(*ranges)
    return kind, terms[terms[:, :-1].prod(axis=1) >= terms[:, -1]]


def _chains() -> Block:
    number = _mix(np.arange(_CHAIN_CANDIDATES, dtype=np.uint64))
    weights = np.arange(3, _CHAIN_TERMS + 1, dtype=np.float64) ** -2.4
    lengths = 3 + np.searchsorted(np.cumsum(weights) / weights.sum(), (number >> 11) / float(1 << 53))
    columns = np.arange(_CHAIN_TERMS, dtype=np.uint64)
    terms = 10 + (_mix(number[:, None] ^ _mix(columns)[None, :]) % 90).astype(np.int64)
    return SUM, np.where(columns[None, :] < lengths[:, None], terms, 0)


_TWO, _THREE = (10, 99), (100, 999)
LEVELS: dict[int, Callable[[], list[Block]]] = {
    1: lambda: [(SUM, _grid(_TWO, _TWO))],
    2: lambda: [(SUM, _grid(_TWO, _TWO)), _differences(DIFFERENCE, _TWO, _TWO)],
    3: lambda: [(PRODUCT, _grid(_TWO, (2, 9)))],
    4: lambda: [(SUM, _grid(_THREE, _THREE)), _differences(DIFFERENCE, _THREE, _THREE)],
    5: lambda: [(PRODUCT_SUM, _grid(_TWO, (2, 9), _TWO)), _differences(PRODUCT_DIFFERENCE, _TWO, (2, 9), _TWO)],
    6: lambda: [(PRODUCT, _grid(_TWO, _TWO))],
    7: lambda: [(PRODUCT, _grid(_THREE, _TWO))],
    8: lambda: [_chains()],
}
_WORDS = {"en": (" write ", " carry ", " borrow 1"), "zh": ("写", "进", "借1")}


def worked_steps(problem: Problem, lang: str) -> list[str]:
    """The steps of a careful pupil in a compact notation.

    47 + 38        7+8=15 write 5 carry 1; 4+3+1=8 write 8
    52 - 38        12-8=4 write 4 borrow 1; 5-3-1=1 write 1
    47 × 8         7×8=56 write 6 carry 5; 4×8+5=37 write 37
    47 × 38        47×30=1410; 47×8=376; 1410+376=1786
    47 × 8 + 12    47×8=376; 376+12=388
    47 + 38 + 12   47+38=85; 85+12=97
    """
    first, second, *rest = problem.terms
    if problem.kind == SUM:
        pairs = zip_longest(_digits(first), _digits(second), fillvalue=0)
        return _chain(problem.terms) if rest else _columns("+", list(pairs), lang)
    if problem.kind == DIFFERENCE:
        return _difference(first, second, lang)
    if problem.kind == PRODUCT and second < 10:
        return _columns("×", [(x, second) for x in _digits(first)], lang)
    if problem.kind == PRODUCT:
        parts = [digit * 10**place for place, digit in enumerate(_digits(second)) if digit][::-1]
        return [f"{first}×{part}={first * part}" for part in parts] + _chain([first * part for part in parts])
    sign = "+" if problem.kind == PRODUCT_SUM else "-"
    return [f"{first}×{second}={first * second}", f"{first * second}{sign}{rest[0]}={problem.answer}"]


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number))]


def _chain(terms: Sequence[int]) -> list[str]:
    totals = pairwise(accumulate(terms))
    return [f"{before}+{term}={after}" for (before, after), term in zip(totals, terms[1:], strict=True)]


def _columns(sign: str, columns: list[tuple[int, int]], lang: str) -> list[str]:
    write, carry_word, _ = _WORDS[lang]
    steps, carry = [], 0
    for number, (x, y) in enumerate(columns, start=1):
        expression = f"{x}{sign}{y}+{carry}" if carry else f"{x}{sign}{y}"
        value = (x + y if sign == "+" else x * y) + carry
        carry = value // 10 if number < len(columns) else 0
        step = f"{expression}={value}{write}{value - 10 * carry}"
        steps.append(f"{step}{carry_word}{carry}" if carry else step)
    return steps


def _difference(first: int, second: int, lang: str) -> list[str]:
    """Column by column; needs first >= second."""
    write, _, borrow_word = _WORDS[lang]
    steps, borrow = [], 0
    for x, y in zip_longest(_digits(first), _digits(second), fillvalue=0):
        expression = f"{y}-{borrow}" if borrow else f"{y}"
        value = x - y - borrow
        borrow = int(value < 0)
        value += 10 * borrow
        steps.append(f"{x + 10 * borrow}-{expression}={value}{write}{value}{borrow_word if borrow else ''}")
    return steps
