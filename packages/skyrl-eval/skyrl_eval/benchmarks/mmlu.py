"""MMLU: 14,042 questions with four choices in 57 subjects, answered in the model's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Benchmark, Context, ask, choice
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample


class FourChoices(Benchmark):
    """Questions with the choices A to D in `meta["choices"]`, answered by a last line "Answer: LETTER"."""

    prompts = ("choices_question",)

    def env(self, item: Item) -> Sample:
        choices = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", item.meta["choices"], strict=True))
        return ask(item, fill("choices_question", letters="ABCD", question=item.question, choices=choices))

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        return choice(item, attempt, r"(?i)Answer[ \t]*:[ \t*]*\$?\(?([A-D])\b")


class MMLU(FourChoices):
    name = "mmlu"
    source = Source("cais/mmlu", "all/test-*.parquet", size=14042)
    notes = ("Zero-shot with reasoning, the answer generated: not the 5-shot figure from log-probabilities of A to D.",)

    class Row(data.Row):
        question: str
        subject: str = ""
        choices: Annotated[list[str], Field(min_length=4, max_length=4)]
        answer: Annotated[int, Field(ge=0, le=3)]

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        ids = [data.content_id(row.subject, row.question, row.choices) for row in rows]
        return [
            self.item(item_id, row.question, "ABCD"[row.answer], category=row.subject, choices=row.choices)
            for item_id, row in zip(ids, rows, strict=True)
        ]


BENCHMARK = MMLU()
