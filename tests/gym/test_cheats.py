"""benchmarks/cheats.py: no cheat of the panel, nor chance, passes its bar; the expert solves all."""

import os

import gymnasium as gym
import pytest

from benchmarks.cheats import CHEATS, LANGS, at_random, matched, results, success, table, wish, write

FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
EPISODES = 1000 if FULL else 40
HIGHEST = {family: 3 for family in CHEATS}
every_cell = pytest.mark.parametrize(
    "family, difficulty, lang",
    [(name, level + 1, lang) for name, top in HIGHEST.items() for level in range(top) for lang in LANGS],
)


def allowed(bar):
    """The bar, and for a sample three standard errors more."""
    return bar if FULL else bar + 3 * (bar * (1 - bar) / EPISODES) ** 0.5


@every_cell
def test_no_cheat_passes_its_bar_and_the_expert_solves_all(family, difficulty, lang):
    bar = 0.15 if difficulty == HIGHEST[family] else 0.30
    for name, policy in CHEATS[family].items():
        assert success(family, difficulty, lang, policy, EPISODES) <= allowed(bar), name
    assert success(family, difficulty, lang, at_random, EPISODES) <= allowed(0.02)
    assert success(family, difficulty, lang, None, EPISODES) == 1.0


SEARCH = "Instruction: [SEP] find me a salve for july, of metal, and price lower than 40.00 dollars [SEP] Search bar"


def test_what_a_cheat_of_the_shop_reads_off_its_pages():
    asked = wish([(SEARCH, {})])
    assert (asked.parts, asked.limit) == (["find me a salve for july", "of metal"], 40.0)
    page = " [SEP] ".join(["x", "B123456789", "Summer Foot Cream", "$12.99", "B987654321", "Winter Lip Balm", "$8.99"])
    assert results(page) == [("B123456789", "Summer Foot Cream", 12.99), ("B987654321", "Winter Lip Balm", 8.99)]


def test_a_cheat_that_matches_words_reads_four_products_and_then_buys():
    env = gym.make("skyrl/webshop_lite-v0", split="val", difficulty=3)
    history, over = [env.reset(seed=3)], False
    while not over:
        observation, _, over, truncated, info = env.step(matched(history))
        assert info["valid_action"] and not truncated
        history.append((observation, info))
    pages = [info["page"] for _, info in history]
    assert all(pages.count(page) >= 3 for page in ("description", "features", "reviews"))


def test_the_page_keeps_other_families_and_replaces_its_own(tmp_path, monkeypatch):
    page = tmp_path / "cheats.md"
    page.write_text("# Cheats\n\nText.\n\n## another\n\nIts table.\n\n## webshop_lite\n\nold\n")
    monkeypatch.setattr("benchmarks.cheats.PAGE", page)
    write("webshop_lite", {"random": {"en:1": 0.0}}, 1000)
    written = page.read_text()
    assert "Its table." in written and "old" not in written and table({"random": {"en:1": 0.0}}) in written
