"""The benchmarks by name, in modules by the way in which they are graded."""

from __future__ import annotations

import difflib

from skyrl_eval.benchmarks.choices import GPQA, MMLU, MMLUPro
from skyrl_eval.benchmarks.common import Benchmark
from skyrl_eval.benchmarks.judged import HLE, BrowseComp, DeepSearchQA
from skyrl_eval.benchmarks.livecodebench import LiveCodeBench
from skyrl_eval.benchmarks.math import GSM8K, MATH
from skyrl_eval.benchmarks.swe_bench import Multilingual, SWEBench
from skyrl_trainer.errors import UserError

_AGENT = (HLE(), BrowseComp(), DeepSearchQA(), MMLU(), MMLUPro(), GPQA(), MATH(), GSM8K())
_CODE = (SWEBench(), Multilingual(), LiveCodeBench())
_BY_NAME: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in (*_AGENT, *_CODE)}
AGENT, CODE = (tuple(benchmark.name for benchmark in part) for part in (_AGENT, _CODE))


def find(name: str) -> Benchmark:
    """The benchmark of this name; UserError with the nearest names where there is none."""
    if name not in _BY_NAME:
        near = difflib.get_close_matches(name, _BY_NAME, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"There is no benchmark {name!r}.{hint} The list: {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]
