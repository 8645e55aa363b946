"""webshop_lite (docs/environments/webshop_lite.md): a made-up web shop with WebShop's rules, without its stack."""

import copy
import re
from functools import lru_cache
from os import PathLike
from typing import Any, NamedTuple

from skyrl_gym.core import Info, Options, Outcome, Task, TextEnv
from skyrl_gym.envs.webshop_lite.catalog import Catalog, load
from skyrl_gym.envs.webshop_lite.generate import pages
from skyrl_gym.envs.webshop_lite.reward import has_attribute, purchase


class View(NamedTuple):
    """Where the agent is. Example: View("item", "red boots", 2, "B123456789", (("color", "red"),))"""

    page: str = "search"
    keywords: str = ""
    number: int = 1
    asin: str = ""
    options: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=1 << 12)
def render(
    catalog: Catalog, view: View, rich: bool, opened: tuple[str, ...], order: int | None
) -> tuple[str, dict[str, View]]:
    """A view's text, plain or with buttons marked, and where each text leads that can be clicked."""
    ui, clicks, lines = catalog.ui, dict[str, View](), list[str]()

    def button(text: str, to: View, pressed: bool = False) -> None:
        clicks[text.lower()] = to
        mark = "clicked button" if pressed else "button"
        lines.append(f"[{mark}] {text} [{mark}_]" if rich else ui["chosen"].format(text) if pressed else text)

    if view.page in ("search", "done"):
        return ui[view.page], clicks
    button(ui["back"], View())
    if view.page == "results":
        found = catalog.search(view.keywords, order)
        lines.append(ui["page"].format(view.number, len(found)))
        if view.number > 1:
            button(ui["prev"], view._replace(number=view.number - 1))
        button(ui["next"], view._replace(number=view.number + 1))
        for place, asin in enumerate(found[10 * view.number - 10 : 10 * view.number], 10 * view.number - 9):
            product = catalog.products[asin]
            button(asin if order is None else f"{place}", view._replace(page="item", asin=asin), asin in opened)
            lines += [product.name, product.price_tag]
    elif view.page == "item":
        product = catalog.products[view.asin]
        button(ui["prev"], View("results", view.keywords, view.number))
        for group, values in product.options.items():
            lines.append(group)
            for value in values:
                options = tuple(sorted((dict(view.options) | {group: value}).items()))
                button(value, view._replace(options=options), (group, value) in view.options)
        lines += [product.name, ui["price"].format(product.price_tag), ui["rating"].format(product.rating)]
        for name in ("description", "features", "reviews"):
            button(ui[name], view._replace(page=name))
        button(ui["buy"], view._replace(page="done"))
        lines = [ui["clicked"].format(value) for _, value in view.options if rich] + lines
    else:
        button(ui["prev"], view._replace(page="item"))
        lines += getattr(catalog.products[view.asin], view.page) or [ui["none"]]
    return ("\n" if rich else " [SEP] ").join(lines), clicks


def parse_action(action: str) -> tuple[str, str]:
    r"""What `re.match(r"(.+)\[(.+)\]", action)` finds, in linear time; two empty strings for nothing."""
    line = action.split("\n", 1)[0]
    close = line.rfind("]")
    start = line.rfind("[", 1, max(close - 1, 0))
    return (line[:start], line[start + 1 : close].lower()) if start > 0 else ("", "")


class WebShopLiteEnv(TextEnv):
    """catalog: a JSON file in WebShop's schema in place of the built-in products."""

    choices = TextEnv.choices | {
        "difficulty": (1, 2, 3),
        "matching": ("webshop", "strict"),
        "observation": ("text", "text_rich", "page"),
        "codes": ("catalog", "numbered"),
        "thoughts": ("off", "on"),
        "expert": ("careful", "hasty"),
    }

    def __init__(self, *, catalog: str | PathLike[str] | None = None, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._path = None if catalog is None else str(catalog)
        if self._path:
            load(self._path, self.defaults["lang"])  # so that a malformed file is told at once

    @classmethod
    def preload(cls, options: Options) -> None:
        load(None, options["lang"]).search("")

    def count_tasks(self, options: Options) -> int:
        shop, wanted = load(self._path, options["lang"]), (options["split"], options["difficulty"])
        if not shop.goals[wanted]:
            there = ", ".join(f"{split}:{level}" for (split, level), goals in shop.goals.items() if goals) or "none"
            raise ValueError(f"{shop.source} has no goals of split and difficulty {wanted}; it has {there}.")
        return len(shop.goals[wanted])

    def make_task(self, options: Options, index: int) -> Task:
        split, difficulty, lang = (options[name] for name in self.id_options)
        shop = load(self._path, lang)
        text, truth = copy.deepcopy(shop.goals[split, difficulty][index])
        rules = shop.ui["rules"] + shop.ui["own"] * (self._path is None)
        rules += shop.ui["think"] * (options["thoughts"] == "on")
        return Task(self.task_id(options, index), text, truth, instructions=rules)

    def begin(self, task: Task) -> str:
        hasty = self.options["expert"] == "hasty"
        haste = (self.np_random.integers(6, size=2) < (4, 2)).tolist() if hasty else [False, False]
        order = int(self.np_random.integers(1 << 31)) if self.options["codes"] == "numbered" else None
        self.set_env_state({"view": View()._asdict(), "opened": [], "thought": False, "haste": haste, "order": order})
        return self._text

    def get_env_state(self) -> dict[str, Any]:
        options = [list(pair) for pair in self._view.options]
        view = self._view._asdict() | {"options": options}
        kept = {"thought": self._thought, "haste": self._haste, "order": self._order}
        return {"view": view, "opened": self._opened, **kept}

    def set_env_state(self, state: dict[str, Any]) -> None:
        self._shop = load(self._path, self.options["lang"])
        self._opened = list(state["opened"])
        self._thought = bool(state["thought"])
        self._haste = list(state["haste"])
        self._order = state["order"]
        goal = self.task.ground_truth
        self._asked = [] if self._haste[0] else goal["attributes"]
        self._wanted = {} if self._haste[1] else goal["options"]
        self._show(View(**state["view"] | {"options": tuple(map(tuple, state["view"]["options"]))}))

    def _show(self, view: View) -> None:
        rich = self.options["observation"] == "text_rich"
        opened = tuple(self._opened) if rich else ()
        text, self._clicks = render(self._shop, view, rich, opened, self._order)
        brief = self.options["observation"] == "page" and view.page != "search"
        parts = (text,) if brief else (self._shop.ui["instruction"], self.task.text, text)
        self._view = view
        self._text = ("\n" if rich else " [SEP] ").join(parts)[:60_000]

    def reset_info(self) -> Info:
        """Of every page, so that the infos of steps have it, too."""
        page = self._view.page
        return {"page": page, "has_search_bar": page == "search", "clickables": list(self._clicks)}

    def act(self, action: str) -> Outcome:
        name, argument = parse_action(action)
        problem, view = "bad_form", None
        if name == "search":
            problem = "bad_search"
            view = View("results", argument[:1000]) if self._view.page == "search" else None
        elif name == "click":
            problem, view = "bad_click", self._clicks.get(argument)
        parts = {"attributes": 0.0, "options": 0.0, "price": 0.0}
        self._thought = name == "think" and self.options["thoughts"] == "on"
        if self._thought:
            return Outcome(self._shop.ui["thought"], parts, True, info=self.reset_info())
        if view is None:
            return Outcome(f"{self._shop.ui[problem]}\n{self._text}", parts, False, info=self.reset_info())
        seen = view.asin if view.page == "item" else f"{view.asin} {view.page}"
        if view.asin and seen not in self._opened:
            self._opened.append(seen)
        self._show(view)
        if view.page != "done":
            return Outcome(self._text, parts, True, info=self.reset_info())
        goal, products = self.task.ground_truth, self._shop.products
        strict = self.options["matching"] == "strict"
        parts, terms = purchase(goal, products[goal["asin"]], products[view.asin], dict(view.options), strict)
        reward = sum(parts.values())
        text = f"{self._text} {self._shop.ui['score'].format(reward)}"
        return Outcome(text, parts, True, reward == 1, True, self.reset_info() | terms)

    def admissible_actions(self) -> list[str]:
        """Every click on the page; on the search page the instruction, cut at its punctuation, as searches."""
        text, page = self.task.text, self._view.page
        if page == "search":
            return [f"search[{part}]" for part in re.split(r"\s*[,:，：、]\s*", text) if part]
        return [f"click[{text}]" for text in self._clicks]

    def expert_action(self) -> str:
        """Searches for the title, reads the results that could be it until one is, picks options and buys."""
        goal, view, ui = self.task.ground_truth, self._view, self._shop.ui
        if self.options["thoughts"] == "on" and not self._thought and (words := self._thoughts()):
            return f"think[{ui['list'].join(words)}]"
        if view.page == "search":
            asked = self._shop.products[goal["asin"]]
            if self._path is None:
                return f"search[{asked.name.lower()}]"
            found = self._shop.search(self.task.text[:1000].lower())[:10]
            return f"search[{self.task.text if any(map(self._meets, found)) else asked.name}]"
        if view.page == "item" and self._may_be(view.asin):
            wanted, offered = self._wanted, self._shop.products[view.asin].options
            told = {} if self._path else pages(self.options["lang"])
            telling = {told[name] for name in (*wanted, *self._asked) if name in told}
            unread = [ui[page] for page in sorted(telling) if f"{view.asin} {page}" not in self._opened]
            missing = [v for g, v in wanted.items() if v in offered.get(g, ()) and (g, v) not in view.options]
            return f"click[{[*unread, *missing, ui['buy']][0]}]"
        if view.page != "results":
            return f"click[{ui['prev']}]"
        if found := [text for text, to in self._clicks.items() if to.page == "item" and self._may_be(to.asin)]:
            return f"click[{found[0].upper()}]"
        hits = self._shop.search(view.keywords, self._order)
        elsewhere = [place for place, asin in enumerate(hits) if self._may_be(asin)]
        if not elsewhere:
            return f"click[{ui['back']}]"
        return f"click[{ui['next' if elsewhere[0] >= 10 * view.number else 'prev']}]"

    # What it looks for in the shop's words, or what a page says of that.
    # Example: "seaside desk lamp", "ready made", "silver", "60"; then "not fitter job" or "ready made".
    def _thoughts(self) -> list[str]:
        goal, page, told = self.task.ground_truth, self._view.page, pages(self.options["lang"])
        if self._path or page in ("results", "item"):
            return []
        products, options = self._shop.products, self._wanted.items()
        asked = [name for name in self._asked if name in told]
        if page == "search":
            known = [value for group, value in options if group not in told]
            return [products[goal["asin"]].name.lower(), *asked, *known, f"{goal['price_upper']:.0f}"]
        here = page in {told[name] for name in asked}
        read = [name for name in products[self._view.asin].attributes if here and told.get(name) == page]
        verdicts = [name if name in asked else self._shop.ui["not"].format(name) for name in read]
        return verdicts + [value for group, value in options if told.get(group) == page]

    def _may_be(self, asin: str) -> bool:
        goal, products, told = self.task.ground_truth, self._shop.products, pages(self.options["lang"])
        if self._path:
            return self._haste[0] or self._meets(asin)
        product, opened = products[asin], self._opened
        seen = asin in opened or self.options["expert"] == "careful"
        if product.name != products[goal["asin"]].name or (seen and product.price > goal["price_upper"]):
            return False
        read = [name for name in goal["attributes"] if f"{asin} {told.get(name)}" in opened]
        offered = asin not in opened or all(v in product.options.get(g, ()) for g, v in self._wanted.items())
        return offered and all(has_attribute(product, name, True) for name in read)

    def _meets(self, asin: str) -> bool:
        goal, products = self.task.ground_truth, self._shop.products
        strict = self.options["matching"] == "strict"
        has = all(value in products[asin].options.get(group, ()) for group, value in goal["options"].items())
        parts, _ = purchase(goal, products[goal["asin"]], products[asin], goal["options"], strict)
        return asin == goal["asin"] or (has and sum(parts.values()) == 1)
