"""DeepSearchQA: 900 questions for research on the web; two thirds ask for a set. The score is the macro-averaged F1."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictBool, ValidationError, field_validator

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Context, ask, final, verdict
from skyrl_eval.judge import JudgeFailed
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

SOURCE = Source("google/deepsearchqa", "DSQA-full.csv", size=900)
JUDGE = "gemini-2.5-flash"
PROMPTS = ("deepsearchqa_judge",)
NOTES = ("An empty answer counts as fully incorrect without asking the judge.",)
RATES = ("fully_correct", "correct_with_excessive", "partially_correct", "fully_incorrect")


class Row(data.Row):
    problem: str
    problem_category: str = ""
    answer: str
    answer_type: Literal["Single Answer", "Set Answer"]

    @field_validator("answer", mode="before")
    @classmethod
    def empty_set(cls, value: Any) -> Any:
        """Some readers make a missing value of the answer "None", which stands for the empty set."""
        return "None" if value is None else value


class Rating(BaseModel):
    details: dict[str, StrictBool] = Field(alias="Correctness Details")
    excessive: list[str] = Field(alias="Excessive Answers", default=[])


def parse_rating(reply: str) -> Rating | None:
    try:
        return Rating.model_validate(json.loads(reply[reply.find("{") : reply.rfind("}") + 1])["Answer Correctness"])
    except (ValueError, KeyError, TypeError, ValidationError):
        return None


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    return [
        Item(
            "deepsearchqa",
            data.content_id(row.problem),
            row.problem,
            row.answer,
            {"category": row.problem_category, "answer_type": row.answer_type},
        )
        for row in rows
    ]


def env(item: Item) -> Sample:
    """The kind of answer (one, or a set) is not shown: the official protocol hides it."""
    return ask(item, item.question)


def grade(item: Item, attempt: Attempt, context: Context) -> Verdict:
    response = final(attempt.answer)
    if not response:
        return verdict(item, attempt, 0.0, "", detail={"precision": 0.0, "recall": 0.0, "rate": "fully_incorrect"})
    if context.judge is None:
        raise JudgeFailed("No judge was given (--judge-url and --judge-model).")
    prompt = fill(
        "deepsearchqa_judge",
        question=item.question.strip(),
        prompt_type=item.meta["answer_type"],
        correct_answer=item.gold.strip(),
        response=response,
    )
    rating, prompt_tokens, completion_tokens = context.judge.ask(prompt, parse_rating)
    found, expected, excessive = sum(rating.details.values()), len(rating.details), len(rating.excessive)
    precision = found / (found + excessive) if found + excessive else 0.0
    recall = found / expected if expected else 0.0
    if found == expected:
        rate = "correct_with_excessive" if excessive else "fully_correct"
    else:
        rate = "partially_correct" if found else "fully_incorrect"
    return verdict(
        item,
        attempt,
        2 * precision * recall / (precision + recall) if precision + recall else 0.0,
        response[-200:],
        detail={"precision": precision, "recall": recall, "rate": rate},
        judge_prompt_tokens=prompt_tokens,
        judge_completion_tokens=completion_tokens,
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    graded = [verdict.detail for verdict in verdicts if verdict.score is not None]
    counts = Counter(detail["rate"] for detail in graded)
    means = {name: sum(detail[name] for detail in graded) / max(len(graded), 1) for name in ("precision", "recall")}
    return means | {name: counts[name] / max(len(graded), 1) for name in RATES}
