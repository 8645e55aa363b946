r"""MATH: competition problems; 500 in the usual subset (the default), 5,000 in all. The last \boxed{} is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import AliasChoices, Field, model_validator

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Context, ask, final, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

SOURCE = Source("HuggingFaceH4/MATH-500", "test.jsonl", size=500)
JUDGE = ""
PROMPTS = ("math_question",)
NOTES = ("Equality by math-verify, not by the string rules of the paper or by a judge: higher than the former.",)


class Row(data.Row):
    problem: str = Field(validation_alias=AliasChoices("problem", "Question"))
    answer: str = Field(default="", validation_alias=AliasChoices("answer", "Answer"))
    solution: str = ""
    subject: str = Field(default="", validation_alias=AliasChoices("subject", "type"))
    level: str = ""
    unique_id: str = ""

    @model_validator(mode="after")
    def has_answer(self) -> Row:
        if not (self.answer or boxed(self.solution)):
            raise ValueError("field 'answer' is missing, and field 'solution' has no \\boxed{}")
        return self


def boxed(text: str) -> str:
    r"""What the last \boxed{} holds, its braces in balance; "" where there is none, or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    begin = start + len("\\boxed{")
    depth = 1
    for place in range(begin, len(text)):
        if text[place - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return ""


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    return [
        Item(
            "math",
            row.unique_id or data.content_id(row.problem),
            row.problem,
            row.answer or boxed(row.solution),
            {"category": row.subject, "level": row.level},
        )
        for row in rows
    ]


def env(item: Item) -> Sample:
    return ask(item, fill("math_question", question=item.question))


def grade(item: Item, attempt: Attempt, context: Context) -> Verdict:
    answer = boxed(final(attempt.answer))
    return verdict(item, attempt, float(bool(answer) and equivalent(item.gold, answer)), answer)


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {}


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify takes the two for the same. Its time limits are signals: call it in the main thread."""
    from math_verify import parse, verify

    return bool(gold.strip() and answer.strip()) and (
        gold.strip() == answer.strip() or verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}"))
    )
