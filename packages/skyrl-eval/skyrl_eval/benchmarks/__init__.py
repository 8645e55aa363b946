"""The benchmarks by name. Each is a module with four functions; Benchmark says what they do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from skyrl_eval.benchmarks.common import Context
from skyrl_eval.data import Row
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample

AGENT = ("hle", "browsecomp", "deepsearchqa", "mmlu", "mmlu-pro", "gpqa", "math", "gsm8k")
CODE = ("swe-verified", "swe-multilingual", "livecodebench")


class Benchmark(Protocol):
    """What a module of this package offers."""

    SOURCE: Source
    JUDGE: str
    """The official judge's model; "" where a rule decides."""
    NOTES: tuple[str, ...]
    """Where this differs from the official protocol, for the report."""
    PROMPTS: tuple[str, ...]
    Row: type[Row]

    def tasks(self, rows: Sequence[Any], shots: Sequence[Any]) -> list[Item]:
        """The items of checked rows."""

    def env(self, item: Item) -> Sample:
        """The env that asks the item's question, and its options: nothing in it comes from `item.gold`."""

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        """A function of its arguments. Raises JudgeFailed or SandboxFailed where nothing can be said."""

    def summary(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        """The benchmark's own figures, beside those that all have."""


def find(name: str) -> Any:
    """The module of a benchmark; UserError with the nearest names where there is none."""
    if name not in (*AGENT, *CODE):
        near = difflib.get_close_matches(name, (*AGENT, *CODE), n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"There is no benchmark {name!r}.{hint} The list: {', '.join((*AGENT, *CODE))}.")
    return importlib.import_module(f"skyrl_eval.benchmarks.{name.replace('-', '_')}")
