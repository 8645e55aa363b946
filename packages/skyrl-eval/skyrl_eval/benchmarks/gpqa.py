"""GPQA: graduate-level questions with four choices; 198 in the diamond set (the default)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.mmlu import FourChoices
from skyrl_eval.types import Item, Source


class GPQA(FourChoices):
    name = "gpqa"
    source = Source("Idavidrein/gpqa", "gpqa_diamond.csv", size=198)
    notes = ("The order of the choices is a hash of the record's id: the same in every run, sample and subset.",)

    class Row(data.Row):
        question: str = Field(alias="Question")
        correct: str = Field(alias="Correct Answer")
        incorrect1: str = Field(alias="Incorrect Answer 1")
        incorrect2: str = Field(alias="Incorrect Answer 2")
        incorrect3: str = Field(alias="Incorrect Answer 3")
        record_id: str | None = Field(default=None, alias="Record ID")
        domain: str = Field(default="", alias="High-level domain")

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        items = []
        for row in rows:
            item_id = row.record_id or data.content_id(row.question)
            order = sorted(range(4), key=lambda place: data.content_id(item_id, place))
            texts = [row.correct, row.incorrect1, row.incorrect2, row.incorrect3]
            choices = [texts[place].strip() for place in order]
            gold = "ABCD"[order.index(0)]
            items.append(self.item(item_id, row.question, gold, category=row.domain, choices=choices))
        return items


BENCHMARK = GPQA()
