"""The dashboard has every metric of the documents, and a missing Ray agent is a sentence."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.write_dashboard import FILE, dashboard, keys
from skyrl_trainer.cli import main

ROOT = Path(__file__).parents[3]


def test_the_dashboard_is_made_of_the_table_of_metrics() -> None:
    assert json.loads(FILE.read_text()) == dashboard(), "run scripts/write_dashboard.py"
    patterns = [re.compile(pattern) for pattern, _ in keys()]
    for key in (
        "reward/mean",
        "agency/tool_use/2/success",
        "agency/alfworld_lite/success",
        "eval/mmlu/accuracy",
        "staleness/3",
        "time/step",
        "stop/length",
    ):
        assert any(pattern.fullmatch(key) for pattern in patterns), key
    assert not any(pattern.fullmatch("reward") for pattern in patterns)
    panels = dashboard()["panels"]
    assert len(panels) > 50 and len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "none upon another"
    assert all(
        "ray_skyrl_metric{" in p["targets"][0]["expr"] or "ray_component" in p["targets"][0]["expr"] for p in panels
    )


def test_without_the_agent_prometheus_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def without(name: str, *package: Any) -> Any:
        return None if name == "aiohttp_cors" else found(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    code = main(["train", "quickstart", "trainer.logger=prometheus", f"trainer.run_dir={tmp_path / 'run'}"])
    said = "".join(capsys.readouterr())
    assert code and "trainer.logger=prometheus is not installed: run `pip install 'ray[default]'`" in said
    assert not (tmp_path / "run").exists()
