"""The benchmarks by name: ours, in modules by the way in which they are graded, and those of others.

A package of yours offers its own by an entry point of the group `skyrl_eval.benchmarks` that names its module.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from skyrl_eval.benchmarks.common import Benchmark, Context, ask, final, last, verdict
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import Registry
from skyrl_trainer.types import Sample

__all__ = ["Benchmark", "Context", "Sample", "ask", "final", "find", "last", "names", "register_benchmark", "verdict"]
B = TypeVar("B", bound=type[Benchmark])
HERE = "skyrl_eval.benchmarks"
BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    {
        "hle": f"{HERE}.judged:HLE",
        "browsecomp": f"{HERE}.judged:BrowseComp",
        "deepsearchqa": f"{HERE}.judged:DeepSearchQA",
        "mmlu": f"{HERE}.choices:MMLU",
        "mmlu-pro": f"{HERE}.choices:MMLUPro",
        "gpqa": f"{HERE}.choices:GPQA",
        "math": f"{HERE}.math:MATH",
        "gsm8k": f"{HERE}.math:GSM8K",
        "swe-verified": f"{HERE}.swe_bench:SWEBench",
        "swe-multilingual": f"{HERE}.swe_bench:Multilingual",
        "livecodebench": f"{HERE}.livecodebench:LiveCodeBench",
    },
)


def register_benchmark(benchmark: B) -> B:
    """A class decorator: the benchmark is found by its `name`."""
    BENCHMARKS.register(benchmark.name)(benchmark)
    return benchmark


def find(name: str) -> Benchmark:
    """The benchmark of this name; UserError with all names where there is none."""
    _load_installed()
    return BENCHMARKS.get(name)()


def names(kind: str) -> list[str]:
    """Of the benchmarks of `eval agent`, or of `eval code`."""
    _load_installed()
    return [name for name in BENCHMARKS.names if BENCHMARKS.get(name).kind == kind]


@cache
def _load_installed() -> None:
    for entry in entry_points(group="skyrl_eval.benchmarks"):
        try:
            entry.load()
        except Exception as error:
            raise UserError(f"The benchmarks of the installed {entry.value} do not load: {error!r}.") from error
