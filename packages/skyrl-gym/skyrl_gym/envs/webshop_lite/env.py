"""webshop_lite: find and buy in a made-up web shop what an instruction asks for; WebShop's rules without its stack.

An action is `search[words]`, on the search page, or `click[text]`, where the text is a button, a product's asin or an
option's value on the page. It is read as WebShop reads it: at the beginning of the first line, greedily, the argument
in lower case. Anything else changes nothing and has reward 0. The only reward comes with the purchase (reward.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar

from skyrl_gym.core import SPLITS, Choices, Outcome, Task, TextEnv
from skyrl_gym.envs.webshop_lite.catalog import Catalog, catalog
from skyrl_gym.envs.webshop_lite.pages import Page, View, render
from skyrl_gym.envs.webshop_lite.reward import purchase

LONGEST_QUERY = 1000
"""Characters of a query that are read."""


def parse_action(action: str) -> tuple[str, str] | None:
    r"""What `re.match(r"(.+)\[(.+)\]", action)` finds, in linear time."""
    line = action.split("\n", 1)[0]
    close = line.rfind("]")
    start = line.rfind("[", 1, max(close - 1, 0))
    return (line[:start], line[start + 1 : close].lower()) if start > 0 else None


class WebShopLiteEnv(TextEnv):
    """Goals by difficulty (1 to 3), in English and Chinese.

    Options `matching`: the published, generous one, or exact values; `observation`: strings joined by [SEP], or lines
    with marked buttons. Argument `catalog`: a JSON file in WebShop's schema in place of the built-in products.
    """

    choices: ClassVar[Choices] = {
        "split": SPLITS,
        "difficulty": (1, 2, 3),
        "lang": ("en", "zh"),
        "matching": ("webshop", "strict"),
        "observation": ("text", "text_rich"),
    }

    def __init__(self, *, catalog: str | PathLike[str] | None = None, render_mode: str | None = None, **defaults: Any):
        super().__init__(render_mode=render_mode, **defaults)
        self._path = None if catalog is None else str(catalog)
        if self._path:
            self._catalog(self.defaults)  # A malformed file is told at once.

    def _catalog(self, options: Mapping[str, Any]) -> Catalog:
        return catalog(self._path, options["lang"])

    def count_tasks(self, options: Mapping[str, Any]) -> int:
        shop, split = self._catalog(options), options["split"]
        if not shop.goals[split, options["difficulty"]]:
            counts = {f"{split}:{level}": len(goals) for (split, level), goals in shop.goals.items() if goals}
            raise ValueError(f"{shop.source} has no goals for {split}:{options['difficulty']}; it has {counts}.")
        return len(shop.goals[split, options["difficulty"]])

    def make_task(self, options: Mapping[str, Any], index: int) -> Task:
        split, difficulty, lang = options["split"], options["difficulty"], options["lang"]
        shop = self._catalog(options)
        goal = shop.goals[split, difficulty][index]
        truth = copy.deepcopy(goal._asdict())
        task_id = f"{split}:{difficulty}:{lang}:{index}"
        return Task(task_id, truth.pop("text"), truth, difficulty, lang, split, shop.ui["rules"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | self._page_info()

    def begin(self, task: Task) -> str:
        self.set_env_state({"view": View(), "opened": []})
        return self._observation()

    def get_env_state(self) -> dict[str, Any]:
        return {"view": list(self._view), "opened": list(self._opened)}

    def set_env_state(self, state: dict[str, Any]) -> None:
        *first, options = state["view"]
        self._shop = self._catalog(self.options)
        self._opened: list[str] = list(state["opened"])
        self._show(View(*first, tuple((group, value) for group, value in options)))

    def _show(self, view: View) -> None:
        rich = self.options["observation"] == "text_rich"
        self._view = view
        self._page: Page = render(self._shop, view, rich, tuple(self._opened) if rich else ())

    def _observation(self) -> str:
        separator = "\n" if self.options["observation"] == "text_rich" else " [SEP] "
        return separator.join((self._shop.ui["instruction"], self.task.text, self._page.text))[:60_000]

    def _page_info(self) -> dict[str, Any]:
        page = self._view.page
        return {"page": page, "has_search_bar": page == "search", "clickables": list(self._page.clicks)}

    def act(self, action: str) -> Outcome:
        name, argument = parse_action(action) or ("", "")
        problem, view = "bad_form", None
        if name == "search":
            problem = "bad_search"
            view = View("results", argument[:LONGEST_QUERY]) if self._view.page == "search" else None
        elif name == "click":
            problem, view = "bad_click", self._page.clicks.get(argument)
        if view is None:
            text = f"{self._shop.ui[problem]}\n{self._observation()}"
            return Outcome(text, {}, valid_action=False, info=self._page_info())
        if view.page == "item" and view.asin not in self._opened:
            self._opened.append(view.asin)
        self._show(view)
        if view.page != "done":
            return Outcome(self._observation(), {}, valid_action=True, info=self._page_info())
        goal, products = self.task.ground_truth, self._shop.products
        strict = self.options["matching"] == "strict"
        parts, terms = purchase(goal, products[goal["asin"]], products[view.asin], dict(view.options), strict)
        reward = sum(parts.values())
        text = f"{self._observation()} {self._shop.ui['score'].format(reward)}"
        return Outcome(text, parts, True, reward == 1.0, True, self._page_info() | terms)

    def admissible_actions(self) -> list[str]:
        """Every click on the page; on the search page the instruction, cut at its punctuation, as searches."""
        if self._view.page == "search":
            return [f"search[{part}]" for part in re.split(r"\s*[,:，：、]\s*", self.task.text)]
        return [f"click[{text}]" for text in self._page.clicks]

    def expert_action(self) -> str:
        """Searches for the name of the goal's product, pages to it, opens it, picks the options and buys."""
        ui, view, goal = self._shop.ui, self._view, self.task.ground_truth
        if view.page == "search":
            return f"search[{self._shop.products[goal['asin']].name}]"
        found = self._shop.search(view.keywords)
        target = "back"
        if view.page == "item" and view.asin == goal["asin"]:
            missing = [value for group, value in goal["options"].items() if (group, value) not in view.options]
            if missing:
                return f"click[{missing[0]}]"
            target = "buy"
        elif goal["asin"] in found:
            ahead = found.index(goal["asin"]) // 10 + 1 - view.number
            if view.page == "results" and ahead == 0:
                return f"click[{goal['asin'].lower()}]"
            target = "next" if view.page == "results" and ahead > 0 else "prev"
        return f"click[{ui[target].lower()}]"
