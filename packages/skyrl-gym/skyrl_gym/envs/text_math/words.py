"""Word problems: stories from words.yaml, each a chain of five sentences with a step or two of arithmetic in each.

At difficulty d the first d sentences are told and the result of the last is asked. The numbers of the first sentence
decide the split. Of these pairs, shuffled, the first tenth is val's and the second test's.
"""

import operator
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from itertools import product
from math import gcd, prod
from typing import Any

from skyrl_gym.data import beside

wording = partial(beside, __file__)
LEVELS = (1, 2, 3, 4, 5)
MOST = 1_000_000
SPACE = {"en": " ", "zh": ""}
_OPERATIONS = {
    "+": ("{}+{}", operator.add),
    "-": ("{}-{}", operator.sub),
    "*": ("{}×{}", operator.mul),
    "/": ("{}÷{}", operator.truediv),
    "%": ("{}×{}%", lambda x, y: x * y / 100),
}


def shuffled(number: int, size: int) -> int:
    """Where `number` goes in a shuffle of range(size): times a stride coprime to size."""
    stride = size * 618 // 1000
    while gcd(stride, size) > 1:
        stride += 1
    return number * stride % size


@cache
def count(split: str, difficulty: int) -> int:
    """Every story gives as many tasks as the one with the fewest choices, all a million at most."""
    stories = wording("words.yaml")["stories"]
    rest = [_rest(story, difficulty).values() for story in stories]
    sizes = [len(_pairs(which, split)) * prod(map(len, values)) for which, values in enumerate(rest)]
    return min(MOST, len(stories) * min(sizes))


def make(split: str, difficulty: int, lang: str, index: int) -> tuple[str, str, list[str]]:
    """The text of a task, its answer and the worked steps; stories take turns."""
    data = wording("words.yaml")
    turn, which = divmod(index, len(data["stories"]))
    story = data["stories"][which]
    rest, pairs = _rest(story, difficulty), _pairs(which, split)
    choice, place = divmod(shuffled(turn, len(pairs) * prod(map(len, rest.values()))), len(pairs))
    values = dict(zip(_numbers(story, 1), pairs[place], strict=True))
    for name, choices in rest.items():
        choice, digit = divmod(choice, len(choices))
        values[name] = choices[digit]
    told = story["steps"][:difficulty]
    names = data["names"][lang]
    fractions = story.get("fractions", False)
    shown = {name: _show(value, fractions) for name, value in values.items()}
    shown |= {"name": names[turn % len(names)], "other": names[(turn + 1) % len(names)]}
    sentences = [step[lang].split(" | ") for step in told]
    parts = [*(each[0] for each in sentences), sentences[-1][1], data["ask"][lang]]
    steps = []
    for number, operation in enumerate("; ".join(step["do"] for step in told).split("; "), start=1):
        left, sign, right = operation.split()
        form, apply = _OPERATIONS[sign]
        x, y = (values[name] if name in values else Fraction(name) for name in (left, right))
        values["it"] = values[f"r{number}"] = apply(x, y)
        equation = form.format(_show(x, fractions, "({})"), _show(y, fractions, "({})"))
        steps.append(f"{equation}={_show(values['it'], fractions)}")
    return SPACE[lang].join(parts).format(**shown), _show(values["it"], fractions), steps


# What a split's first sentences of a story may name.
@cache
def _pairs(which: int, split: str) -> list[tuple[Fraction, ...]]:
    pairs = list(product(*_numbers(wording("words.yaml")["stories"][which], 1).values()))
    either = sorted({tuple(sorted(pair)) for pair in pairs})
    tenth = len(either) // 10
    begin, end = {"val": (0, tenth), "test": (tenth, 2 * tenth), "train": (2 * tenth, len(either))}[split]
    mine = {either[shuffled(place, len(either))] for place in range(begin, end)}
    return [pair for pair in pairs if tuple(sorted(pair)) in mine]


def _rest(story: dict[str, Any], difficulty: int) -> dict[str, tuple[Fraction, ...]]:
    first = _numbers(story, 1)
    return {name: values for name, values in _numbers(story, difficulty).items() if name not in first}


def _numbers(story: dict[str, Any], difficulty: int) -> dict[str, tuple[Fraction, ...]]:
    told = "".join(step["en"] for step in story["steps"][:difficulty])
    return {name: _values(spec) for name, spec in story["numbers"].items() if f"{{{name}}}" in told}


# What "2..9", "0.5..2.5/0.25" or "1/2 3/4" stands for.
@cache
def _values(spec: str) -> tuple[Fraction, ...]:
    if ".." not in spec:
        return tuple(map(Fraction, spec.split()))
    ends, _, step = spec.partition("/")
    low, high = map(Fraction, ends.split(".."))
    by = Fraction(step or 1)
    return tuple(low + by * number for number in range(int((high - low) / by) + 1))


def _show(value: Fraction, fractions: bool, form: str = "{}") -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return form.format(value) if fractions else f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
