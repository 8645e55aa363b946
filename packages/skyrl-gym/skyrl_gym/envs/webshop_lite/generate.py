"""The built-in catalog: 1,500 made-up products as rows in WebShop's own JSON schema, which catalog.py reads.

50 kinds of products in five categories, each with five clusters of six: a product that goals are made from and five
near misses, one without each of its three attributes, one with other values of its first option, and one above every
price limit of its goals. Every draw is of a pair [English, Chinese] of words.json, from one generator.
"""

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
    found: list[dict[str, Any]] = []
    for kind in kinds:
        brands, used = iter(rng.sample(words()["brands"], CLUSTERS * 6)), set[Any]()
        for attributes in rng.sample(list(combinations(range(8), 3)), CLUSTERS):
            drafts = _cluster(rng, kind["kind"], attributes)
            cluster = [{"asin": f"B{next(asins)}"} | _row(rng, kind, next(brands), side, *draft) for draft in drafts]
            cluster[0]["instructions"] = _instructions(rng, kind, used, side, *drafts[0][:2])
            found += cluster
    rng.shuffle(found)
    return found


def _cluster(rng: random.Random, kind: list[Any], attributes: tuple[int, ...]) -> list[tuple[Any, Any, int]]:
    first, *rest = (list(map(tuple, words()["options"][group]["values"])) for group in kind[4])
    half, price = rng.sample(first, len(first) // 2), rng.randint(kind[2], kind[3])
    has, lacks = ([[value for value in first if (value in half) == inside], *rest] for inside in (True, False))
    near = [(attributes, lacks)]
    for lost, other in zip(attributes, rng.sample(sorted({*range(8)} - {*attributes}), 3), strict=True):
        near.append((tuple(other if each == lost else each for each in attributes), has))
    # A price limit lies more than 10 and at most 40 above the price (catalog.price_limit).
    priced = [(*draft, price + rng.randint(-3, 9)) for draft in near]
    return [(attributes, has, price), *priced, (attributes, has, price + rng.randint(42, 60))]


def _row(rng: random.Random, kind: Any, brand: Any, side: int, owned: Any, values: Any, price: int) -> dict[str, Any]:
    """A product. The title tells one of its attributes, the description another, a bullet point the third."""
    attributes, name = [kind["attributes"][n] for n in owned], kind["kind"][side].replace(" ", " " * (side == 0))
    titled, described, featured = rng.sample(attributes, 3)
    bullets = [pair[side] for pair in rng.sample(kind["features"], 2)] + [featured[2 + side]]
    rng.shuffle(bullets)
    series, text = rng.choice(words()["series"])[side], rng.choice(kind["texts"])[side].format(type=name)
    groups = [words()["options"][group]["name"][side] for group in kind["kind"][4]]
    choices = [[{"value": pair[side]} for pair in pairs] for pairs in values]
    return {
        "name": f"{brand[side]} {name.title()} {series}{(', ', '，')[side]}{titled[side]}",
        "category": kind["category"][side],
        "query": name,
        "product_category": f"{kind['path'][side]} › {name.title()}",
        "full_description": f"{text}{(' ', '')[side]}{described[2 + side]}",
        "small_description": bullets,
        "pricing": f"${price - 0.01:.2f}",
        "customization_options": dict(zip(groups, choices, strict=True)),
        "Attributes": [attribute[side] for attribute in attributes],
        "nouns": [brand[side], *kind["kind"][side].split()],
        "rating": f"{rng.randint(31, 49) / 10}",
        "reviews": [pair[side] for pair in rng.sample(words()["reviews"], 2)],
        "instructions": [],
    }


def _instructions(rng: random.Random, kind: Any, used: set[Any], side: int, owned: Any, values: Any) -> list[Any]:
    """Goals that no other cluster of the kind has: n attributes, and the first option, or all of them for n = 3."""
    found = []
    for level, count in GOALS.items():
        candidates = product(combinations(owned, level), product(*values[: 1 if level < 3 else None]))
        for goal in rng.sample([goal for goal in candidates if goal not in used], count):
            used.add(goal)
            attributes, options = [kind["attributes"][n][side] for n in goal[0]], [pair[side] for pair in goal[1]]
            found.append({"instruction_attributes": attributes, "instruction_options": options})
    return found
