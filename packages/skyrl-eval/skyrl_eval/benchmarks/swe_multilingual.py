"""SWE-bench Multilingual: 300 issues of 41 repositories in nine languages, in the schema of swebench 5."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_eval.benchmarks import swe_verified
from skyrl_eval.benchmarks.swe_verified import JUDGE, PROMPTS, Row, env, grade, summary
from skyrl_eval.types import Item, Source

__all__ = ["JUDGE", "NOTES", "PROMPTS", "SOURCE", "Row", "env", "grade", "summary", "tasks"]

SOURCE = Source("SWE-bench/SWE-bench_Multilingual", "data/test-*.parquet", size=300)
NOTES = swe_verified.NOTES[1:]


def tasks(rows: Sequence[Row], shots: Sequence[Row]) -> list[Item]:
    return swe_verified.tasks(rows, shots, "swe-multilingual")
