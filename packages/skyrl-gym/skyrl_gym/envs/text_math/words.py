"""Word problems: stories from words.yaml, each a chain of five sentences with a step or two of arithmetic in each.

At difficulty d the first d sentences are told and the result of the last is asked. A task is a story and one choice of
its numbers, whatever the names in it. A story's choices are shuffled; the first tenth is val, the second test.
"""

import operator
from decimal import Decimal
from fractions import Fraction
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any

import yaml

LEVELS = (1, 2, 3, 4, 5)
MOST = 1_000_000
SPACE = {"en": " ", "zh": ""}
_ASK = {"en": "Answer in \\boxed{{}}.", "zh": "把答案写进 \\boxed{{}}。"}
_OPERATIONS = {
    "+": ("{}+{}", operator.add),
    "-": ("{}-{}", operator.sub),
    "*": ("{}×{}", operator.mul),
    "/": ("{}÷{}", operator.truediv),
    "%": ("{}×{}%", lambda x, y: x * y / 100),
}


@cache
def wording(name: str) -> Any:
    """The data file `name` beside this module; read once a process."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def shuffled(number: int, size: int) -> int:
    """Where `number` goes in a shuffle of range(size): times a stride that has no factor in common with size."""
    stride = size * 618 // 1000
    while gcd(stride, size) > 1:
        stride += 1
    return number * stride % size


@cache
def count(split: str, difficulty: int) -> int:
    """How many tasks there are: every story gives as many as the one with the fewest choices, a million at most."""
    stories = wording("words.yaml")["stories"]
    sizes = [prod(map(len, _numbers(story, difficulty).values())) for story in stories]
    return min(MOST, len(stories) * min(len(_places(split, size)) for size in sizes))


def make(split: str, difficulty: int, lang: str, index: int) -> tuple[str, str, list[str]]:
    """The text of a task, its answer and the worked steps; stories take turns."""
    data = wording("words.yaml")
    turn, which = divmod(index, len(data["stories"]))
    story = data["stories"][which]
    numbers = _numbers(story, difficulty)
    size = prod(map(len, numbers.values()))
    place = _places(split, size)[turn]
    choice, values = shuffled(place, size), {}
    for name, choices in numbers.items():
        choice, digit = divmod(choice, len(choices))
        values[name] = choices[digit]
    told, names, fractions = story["steps"][:difficulty], data["names"][lang], story.get("fractions", False)
    shown = {name: _show(value, fractions) for name, value in values.items()}
    shown |= {"name": names[place % len(names)], "other": names[(place + 1) % len(names)]}
    sentences = [step[lang].split(" | ") for step in told]
    parts = [*(sentence[0] for sentence in sentences), sentences[-1][1], _ASK[lang]]
    steps = []
    for number, operation in enumerate("; ".join(step["do"] for step in told).split("; "), start=1):
        left, sign, right = operation.split()
        form, apply = _OPERATIONS[sign]
        x, y = (values[name] if name in values else Fraction(name) for name in (left, right))
        values["it"] = values[f"r{number}"] = apply(x, y)
        equation = form.format(_show(x, fractions, "({})"), _show(y, fractions, "({})"))
        steps.append(f"{equation}={_show(values['it'], fractions)}")
    return SPACE[lang].join(parts).format(**shown), _show(values["it"], fractions), steps


def _places(split: str, size: int) -> range:
    tenth = size // 10
    return {"val": range(tenth), "test": range(tenth, 2 * tenth), "train": range(2 * tenth, size)}[split]


def _numbers(story: dict[str, Any], difficulty: int) -> dict[str, tuple[Fraction, ...]]:
    """What each number may be that the first sentences of a story name."""
    told = "".join(step["en"] for step in story["steps"][:difficulty])
    return {name: _values(spec) for name, spec in story["numbers"].items() if f"{{{name}}}" in told}


@cache
def _values(spec: str) -> tuple[Fraction, ...]:
    """What "2..9", "0.5..2.5/0.25" or "1/2 3/4" stands for."""
    if ".." not in spec:
        return tuple(map(Fraction, spec.split()))
    ends, _, step = spec.partition("/")
    low, high = map(Fraction, ends.split(".."))
    by = Fraction(step or 1)
    return tuple(low + by * number for number in range(int((high - low) / by) + 1))


def _show(value: Fraction, fractions: bool, form: str = "{}") -> str:
    """A whole number, a fraction (in `form`) or a decimal; those of the stories all end."""
    if value.denominator == 1:
        return str(value.numerator)
    return form.format(value) if fractions else f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
