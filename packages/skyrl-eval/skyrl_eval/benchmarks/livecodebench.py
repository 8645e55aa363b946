"""LiveCodeBench: problems of programming contests; a program has to pass all public and private tests.

Programs run in the sandbox. What they ought to print never gets there: outputs are compared here.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, Json

from skyrl_eval import data, sandbox
from skyrl_eval.benchmarks.common import NOTES, Benchmark, Context, ask, final, verdict
from skyrl_eval.prompts import fill, text
from skyrl_eval.types import Attempt, Item, Source, Verdict
from skyrl_gym.envs.code_lite.rows import PRELUDE, opened, same_output
from skyrl_trainer.types import Sample

SECONDS = 6  # for each test
CALL = """
__name__ = "tmp_sol"  # as upstream has it
{code}
_call = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
_value = _call(*[json.loads(_line) for _line in sys.stdin.read().split("\\n")])
if "numpy" in sys.modules:
    sys.modules["numpy"].set_printoptions(legacy="1.25")  # 3, not np.int64(3)
print("\\n" + {mark!r} + repr(list(_value) if isinstance(_value, tuple) else _value))
"""
MARK = ">>>>> value "
START = """import os, runpy
os.dup2(os.open("/task/input", os.O_RDONLY), 0), os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
try: runpy.run_path("/task/program.py", run_name="__main__")
except SystemExit: pass"""


def code_of(answer: str) -> str:
    """The last block between ``` lines; "" where there is none."""
    lines = answer.split("\n")
    fences = [place for place, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


def same_value(output: str, expected: str) -> bool:
    """Python's equality of what the function returned (a tuple made a list) and the JSON that is expected."""
    value = output.rpartition(MARK)[2].strip()
    if len(value) > 4 * len(expected) + 999 or ("{" in value and "{" not in expected):
        return False  # to read it may take minutes
    try:
        return bool(ast.literal_eval(value) == json.loads(expected))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def outputs(program: str, inputs: Sequence[str]) -> Iterator[str | None]:
    """What the program prints for each input, in a sandbox of its own; None where it does not end well."""
    with sandbox.folder("skyrl-lcb-") as folder:
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        for given in inputs:
            (folder / "input").write_bytes(given.encode("utf-8", "replace"))
            done = sandbox.run(["python", "-c", START], [(folder, "/task", False)], seconds=SECONDS)
            yield None if done.code or done.timed_out else done.output[: 1 << 24]


class LiveCodeBench(Benchmark):
    name = "livecodebench"
    kind, executors = "code", ("namespace",)
    source = Source("livecodebench/code_generation_lite", "test*.jsonl", size=1055)
    prompts = ("livecodebench_system", "livecodebench_stdin", "livecodebench_functional")
    notes = NOTES["livecodebench"]

    class Row(data.Row):
        question_id: str
        question_content: str
        starter_code: str = ""
        difficulty: Literal["easy", "medium", "hard"]
        contest_date: str = ""
        public_test_cases: Json[list[Any]]
        private_test_cases: str = Field(min_length=2)
        """JSON, or base64 of the zlib of a pickle of JSON: opened when it is needed, for it is large."""
        metadata: Json[dict[str, Any]] = Field(default_factory=dict)

    def item_of(self, row: Row) -> Item:
        tests = {"public": row.public_test_cases, "private": row.private_test_cases}
        gold = tests | {"call": row.metadata.get("func_name")}
        meta = {"category": row.difficulty, "date": row.contest_date, "starter_code": row.starter_code}
        return self.item(row.question_id, row.question_content, gold, **meta)

    def env(self, item: Item) -> Sample:
        kind = "functional" if item.meta["starter_code"] else "stdin"
        question = fill(f"livecodebench_{kind}", question=item.question, starter_code=item.meta["starter_code"])
        return ask(item, question, text("livecodebench_system"))

    def grade(self, item: Item, attempt: Attempt, context: Context) -> Verdict:
        if not (code := code_of(final(attempt.answer))).strip():
            return verdict(item, attempt, 0.0, "")
        tests, call = [*item.gold["public"], *opened(item.gold["private"])], item.gold["call"]
        program = PRELUDE + (CALL.format(code=code, name=call, mark=MARK) if call else code)
        same, passed = same_value if call else same_output, 0
        for output, test in zip(outputs(program, [test["input"] for test in tests]), tests, strict=True):
            if output is None or not same(output, test["output"]):
                break
            passed += 1
        detail = {"tests": len(tests), "passed": passed}
        return verdict(item, attempt, float(0 < len(tests) == passed), code[:200], detail=detail)
