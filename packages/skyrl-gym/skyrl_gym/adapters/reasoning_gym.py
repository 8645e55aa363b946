"""reasoning-gym's data sets as environments of one turn; needs the extra `reasoning-gym`.

Each data set has its own name: `gymnasium.make("skyrl_gym.adapters.reasoning_gym:leg_counting")`, or as a run's source
of tasks "skyrl_gym.adapters.reasoning_gym:leg_counting?split=val&size=500". The reward is its `score_answer`, 0 to 1.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

from skyrl_gym.core import SPLITS, Choices, Options, Outcome, Task, TextEnv
from skyrl_gym.data import beside
from skyrl_gym.parsing import last_answer
from skyrl_gym.registry import add_env

try:
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS
except ImportError as error:
    raise ModuleNotFoundError(f"reasoning-gym is not here: pip install 'skyrl-gym[reasoning-gym]' ({error}).") from None

LEFT_OUT = beside(__file__, "reasoning_gym.yaml")
"""By name why it is left out."""
INDICES = {"train": range(8000), "val": range(8000, 9000), "test": range(9000, 10_000)}
INSTRUCTIONS = "Think, then write your final answer as <answer>...</answer>, without anything else in it."


class ReasoningGymEnv(TextEnv):
    """config: fields of the data set's configuration, such as {"max_animals": 3}."""

    choices: ClassVar[Choices] = {"split": SPLITS}
    id_options = ("split",)

    def __init__(self, dataset: str, config: Mapping[str, Any] | None = None, **defaults: Any) -> None:
        super().__init__(**defaults)
        if dataset in LEFT_OUT:
            raise ValueError(f"The data set {dataset!r} is left out: {LEFT_OUT[dataset]}.")
        try:
            self._source = dataset, json.dumps(config or {})
            _dataset(*self._source)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"The data set {dataset!r} does not take config={config!r}: {error}.") from None

    def count_tasks(self, options: Options) -> int:
        return len(INDICES[options["split"]])

    def make_task(self, options: Options, index: int) -> Task:
        place = INDICES[options["split"]][index]
        entry = _dataset(*self._source)[place]
        task_id, data = self.task_id(options, index), {"place": place}
        return Task(task_id, entry["question"], entry["answer"], instructions=INSTRUCTIONS, data=data)

    def act(self, action: str) -> Outcome:
        answer, dataset, score = last_answer(action), _dataset(*self._source), 0.0
        if answer is not None:
            with suppress(Exception):  # a scorer may raise anything on what it did not expect
                score = float(dataset.score_answer(answer.strip(), dataset[self.task.data["place"]]))
        return Outcome("", {"answer": score}, answer is not None, score >= 1, terminated=True)

    def expert_action(self) -> str:
        if self.task.ground_truth is None:
            raise NotImplementedError(f"{self._source[0]} gives no answers, only their scores.")
        return f"<answer>{self.task.ground_truth}</answer>"


# For the whole process: some take seconds to make. config: as JSON.
@cache
def _dataset(name: str, config: str) -> Any:
    return create_dataset(name, **{"seed": 0, "size": INDICES["test"].stop, **json.loads(config)})


for name in DATASETS:  # __init__ says why one is left out
    add_env(name, f"{__name__}:ReasoningGymEnv", kwargs={"dataset": name})
