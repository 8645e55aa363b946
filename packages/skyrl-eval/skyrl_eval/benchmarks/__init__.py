"""The benchmarks by name: ours, in modules by the way in which they are graded, and those of others.

A package of yours offers its own by an entry point of the group `skyrl_eval.benchmarks` that names its module.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from skyrl_eval.benchmarks.common import BENCHMARKS, Benchmark
from skyrl_trainer.errors import UserError

MODULES = ("judged", "choices", "math", "swe_bench", "livecodebench")


def find(name: str) -> Benchmark:
    """The benchmark of this name; UserError with the nearest names where there is none."""
    if name not in (known := names()):
        near = difflib.get_close_matches(name, known, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"There is no benchmark {name!r}.{hint} The list: {', '.join(known)}.")
    return BENCHMARKS.get(name)


def names(kind: str | None = None) -> list[str]:
    """Of all benchmarks, or of those of `eval agent` or `eval code`, in the order of their registration."""
    _load()
    return [name for name in BENCHMARKS if kind in (None, BENCHMARKS.get(name).kind)]


@cache
def _load() -> None:
    for module in MODULES:
        import_module(f"skyrl_eval.benchmarks.{module}")
    for entry in entry_points(group="skyrl_eval.benchmarks"):
        try:
            entry.load()
        except Exception as error:
            raise UserError(f"The benchmarks of the package behind {entry.value} do not load: {error!r}.") from error
