"""GSM8K: 1,319 word problems whose answers are whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Benchmark, Context, ask, final, last, verdict
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample


def number(text: str) -> str:
    """Without currency, commas, a full stop at its end and decimals that are 0: "$1,200.00." is "1200"."""
    plain = text.replace(",", "").replace("$", "").strip().rstrip(".")
    whole, _, decimals = plain.partition(".")
    return whole if not decimals.strip("0") else plain


class GSM8K(Benchmark):
    name = "gsm8k"
    source = Source("openai/gsm8k", "main/test-*.parquet", size=1319)
    prompts = ("gsm8k_question",)
    notes = ("Zero-shot; the score is the flexible one (last number), `strict` asks for a line '#### number'.",)

    class Row(data.Row):
        question: str
        answer: Annotated[str, Field(pattern="####")]

    def tasks(self, rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
        golds = [number(row.answer.rpartition("####")[2]) for row in rows]
        return [self.item(data.content_id(r.question), r.question, g) for r, g in zip(rows, golds, strict=True)]

    def env(self, item: Item) -> Sample:
        return ask(item, fill("gsm8k_question", question=item.question))

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        text = final(attempt.answer)
        strict = number(last(r"####[ \t]*(\$?-?[\d.,]+)", text))
        answer = strict or number(last(r"(-?\$?\d[\d.,]*)", text))
        return verdict(item, attempt, float(answer == item.gold), answer, detail={"strict": strict == item.gold})

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        return {"strict": sum(bool(verdict.detail.get("strict")) for verdict in verdicts) / max(len(verdicts), 1)}


BENCHMARK = GSM8K()
