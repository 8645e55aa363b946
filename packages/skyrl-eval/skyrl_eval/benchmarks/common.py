"""What a benchmark is: attributes, four functions, and a name under which it is registered."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skyrl_eval import data, sandbox
from skyrl_eval.prompts import fill
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_gym.data import beside
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample

if TYPE_CHECKING:
    from skyrl_eval.judge import Judge

QUESTION_ENV = "skyrl_eval:skyrl/question-v0"
NOTES = {name: tuple(notes) for name, notes in beside(__file__, "notes.yaml").items()}


@dataclass(frozen=True)
class Context:
    """What graders work with beside the attempt."""

    judge: "Judge | None" = None
    executor: str = "namespace"  # where code runs: "namespace", "docker" or "podman"
    repos: Path | None = None  # a folder with clones, owner__name each; else they are fetched from GitHub
    logs: Path | None = None  # where test output is kept
    lenient: bool = False  # read answers that the official parsers do not


class Benchmark:
    """A subclass gives the row's schema, and says how to make items, ask them and grade answers."""

    name: ClassVar[str]
    source: ClassVar[Source] = Source()
    kind: ClassVar[str] = "agent"  # `eval agent` or `eval code`
    executors: ClassVar[tuple[str, ...]] = ()  # that may run a model's code for grading, the best one first
    steps: ClassVar[int] = 1  # turns of an attempt, where --tools asks for no more
    slow: ClassVar[bool] = False  # a step of its env may run for minutes: there are more EnvWorkers, and they wait
    lenient: ClassVar[bool] = False  # its grader reads Context.lenient
    images: ClassVar[bool] = False  # some of its questions show one
    judge: ClassVar[str] = ""  # the official judge's model; "" where a rule decides
    prompts: ClassVar[tuple[str, ...]] = ()
    notes: ClassVar[tuple[str, ...]] = ()  # where this differs from the official protocol, for the report

    Row: ClassVar[type[data.Row]]  # the columns that are used

    def tasks(self, rows: Sequence[Any], shots: Sequence[Any]) -> list[Item]:
        """The items of checked rows; `shots` are rows to be shown as worked examples."""
        return [self.item_of(row) for row in rows]

    def item_of(self, row: Any) -> Item:
        """The item of one row, for `tasks`."""
        raise NotImplementedError

    def env(self, item: Item) -> Sample:
        """The env that asks the question, by default in the first prompt, if any; nothing in it is of `item.gold`."""
        return ask(item, fill(self.prompts[0], question=item.question) if self.prompts else item.question)

    def check(self, context: Context) -> None:
        """UserError where grading could not work, called before anything is spent."""
        if self.judge and context.judge is None:
            who = f"{self.name} is graded by a judge (officially {self.judge})"
            raise UserError(f"{who}: give --judge-url and --judge-model.")
        if context.lenient and not self.lenient:
            raise UserError(f"--lenient: {self.name} has no letters to read otherwise, so leave it out.")
        if self.executors:
            if context.executor not in self.executors:
                raise UserError(f"--executor {context.executor}: {self.name} takes {' or '.join(self.executors)}.")
            sandbox.check(context.executor)

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        """A function of its arguments. Raises JudgeFailed or SandboxFailed where nothing can be said."""
        raise NotImplementedError

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        """The benchmark's own figures, beside those that all have."""
        return {}

    def item(self, item_id: str, question: str, gold: Any, image: str = "", **meta: Any) -> Item:
        return Item(self.name, item_id, question, gold, meta, image)


def ask(item: Item, question: str, instructions: str = "") -> Sample:
    """The sample of a question that is answered in one turn, or in several with tools."""
    task = {"instructions": instructions, "question": question} | ({"image": item.image} if item.image else {})
    return Sample(f"{item.bench}:{item.item_id}", QUESTION_ENV, 0, {"task": task})


def final(answer: str) -> str:
    """A message without its reasoning: what follows </think>, nothing where the reasoning was cut off."""
    _, closed, tail = answer.rpartition("</think>")
    return tail.strip() if closed else "" if "<think>" in answer else answer.strip()


def last(pattern: str, text: str) -> str:
    """The first group of the pattern's last match, or ""."""
    return ["", *re.findall(pattern, text)][-1]


def verdict(item: Item, attempt: Attempt, score: float | None, answer: str, **fields: Any) -> Verdict:
    """A verdict with its status; an empty answer is one that could not be found."""
    status = "ungraded" if score is None else "correct" if score == 1 else "wrong" if answer else "unparsed"
    if attempt.stop == "length" and status in ("wrong", "unparsed"):
        status = "truncated"
    return Verdict(item.bench, item.item_id, attempt.sample, score, status, answer, **fields)
