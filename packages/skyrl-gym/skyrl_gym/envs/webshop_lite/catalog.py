"""A catalog: products, goals (docs/environments/webshop_lite.md) and search, from rows in WebShop's JSON schema."""

import itertools
import random
import re
import zlib
from functools import cached_property, lru_cache
from typing import Any

from skyrl_gym.bm25 import BM25
from skyrl_gym.core import SPLITS
from skyrl_gym.data import beside, read_list
from skyrl_gym.envs.webshop_lite.generate import rows, words

_FORM = beside(__file__, "row.yaml")


class Product:
    """A row made ready. Texts are on one line and without square brackets, which actions need."""

    def __init__(self, row: dict[str, Any], ui: dict[str, Any]) -> None:
        self.asin = row["asin"]
        self.name = _clean(row["name"])[:500]
        self.query = row["query"].lower().strip()
        self.categories = {part.strip() for part in row["product_category"].split("›")}
        self.description = [_clean(text)[:8000] for text in [row.get("full_description")] if text]
        self.features = [_clean(each)[:1000] for each in row.get("small_description") or ()][:20]
        self.reviews = [_clean(each)[:1000] for each in row.get("reviews") or ()][:20]
        self.rating = row.get("rating") or "N.A."
        self.attributes = [_clean(each).lower() for each in row.get("Attributes") or ()]
        # The words that tell brand and type; WebShop has spaCy find the nouns of the name.
        self.nouns = {each.lower() for each in row.get("nouns") or re.findall(r"[^\W\d_]{3,}", row["name"])}
        prices = re.findall(_FORM["texts"]["price"][0], row.get("pricing") or "")
        found = [float(each.replace(",", "")) for each in prices][:2] or [100.0]
        self.price = round(found[0] + _share(f"price {self.asin}") * (found[-1] - found[0]), 2)
        self.price_tag = " to ".join(f"${price:.2f}" for price in found)
        self.options: dict[str, list[str]] = {}
        self.group_of: dict[str, str] = {}
        buttons = {str(text).lower() for text in ui.values()}
        for name, values in (row.get("customization_options") or {}).items():
            group = _clean(name).lower()
            for value in dict.fromkeys(_clean(x["value"].replace("/", " | ")).lower() for x in values or ()):
                # What a button or another group says too is told apart by its group, so that each can be clicked.
                text = f"{value} ({group})" if value in self.group_of or value in buttons else value
                self.options.setdefault(group, []).append(text)
                self.group_of[text] = group


class Catalog:
    """Products by asin, goals (sentence and ground truth) by split and difficulty, search, and the words of pages."""

    def __init__(self, raw: list[dict[str, Any]], path: str | None, lang: str) -> None:
        self.path, self.lang, self.ui = path, lang, words()["ui"][lang]
        self.source = source = path or "the built-in catalog"
        self.products: dict[str, Product] = {}
        goals = []
        for number, row in enumerate(raw, start=1):
            if row["asin"] not in self.products:
                product = self.products[row["asin"]] = Product(row, self.ui)
                found = _goals(row, product, f"{source} row {number}", self.ui)
                goals.append((found, row["split"] if path is None else None))
        self.goals = _split([each for each in goals if each[0]])
        self._asins = list(self.products)
        self._hits = lru_cache(maxsize=1 << 13)(self._search)

    def __reduce__(self) -> Any:
        return load, (self.path, self.lang)  # a copy is this one, and a pickle does not hold the products

    @cached_property
    def _index(self) -> BM25:
        texts = ([p.name, *p.description, *p.features[:1], *p.group_of] for p in self.products.values())
        return BM25([" ".join(text) for text in texts])

    def search(self, keywords: str, order: int | None = None) -> list[str]:
        """Asins; a number orders those of one title."""
        hits = self._hits(keywords)
        if order is None:
            return hits
        rng, names = random.Random(order), [self.products[asin].name for asin in hits]
        return sorted(hits, key=lambda asin: (names.index(self.products[asin].name), rng.random()))

    def _search(self, keywords: str) -> list[str]:
        query = " ".join(word for word in keywords[:1000].lower().split() if word not in words()["stop_words"])
        return [self._asins[number] for number in self._index.search(query, 50)]


@lru_cache(maxsize=4)
def load(path: str | None, lang: str) -> Catalog:
    """The generated catalog, or that of a JSON file. OSError, or ValueError with file, row (from 1), field and form."""
    if path is None:
        return Catalog(rows(lang), None, lang)
    raw = read_list(path, "products")
    for number, row in enumerate(raw, start=1):
        _check(row, _FORM["row"], f"{path} row {number}", "the row")
    return Catalog(raw, path, lang)


def _check(value: Any, form: Any, where: str, what: str) -> None:
    pattern, expected = "", "a list" if isinstance(form, list) else "an object"
    if isinstance(form, str):
        pattern, expected = _FORM["texts"][form]
    if not isinstance(value, type(form)) or (pattern and not re.search(pattern, value)):
        raise ValueError(f"{where}: {what} must be {expected}, got {value!r:.60}.")
    if isinstance(form, list):
        for number, each in enumerate(value):
            _check(each, form[0], where, f"{what}[{number}]")
    elif isinstance(form, dict):
        for name, inner in form.items():
            for key in value if name == "*?" else [name.rstrip("?")]:
                if not (name.endswith("?") and value.get(key) in (None, "")):
                    _check(value.get(key), inner, where, f"field {key}" if form is _FORM["row"] else f"{what}.{key}")


def _goals(row: dict[str, Any], product: Product, where: str, ui: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    asked, found = row.get("instructions"), []
    if asked is None:
        named = row.get("instruction_attributes") or product.attributes
        every = itertools.product(*(product.options[group] for group in sorted(product.options)))
        # At most a thousand: some products have more combinations than a catalog has products.
        asked = [{"instruction_attributes": named, "instruction_options": x} for x in itertools.islice(every, 1000)]
    for number, goal in enumerate(asked):
        values = [_clean(x.replace("/", " | ")).lower() for x in goal["instruction_options"]]
        attributes = [_clean(x).lower() for x in goal["instruction_attributes"]]
        options = {product.group_of[value]: value for value in values if value in product.group_of}
        if len(options) != len(values):
            field = f"field instructions[{number}].instruction_options"
            raise ValueError(f"{where}: {field} must be values of different options of the product, got {values}.")
        text = goal.get("instruction")
        if not text:
            request = ui["requests"][int(_share(f"request {product.asin} {number}") * len(ui["requests"]))]
            request = request.format(type=product.query, attributes=ui["list"].join(attributes))
            told = ui["and"].join(ui["pair"].format(*pair) for pair in options.items())
            text = (row.get("instruction_text") or request) + ui["with"] * bool(told) + told
        limit = price_limit(product.price, f"limit {product.asin} {number}")
        text = _clean(text).strip(".") + ("" if limit is None else ui["upper"].format(limit))
        truth = {"asin": product.asin, "attributes": attributes, "options": options, "price_upper": limit or 1e6}
        if attributes:  # as in WebShop, where a goal without attributes is none
            found.append((text, truth))
    return found


def price_limit(price: float, key: str) -> float | None:
    """The larger of two out of the next four multiples of ten above the price; None where there are no two to 990."""
    above = [10.0 * n for n in range(int(price // 10) + 1, min(int(price // 10) + 5, 100))]
    pairs = [max(pair) for pair in itertools.combinations(above, 2)]
    return pairs[int(_share(key) * len(pairs))] if pairs else None


# Of products in a shuffled order seven tenths to train, two to val, one to test, where none is given.
# The difficulty is by what is asked; of the built-in goals, which name a tag besides, it is one less.
def _split(products: list[tuple[list[Any], str | None]]) -> dict[tuple[str, int], list[tuple[str, dict[str, Any]]]]:
    found: dict[tuple[str, int], list[Any]] = {(split, level): [] for split in SPLITS for level in (1, 2, 3)}
    random.Random("webshop_lite splits 1").shuffle(products)
    for place, (goals, given) in enumerate(products):
        split = given or SPLITS[(10 * place >= 7 * len(products)) + (10 * place >= 9 * len(products))]
        for text, truth in goals:
            asked = len(truth["attributes"]) + len(truth["options"]) - (1 if given is None else 2)
            found[split, min(max(asked, 1), 3)].append((text, truth))
    return found


def _share(key: str) -> float:
    return zlib.crc32(key.encode()) / (1 << 32)


def _clean(text: str) -> str:
    return " ".join(text.replace("[", "(").replace("]", ")").split())
