"""The benchmarks by name, one module each."""

from __future__ import annotations

import difflib
import importlib

from skyrl_eval.benchmarks.common import Benchmark
from skyrl_trainer.errors import UserError

AGENT = ("hle", "browsecomp", "deepsearchqa", "mmlu", "mmlu-pro", "gpqa", "math", "gsm8k")
CODE = ("swe-verified", "swe-multilingual", "livecodebench")


def find(name: str) -> Benchmark:
    """The benchmark of this name; UserError with the nearest names where there is none."""
    if name not in (*AGENT, *CODE):
        near = difflib.get_close_matches(name, (*AGENT, *CODE), n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"There is no benchmark {name!r}.{hint} The list: {', '.join((*AGENT, *CODE))}.")
    return importlib.import_module(f"skyrl_eval.benchmarks.{name.replace('-', '_')}").BENCHMARK
