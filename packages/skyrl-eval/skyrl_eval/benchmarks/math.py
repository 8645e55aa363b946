r"""MATH and GSM8K: an expression in the last \boxed{}, compared by math-verify; a whole number, compared as text."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AliasChoices, Field, model_validator

from skyrl_eval import data
from skyrl_eval.benchmarks.common import NOTES, Benchmark, Context, final, last, verdict
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_gym.answers import verified

BOX = re.compile(r"\\f?box(?:ed)?\s*\{")


def boxed(text: str) -> str:
    r"""What the last \boxed{} or \fbox{} holds, its braces in balance, or else \boxed 2 has; "" where there is none."""
    held, depth = text[max((box.end() for box in BOX.finditer(text)), default=len(text)) :], 1
    # A backslash takes what follows out of the balance; in a row break it is the other backslash.
    for found in re.finditer(r"\\.|[{}]", held):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return held[: found.start()].strip()
    return last(r"\\boxed\s+([^\s\\{}$]+)", text)


def equivalent(gold: str, answer: str) -> bool:
    """Whether the two are the same text, or math-verify takes them for the same; two missing answers are not."""
    told = gold.strip() and answer.strip()
    return bool(told) and (gold.strip() == answer.strip() or verified(answer, gold))


def number(text: str) -> str:
    """Without currency, commas, a full stop at its end and decimals that are 0: "$1,200.00." is "1200"."""
    plain = text.replace(",", "").replace("$", "").strip().rstrip(".")
    whole, _, decimals = plain.partition(".")
    return whole if not decimals.strip("0") else plain


class MATH(Benchmark):
    """Competition problems; 500 in the usual subset (the default), 5,000 in all."""

    name = "math"
    source = Source("HuggingFaceH4/MATH-500", "test.jsonl", size=500)
    prompts = ("math_question",)
    notes = NOTES["math"]

    class Row(data.Row):
        problem: str = Field(validation_alias=AliasChoices("problem", "Question"))
        answer: str = Field(default="", validation_alias=AliasChoices("answer", "Answer"))
        solution: str = ""
        subject: str = Field(default="", validation_alias=AliasChoices("subject", "type"))
        level: str = ""
        unique_id: str = ""

        @model_validator(mode="after")
        def has_answer(self) -> Self:
            if not (self.answer or boxed(self.solution)):
                raise ValueError("field 'answer' is missing, and field 'solution' has no \\boxed{}")
            return self

    def item_of(self, row: Row) -> Item:
        item_id = row.unique_id or data.content_id(row.problem)
        gold = row.answer or boxed(row.solution)
        return self.item(item_id, row.problem, gold, category=row.subject, level=row.level)

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        answer = boxed(final(attempt.answer))
        return verdict(item, attempt, float(equivalent(item.gold, answer)), answer)


class GSM8K(Benchmark):
    """1,319 word problems whose answers are whole numbers."""

    name = "gsm8k"
    source = Source("openai/gsm8k", "main/test-*.parquet", size=1319)
    prompts = ("gsm8k_question",)
    notes = NOTES["gsm8k"]

    class Row(data.Row):
        question: str
        answer: Annotated[str, Field(pattern=r"####\s*[-$]*\d[\d.,]*\s*$")]

    def item_of(self, row: Row) -> Item:
        return self.item(data.content_id(row.question), row.question, number(row.answer.rpartition("####")[2]))

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        text = final(attempt.answer).replace("\u2212", "-")
        strict = number(last(r"####[ \t]*(?!\d+[.)][ \t]+\S.*\n\s*\S)(\$?-?[\d.,]+)", text))  # no "#### 2. So"
        answer = strict or number(last(r"(-?\$?\d[\d.,]*)", text))
        return verdict(item, attempt, float(answer == item.gold), answer, detail={"strict": strict == item.gold})

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        return {"strict": sum(bool(verdict.detail.get("strict")) for verdict in verdicts) / len(verdicts)}
