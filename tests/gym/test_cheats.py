"""benchmarks/cheats.py: no cheat of the panel, nor chance, passes its bar; the expert solves all."""

import os
import re

import gymnasium as gym
import pytest

from benchmarks.cheats import (
    CHEATS,
    LANGS,
    all_pages,
    at_random,
    meant,
    results,
    success,
    table,
    titled,
    understood,
    wish,
    write,
)

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


def stated(asked, pages):
    """How many of the wishes the pages state, in one of the two sentences for each."""
    return sum(any(say in " ".join(pages) for say in says.split("|")) for says in understood(asked, "page"))


def meant_or_packed(asked, values, pages):
    numbers = understood(asked, "pack")
    held = [x for x in values if numbers and re.search(rf"{x}\D*{numbers[0]}(?!\d)", pages[1].lower())]
    return held[0] if held else meant(asked, values)


@pytest.mark.parametrize("lang", LANGS)
@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_whoever_knows_the_words_and_reads_four_products_solves_what_is_among_them(difficulty, lang):
    """From what the pages show alone, so they say all that is needed; a fifth would take more steps than there are."""
    env, reader, missed = gym.make("skyrl/webshop_lite-v0", split="val"), all_pages(stated, meant_or_packed), 0
    for seed in range(1000 if FULL else 60):
        history, over = [env.reset(seed=seed, options={"difficulty": difficulty, "lang": lang})], False
        while not over:
            observation, _, over, truncated, info = env.step(reader(history))
            assert info["valid_action"] and not truncated
            history.append((observation, info))
        four = titled(wish(history), results(history[1][0]))[:4]
        there = env.unwrapped.task.ground_truth["asin"] in [each.code for each in four]
        assert info["success"] == there
        missed += not there
    assert 0 < missed < seed / 3


def test_the_page_keeps_other_families_and_replaces_its_own(tmp_path, monkeypatch):
    page = tmp_path / "cheats.md"
    page.write_text("# Cheats\n\nText.\n\n## another\n\nIts table.\n\n## webshop_lite\n\nold\n")
    monkeypatch.setattr("benchmarks.cheats.PAGE", page)
    write("webshop_lite", {"random": {"en:1": 0.0}}, 1000)
    written = page.read_text()
    assert written.startswith("# Cheats\n\nText.\n\n## another\n\nIts table.\n\n## webshop_lite\n\n")
    assert "old" not in written and written.endswith(table({"random": {"en:1": 0.0}}) + "\n")
