"""The tasks of code_lite: programs of a few steps, in words and in Python, from the descriptions in steps.yaml.

A step is only taken where the steps after it can see what it does: no list is sorted of which the sum is asked.
Programs are numbered without being listed, as `ways` counts how many lead up to any point.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from hashlib import blake2b
from string import Template
from textwrap import indent
from typing import Any, NamedTuple

from skyrl_gym.data import beside
from skyrl_gym.envs.text_math.words import shuffled

data = partial(beside, __file__, "steps.yaml")
LEVELS = (1, 2, 3, 4, 5)
RESIDUES = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}
MOST, SHOWN, HIDDEN, DRAWN, LONGEST = 1_000_000, 3, 16, 40, 200
TAB, TURNS = "    ", {True: 8, False: 64}
MOST_HALVED = 100_000
"""With an even k an odd number goes down by k at a time."""
ARGUMENT = range(2, 7)
"""What the argument k may be."""
Part = tuple[str, Any]
"""A step's name and its k: a number, a letter, "k" for the argument, or None. Example: ("clip", 5)"""
Node = tuple[str, bool, bool]
"""A kind of value, and whether the steps after it see its order and its repeats."""


class Step(NamedTuple):
    """A step from one kind of value to another; the fields of steps.yaml."""

    source: str
    target: str
    sees: tuple[str, str]
    ks: tuple[Any, ...]
    says: dict[str, str]
    code: str


@cache
def steps() -> dict[str, Step]:
    """Every step by its name; one that takes two kinds of values is two steps."""
    found = {}
    for row in data()["steps"]:
        low, _, high = row.get("k", "").partition("..")
        ks = (*range(int(low), int(high) + 1), "k") if high else (*low.split(),) or (None,)
        for source in row["from"].split():
            target = source if row["to"] == "same" else row["to"]
            sees = row.get("order", ""), row.get("repeats", "")
            found[f"{row['name']} {source}"] = Step(source, target, sees, ks, row, row["code"])
    return found


def residue(part: Part) -> int:
    return blake2b(f"{part[0]} {part[1]}".encode()).digest()[0] % 10


@cache
def befores(node: Node) -> list[tuple[Part, Node]]:
    """The parts that may come before what `node` describes, and what describes their input."""
    found, after = [], {"shows": True, "blind": False, "sorts": False, "drops": False}
    for name, step in steps().items():
        pairs = list(zip(step.sees, node[1:], strict=True))
        if step.target == node[0] and all(seen or flag not in ("needs", "sorts", "drops") for flag, seen in pairs):
            order, repeats = (after.get(flag, seen) for flag, seen in pairs)
            found += [((name, k), (step.source, order, repeats)) for k in step.ks]
    return found


@cache
def ways(node: Node, length: int) -> tuple[int, ...]:
    """By residue, how many programs of so many steps lead up to a node."""
    counts = [0 if length else int(not left) for left in range(10)]
    for part, before in befores(node) if length else ():
        for left, ways_there in enumerate(ways(before, length - 1)):
            counts[(left + residue(part)) % 10] += ways_there
    return tuple(counts)


def ends(split: str) -> Iterator[tuple[Node, int]]:
    return (((kind, True, True), left) for left in RESIDUES[split] for kind in data()["values"])


@cache
def programs(split: str, difficulty: int) -> int:
    return sum(ways(node, difficulty + 1)[left] for node, left in ends(split))


def count(split: str, difficulty: int) -> int:
    """How many tasks there are, a million at most."""
    return min(MOST, programs(split, difficulty) // TURNS[difficulty == 1])


def program(split: str, difficulty: int, rank: int) -> list[Part]:
    """Program number `rank` of a split, its steps in their order."""
    for node, left in ends(split):
        if rank < (size := ways(node, difficulty + 1)[left]):
            break
        rank -= size
    parts: list[Part] = []
    for length in range(difficulty, -1, -1):
        for part, before in befores(node):
            if rank < (size := ways(before, length)[(left - residue(part)) % 10]):
                break
            rank -= size
        parts, node, left = [part, *parts], before, (left - residue(part)) % 10
    return parts


def lines(step: Step, x: str, y: str, k: Any) -> str:
    """A step in Python, for functions called here and the source that is shown."""
    spelled = f"({k})" if isinstance(k, int) and k < 0 else repr(k) if isinstance(k, str) and k != "k" else str(k)
    text = Template(step.code).substitute(x=x, y=y, k=spelled)
    return text if "$y" in step.code else f"{y} = {text}"


def source(name: str, parts: list[Part]) -> str:
    """The function that does the steps."""
    chosen = [(steps()[part], k) for part, k in parts]
    body = [lines(step, step.source, step.target, k) for step, k in chosen]
    head = f"def {name}({chosen[0][0].source}{', k' * takes_k(parts)}):"
    return indent("\n".join([head, *body, f"return {chosen[-1][0].target}"]), TAB).strip()


def takes_k(parts: list[Part]) -> bool:
    return any(k == "k" for _, k in parts)


@cache
def function(name: str) -> Callable[[Any, Any], Any]:
    """A step as a function of its input and k."""
    made: dict[str, Any] = {}
    exec(f"def step(x, k):\n{indent(lines(steps()[name], 'x', 'y', 'k'), TAB)}\n    return y", made)
    return made["step"]


def run(parts: list[Part], value: Any, k: int) -> Any:
    """What a program makes of a value, with the argument k. OverflowError where that would take too long."""
    for name, own in parts:
        if name == "halving number" and abs(value) > MOST_HALVED:
            raise OverflowError(value)
        value = function(name)(value, k if own == "k" else own)
    return value


def inputs(kind: str, rng: random.Random) -> list[Any]:
    """Odd ones first, then such as one would try."""
    if kind == "numbers":
        pools = [rng.sample(range(-9, 21), 5) if turn % 2 else range(-9, 21) for turn in range(DRAWN)]
        odd = [[], [0], [-4, -4, -4], [3, 2, 1, -1, -2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
        return odd + [rng.choices(pool, k=rng.randint(3, 9)) for pool in pools]
    if kind == "number":
        return [0, 1, -1, -17, *rng.sample(range(2, 2000), DRAWN)]
    drawn = [rng.choices(rng.sample(data()["vocabulary"], 6), k=rng.randint(3, 7)) for _ in range(DRAWN)]
    if kind == "words":
        return [[], [""], ["noon", "noon"], ["tree", "a", "tree", "tree", "an"], *drawn]
    if kind == "text":
        texts = ["".join(rng.choices("aabenrs ", k=rng.randint(6, 18))) for _ in range(DRAWN // 2)]
        return ["", "z", "aaaa", "nnee nn", *texts, *(" ".join(each[:4]) for each in drawn[DRAWN // 2 :])]
    return [{}, {"a": 0}, {"an": -3, "ant": 5}, *({w: rng.randint(-4, 12) for w in each} for each in drawn)]


def tests(name: str, parts: list[Part]) -> list[list[str]] | None:
    """[call, value] of the shown examples, then of the hidden tests; None where they tell too little."""
    rng = random.Random(f"skyrl_gym code_lite {parts}")
    given = [(value, rng.choice(ARGUMENT)) for value in inputs(steps()[parts[0][0]].source, rng)]
    try:
        values = [run(parts, *each) for each in given]
    except OverflowError:
        return None
    texts, odd = [repr(value) for value in values], range(len(given) - DRAWN)
    new = list({texts[n]: n for n in range(len(odd), len(given))}.values())
    shown = [n for n in new if values[n]][:SHOWN]
    left = [n for n in dict.fromkeys([*new, *range(len(odd), len(given))]) if n not in shown]
    hidden = [*odd]
    for wrong in near_misses(parts):
        told = [n for n in [*hidden, *left] if differs(wrong, given[n], values[n])][:2]
        if len(told) < 2:
            return None
        hidden += [n for n in told if n not in hidden]
    chosen = shown + hidden + [n for n in left if n not in hidden][: HIDDEN - len(hidden)]
    said = [texts[n] for n in chosen]
    if len(shown) < SHOWN or len(set(said)) < SHOWN + 2 or max(map(said.count, said)) > HIDDEN // 2:
        return None
    if max(map(len, said)) > LONGEST:
        return None
    ending = ", {}" * takes_k(parts)
    return [[f"{name}({given[n][0]!r}{ending.format(given[n][1])})", texts[n]] for n in chosen]


def near_misses(parts: list[Part]) -> list[list[Part]]:
    """Programs with a step left out, one without steps, and one that takes the argument for 4."""
    fixed = [(name, 4 if k == "k" else k) for name, k in parts]
    return [[], *(parts[:n] + parts[n + 1 :] for n in range(len(parts))), *[fixed] * takes_k(parts)]


def differs(parts: list[Part], given: tuple[Any, int], truth: Any) -> bool:
    try:
        return bool(run(parts, *given) != truth)
    except Exception:  # steps that do not fit together without the one between them
        return True


@lru_cache(1024)  # groups play the same task many times
def make(split: str, difficulty: int, index: int) -> tuple[str, list[Part], list[list[str]]]:
    """The function's name, the program and its tests."""
    name, turns = data()["names"][index % len(data()["names"])], TURNS[difficulty == 1]
    for rank in range(turns * index, turns * (index + 1)):
        parts = program(split, difficulty, shuffled(rank, programs(split, difficulty)))
        if found := tests(name, parts):
            return name, parts, found
    raise RuntimeError(f"code_lite: none of {turns} programs of task {split}:{difficulty}:{index} can be told apart.")


def text(lang: str, name: str, parts: list[Part], examples: list[list[str]]) -> str:
    """What is asked."""
    says = data()["texts"][lang]
    values = data()["values"]
    chosen = [(steps()[part], k) for part, k in parts]
    given, made, argument = chosen[0][0].source, chosen[-1][0].target, takes_k(parts)
    signature = f"{name}({given}: {values[given]['type']}{', k: int' * argument}) -> {values[made]['type']}"
    asks = says["asks"].format(signature=signature, what=values[given][lang] + says["argument"] * argument)
    listed = [f"{n}. {step.says[lang].replace('{k}', str(k))}" for n, (step, k) in enumerate(chosen, start=1)]
    shown = [f"{call} == {value}" for call, value in examples]
    return "\n".join([asks, *listed, says["returns"], "", says["examples"], *shown])
