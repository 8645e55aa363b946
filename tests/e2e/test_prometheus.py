"""A run that is scraped while it trains: what Ray's port serves are the rows of metrics.jsonl."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.runs import QUICK, Run, metrics
from tests.trainer.fakes import tiny_policy


def scrape(url: str) -> tuple[dict[str, float], set[str]]:
    """Our gauges by key, and the processes of which Ray serves the memory."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        samples = [each for family in text_string_to_metric_families(answer.read().decode()) for each in family.samples]
    ours = {each.labels["key"]: each.value for each in samples if each.name == "ray_skyrl_metric"}
    return ours, {each.labels.get("Component", "") for each in samples if "component_rss" in each.name}


@pytest.mark.full
def test_what_is_scraped_are_the_rows_of_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "100")
    model = {"trainer__policy__model__path": tiny_policy(tmp_path / "policy"), "trainer__max_steps": 1000}
    run = Run(tmp_path / "run", **{**QUICK, **model, "trainer__logger": "prometheus"})
    seen: dict[int, dict[str, float]] = {}
    processes: set[str] = set()
    try:
        run.wait_for_step(1)
        (targets,) = json.loads((run.folder / "prometheus.json").read_text())
        deadline, last = time.monotonic() + 200, {"": 0.0}
        while len(seen) < 3 or not any("RolloutWorker" in name for name in processes):
            assert time.monotonic() < deadline and run.process.poll() is None, (sorted(seen), processes)
            found, now = scrape(f"http://{targets['targets'][0]}/metrics")
            processes |= now
            if found and repr(found) == repr(last):  # else it may stand between two steps
                seen[int(found["step"])] = found
            last = found
            time.sleep(0.2)
        rows = {int(row["step"]): row for row in metrics(run.folder)}
    finally:
        run.kill()
        run.finish()
    for step, found in seen.items():
        busy = {key for key in found if key.startswith("busy/")}
        assert busy == {"busy/engine 0"}
        numbers = {key: value for key, value in found.items() if not math.isnan(value) and key not in busy}
        assert numbers == {key: value for key, value in rows[step].items() if value is not None}
    assert any("RolloutWorker" in name for name in processes) and any("Engine" in name for name in processes)
