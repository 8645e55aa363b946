"""text_math (docs/environments/text_math.md): a question with an exact answer; arithmetic, words, logic, rows."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

from skyrl_gym.answers import LONGEST, Answer, canonical, verified, written
from skyrl_gym.core import SPLITS, Choices, Options, Outcome, Row, RowsOnly, Task, TextEnv
from skyrl_gym.data import ROLES, read_row, row_id
from skyrl_gym.envs.text_math import arithmetic, logic, words
from skyrl_gym.parsing import last_answer

CORRECT, FORMAT = 1.0, 0.1
_MARKS = {"openai/gsm8k": "####", "math_dapo": "Answer:"}  # before answers, by data source
_FAMILIES: dict[str, ModuleType] = {"arithmetic": arithmetic, "words": words, "logic": logic}


def boxed(answer: object) -> str:
    return f"\\boxed{{{written(answer)}}}"


def _read(text: str, mark: str) -> Answer | None:
    content = last_answer(text, mark=mark)
    return None if content is None else canonical(content)


class TextMathEnv(TextEnv):
    """Families by difficulty (arithmetic 1 to 8, words and logic 1 to 5). Option `solution` is the expert's style."""

    choices: ClassVar[Choices] = {
        "split": SPLITS,
        "family": tuple(_FAMILIES),
        "difficulty": tuple(arithmetic.LEVELS),
        "lang": ("en", "zh"),
        "solution": ("short", "worked"),
    }
    id_options = ("split", "family", "difficulty", "lang")

    def count_tasks(self, options: Options) -> int:
        split, family, difficulty = options["split"], options["family"], options["difficulty"]
        if difficulty not in _FAMILIES[family].LEVELS:
            valid = ", ".join(map(str, _FAMILIES[family].LEVELS))
            raise ValueError(f"text_math: family {family!r} has no difficulty {difficulty}; valid ones are {valid}.")
        return int(_FAMILIES[family].count(split, difficulty))

    def make_task(self, options: Options, index: int) -> Task:
        split, family, difficulty, lang = (options[name] for name in self.id_options)
        if family == "arithmetic":
            problem = arithmetic.table(difficulty).problem(split, index)
            text, answer = problem.text(lang), problem.answer
            data: dict[str, Any] = {"kind": problem.kind, "terms": list(problem.terms)}
        else:
            text, answer, steps = _FAMILIES[family].make(split, difficulty, lang, index)
            data = {"steps": steps}
        return Task(self.task_id(options, index), text, answer, data=data)

    def task_from_row(self, row: Row, options: Options) -> Task:
        row = read_row(row, "options['task']")
        prompt, spec = row["prompt"], row["reward_spec"]
        said = {role: [each["content"] for each in prompt if each["role"] == role] for role in ROLES}
        if said["assistant"] or said["tool"]:
            raise ValueError("options['task']: field 'prompt' must hold messages of the system and the user alone.")
        mark, truth = _MARKS.get(row.get("data_source") or "", ""), spec.get("ground_truth")
        verify = "math_verify" in (spec.get("method"), spec.get("style"))
        known = type(truth) in (str, int, float)
        if verify and find_spec("math_verify") is None:
            raise ImportError("options['task']: the row asks for 'math_verify': `pip install math-verify`.")
        answer = truth if verify and known else _read(boxed(truth), mark) if known else None
        if answer is None or (isinstance(answer, str) and not isinstance(truth, str)):
            raise ValueError(
                "options['task']: field 'reward_spec.ground_truth' must be a number, a word, a list or a set, such as "
                f"'1, 2', got {truth!r:.60}. With env_class: prompt, or environment.env_class=prompt, none is needed."
            )
        text, instructions = ("\n\n".join(said[role]) for role in ("user", "system"))
        data = {"mark": mark, "verify": verify}
        return Task(row_id(prompt), text, truth, instructions=instructions, data=data)

    def act(self, action: str) -> Outcome:
        mark, truth = self.task.data.get("mark", ""), self.task.ground_truth
        if self.task.data.get("verify"):
            well_formed = 0 < len(given := last_answer(action, mark=mark) or "") <= LONGEST
            correct = well_formed and verified(given, written(truth))
        else:
            answer, right = _read(action, mark), _read(boxed(truth), mark)
            well_formed, correct = type(answer) is type(right), answer == right
        parts = {"correct": CORRECT * correct, "format": FORMAT * well_formed}
        return Outcome("", parts, well_formed, success=correct, terminated=True)

    def expert_action(self) -> str:
        r"""`\boxed{85}`, or with option solution="worked" the steps before it; a dataset row has no steps."""
        answer, data = boxed(self.task.ground_truth), self.task.data
        if self.options["solution"] == "short" or "mark" in data:
            return answer
        steps = data.get("steps")
        if steps is None:
            steps = arithmetic.worked_steps(arithmetic.Problem(data["kind"], tuple(data["terms"])), self.task.lang)
        return "; ".join([*steps, answer])


class RowsEnv(RowsOnly, TextMathEnv):
    """text_math without tasks of its own: every episode plays a dataset row."""
