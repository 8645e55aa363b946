"""Humanity's Last Exam: 2,500 expert questions, 2,158 of them without an image (the default here)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from skyrl_eval import data, metrics
from skyrl_eval.benchmarks.common import ask
from skyrl_eval.benchmarks.common import judged_match as grade
from skyrl_eval.prompts import text
from skyrl_eval.types import Item, Source, Verdict
from skyrl_trainer.types import Sample

__all__ = ["JUDGE", "NOTES", "PROMPTS", "SOURCE", "Row", "env", "grade", "summary", "tasks"]

SOURCE = Source("cais/hle", "data/test-*.parquet", gated=True, size=2500)
JUDGE = "o3-mini-2025-01-31"
PROMPTS = ("hle_system", "hle_judge")
NOTES = (
    "An empty answer counts as wrong without asking the judge.",
    "Calibration is over all bins; the official figure leaves out the last one, and is given from 200 items up.",
)


class Row(data.Row):
    id: str
    question: str
    answer: str
    answer_type: Literal["exactMatch", "multipleChoice"]
    image: str | None = None
    category: str = Field(default="")
    raw_subject: str = ""


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    return [
        Item(
            "hle",
            row.id,
            row.question,
            row.answer,
            {"category": row.category, "subject": row.raw_subject, "answer_type": row.answer_type},
            row.image or "",
        )
        for row in rows
    ]


def env(item: Item) -> Sample:
    return ask(item, item.question, text("hle_system"))


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {"calibration": metrics.calibration(verdicts)}
