"""What several benchmarks share: questions of one turn, the answer without the reasoning, verdicts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_eval.judge import Judge, JudgeFailed, Match, parse_match
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Verdict
from skyrl_trainer.types import Sample

QUESTION_ENV = "skyrl_eval:skyrl/question-v0"
SWE_ENV = "skyrl_eval:skyrl/swe-v0"


@dataclass(frozen=True)
class Context:
    """What graders work with beside the attempt."""

    judge: Judge | None = None
    executor: str = "namespace"
    """Where code runs: "namespace", "docker" or "podman"."""
    repos: Path | None = None
    """A folder with clones, owner__name each, for benchmarks that need repositories."""
    logs: Path | None = None
    """Where test output is kept."""


def ask(item: Item, question: str, instructions: str = "") -> Sample:
    """The sample of a question that is answered in one turn, or in several with tools."""
    task = {"instructions": instructions, "question": question} | ({"image": item.image} if item.image else {})
    return Sample(f"{item.bench}:{item.item_id}", QUESTION_ENV, 0, {"task": task})


def final(answer: str) -> str:
    """A message without its reasoning: what follows </think>, nothing where the reasoning was cut off."""
    head, closed, tail = answer.rpartition("</think>")
    return tail.strip() if closed else head.strip() if "<think>" in answer else answer.strip()


def last(pattern: str, text: str) -> str:
    """The first group of the pattern's last match, or ""."""
    found = re.findall(pattern, text)
    return found[-1] if found else ""


def verdict(item: Item, attempt: Attempt, score: float | None, answer: str, **fields: Any) -> Verdict:
    """A verdict with its status; an empty answer is one that could not be found."""
    status = "ungraded" if score is None else "correct" if score == 1 else "wrong" if answer else "unparsed"
    if attempt.stop == "length" and status in ("wrong", "unparsed"):
        status = "truncated"
    return Verdict(item.bench, item.item_id, attempt.sample, score, status, answer, **fields)


def choice(item: Item, attempt: Attempt, *patterns: str) -> Verdict:
    """A letter, found by the first of the patterns that matches, its last match: compared with the gold letter."""
    text = final(attempt.answer)
    answer = next((found for pattern in patterns if (found := last(pattern, text))), "").upper()
    return verdict(item, attempt, float(answer == item.gold), answer)


def lettered(choices: list[str]) -> str:
    return "\n".join(f"{chr(65 + place)}) {text}" for place, text in enumerate(choices))


def judged_match(item: Item, attempt: Attempt, context: Context) -> Verdict:
    """HLE's and BrowseComp's judgement of an answer, with the confidence that it states."""
    response = final(attempt.answer)
    if not response:
        return verdict(item, attempt, 0.0, "")
    if context.judge is None:
        raise JudgeFailed("No judge was given (--judge-url and --judge-model).")
    prompt = fill("hle_judge", question=item.question, response=response, correct_answer=item.gold)
    match, prompt_tokens, completion_tokens = context.judge.ask(prompt, parse_match, Match)
    return verdict(
        item,
        attempt,
        float(match.correct == "yes"),
        match.extracted_final_answer or response[-200:],
        confidence=min(max(match.confidence, 0), 100) / 100,
        judge_prompt_tokens=prompt_tokens,
        judge_completion_tokens=completion_tokens,
    )
