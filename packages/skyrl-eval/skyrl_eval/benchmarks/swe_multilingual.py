"""SWE-bench Multilingual: 300 issues of 41 repositories in nine languages, in the schema of swebench 5."""

from __future__ import annotations

from skyrl_eval.benchmarks.swe_verified import SWEBench
from skyrl_eval.types import Source


class Multilingual(SWEBench):
    name = "swe-multilingual"
    source = Source("SWE-bench/SWE-bench_Multilingual", "data/test-*.parquet", size=300)
    notes = SWEBench.notes[1:]


BENCHMARK = Multilingual()
