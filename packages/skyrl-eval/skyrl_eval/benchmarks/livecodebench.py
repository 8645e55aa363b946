"""LiveCodeBench: problems of programming contests; a program has to pass all public and private tests.

Programs run in the sandbox. What they ought to print never gets there: outputs are compared here.
"""

import ast
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, Json, TypeAdapter, ValidationError

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
MARK, RESULTS = ">>>>> value ", TypeAdapter(list[tuple[bool, str]])
RUNNER = """
import json, os, subprocess, sys
run = subprocess.run
inputs, seconds = json.load(open("/task/inputs.json"))
os.remove("/task/inputs.json")
results = []
program = "import runpy\\ntry: runpy.run_path('/task/program.py', run_name='__main__')\\nexcept SystemExit: pass"
for text in inputs:
    try:
        done = run([sys.executable, "-c", program], input=text.encode(), stdout=-1, stderr=-3, timeout=seconds)
        results.append([done.returncode == 0, done.stdout[: 1 << 24].decode("utf-8", "replace")])
    except subprocess.TimeoutExpired:
        results.append([False, "timeout"])
    if not results[-1][0]:
        break
json.dump(results, open("/task/results.json", "w"))
"""


def code_of(answer: str) -> str:
    """The last block between ``` lines; "" where there is none."""
    lines = answer.split("\n")
    fences = [place for place, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


def same_value(output: str, expected: str) -> bool:
    """Python's equality of what the function returned (a tuple made a list) and the JSON that is expected."""
    try:
        return bool(ast.literal_eval(output.rpartition(MARK)[2].strip()) == json.loads(expected))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def run_program(program: str, inputs: list[str]) -> list[tuple[bool, str]]:
    """For each input up to the first failure, whether the program ended well, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="skyrl-lcb-") as name:
        folder, limit = Path(name), (SECONDS + 1) * len(inputs) + 5
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "inputs.json").write_text(json.dumps([inputs, SECONDS]))
        sandbox.run(["python", "-I", "-c", RUNNER], [(folder, "/task", True)], seconds=limit, cwd="/task")
        try:
            return RESULTS.validate_json(sandbox.read_back(folder / "results.json").encode("utf-8", "replace"))
        except ValidationError:  # the program has killed the runner, or written there itself
            return []


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
        results = run_program(program, [test["input"] for test in tests])
        same = same_value if call else same_output
        passed = [ok and same(output, test["output"]) for (ok, output), test in zip(results, tests, strict=False)]
        first = [*passed, False].index(False)
        detail = {"tests": len(tests), "passed": first}
        return verdict(item, attempt, float(0 < len(tests) == first), code[:200], detail=detail)
