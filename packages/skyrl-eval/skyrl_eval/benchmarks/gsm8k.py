"""GSM8K: 1,319 word problems whose answers are whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Context, ask, final, last, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

SOURCE = Source("openai/gsm8k", "main/test-*.parquet", size=1319)
JUDGE = ""
PROMPTS = ("gsm8k_question",)
NOTES = ("Zero-shot; the score is the flexible one (last number), `strict` asks for a line '#### number'.",)


class Row(data.Row):
    question: str
    answer: Annotated[str, Field(pattern="####")]


def number(text: str) -> str:
    """Without currency, commas and a full stop at its end: "$1,200." is "1200"."""
    plain = text.replace(",", "").replace("$", "").strip().rstrip(".")
    whole, _, decimals = plain.partition(".")
    return whole if not decimals.strip("0") else plain


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    return [
        Item("gsm8k", data.content_id(row.question), row.question, number(row.answer.rpartition("####")[2]))
        for row in rows
    ]


def env(item: Item) -> Sample:
    return ask(item, fill("gsm8k_question", question=item.question))


def grade(item: Item, attempt: Attempt, context: Context) -> Verdict:
    text = final(attempt.answer)
    strict = number(last(r"####[ \t]*(\$?-?[\d.,]+)", text))
    answer = strict or number(last(r"(-?\$?\d[\d.,]*)", text))
    return verdict(item, attempt, float(answer == item.gold), answer, detail={"strict": strict == item.gold})


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {"strict": sum(bool(verdict.detail.get("strict")) for verdict in verdicts) / max(len(verdicts), 1)}
