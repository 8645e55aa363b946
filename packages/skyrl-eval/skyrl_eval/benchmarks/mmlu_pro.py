"""MMLU-Pro: 12,032 questions with up to ten choices; five worked examples of the same category come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Benchmark, Context, ask, choice
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

CUE = "Answer: Let's think step by step."


class MMLUPro(Benchmark):
    name = "mmlu-pro"
    source = Source("TIGER-Lab/MMLU-Pro", "data/test-*.parquet", "data/validation-*.parquet", size=12032)
    prompts = ("mmlu_pro_system",)
    notes = (
        "Where no letter is found the official code guesses at random; here the item is unparsed, and wrong.",
        "Without a validation file beside the test file no worked examples are shown.",
    )

    class Row(data.Row):
        question_id: str
        question: str
        options: Annotated[list[str], Field(min_length=2, max_length=10)]
        answer: Annotated[str, Field(pattern="^[A-J]$")]
        category: str = ""
        cot_content: str = ""

        def asked(self) -> str:
            """The question, its choices without those that are "N/A" (always the last ones), and the cue."""
            choices = [text for text in self.options if text != "N/A"]
            lines = [f"{chr(65 + place)}. {text}" for place, text in enumerate(choices)]
            return "\n".join(("Question:", self.question, "Options:", *lines, CUE))

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        examples: dict[str, list[str]] = {}
        for shot in shots:
            answer = shot.cot_content.removeprefix("A: Let's think step by step.").strip()
            examples.setdefault(shot.category, []).append(f"{shot.asked()} {answer}")
        asked = ["\n\n".join((*examples.get(row.category, [])[:5], row.asked())) for row in rows]
        return [
            self.item(row.question_id, row.question, row.answer, category=row.category, asked=text)
            for row, text in zip(rows, asked, strict=True)
        ]

    def env(self, item: Item) -> Sample:
        return ask(item, item.meta["asked"], fill("mmlu_pro_system", category=item.meta["category"]))

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        return choice(item, attempt, r"answer is \(?([A-J])\)?", r"[aA]nswer:\s*([A-J])", r"\b([A-J])\b")


BENCHMARK = MMLUPro()
