"""The shop's pages: what each shows, and to which view each of its buttons leads.

Options belong to the item page and its sub-pages: every way back to the results or to the search forgets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from skyrl_gym.envs.webshop_lite.catalog import Catalog


class View(NamedTuple):
    """Where the agent is. Example: View("item", "red boots", 2, "B123456789", (("color", "red"),))"""

    page: str = "search"
    """search, results, item, description, features, reviews or done."""
    keywords: str = ""
    number: int = 1
    """Which page of the results, from 1."""
    asin: str = ""
    options: tuple[tuple[str, str], ...] = ()


class Page(NamedTuple):
    text: str
    clicks: dict[str, View]
    """What can be clicked, in lower case, and where it leads."""


class _Part(NamedTuple):
    text: str
    to: View | None = None
    pressed: bool = False


@lru_cache(maxsize=1 << 12)
def render(catalog: Catalog, view: View, rich: bool, opened: tuple[str, ...]) -> Page:
    """The page of a view, as plain text or with buttons marked; `opened` are the products that were looked at."""
    parts, ui = list(_parts(catalog, view, opened)), catalog.ui
    clicks = {part.text.lower(): part.to for part in parts if part.to}
    if not rich:
        return Page(" [SEP] ".join(ui["chosen"].format(part.text) if part.pressed else part.text for part in parts), clicks)
    lines = [ui["clicked"].format(part.text) for part in parts if part.pressed and part.text in dict(view.options).values()]
    for text, to, pressed in parts:
        mark = "clicked button" if pressed else "button"
        lines.append(f"[{mark}] {text} [{mark}_]" if to else text)
    return Page("\n".join(lines), clicks)


def _parts(catalog: Catalog, view: View, opened: tuple[str, ...]) -> Iterator[_Part]:
    ui = catalog.ui
    if view.page in ("search", "done"):
        yield _Part(ui[view.page])
        return
    yield _Part(ui["back"], View())
    if view.page == "results":
        found = catalog.search(view.keywords)
        yield _Part(ui["page"].format(view.number, len(found)))
        if view.number > 1:
            yield _Part(ui["prev"], view._replace(number=view.number - 1))
        yield _Part(ui["next"], view._replace(number=view.number + 1))
        for asin in found[10 * view.number - 10 : 10 * view.number]:
            yield _Part(asin, view._replace(page="item", asin=asin), asin in opened)
            yield from (_Part(catalog.products[asin].name), _Part(catalog.products[asin].price_tag))
        return
    product = catalog.products[view.asin]
    if view.page != "item":
        yield _Part(ui["prev"], view._replace(page="item"))
        texts = {"description": (product.description,), "features": product.bullets, "reviews": product.reviews}
        yield from map(_Part, filter(None, texts[view.page]))
        return
    yield _Part(ui["prev"], View("results", view.keywords, view.number))
    for group, values in product.options.items():
        yield _Part(group)
        for value in values:
            options = dict(view.options) | {group: value}
            yield _Part(value, view._replace(options=tuple(sorted(options.items()))), (group, value) in view.options)
    yield from (_Part(product.name), _Part(ui["price"].format(product.price_tag)), _Part(ui["rating"].format(product.rating)))
    for name in ("description", "features", "reviews"):
        yield _Part(ui[name], view._replace(page=name))
    yield _Part(ui["buy"], view._replace(page="done"))
