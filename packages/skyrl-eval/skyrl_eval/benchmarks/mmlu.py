"""MMLU: 14,042 questions with four choices in 57 subjects, answered in the model's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Context, ask, choice, lettered
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

SOURCE = Source("cais/mmlu", "all/test-*.parquet", size=14042)
JUDGE = ""
PROMPTS = ("choices_question",)
NOTES = ("Zero-shot with reasoning, the answer generated: not the 5-shot figure from log-probabilities of A to D.",)


class Row(data.Row):
    question: str
    subject: str = ""
    choices: Annotated[list[str], Field(min_length=4, max_length=4)]
    answer: Annotated[int, Field(ge=0, le=3)]


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    return [
        Item(
            "mmlu",
            data.content_id(row.subject, row.question, row.choices),
            row.question,
            "ABCD"[row.answer],
            {"category": row.subject, "choices": row.choices},
        )
        for row in rows
    ]


def env(item: Item) -> Sample:
    choices = lettered(item.meta["choices"])
    return ask(item, fill("choices_question", letters="ABCD", question=item.question, choices=choices))


def grade(item: Item, attempt: Attempt, context: Context) -> Verdict:
    return choice(item, attempt, r"(?i)Answer[ \t]*:[ \t*]*\$?\(?([A-D])\b")


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {}
