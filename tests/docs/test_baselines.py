"""docs/environments/baselines: every cell is there, the page says what the file says, and some are measured again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gymnasium
import pytest

from benchmarks import baselines
from benchmarks.cheats import HIGHEST, LANGS, place
from skyrl_gym.baseline import episodes, figures, make_agent
from tests.eval.scripted_server import served

FOUND = json.loads(baselines.FOUND.read_text())


def test_every_family_difficulty_and_language_has_its_three_agents() -> None:
    assert FOUND.keys() >= set(baselines.SIMPLE)
    for agent in baselines.SIMPLE:
        assert FOUND[agent].keys() == HIGHEST.keys()
        for family, highest in HIGHEST.items():
            assert FOUND[agent][family]["made"].keys() == {"date", "machine", "commit"}
            cells = FOUND[agent][family]["cells"]
            assert cells.keys() == {f"{lang}:{level}" for lang in LANGS for level in range(1, highest + 1)}
            assert all(cell["episodes"] == 200 for cell in cells.values())
            assert agent != "expert" or all(cell["success"] == 1 for cell in cells.values())


def test_the_page_is_made_of_the_file_and_of_the_figures_of_what_was_learned() -> None:
    page = baselines.FOUND.with_suffix(".md").read_text(encoding="utf-8")
    assert page == baselines.page(FOUND), "python -m benchmarks.baselines --family words --write makes it anew"
    assert baselines.FOUND.read_text() == baselines.one_line_a_cell(FOUND)


AGAIN = [
    ("random", "logic", "en", 1),
    ("first", "arithmetic", "zh", 3),
    ("random", "tool_use", "zh", 2),
    ("random", "webshop_lite", "en", 2),
    ("random", "alfworld_lite", "en", 1),
]


@pytest.mark.parametrize("agent, family, lang, level", AGAIN)
def test_a_cell_measured_again_is_the_same(agent: str, family: str, lang: str, level: int) -> None:
    env_id, options = place(family, level, lang)
    player = make_agent(agent, None, env_id, options)
    again = figures(list(episodes(gymnasium.make(env_id), player, range(200), options)))
    cell = FOUND[agent][family]["cells"][f"{lang}:{level}"]
    assert {name: baselines._short(value) for name, value in again.items()} == cell


def test_a_model_behind_an_endpoint_is_a_column_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "FOUND", tmp_path / "baselines.json")
    (tmp_path / "baselines.json").write_text(json.dumps({"expert": {"logic": FOUND["expert"]["logic"]}}))
    with served(lambda _: (200, "\\boxed{1}")) as (url, asked):
        words = ["--agent", url, "--model", "m", "--family", "logic", "--episodes", "2", "--write"]
        monkeypatch.setattr(sys, "argv", ["baselines", *words])
        assert baselines.main() == 0
    written = json.loads((tmp_path / "baselines.json").read_text())
    assert set(written) == {"expert", "m"} and len(asked) == 2 * 10
    assert "| tasks | expert | m |" in (tmp_path / "baselines.md").read_text()
    monkeypatch.setattr(sys, "argv", ["baselines", "--agent", url, "--family", "logic"])
    assert baselines.main() == 2
