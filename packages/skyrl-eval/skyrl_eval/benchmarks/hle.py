"""Humanity's Last Exam: 2,500 expert questions, 2,158 of them without an image (the default here)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from skyrl_eval import data
from skyrl_eval.benchmarks.common import MatchedAnswer, ask
from skyrl_eval.prompts import text
from skyrl_eval.types import Item, Source
from skyrl_trainer.types import Sample


class HLE(MatchedAnswer):
    name = "hle"
    source = Source("cais/hle", "data/test-*.parquet", size=2500)
    judge = "o3-mini-2025-01-31"
    prompts = ("hle_system", "hle_judge")
    notes = (
        "An empty answer counts as wrong without asking the judge.",
        "Calibration is over all bins; the official figure leaves out the last one, and is given from 200 items up.",
    )

    class Row(data.Row):
        id: str
        question: str
        answer: str
        answer_type: Literal["exactMatch", "multipleChoice"]
        image: str | None = None
        category: str = ""

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        return [
            self.item(r.id, r.question, r.answer, r.image or "", category=r.category, answer_type=r.answer_type)
            for r in rows
        ]

    def env(self, item: Item) -> Sample:
        return ask(item, item.question, text("hle_system"))


BENCHMARK = HLE()
