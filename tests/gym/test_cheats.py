"""No cheat of the panel, nor chance, passes its bar; the expert solves all."""

import contextlib
import io
import os
import re
from types import SimpleNamespace

import pytest

from benchmarks.cheat_policies import all_pages, found, meant, results, titled, understood, wish
from benchmarks.cheat_programs import understanding
from benchmarks.cheats import CHANCE, HIGHEST, LANGS, cheats, made, success, table, write

FULL = os.environ.get("SKYRL_TEST_FULL") == "1"
CELLS = [
    (family, level, lang)
    for family, top in HIGHEST.items()
    for level in range(1, top + 1)
    for side, lang in enumerate(LANGS)
    if FULL or (top - level) % 2 == side  # every level in one language, the highest in English
    if FULL or family != "sql_lite" or level in (1, top)  # whose cheats take the longest
]


def episodes_of(family):
    """As many as the page's tables have; for a sample, fewer."""
    return (1000 if family == "webshop_lite" else 200) if FULL else 20


def allowed(bar, episodes):
    """The bar, and for a sample three standard errors more."""
    return bar if FULL else bar + 3 * (bar * (1 - bar) / episodes) ** 0.5


@pytest.fixture(autouse=True)
def programs_that_run_here(monkeypatch):
    """A sandbox costs more than all else; the experts' programs, and the cheats', need none."""

    def run_here(code, files=None):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {})
        return SimpleNamespace(output=printed.getvalue(), error=None)

    monkeypatch.setattr("skyrl_gym.tools.python_exec.shared_sandbox", lambda limits: SimpleNamespace(run=run_here))
    monkeypatch.setattr("skyrl_gym.envs.code_lite.judge.sandbox", lambda rows: SimpleNamespace(run=run_here))


@pytest.mark.parametrize("family, difficulty, lang", CELLS)
def test_no_cheat_passes_its_bar_and_the_expert_solves_all(family, difficulty, lang):
    episodes, bar = episodes_of(family), 0.15 if difficulty == HIGHEST[family] else 0.30
    for name, policy in cheats(family, difficulty, lang, episodes).items():
        assert success(family, difficulty, lang, policy, episodes) <= allowed(bar, episodes), name
    if family in CHANCE:
        assert success(family, difficulty, lang, CHANCE[family], episodes) <= allowed(0.02, episodes)
    assert success(family, difficulty, lang, None, episodes) == 1.0


def test_what_is_found_is_copied_from_the_first_article_alone():
    answers = [("seen", {}), ("<tool_response>\nVelmora: 7 of 12.\nTardun: 9.\n</tool_response>", {})]
    for place, text in enumerate(("Velmora", "7", "12", "none")):
        assert f"<answer>{text}</answer>" in found(lambda _, place=place: place)(answers)


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
    env, reader, missed = made("webshop_lite", difficulty, lang), all_pages(stated, meant_or_packed), 0
    for seed in range(1000 if FULL else 30):
        history, over = [env.reset(seed=seed)], False
        while not over:
            observation, _, over, truncated, info = env.step(reader(history))
            assert info["valid_action"] and not truncated
            history.append((observation, info))
        four = titled(wish(history), results(history[1][0]))[:4]
        there = env.unwrapped.task.ground_truth["asin"] in [each.code for each in four]
        assert info["success"] == there
        missed += not there
    assert 0 < missed < seed / 3


@pytest.mark.parametrize("difficulty, lang", [(level, LANGS[level % 2]) for level in range(1, 6)])
def test_whoever_knows_the_sentences_of_code_lite_and_leaves_out_nothing_solves_all(difficulty, lang):
    """From the question alone, so it says all that is needed."""
    reader = understanding(lambda parts, turn: parts)
    assert success("code_lite", difficulty, lang, reader, 200 if FULL else 20) == 1.0


def test_the_page_keeps_other_families_and_replaces_its_own(tmp_path, monkeypatch):
    page = tmp_path / "cheats.md"
    page.write_text("# Cheats\n\nText.\n\n## another\n\nIts table.\n\n## webshop_lite\n\nold\n")
    monkeypatch.setattr("benchmarks.cheats.PAGE", page)
    write("webshop_lite", {"random": {"en:1": 0.0}}, 1000)
    written = page.read_text()
    assert written.startswith("# Cheats\n\nText.\n\n## another\n\nIts table.\n\n## webshop_lite\n\n")
    assert "old" not in written and written.endswith(table({"random": {"en:1": 0.0}}) + "\n")
    write("words", {"expert": {"en:1": 1.0}}, 200)
    assert page.read_text().startswith(f"{written}\n## words\n\nSuccess in 200 episodes")
