"""The built-in catalog: 2,400 made-up products, in clusters of six of one title, as rows in WebShop's JSON schema."""

from functools import cache, partial
from itertools import product
from random import Random
from typing import Any

from skyrl_gym.core import SPLITS
from skyrl_gym.data import beside

words = partial(beside, __file__, "words.json")
GOALS = 4
"""Of a product at each difficulty: 1,600 products, so 19,200 goals in all."""


@cache
def pages(lang: str) -> dict[str, str]:
    """Which page of a product tells an attribute, and what the values of the option "pack" mean."""
    side, facets = ("en", "zh").index(lang), words()["facets"].values()
    told = {value[0][side]: facet["page"] for facet in facets for value in facet["values"]}
    return told | {words()["pack"]["name"][side]: "features"}


def rows(lang: str) -> list[dict[str, Any]]:
    """The rows, in an order that says nothing about clusters; the field `split` is ours."""
    rng, side = Random("webshop_lite catalog 2"), ("en", "zh").index(lang)
    found: list[dict[str, Any]] = []
    for line, kind in [(each, kind) for each in words()["lines"] for kind in each["kinds"]]:
        for place, tag in enumerate(rng.sample(words()["tags"], 10)):
            split = SPLITS[max(place // 2 - 2, 0)]  # six tags of a kind to train, two to val and two to test
            found += [{"split": split} | row for row in _cluster(rng, line, kind, tag, side)]
    rng.shuffle(found)
    asins = rng.sample(range(10**8, 10**9), len(found))
    return [{"asin": f"B{number}"} | row for number, row in zip(asins, found, strict=True)]


def _cluster(rng: Random, line: Any, kind: Any, tag: Any, side: int) -> list[dict[str, Any]]:
    # One facet tells the four apart, two others only together: the goals of difficulty 1, and those of 2 and 3.
    facets = [words()["facets"][name] for name in rng.sample(line["facets"], 3)]
    alone, one, other = ([(facet["page"], value) for value in rng.sample(facet["values"], 4)] for facet in facets)
    owned = [[alone[n], one[n // 2], other[n % 2]] for n in range(4)]
    values = rng.sample(words()["options"][line["option"]][1], 8)
    packs = rng.sample(words()["pack"]["values"], 3)
    # A price limit is a multiple of ten that is more than 10 and at most 40 above the price (catalog.price_limit).
    tens = 10 * rng.randint(kind[1] // 10, kind[2] // 10)
    near = rng.choice(owned)
    far = rng.choice(owned)
    drafts = [(each, values[:4], tens + rng.randint(2, 9)) for each in owned]
    drafts += [(near, values[4:], tens + rng.randint(2, 9)), (far, values[:4], tens + rng.randint(42, 55))]
    found = [_row(rng, (line, kind, tag), side, packs, *draft) for draft in drafts]
    for row, each in zip(found, owned, strict=False):
        row["instructions"] = _instructions(rng, (kind, tag), side, packs, each, values[:4])
    return found


def _row(rng: Random, what: Any, side: int, packs: Any, owned: Any, values: Any, price: int) -> dict[str, Any]:
    (line, kind, tag), pack = what, words()["pack"]
    name, space = kind[0][side].replace(" ", " " * (side == 0)), (" ", "")[side]
    told = {page: rng.choice(value[1])[side] for page, value in owned}
    reviews = [told["reviews"], rng.choice(words()["reviews"])[side]]
    rng.shuffle(reviews)
    use = (", ", "，")[side].join(each[side] for each in kind[3]).capitalize() + ".。"[side]
    choices = {words()["options"][line["option"]][0][side]: values, pack["name"][side]: pack["letters"]}
    return {
        "name": f"{tag[0][side]}{space}{name}".title(),
        "category": line["path"][side],
        "query": name,
        "product_category": f"{line['path'][side]} › {name.title()}",
        "full_description": space.join([use, tag[1][0][side], told["description"]]),
        "small_description": [pack["says"][side].format(*(each[0] for each in packs)), told["features"]],
        "pricing": f"${price - 0.01:.2f}",
        "customization_options": {group: [{"value": x[0][side]} for x in each] for group, each in choices.items()},
        "Attributes": [tag[0][side], *(value[0][side] for _, value in owned)],
        "nouns": kind[0][side].split(),
        "rating": f"{rng.randint(31, 49) / 10}",
        "reviews": reviews,
        "instructions": [],
    }


def _instructions(rng: Random, what: Any, side: int, packs: Any, owned: Any, values: Any) -> list[dict[str, Any]]:
    (kind, tag), found = what, []
    for level, asked in ((1, owned[:1]), (2, owned[1:]), (3, owned[1:])):
        offered = product(values, zip(words()["pack"]["letters"], packs, strict=True) if level == 3 else [None])
        for value, pack in rng.sample(list(offered), GOALS):
            options = [value, *([[pack[0][0], pack[1][1]]] if pack else [])]
            said = [kind[3], tag[2], *(each[2] for _, each in asked), *(asks for _, asks in options)]
            use, whom, *rest = (rng.choice(asks)[side] for asks in said)
            text = rng.choice(words()["wishes"])[side].format(f"{use}{' ，'[side]}{whom}")
            goal = {"instruction_attributes": [tag[0][side], *(each[0][side] for _, each in asked)]}
            goal["instruction_options"] = [name[side] for name, _ in options]
            found.append(goal | {"instruction": (", ", "，")[side].join([text, *rest])})
    return found
