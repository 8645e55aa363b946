"""MMLU, MMLU-Pro and GPQA: questions with choices, answered in the model's own words. A letter is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Benchmark, Context, ask, final, last, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

CUE = "Answer: Let's think step by step."


class Choices(Benchmark):
    """The answer is a letter: the last match of the first of the patterns that matches at all."""

    patterns: ClassVar[tuple[str, ...]]

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        text = final(attempt.answer)
        answer = next((found for pattern in self.patterns if (found := last(pattern, text))), "").upper()
        return verdict(item, attempt, float(answer == item.gold), answer)


class FourChoices(Choices):
    """Questions with the choices A to D in `meta["choices"]`, answered by a last line "Answer: LETTER"."""

    prompts = ("choices_question",)
    patterns = (r"(?i)Answer[ \t]*:[ \t*]*\$?\(?([A-D])\b",)

    def env(self, item: Item) -> Sample:
        choices = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", item.meta["choices"], strict=True))
        return ask(item, fill("choices_question", letters="ABCD", question=item.question, choices=choices))


class MMLU(FourChoices):
    """14,042 questions in 57 subjects."""

    name = "mmlu"
    source = Source("cais/mmlu", "all/test-*.parquet", size=14042)
    notes = ("Zero-shot with reasoning, the answer generated: not the 5-shot figure from log-probabilities of A to D.",)

    class Row(data.Row):
        question: str
        subject: str = ""
        choices: Annotated[list[str], Field(min_length=4, max_length=4)]
        answer: Annotated[int, Field(ge=0, le=3)]

    def item_of(self, row: Row) -> Item:
        item_id = data.content_id(row.subject, row.question, row.choices)
        return self.item(item_id, row.question, "ABCD"[row.answer], category=row.subject, choices=row.choices)


class GPQA(FourChoices):
    """Graduate-level questions; 198 in the diamond set (the default)."""

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

    def item_of(self, row: Row) -> Item:
        item_id = row.record_id or data.content_id(row.question)
        order = sorted(range(4), key=lambda place: data.content_id(item_id, place))
        texts = [row.correct, row.incorrect1, row.incorrect2, row.incorrect3]
        choices = [texts[place].strip() for place in order]
        return self.item(item_id, row.question, "ABCD"[order.index(0)], category=row.domain, choices=choices)


class MMLUPro(Choices):
    """12,032 questions with up to ten choices; five worked examples of the same category come first."""

    name = "mmlu-pro"
    source = Source("TIGER-Lab/MMLU-Pro", "data/test-*.parquet", "data/validation-*.parquet", size=12032)
    prompts = ("mmlu_pro_system",)
    patterns = (r"answer is \(?([A-J])\)?", r"[aA]nswer:\s*([A-J])", r"\b([A-J])\b")
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
        items = []
        for row in rows:
            asked = "\n\n".join((*examples.get(row.category, [])[:5], row.asked()))
            items.append(self.item(row.question_id, row.question, row.answer, category=row.category, asked=asked))
        return items

    def env(self, item: Item) -> Sample:
        return ask(item, item.meta["asked"], fill("mmlu_pro_system", category=item.meta["category"]))
