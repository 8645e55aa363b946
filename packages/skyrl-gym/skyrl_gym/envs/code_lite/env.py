"""code_lite (docs/environments/code_lite.md): a Python program against tests, with the first failure shown."""

import json
import re
from functools import partial

from skyrl_gym.core import Options, Outcome, Row, RowsOnly, Task, TextEnv
from skyrl_gym.data import read_row, row_id
from skyrl_gym.envs.code_lite import judge, tasks
from skyrl_gym.envs.code_lite.rows import read_tests
from skyrl_gym.parsing import last_code

CORRECT, FORMAT, LONGEST = 1.0, 0.1, 300


def cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


class CodeLiteEnv(TextEnv):
    """Difficulties 1 to 5: functions of two to six steps. A row's kind of task is in the row."""

    choices = TextEnv.choices | {"difficulty": tasks.LEVELS}
    kept = ("tries",)

    @classmethod
    def preload(cls, options: Options) -> None:
        tasks.count(options["split"], options["difficulty"])

    def count_tasks(self, options: Options) -> int:
        return tasks.count(options["split"], options["difficulty"])

    def make_task(self, options: Options, index: int) -> Task:
        split, difficulty, lang = (options[name] for name in self.id_options)
        name, parts, tests = tasks.make(split, difficulty, index)
        text = tasks.text(lang, name, parts, tests[: tasks.SHOWN])
        solution, instructions = tasks.source(name, parts), tasks.data()["texts"][lang]["instructions"]
        data = {"kind": "own", "tests": tests, "shown": tasks.SHOWN, "setup": ""}
        return Task(self.task_id(options, index), text, solution, instructions=instructions, data=data)

    def task_from_row(self, row: Row, options: Options) -> Task:
        row = read_row(row, "options['task']")
        prompt, data = row["prompt"], read_tests(row)
        if any(each["role"] not in ("system", "user") for each in prompt):
            raise ValueError("options['task']: field 'prompt' may have system and user messages only.")
        says = tasks.data()["texts"][options["lang"]]
        told, asked = ([each["content"] for each in prompt if each["role"] == role] for role in ("system", "user"))
        if data["kind"] == "asserts":
            asked.append(f"{says['must']}\n{data['asserts'][0]}")
        elif data["kind"] == "stdin":
            asked.append(says["stdin"])
        if row.get("starter_code"):
            asked.append(f"{says['starter']}\n```python\n{row['starter_code']}\n```")
        text, instructions = "\n\n".join(asked), "\n\n".join([*told, says["instructions"]])
        return Task(row_id(prompt), text, row.get("code"), instructions=instructions, data=data)

    def begin(self, task: Task) -> str:
        self.tries = 0
        return task.text

    def act(self, action: str) -> Outcome:
        self.tries += 1
        code, says = last_code(action), tasks.data()["texts"][self.task.lang]
        parts = {"correct": 0.0, "format": FORMAT * (code is not None and self.tries == 1)}
        if code is None:
            return Outcome(says["no_block"], parts, valid_action=False, info={"tool_calls": []})
        failure = self._judged(code)
        call = {"tool": "tests", "args": {}, "result": json.dumps(failure)}
        parts["correct"] = CORRECT * (failure is None)
        said = self._said(failure) if failure else says["passed"]
        return Outcome(said, parts, True, failure is None, failure is None, {"tool_calls": [call]})

    def _judged(self, code: str) -> judge.Failure | None:
        if self.recorded:
            failure = json.loads(self.recorded[0]["result"])
            return failure and judge.Failure(*failure)
        kind, tests, setup = (self.task.data[name] for name in ("kind", "tests", "setup"))
        judges = {"asserts": judge.assert_failure, "stdin": judge.program_failure}
        failure = judges.get(kind, partial(judge.call_failure, rows=kind != "own"))(code, tests, setup)
        # No two runs have the same addresses.
        return failure and failure._replace(got=cut(re.sub(" at 0x[0-9a-f]+", " at 0x...", failure.got)))

    def _said(self, failure: judge.Failure) -> str:
        data, says = self.task.data, tasks.data()["texts"][self.task.lang]
        call, right = data["tests"][failure.test]
        if data["kind"] == "asserts":
            call, right = ", ".join(call), data["asserts"][failure.test]
        elif data["kind"] == "stdin":
            call, right = says["input"].format(repr(call)), repr(right)
        hidden = failure.kind == "wrong" and failure.test >= data["shown"]
        numbers = {"number": failure.test + 1, "all": len(data["tests"])}
        form = says["hidden" if hidden else failure.kind]
        return str(form.format(call=cut(call), got=failure.got, want=cut(right), **numbers))

    def expert_action(self) -> str:
        if not self.task.ground_truth:
            raise ValueError("This row has no reference solution: it lacks the field 'code'.")
        return f"```python\n{self.task.ground_truth}\n```"


class RowsEnv(RowsOnly, CodeLiteEnv):
    """code_lite without tasks of its own: every episode plays a row of MBPP or LiveCodeBench."""
