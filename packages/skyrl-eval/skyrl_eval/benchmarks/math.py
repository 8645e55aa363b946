r"""MATH: competition problems; 500 in the usual subset (the default), 5,000 in all. The last \boxed{} is the answer."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import AliasChoices, Field, model_validator

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Benchmark, Context, ask, final, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample


def boxed(text: str) -> str:
    r"""What the last \boxed{} holds, its braces in balance; "" where there is none, or it is not closed."""
    begin = text.rfind("\\boxed{") + len("\\boxed{")
    depth = 1
    for place in range(begin, len(text) if "\\boxed{" in text else 0):
        if text[place - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return ""


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify takes the two for the same. Its time limits are signals: call it in the main thread."""
    from math_verify import parse, verify

    if not (gold.strip() and answer.strip()):  # two missing answers are not the same answer
        return False
    return gold.strip() == answer.strip() or verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}"))


class MATH(Benchmark):
    name = "math"
    source = Source("HuggingFaceH4/MATH-500", "test.jsonl", size=500)
    prompts = ("math_question",)
    notes = ("Equality by math-verify, not by the string rules of the paper or by a judge: higher than the former.",)

    class Row(data.Row):
        problem: str = Field(validation_alias=AliasChoices("problem", "Question"))
        answer: str = Field(default="", validation_alias=AliasChoices("answer", "Answer"))
        solution: str = ""
        subject: str = Field(default="", validation_alias=AliasChoices("subject", "type"))
        level: str = ""
        unique_id: str = ""

        @model_validator(mode="after")
        def has_answer(self) -> MATH.Row:
            if not (self.answer or boxed(self.solution)):
                raise ValueError("field 'answer' is missing, and field 'solution' has no \\boxed{}")
            return self

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        ids = [row.unique_id or data.content_id(row.problem) for row in rows]
        return [
            self.item(item_id, r.problem, r.answer or boxed(r.solution), category=r.subject, level=r.level)
            for item_id, r in zip(ids, rows, strict=True)
        ]

    def env(self, item: Item) -> Sample:
        return ask(item, fill("math_question", question=item.question))

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        answer = boxed(final(attempt.answer))
        return verdict(item, attempt, float(equivalent(item.gold, answer)), answer)


BENCHMARK = MATH()
