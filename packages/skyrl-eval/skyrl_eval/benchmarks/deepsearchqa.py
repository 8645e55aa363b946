"""DeepSearchQA: 900 questions for research on the web; two thirds ask for a set. The score is the macro-averaged F1."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictBool, ValidationError, field_validator

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Benchmark, Context, ask, final, judge_of, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

RATES = ("fully_correct", "correct_with_excessive", "partially_correct", "fully_incorrect")


class Rating(BaseModel):
    """The judge's reply. Example: {"Correctness Details": {"Ix": true, "Ox": false}, "Excessive Answers": ["Ux"]}"""

    details: dict[str, StrictBool] = Field(alias="Correctness Details")
    excessive: list[str] = Field(alias="Excessive Answers", default=[])

    def figures(self) -> tuple[float, dict[str, Any]]:
        """F1; and precision, recall and which of the four rates the answer counts for."""
        found, expected, excessive = sum(self.details.values()), len(self.details), len(self.excessive)
        precision = found / (found + excessive) if found + excessive else 0.0
        recall = found / expected if expected else 0.0
        rate = RATES[bool(excessive)] if found == expected else RATES[2 if found else 3]
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        return f1, {"precision": precision, "recall": recall, "rate": rate}


def parse_rating(reply: str) -> Rating | None:
    try:
        return Rating.model_validate(json.loads(reply[reply.find("{") : reply.rfind("}") + 1])["Answer Correctness"])
    except (ValueError, KeyError, TypeError, ValidationError):
        return None


class DeepSearchQA(Benchmark):
    name = "deepsearchqa"
    source = Source("google/deepsearchqa", "DSQA-full.csv", size=900)
    judge = "gemini-2.5-flash"
    prompts = ("deepsearchqa_judge",)
    notes = ("An empty answer counts as fully incorrect without asking the judge.",)

    class Row(data.Row):
        problem: str
        problem_category: str = ""
        answer: str
        answer_type: Literal["Single Answer", "Set Answer"]

        @field_validator("answer", mode="before")
        @classmethod
        def empty_set(cls, value: Any) -> Any:
            """Some readers take the answer "None", which stands for the empty set, for a missing value."""
            return "None" if value is None else value

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        return [
            self.item(data.content_id(r.problem), r.problem, r.answer, category=r.problem_category, kind=r.answer_type)
            for r in rows
        ]

    def env(self, item: Item) -> Sample:
        """The kind of answer (one, or a set) is not shown: the official protocol hides it."""
        return ask(item, item.question)

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        if not (response := final(attempt.answer)):
            return verdict(item, attempt, 0.0, "", detail={"precision": 0.0, "recall": 0.0, "rate": RATES[3]})
        parts = {"question": item.question.strip(), "prompt_type": item.meta["kind"], "response": response}
        prompt = fill("deepsearchqa_judge", correct_answer=item.gold.strip(), **parts)
        rating, prompt_tokens, completion_tokens = judge_of(context).ask(prompt, parse_rating)
        f1, detail = rating.figures()
        tokens = {"judge_prompt_tokens": prompt_tokens, "judge_completion_tokens": completion_tokens}
        return verdict(item, attempt, f1, response[-200:], detail=detail, **tokens)

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        graded = [verdict.detail for verdict in verdicts if verdict.score is not None]
        counts, n = Counter(detail["rate"] for detail in graded), max(len(graded), 1)
        means = {name: sum(detail[name] for detail in graded) / n for name in ("precision", "recall")}
        return means | {name: counts[name] / n for name in RATES}


BENCHMARK = DeepSearchQA()
