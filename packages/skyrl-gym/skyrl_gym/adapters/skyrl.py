"""A BaseTextEnv as a TextEnv that is played from dataset rows: `reset(options={"task": row})`.

The row, without `prompt` and `env_class`, is `extras`. System messages become the instructions, others' contents the
observation. An episode succeeds when its last reward is at least 1. A state is saved as the actions so far, which
restores classes that are deterministic.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from skyrl_gym.core import Choices, Outcome, Task, TextEnv
from skyrl_gym.data import read_row, row_id
from skyrl_gym.envs import create


class SkyRLEnv(TextEnv):
    """The argument `extras` is added to every row's, for example {"max_turns": 3}."""

    choices: ClassVar[Choices] = {}

    def __init__(self, env_class: Any, env_kwargs: Any, env_config: Any = None, extras: Any = None, **kwargs: Any):
        super().__init__(**kwargs)
        self._arguments = {"env_class": env_class, **env_kwargs, "env_config": env_config or {}}
        self._extras = extras or {}

    def count_tasks(self, options: Any) -> int:
        raise ValueError("This environment is played from dataset rows: reset(options={'task': row}).")

    def task_from_row(self, row: Any, options: Any) -> Task:
        row = read_row(row, "options['task']")
        return Task(row_id(row), _contents(row["prompt"]), row["reward_spec"].get("ground_truth"), data=row)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"instructions": self._instructions}  # init may have changed the row's

    def begin(self, task: Task) -> str:
        row = copy.deepcopy(task.data)
        prompt, extras = row.pop("prompt"), {name: row[name] for name in row if name != "env_class"}
        self._env, self._actions = create(**self._arguments, extras=extras | self._extras), list[str]()
        messages, _ = self._env.init(prompt)
        self._instructions = _contents(messages, system=True)
        return _contents(messages)

    def act(self, action: str) -> Outcome:
        self._actions.append(action)
        step = self._env.step(action)
        if step["done"]:
            self._env.close()
        reward, done, metadata = float(step["reward"]), bool(step["done"]), step["metadata"]
        parts, info = {"reward": reward}, {"metadata": metadata}
        valid = bool(metadata.get("valid_action", True))
        return Outcome(_contents(step["observations"]), parts, valid, done and reward >= 1, done, info)

    def get_env_state(self) -> dict[str, Any]:
        return {"actions": self._actions}

    def set_env_state(self, state: dict[str, Any]) -> None:
        self.begin(self.task)
        for action in state["actions"]:
            self.act(action)


def _contents(messages: list[dict[str, str]], system: bool = False) -> str:
    return "\n\n".join(message["content"] for message in messages if (message["role"] == "system") == system)
