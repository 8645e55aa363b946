"""docs/grafana.json: a dashboard of a run's metrics, made of the table in docs/metrics.md; --check: is it up to date?

python scripts/write_dashboard.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
FILE = DOCS / "grafana.json"
ACTORS = '{Component=~"ray::.*"}'
OF_RAY = {
    "processor of each kind of process, in percent": f"sum by (Component) (ray_component_cpu_percentage{ACTORS})",
    "memory of each kind of process, in MB": f"sum by (Component) (ray_component_rss_mb{ACTORS})",
    "seconds that each engine computed in the step": 'ray_skyrl_metric{run="$run", key=~"busy/.*"}',
}
"""What Ray serves on the same port, and what metrics.jsonl does not have."""


def keys() -> list[tuple[str, str]]:
    """(regular expression of the keys of a row of the table, what they are)."""
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    found = []
    for names, what in rows:
        parts = [
            re.sub(r"<[^>]*>|\.\.\.", ".+", re.escape(name).replace(r"\.\.\.", "..."))
            for name in re.findall("`(.+?)`", names)
        ]
        found.append(("|".join(parts), what))
    return found


def panel(number: int, title: str, expression: str, legend: str, about: str) -> dict[str, Any]:
    place = {"h": 7, "w": 8, "x": 8 * (number % 3), "y": 7 * (number // 3)}
    target = {"expr": expression, "legendFormat": legend, "refId": "A"}
    source = {"type": "prometheus", "uid": "${source}"}
    return {"id": number + 1, "type": "timeseries", "title": title, "description": about, "gridPos": place,
            "datasource": source, "targets": [target]}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels = []
    for pattern, about in keys():
        expression = f'ray_skyrl_metric{{run="$run", key=~"{pattern.replace(chr(92), chr(92) * 2)}"}}'
        title = re.sub(r"\\(.)", r"\1", pattern.replace(".+", "*")).replace("|", ", ")
        panels.append(panel(len(panels), title, expression, "{{key}}", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", about)))
    for title, expression in OF_RAY.items():
        panels.append(panel(len(panels), title, expression, "{{Component}}{{key}}", title))
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    run = {"name": "run", "type": "query", "query": "label_values(ray_skyrl_metric, run)", "refresh": 2,
           "datasource": {"type": "prometheus", "uid": "${source}"}}  # fmt: skip
    return {"title": "SkyRL run", "uid": "skyrl-run", "schemaVersion": 39, "refresh": "10s",
            "time": {"from": "now-3h", "to": "now"}, "templating": {"list": [source, run]}, "panels": panels,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().check:
        sys.exit(0 if FILE.exists() and FILE.read_text() == text else f"{FILE} is old: run scripts/write_dashboard.py")
    FILE.write_text(text)


if __name__ == "__main__":
    main()
