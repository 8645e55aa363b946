"""Logic puzzles with exactly one solution: knights and knaves, orders of arrival, guests of a party.

At difficulty d a puzzle is about d + 2 people. A world says everything about them, and a bit mask says in which worlds
a clue holds. A puzzle takes clues that hold in a secret world until no other is left, and then does without those that
it can: one solution, proved, and no idle clue. A hash of what the clues mean decides the split.
"""

import hashlib
import random
from bisect import bisect_left
from functools import cache, reduce
from itertools import accumulate, permutations, product
from math import perm
from operator import and_
from typing import Any

import numpy as np

from skyrl_gym.envs.text_math.words import MOST, SPACE, shuffled, wording

LEVELS = (1, 2, 3, 4, 5)
_SHARES = {"val": (0,), "test": (1,), "train": range(2, 10)}
_KINDS = ("knights", "orders", "guests")
Clue = tuple[str, tuple[int, ...], int]
"""A form, the people it names, and the mask: bit i for world i. Example: ("before", (2, 0), 0b110001)."""


@cache
def solver(kind: str, people: int) -> tuple[list[tuple[int, ...]], list[Clue]]:
    """All worlds and all clues."""
    worlds = list(permutations(range(people)) if kind == "orders" else product((0, 1), repeat=people))
    columns = np.array(worlds).T
    clues = []
    for form, clue in wording("logic.yaml")[kind]["clues"].items():
        for named in permutations(range(people), clue["people"]):
            known = dict(zip("xyz", columns[list(named)], strict=False))
            bits = np.packbits(eval(clue["holds"], known), bitorder="little")
            clues.append((form, named, int.from_bytes(bits.tobytes(), "little")))
    return worlds, clues


def puzzle(kind: str, people: int, split: str, rng: random.Random) -> tuple[tuple[int, ...], list[Clue]]:
    """A world, and clues of which it is the only solution and none can be left out. All worlds are as likely."""
    worlds, clues = solver(kind, people)
    secret = int(rng.random() * len(worlds))
    while True:
        chosen, left = list[Clue](), -1
        while left != 1 << secret:  # ends: all clues that hold in a world hold together in no other (tested)
            clue = clues[int(rng.random() * len(clues))]
            if clue[2] >> secret & 1 and left & clue[2] != left:
                chosen.append(clue)
                left &= clue[2]
        for clue in list(chosen):
            rest = [other for other in chosen if other is not clue]
            if reduce(and_, (mask for _, _, mask in rest), -1) == left:
                chosen = rest
        form = relabelled(kind, people, [mask for _, _, mask in chosen])
        plain = f"{wording('logic.yaml')[kind]['salt']} {kind} {people} {form}"
        if hashlib.blake2b(plain.encode(), digest_size=8).digest()[0] % 10 in _SHARES[split]:
            return worlds[secret], chosen


def relabelled(kind: str, people: int, masks: list[int]) -> list[Any]:
    """The same list for puzzles that differ only in who is who."""
    # As Weisfeiler and Leman compare graphs; puzzles that this cannot tell apart lie in one split as well.
    ranks, meaning = [0] * people, _same_mask(kind, people)

    def told() -> list[Any]:
        return [sorted((form, *[ranks[who] for who in names]) for form, names in meaning[mask]) for mask in masks]

    for _ in range(2):
        about: list[list[Any]] = [[] for _ in ranks]
        for mask, number in zip(masks, _ranked(told()), strict=True):
            for form, names in meaning[mask]:
                for place, who in enumerate(names):
                    about[who].append((number, form, place, *[ranks[other] for other in names]))
        ranks = _ranked([(rank, *sorted(each)) for rank, each in zip(ranks, about, strict=True)])
    return sorted(told())


def _ranked(values: list[Any]) -> list[int]:
    order = sorted(values)
    return [bisect_left(order, value) for value in values]


# By mask, every clue that means it: "both are knights" names two people in either order.
@cache
def _same_mask(kind: str, people: int) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for form, named, mask in solver(kind, people)[1]:
        found.setdefault(mask, []).append((form, named))
    return found


def count(split: str, difficulty: int) -> int:
    """One of each kind for each ordered choice of names, a million at most."""
    return min(MOST, len(_KINDS) * perm(len(wording("logic.yaml")["people"]["en"]), difficulty + 2))


def make(split: str, difficulty: int, lang: str, index: int) -> tuple[str, str, list[str]]:
    """The text of a task, its answer and the worked steps: how many worlds are left after each clue."""
    data, kind, people = wording("logic.yaml"), _KINDS[index % len(_KINDS)], difficulty + 2
    world, clues = puzzle(kind, people, split, random.Random(f"text_math:logic:{split}:{difficulty}:{index}"))
    free, names = list(data["people"][lang]), []
    choice = shuffled(index // len(_KINDS), perm(len(free), people))
    for _ in range(people):
        choice, pick = divmod(choice, len(free))
        names.append(free.pop(pick))
    comma, last = data["join"][lang]
    listed = comma.join(names[:-1]) + last + names[-1]
    said = [data[kind]["clues"][form][lang].format(*(names[i] for i in named)) for form, named, _ in clues]
    intro, ask = (data[kind][part][lang].format(people=listed) for part in ("intro", "ask"))
    if kind == "orders":
        answer = [name for _, name in sorted(zip(world, names, strict=True))]
    else:
        answer = [data[kind]["facts"][lang][fact] for fact in world]
    cases, left = len(solver(kind, people)[0]), accumulate((mask for _, _, mask in clues), and_)
    steps = [data["left"][lang].format(n, worlds.bit_count(), cases) for n, worlds in enumerate(left, start=1)]
    return SPACE[lang].join([intro, *said, ask]), ", ".join(answer), steps
