"""MMLU-Pro: 12,032 questions with up to ten choices; five worked examples of the same category come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from skyrl_eval import data
from skyrl_eval.benchmarks.common import Context, ask, choice
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.types import Sample

SOURCE = Source("TIGER-Lab/MMLU-Pro", "data/test-*.parquet", "data/validation-*.parquet", size=12032)
JUDGE = ""
PROMPTS = ()
NOTES = (
    "Where no letter is found the official code guesses at random; here the item is unparsed, and wrong.",
    "Without a validation file beside the test file no worked examples are shown.",
)
INSTRUCTIONS = (
    "The following are multiple choice questions (with answers) about {}. Think step by step and then finish your "
    'answer with "the answer is (X)" where X is the correct letter choice.'
)


class Row(data.Row):
    question_id: str
    question: str
    options: Annotated[list[str], Field(min_length=2, max_length=10)]
    answer: Annotated[str, Field(pattern="^[A-J]$")]
    category: str = ""
    cot_content: str = ""


def ask_about(row: Row) -> str:
    """The question, its choices without those that are "N/A" (always the last ones), and the cue."""
    choices = [text for text in row.options if text != "N/A"]
    lines = [f"{chr(65 + place)}. {text}" for place, text in enumerate(choices)]
    return "\n".join(("Question:", row.question, "Options:", *lines))


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    cue = "Answer: Let's think step by step."
    examples: dict[str, list[str]] = {}
    for shot in shots:
        answer = shot.cot_content.removeprefix("A: Let's think step by step.").strip()
        examples.setdefault(shot.category, []).append(f"{ask_about(shot)}\n{cue} {answer}")
    return [
        Item(
            "mmlu-pro",
            row.question_id,
            row.question,
            row.answer,
            {
                "category": row.category,
                "asked": "\n\n".join((*examples.get(row.category, [])[:5], f"{ask_about(row)}\n{cue}")),
            },
        )
        for row in rows
    ]


def env(item: Item) -> Sample:
    return ask(item, item.meta["asked"], INSTRUCTIONS.format(item.meta["category"]))


def grade(item: Item, attempt: Attempt, context: Context) -> Verdict:
    return choice(item, attempt, r"answer is \(?([A-J])\)?", r"[aA]nswer:\s*([A-J])", r"\b([A-J])\b")


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {}
