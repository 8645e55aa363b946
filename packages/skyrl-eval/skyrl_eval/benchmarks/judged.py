"""HLE, BrowseComp and DeepSearchQA: short answers to hard questions, which a judge compares with the right ones."""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from skyrl_eval import data, metrics
from skyrl_eval.benchmarks.common import NOTES, Benchmark, Context, ask, final, verdict
from skyrl_eval.judge import Judge, JudgeFailed, Match, objects, parse_match
from skyrl_eval.prompts import fill, text
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

RATES = ("fully_correct", "correct_with_excessive", "partially_correct", "fully_incorrect")


def judge_of(context: Context) -> Judge:
    if context.judge is None:
        raise JudgeFailed("No judge was given (--judge-url and --judge-model).")
    return context.judge


class MatchedAnswer(Benchmark):
    """HLE's and BrowseComp's way: a judge says whether the answer matches, and reads the confidence off it."""

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        if not (response := final(attempt.answer)):
            return verdict(item, attempt, 0.0, "")
        prompt = fill("hle_judge", question=item.question, response=response, correct_answer=item.gold)
        match, tokens = judge_of(context).ask(prompt, parse_match, Match)
        answer, confidence = match.extracted_final_answer or response[-200:], match.confidence / 100
        return verdict(item, attempt, float(match.correct == "yes"), answer, confidence=confidence, **tokens)

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        return {"calibration": metrics.calibration(verdicts)}


class HLE(MatchedAnswer):
    """Humanity's Last Exam: 2,500 expert questions, 2,158 of them without an image (the default here)."""

    name = "hle"
    images = True
    source = Source("cais/hle", "data/test-*.parquet", size=2500)
    judge = "o3-mini-2025-01-31"
    prompts = ("hle_system", "hle_judge")
    notes = NOTES["hle"]

    class Row(data.Row):
        id: str
        question: str = Field(min_length=1)
        answer: str = Field(min_length=1)
        answer_type: Literal["exactMatch", "multipleChoice"]
        image: str | None = None
        category: str = ""

    def item_of(self, row: Row) -> Item:
        return self.item(row.id, row.question, row.answer, row.image or "", category=row.category)

    def env(self, item: Item) -> Sample:
        return ask(item, item.question, text("hle_system"))


def decrypt(text: str, password: str) -> str:
    """Base64 of the text XORed with the password's SHA-256, again and again."""
    key = cycle(hashlib.sha256(password.encode()).digest())
    return bytes(byte ^ next(key) for byte in base64.b64decode(text, validate=True)).decode()


class BrowseComp(MatchedAnswer):
    """1,266 questions whose short answers are hard to find on the web, kept encrypted in the file."""

    name = "browsecomp"
    url = "https://openaipublic.blob.core.windows.net/simple-evals/browse_comp_test_set.csv"
    source = Source(url=url, sha256="7b24471c", size=1266)
    judge = "gpt-4o"
    prompts = ("browsecomp_question", "hle_judge")
    notes = NOTES["browsecomp"]

    class Row(data.Row):
        canary: str
        problem: str
        answer: str
        problem_topic: str = ""

        @field_validator("problem", "answer")
        @classmethod
        def opened(cls, value: str, info: ValidationInfo) -> str:
            return decrypt(value, info.data.get("canary", ""))

    def item_of(self, row: Row) -> Item:
        return self.item(data.content_id(row.problem), row.problem, row.answer, category=row.problem_topic)


class Rating(BaseModel):
    """A reply such as {"Correctness Details": {"Ix": true, "Ox": false}, "Excessive Answers": ["Ux"]}."""

    details: dict[str, bool] = Field(alias="Correctness Details", min_length=1)
    excessive: list[Any] | None = Field(alias="Excessive Answers", default=None)

    def figures(self) -> tuple[float, dict[str, Any]]:
        found, expected = sum(self.details.values()), len(self.details)
        excessive = len(self.excessive or ())
        precision = found / max(found + excessive, 1)
        rate = RATES[bool(excessive)] if found == expected else RATES[2 if found else 3]
        f1 = 2 * found / (found + excessive + expected)
        return f1, {"precision": precision, "recall": found / expected, "rate": rate}


def parse_rating(reply: str) -> Rating | None:
    key = "Answer Correctness"
    ratings = [found[key] for found in objects(final(reply), key)]
    try:
        return Rating.model_validate(ratings[-1])
    except (LookupError, ValidationError):
        return None


class DeepSearchQA(Benchmark):
    """900 questions for research on the web; two thirds ask for a set. The score is the macro-averaged F1."""

    name = "deepsearchqa"
    source = Source("google/deepsearchqa", "DSQA-full.csv", size=900)
    judge = "gemini-2.5-flash"
    prompts = ("deepsearchqa_judge",)
    notes = NOTES["deepsearchqa"]

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

    def item_of(self, row: Row) -> Item:
        meta = {"category": row.problem_category, "kind": row.answer_type}
        return self.item(data.content_id(row.problem), row.problem, row.answer, **meta)

    def env(self, item: Item) -> Sample:
        """The kind of answer (one, or a set) is not shown: the official protocol hides it."""
        return ask(item, item.question)

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        if not (response := final(attempt.answer)):
            return verdict(item, attempt, 0.0, "", detail={"precision": 0.0, "recall": 0.0, "rate": RATES[3]})
        parts = {"question": item.question.strip(), "prompt_type": item.meta["kind"], "response": response}
        prompt = fill("deepsearchqa_judge", correct_answer=item.gold.strip(), **parts)
        rating, tokens = judge_of(context).ask(prompt, parse_rating)
        f1, detail = rating.figures()
        return verdict(item, attempt, f1, response[-200:], detail=detail, **tokens)

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        graded = [verdict.detail for verdict in verdicts if verdict.score is not None]
        counts, n = Counter(detail["rate"] for detail in graded), max(len(graded), 1)
        means = {name: sum(detail[name] for detail in graded) / n for name in ("precision", "recall")}
        return means | {name: counts[name] / n for name in RATES}
