"""timeline.jsonl: who worked from when to when, a line a step; the report draws it.

Example: {"step": 3, "train": [[1790000000.1, 1790000001.4]], "engine 0": [[1790000000.0, 1790000000.9]]}, in seconds as
time.time() counts them. "rollout" is the driver's wait for tries.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE_NAME = "timeline.jsonl"
Spans = dict[str, list[tuple[float, float]]]


def write_spans(run_dir: Path, step: int, spans: Spans) -> None:
    rounded = {who: [(round(start, 3), round(end, 3)) for start, end in own] for who, own in spans.items()}
    with (run_dir / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **rounded}) + "\n")


def read_spans(run_dir: Path) -> list[dict[str, Any]]:
    """A line each; [] without a file. One torn by a crash is left out, with what stands behind it."""
    path, spans = run_dir / FILE_NAME, []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            spans.append(json.loads(line))
    return spans
