"""The built-in catalog: 1,500 made-up products as rows in WebShop's own JSON schema, which catalog.py reads.

50 kinds of products in five categories, each with five clusters of six. A cluster is a product that goals are made
from and five near misses of its kind, query and category: one without each of its three attributes, one with other
values of its first option, and one above every price limit of its goals. Both languages have the same products and
goals: every draw is of a pair [English, Chinese] of words.json, from one generator with a fixed seed.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

CLUSTERS = 5
GOALS = {1: 7, 2: 7, 3: 6}
"""Goals of a cluster by how many attributes they name: 20, so 5,000 in all."""


@cache
def words() -> dict[str, Any]:
    """The data file beside this module."""
    return json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


def rows(lang: str) -> list[dict[str, Any]]:
    """The rows, in an order that says nothing about clusters."""
    rng, side = random.Random("webshop_lite catalog 1"), ("en", "zh").index(lang)
    kinds = [line | {"kind": kind} for line in words()["lines"] for kind in line["kinds"]]
    asins = iter(rng.sample(range(10**8, 10**9), len(kinds) * CLUSTERS * 6))
    found = []
    for kind in kinds:
        brands = iter(rng.sample(words()["brands"], CLUSTERS * 6))
        used: set[Any] = set()
        for attributes in rng.sample(list(combinations(range(len(kind["attributes"])), 3)), CLUSTERS):
            cluster = _cluster(rng, kind["kind"], attributes)
            for number, draft in enumerate(cluster):
                row = {"asin": f"B{next(asins)}", **_row(rng, kind, draft, next(brands)[side], side)}
                found.append(row | {"instructions": [] if number else _instructions(rng, kind, draft, used, side)})
    rng.shuffle(found)
    return found


def _cluster(rng: random.Random, kind: list[Any], attributes: tuple[int, ...]) -> list[dict[str, Any]]:
    """What decides whether a product meets a goal: of the product that goals are made from, then of the near misses."""
    low, high, groups = kind[2:]
    values = {group: words()["options"][group]["values"] for group in groups}
    first = values[groups[0]]
    half = set(rng.sample(range(len(first)), len(first) // 2))
    has, lacks = ([value for n, value in enumerate(first) if (n in half) == inside] for inside in (True, False))
    base = {"attributes": attributes, "values": values | {groups[0]: has}, "price": rng.randint(low, high)}
    near = [base | {"values": values | {groups[0]: lacks}}]
    for lost, other in zip(attributes, rng.sample(sorted(set(range(8)) - set(attributes)), 3), strict=True):
        near.append(base | {"attributes": tuple(other if each == lost else each for each in attributes)})
    # A price limit lies more than 10 and at most 40 above the price (catalog.price_limit).
    near = [draft | {"price": base["price"] + rng.randint(-3, 9)} for draft in near]
    return [base, *near, base | {"price": base["price"] + rng.randint(42, 60)}]


def _row(rng: random.Random, kind: dict[str, Any], draft: dict[str, Any], brand: str, side: int) -> dict[str, Any]:
    """A product. The title tells one of its attributes, the description another, a bullet point the third."""
    titled, described, featured = (kind["attributes"][n] for n in rng.sample(draft["attributes"], 3))
    bullets = [pair[side] for pair in rng.sample(kind["features"], 2)] + [featured[2 + side]]
    rng.shuffle(bullets)
    name = kind["kind"][side].replace(" ", " " if side == 0 else "")
    series, text = rng.choice(words()["series"])[side], rng.choice(kind["texts"])[side]
    return {
        "name": f"{brand} {name.title()} {series}{',，'[side]} {titled[side]}",
        "category": kind["category"][side],
        "query": name,
        "product_category": f"{kind['path'][side]} › {name.title()}",
        "full_description": f"{text.format(type=name)} {described[2 + side]}",
        "small_description": bullets,
        "pricing": f"${draft['price'] - 0.01:.2f}",
        "customization_options": {
            words()["options"][group]["name"][side]: [{"value": value[side]} for value in values]
            for group, values in draft["values"].items()
        },
        "Attributes": [kind["attributes"][n][side] for n in draft["attributes"]],
        "nouns": [brand, *kind["kind"][side].split()],
        "rating": f"{rng.randint(31, 49) / 10}",
        "reviews": [pair[side] for pair in rng.sample(words()["reviews"], 2)],
    }


def _instructions(
    rng: random.Random, kind: dict[str, Any], draft: dict[str, Any], used: set[Any], side: int
) -> list[dict[str, Any]]:
    """Goals that no other cluster of the kind has: n attributes, and the first option, or all of them for n = 3."""
    chosen = []
    for level, count in GOALS.items():
        values = [[tuple(pair) for pair in pairs] for pairs in draft["values"].values()][: 1 if level < 3 else None]
        candidates = product(combinations(draft["attributes"], level), product(*values))
        chosen += rng.sample([goal for goal in candidates if goal not in used], count)
    used.update(chosen)
    return [
        {
            "instruction_attributes": [kind["attributes"][n][side] for n in attributes],
            "instruction_options": [pair[side] for pair in options],
        }
        for attributes, options in chosen
    ]
