"""A BaseTextEnv as a TextEnv that is played from dataset rows: `reset(options={"task": row})`, or argument `rows`.

What becomes what: docs/environments/README.md. A state, the actions so far, restores classes that are deterministic.
"""

import copy
from functools import partial
from typing import Any, ClassVar

from gymnasium.envs.registration import load_env_creator

from skyrl_gym.core import Choices, Info, Outcome, RowsOnly, Task
from skyrl_gym.data import read_row, row_id
from skyrl_gym.envs import create


class Repeated(RowsOnly):
    """Plays rows; a state is the actions so far: played again."""

    choices: ClassVar[Choices] = {}
    id_options = ()
    kept = ("actions",)
    actions: list[str]

    def task_from_row(self, row: Any, options: Any) -> Task:
        row = read_row(row, "options['task']")
        return Task(row_id(row), contents(row["prompt"]), row["reward_spec"].get("ground_truth"), data=row)

    def set_env_state(self, state: dict[str, Any]) -> None:
        self.begin(self.task)
        for action in state["actions"]:
            self.act(action)


class SkyRLEnv(Repeated):
    """`extras` is added to every row's, for example {"max_turns": 3}; other arguments are for the class."""

    def __init__(
        self,
        env_class: Any,
        env_kwargs: Any,
        extras: Any = None,
        rows: Any = None,
        render_mode: Any = None,
        **kwargs: Any,
    ):
        super().__init__(rows=rows, render_mode=render_mode)
        env_class = load_env_creator(env_class) if isinstance(env_class, str) else env_class
        self.metadata = self.metadata | getattr(env_class, "metadata", {})  # that it waits, for one
        self._create = partial(create, env_class, **{"env_config": {}, **env_kwargs, **kwargs})
        self._extras = extras or env_kwargs.get("extras") or {}
        self._env: Any = None

    def begin(self, task: Task) -> str:
        self.close()
        row = copy.deepcopy(task.data)
        prompt, extras = row.pop("prompt"), {name: row[name] for name in row if name != "env_class"}
        self._env, self.actions = self._create(extras=extras | self._extras), list[str]()
        messages, self._metadata = self._env.init(prompt)
        self._instructions = contents(messages, system=True)
        return contents(messages)

    def reset_info(self) -> Info:
        metadata = self._metadata or {}
        return {"instructions": self._instructions, "metadata": metadata, "stop": metadata.get("stop", [])}

    def act(self, action: str) -> Outcome:
        self.actions.append(action)
        recorded = self.recorded if self.metadata.get("waits") else None  # others' tools may keep a state
        self._env._recorded, self._env._executed = list(recorded or ()), ()
        step = self._env.step(action)
        reward, done, metadata = float(step["reward"]), bool(step["done"]), step.get("metadata") or {}
        info = {"metadata": metadata, "metrics": self._env.get_metrics(), "tool_calls": [*self._env._executed]}
        if step.get("postprocessed_action") is not None:
            info["postprocessed_action"] = step["postprocessed_action"]
        if done:
            self.close()
        valid = bool(metadata.get("valid_action", True))
        text = contents(step["observations"], None)
        return Outcome(text, {"reward": reward}, valid, done and reward >= 1, done, info)

    def close(self) -> None:
        """Closes the episode's environment, unless its end has done so."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


def contents(messages: list[dict[str, str]], system: bool | None = False) -> str:
    """What the messages say; who says it, too, where the agent is to read more than one role."""
    said = [each for each in messages if system in (None, each["role"] == "system")]
    form = "{content}" if len({each["role"] for each in said}) < 2 else "{role}: {content}"
    return "\n\n".join(form.format_map({**each, "content": each["content"] or ""}) for each in said)
