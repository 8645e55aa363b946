"""skyrl/question-v0: asks one question and takes the first answer. It knows no gold answer, so its reward is 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym import Outcome, Task, TextEnv


class QuestionEnv(TextEnv):
    """The reset option `task` is {"question", "instructions"}, as `Benchmark.env` makes it."""

    choices = {"split": ("test",)}  # noqa: RUF012 (TextEnv's declaration)
    id_options = ("split",)

    def count_tasks(self, options: Mapping[str, Any]) -> int:
        raise ValueError("skyrl/question-v0 has no questions of its own: give one as options['task'].")

    def task_from_row(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
        return Task("question", row["question"], None, split="test", instructions=row.get("instructions", ""))

    def begin(self, task: Task) -> str:
        return task.text

    def act(self, action: str) -> Outcome:
        return Outcome("", {}, valid_action=bool(action.strip()), terminated=True)
