"""docs/algorithms: every recipe is valid, every algorithm has its page, and the table of options says who has which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from scripts.write_settings import algorithms, configuration_markdown
from skyrl_trainer.config import load_config
from skyrl_trainer.learner.compose import algorithm_class

DOCS = Path("docs/algorithms")
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in ("README.md", "learning.md"))
NAMES = {"rloo_reinforce_maxrl.md": {"grpo", "dapo"}, "corrections.md": {"grpo"}, "gspo.md": {"gspo", "gspo_token"}}
"""Algorithms of a page's recipes, where they are not what the page is called."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_is_valid(page: str, tmp_path: Path) -> None:
    found = set()
    for number, text in enumerate(blocks(page, "yaml")):
        recipe = tmp_path / f"{number}.yaml"
        recipe.write_text(text, encoding="utf-8")
        config = load_config(str(recipe), [])
        found.add(config.trainer.algorithm.name)
        given = yaml.safe_load(text)["trainer"]["algorithm"].get("options", {})
        options = algorithm_class(config.trainer.algorithm.name)(config).options
        assert {name: getattr(options, name) for name in given} == given
    assert found == NAMES.get(page, {page.removesuffix(".md")})


def test_every_algorithm_has_a_page_and_a_row() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for name in algorithms():
        row = name.removesuffix("_ppo")  # sapo_ppo and its like are named on ppo's page
        page = re.search(rf"^\| \[`{row}`\]\((\w+\.md)\)", index, re.MULTILINE)
        assert page and (DOCS / page[1]).is_file(), name


def test_the_table_of_options_says_who_has_another_default_and_who_refuses() -> None:
    rows = {line.split("`")[1]: line for line in configuration_markdown().splitlines() if line.startswith("| `")}
    assert "`0.2`; gspo `0.0003`" in rows["epsilon"] and "refused by cispo, sapo" in rows["epsilon"]
    assert "cispo `5.0`; dapo `0.28`" in rows["epsilon_high"]
    assert "(sapo" in rows["sapo_gate"] and "`paper`, `sigmoid`" in rows["sapo_gate"]


def test_the_example_of_a_loss_of_ones_own_works() -> None:
    exec(blocks("README.md", "python")[0], {"__name__": "plugin"})
    config = load_config(None, ["trainer.algorithm.name=sqrt_ratio", "trainer.algorithm.options.power=0.25"])
    assert algorithm_class("sqrt_ratio")(config).options.power == 0.25
