"""A catalog: products, goals by split and difficulty, and search, from rows in WebShop's own JSON schema (_ROW).

Of rows with one asin the first counts. A product's goals are its `instructions`; else, by WebShop's synthetic rule,
`instruction_text` with `instruction_attributes` and each combination of options. A sentence that is not given is made
from query and attributes. All is frozen: a price given as a range, and the price limit of a goal, come from a checksum
of the asin. A goal is of difficulty 1, 2 or 3: up to two, three, or more attributes and options. No product has goals
in two splits.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_gym.bm25 import BM25
from skyrl_gym.core import SPLITS
from skyrl_gym.envs.webshop_lite.generate import rows, words

_ROW = {
    **dict.fromkeys(("asin", "name", "category", "query", "product_category"), str),
    **dict.fromkeys(("full_description?", "pricing?", "rating?", "instruction_text?"), str),
    **dict.fromkeys(("small_description?", "Attributes?", "reviews?", "nouns?", "instruction_attributes?"), [str]),
    "customization_options?": {"*?": [{"value": str}]},
    "instructions?": [{"instruction?": str, "instruction_attributes": [str], "instruction_options": [str]}],
}
"""`?`: may be missing, null or empty; `*`: any name. Further fields are ignored."""
_PRICE = re.compile(r"\$\s*(\d[\d,]*(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Texts are on one line and without square brackets, which actions need; options and attributes lower-case."""

    asin: str
    name: str
    query: str
    categories: frozenset[str]
    description: str
    bullets: tuple[str, ...]
    price: float
    price_tag: str
    options: dict[str, tuple[str, ...]]
    """Values by group; no value occurs in two groups."""
    attributes: tuple[str, ...]
    nouns: frozenset[str]
    """The words of the name that tell brand and type; WebShop has spaCy find them."""
    rating: str
    reviews: tuple[str, ...]


class Goal(NamedTuple):
    """Example: Goal("B1", "find me non slip boots, and price lower than 60.00 dollars", ["non slip"], {}, 60.0)"""

    asin: str
    text: str
    attributes: list[str]
    options: dict[str, str]
    price_upper: float


class Catalog:
    """`products` by asin, `goals` by split and difficulty, `search`, and the words of pages in its language, `ui`."""

    def __init__(self, raw: list[dict[str, Any]], source: str, lang: str) -> None:
        self.source, self.ui = source, words()["ui"][lang]
        self.products: dict[str, Product] = {}
        goals: list[list[Goal]] = []
        for number, row in enumerate(raw, start=1):
            if row["asin"] not in self.products:
                product = self.products[row["asin"]] = _product(row, self.ui)
                goals.append(list(_goals(row, product, f"{source} row {number}", self.ui)))
        self.goals = _split(goals)
        self._asins, found = list(self.products), self.products.values()
        self._index = BM25([" ".join([p.name, p.description, *p.bullets[:1], *sum(p.options.values(), ())]) for p in found])
        self.search = lru_cache(maxsize=1 << 13)(self._search)

    def _search(self, keywords: str) -> tuple[str, ...]:
        """The asins of at most 50 products, best first; stop words do not count."""
        query = " ".join(word for word in keywords.lower().split() if word not in words()["stop_words"])
        return tuple(self._asins[number] for number in self._index.search(query, 50))


@lru_cache(maxsize=4)
def catalog(path: str | None, lang: str) -> Catalog:
    """The generated catalog, or the one in a JSON file; made once a process.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is malformed; names file, row (from 1) and field, and what was expected.
    """
    if path is None:
        return Catalog(rows(lang), "the built-in catalog", lang)
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no catalog {path}; expected a JSON list of products in WebShop's schema.")
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file in UTF-8 ({error}).") from None
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{path}: expected a list of products, got {_show(raw)}.")
    for number, row in enumerate(raw, start=1):
        _check(row, _ROW, f"{path} row {number}: ", "the row")
        for field, good, expected in (
            ("asin", row["asin"].isalnum(), "letters and digits"),
            ("pricing", not row.get("pricing") or _PRICE.search(row["pricing"]), "like '$12.99' or '$10.00$20.00'"),
        ):
            if not good:
                raise ValueError(f"{path} row {number}: field '{field}' must be {expected}, got {_show(row[field])}.")
    return Catalog(raw, path, lang)


def _check(value: Any, form: Any, where: str, what: str) -> None:
    """Raises ValueError unless `value` has the form, which is written as _ROW is."""
    expected = {dict: "an object", list: "a list"}.get(type(form), "a string that is not empty")
    if not isinstance(value, str if form is str else type(form)) or (form is str and not value.strip()):
        raise ValueError(f"{where}{what} must be {expected}, got {_show(value)}.")
    if isinstance(form, list):
        for number, each in enumerate(value):
            _check(each, form[0], where, f"{what}[{number}]")
    elif isinstance(form, dict):
        for name, inner in form.items():
            for key in value if name == "*?" else [name.rstrip("?")]:
                if not (name.endswith("?") and value.get(key) in (None, "")):
                    _check(value.get(key), inner, where, f"field {key}" if form is _ROW else f"{what}.{key}")


def _product(row: dict[str, Any], ui: dict[str, str]) -> Product:
    prices = [float(each.replace(",", "")) for each in _PRICE.findall(row.get("pricing") or "")][:2] or [100.0]
    options: dict[str, tuple[str, ...]] = {}
    taken = {str(text).lower() for text in ui.values()}
    for name, values in (row.get("customization_options") or {}).items():
        group, unique = _clean(name).lower(), dict.fromkeys(_option(value["value"]) for value in values or ())
        if unique:
            # A value that a button or another group has too is told apart by its group, so that each can be clicked.
            options[group] = tuple(f"{value} ({group})" if value in taken else value for value in unique)
            taken.update(options[group])
    return Product(
        asin=row["asin"],
        name=_clean(row["name"])[:500],
        query=row["query"].lower().strip(),
        categories=frozenset(part.strip() for part in row["product_category"].split("›")),
        description=_clean(row.get("full_description") or "")[:8000],
        bullets=tuple(_clean(each)[:1000] for each in row.get("small_description") or ())[:20],
        price=round(prices[0] + _share(f"price {row['asin']}") * (prices[-1] - prices[0]), 2),
        price_tag=" - ".join(f"${price:.2f}" for price in prices),
        options=options,
        attributes=tuple(_clean(each).lower() for each in row.get("Attributes") or ()),
        nouns=frozenset(each.lower() for each in row.get("nouns") or re.findall(r"[^\W\d_]{3,}", row["name"])),
        rating=row.get("rating") or "N.A.",
        reviews=tuple(_clean(each)[:1000] for each in row.get("reviews") or ())[:20],
    )


def _goals(row: dict[str, Any], product: Product, where: str, ui: dict[str, Any]) -> Iterator[Goal]:
    group_of = {value: group for group, values in product.options.items() for value in values}
    # At most a thousand combinations: some products have more of them than a catalog has products.
    every = itertools.islice(itertools.product(*(product.options[group] for group in sorted(product.options))), 1000)
    named = row.get("instruction_attributes") or product.attributes
    asked = [(goal.get("instruction"), goal["instruction_attributes"], goal["instruction_options"]) for goal in row["instructions"]] if row.get("instructions") is not None else [(None, named, values) for values in every]
    for number, (text, attributes, values) in enumerate(asked):
        options = {group_of[value]: value for value in map(_option, values) if value in group_of}
        if len(options) != len(values):
            field = f"field instructions[{number}].instruction_options"
            raise ValueError(f"{where}: {field} must be values of different options of the product, got {values}.")
        if not attributes:
            continue  # as in WebShop, where a goal without attributes is none
        lowered = [_clean(each).lower() for each in attributes]
        if text is None:
            request = ui["requests"][int(4 * _share(f"request {product.asin} {number}"))]
            text = row.get("instruction_text") or request.format(type=product.query, attributes=ui["list"].join(lowered))
            text += ui["with"] * bool(options) + ui["and"].join(ui["pair"].format(*pair) for pair in options.items())
        limit = price_limit(product.price, f"limit {product.asin} {number}")
        text = _clean(text).strip(".") + ("" if limit is None else ui["upper"].format(limit))
        yield Goal(product.asin, text, lowered, options, 1e6 if limit is None else limit)


def price_limit(price: float, key: str) -> float | None:
    """The larger of two out of the next four multiples of ten above the price; None where there are no two to 990."""
    above = [10.0 * n for n in range(1, 100) if 10 * n > price][:4]
    pairs = [max(pair) for pair in itertools.combinations(above, 2)]
    return pairs[int(_share(key) * len(pairs))] if pairs else None


def _split(goals: list[list[Goal]]) -> dict[tuple[str, int], list[Goal]]:
    """Seven tenths to train, two to val, one to test, product by product in a shuffled order."""
    found: dict[tuple[str, int], list[Goal]] = {(split, level): [] for split in SPLITS for level in (1, 2, 3)}
    total, done = sum(map(len, goals)), 0
    random.Random("webshop_lite splits 1").shuffle(goals)
    for each in goals:
        split = SPLITS[(10 * done >= 7 * total) + (10 * done >= 9 * total)]
        for goal in each:
            found[split, min(max(len(goal.attributes) + len(goal.options) - 1, 1), 3)].append(goal)
        done += len(each)
    return found


def _share(key: str) -> float:
    """A number in [0, 1) that looks random and is always the same for a key."""
    return zlib.crc32(key.encode()) / (1 << 32)


def _clean(text: str) -> str:
    return " ".join(text.replace("[", "(").replace("]", ")").split())


def _option(value: str) -> str:
    return _clean(value.replace("/", " | ")).lower()


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text
