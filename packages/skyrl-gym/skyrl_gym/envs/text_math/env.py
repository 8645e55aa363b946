r"""text_math: one arithmetic question, one answer, in one step.

The answer is the last complete `\boxed{...}` of the action (skyrl_gym.parsing). It is well formed when it holds one
whole number: an optional sign and ASCII digits, spaces around them ignored. The reward is 0.1 for the form
(`format`) and 1.0 for the right number (`correct`). The episode ends after the step, whatever the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_gym.core import SPLITS, Choices, Outcome, Task, TextEnv
from skyrl_gym.data import check_row
from skyrl_gym.envs.text_math.expert import boxed, worked_solution
from skyrl_gym.envs.text_math.tasks import LEVELS, Problem, problem_data, table
from skyrl_gym.parsing import last_boxed

CORRECT, FORMAT = 1.0, 0.1


def canonical_integer(text: str) -> str | None:
    """A whole number without plus sign and leading zeros, or None; strings, because int() refuses long ones."""
    text = text.strip()
    negative = text.startswith(("-", "\u2212"))
    digits = text[1:] if negative or text.startswith("+") else text
    if not (digits.isascii() and digits.isdigit()):
        return None
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if negative and digits != "0" else digits


class TextMathEnv(TextEnv):
    """Arithmetic by difficulty (1 to 8), in English and Chinese. Option `solution` is the expert's style."""

    choices: ClassVar[Choices] = {
        "split": SPLITS,
        "difficulty": tuple(LEVELS),
        "lang": ("en", "zh"),
        "solution": ("short", "worked"),
    }

    def count_tasks(self, options: Mapping[str, Any]) -> int:
        return table(options["difficulty"]).count(options["split"])

    def make_task(self, options: Mapping[str, Any], index: int) -> Task:
        split, difficulty, lang = options["split"], options["difficulty"], options["lang"]
        problem = table(difficulty).problem(split, index)
        return Task(
            task_id=f"{split}:{difficulty}:{lang}:{index}",
            text=problem.text(lang),
            ground_truth=problem.answer,
            difficulty=difficulty,
            lang=lang,
            split=split,
            data=problem_data(problem),
        )

    def task_from_row(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
        check_row(row, "options['task']")
        prompt = row["prompt"]
        roles = [message["role"] for message in prompt]
        if roles not in (["user"], ["system", "user"]):
            raise ValueError(
                f"options['task']: text_math takes a prompt of one user message, after one system message or none; "
                f"field 'prompt' has {', '.join(roles)}."
            )
        ground_truth = row["reward_spec"]["ground_truth"]
        answer = None if isinstance(ground_truth, bool) else canonical_integer(str(ground_truth))
        if answer is None:
            raise ValueError(
                "options['task']: field 'reward_spec.ground_truth' must be a whole number such as 85 or '85', "
                f"got {ground_truth!r}."
            )
        digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=6).hexdigest()
        return Task(
            task_id=f"row:{digest}",
            text=prompt[-1]["content"],
            ground_truth=ground_truth,
            difficulty=options["difficulty"],
            lang=options["lang"],
            split=options["split"],
            instructions=prompt[0]["content"] if len(prompt) == 2 else "",
        )

    def begin(self, task: Task) -> str:
        return task.text

    def act(self, action: str) -> Outcome:
        content = last_boxed(action)
        answer = None if content is None else canonical_integer(content)
        correct = answer is not None and answer == canonical_integer(str(self.task.ground_truth))
        return Outcome(
            observation="",
            reward_parts={"correct": CORRECT * correct, "format": FORMAT * (answer is not None)},
            valid_action=answer is not None,
            success=correct,
            terminated=True,
        )

    def expert_action(self) -> str:
        r"""`\boxed{85}`, or with option solution="worked" the steps before it; a dataset row has no steps."""
        if self.options["solution"] == "worked" and self.task.data:
            problem = Problem(self.task.data["kind"], tuple(self.task.data["terms"]))
            return worked_solution(problem, self.task.lang)
        return boxed(self.task.ground_truth)
