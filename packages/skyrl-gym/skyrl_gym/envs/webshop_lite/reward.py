"""The reward of a purchase, as WebShop publishes it (Yao et al., 2022, and the code of its repository).

    r = r_type * (matched attributes + matched options + [price <= limit]) / (goal attributes + goal options + 1)

The published matching is generous: "x-large" passes for "large", and "8" for "8.5"; with `strict` only the same does.
"""

import re
from functools import lru_cache
from typing import Any

from skyrl_gym.envs.webshop_lite.catalog import Product
from skyrl_gym.envs.webshop_lite.generate import words


def purchase(
    goal: dict[str, Any], wanted: Product, bought: Product, chosen: dict[str, str], strict: bool
) -> tuple[dict[str, float], dict[str, Any]]:
    """The reward's parts, each already times r_type, and the terms of the formula.
    wanted: the product that the goal was made from. chosen: the options of the `bought` one, value by group.
    """
    query, category = bought.query == wanted.query, len(bought.categories & wanted.categories) >= 2
    title = len(bought.nouns & wanted.nouns) / len(wanted.nouns) if wanted.nouns else 0.2
    r_type = 1.0 if query or category or title > 0.2 else 0.5
    if title < 0.1:
        r_type = 0.1 if title else 0.0
    attributes = sum(has_attribute(bought, attribute, strict) for attribute in goal["attributes"])
    colors = [normalize_color(own) for own in chosen.values()]
    like = [any(_alike(own, normalize_color(value)) for own in colors) for value in goal["options"].values()]
    options = len(goal["options"].items() & chosen.items()) if strict else sum(like)
    in_price = bought.price <= goal["price_upper"]
    asked = len(goal["attributes"]) + len(goal["options"]) + 1
    parts = {"attributes": r_type * attributes / asked, "options": r_type * options / asked}
    # The rest of the whole and not a share of its own: sevenths and the like would add up to 0.9999999999999999.
    whole = r_type * (attributes + options + 1) / asked
    parts["price"] = whole - (parts["attributes"] + parts["options"]) if in_price else 0.0
    terms = {"r_type": r_type, "query_match": query, "category_match": category, "title_score": title}
    terms |= {"r_att": attributes / len(goal["attributes"]), "r_price": float(in_price)}
    return parts, terms | ({"r_option": options / len(goal["options"])} if goal["options"] else {})


def has_attribute(product: Product, attribute: str, strict: bool) -> bool:
    """Whether an attribute is listed, or, unless `strict`, nearly so, or is in one of the product's texts."""
    if strict or attribute in product.attributes:
        return attribute in product.attributes
    texts = (product.name, " ".join(product.features), *product.description)
    return any(_alike(own, attribute) for own in product.attributes) or any(attribute in x.lower() for x in texts)


def normalize_color(value: str) -> str:
    """The first word of the published list that the value contains, or the value: "titanium" becomes "tan"."""
    return next((color for color in words()["colors"] if color in value), value)


@lru_cache(maxsize=1 << 16)
def _alike(one: str, two: str) -> bool:
    return token_set_ratio(one, two) > 85


def token_set_ratio(one: str, two: str) -> int:
    """The likeness of two sets of words, 0 to 100, as thefuzz and rapidfuzz measure it, but Chinese is kept."""
    first, second = (set(re.findall(r"\w+", text.lower())) for text in (one, two))
    both, left, right = (" ".join(sorted(part)) for part in (first & second, first - second, second - first))
    sizes = [len(f"{both} {rest}".strip()) for rest in (left, right)]
    distance = len(left) + len(right) - 2 * _common_subsequence(left, right)
    if not (first and second):
        return 0
    ratios = (1 - distance / sum(sizes), *(2 * len(both) / (len(both) + size) for size in sizes))
    return round(100 * max(ratios))


# The length of the longest common subsequence; one bit for each character of `one` (Hyyrö, 2004).
def _common_subsequence(one: str, two: str) -> int:
    row = full = (1 << len(one)) - 1
    places = {character: sum(1 << n for n, each in enumerate(one) if each == character) for character in set(one)}
    for character in two:
        hits = row & places.get(character, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(one) - row.bit_count()
