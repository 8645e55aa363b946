"""Our environments for TRL: `GRPOTrainer(environment_factory=environment_factory("webshop_lite"), ...)`.

The agent plays through one tool, `act`; the reward is the episode's sum. A dataset row names the task, by `task_id` or
`seed`, with `split` and the like beside it, or is one in SkyRL's format.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium

from skyrl_gym.registry import resolve_env_id


class TextEnvironment:
    """What TRL asks for: every public method but `reset` and `get_reward` is a tool."""

    def __init__(self, env_id: str, **kwargs: Any) -> None:
        self.env = gymnasium.make(resolve_env_id(env_id), **kwargs)
        self.reward, self.done = 0.0, True

    def reset(self, **row: Any) -> str | None:
        from_row = row.get("reward_spec") is not None  # whose prompt holds instructions and question already
        names = ("task_id", *getattr(self.env.unwrapped, "choices", ()))
        options = {"task": row} if from_row else {name: row[name] for name in names if row.get(name) is not None}
        if not from_row and "task_id" not in options and row.get("seed") is None:
            raise ValueError(f"A dataset row names its task by task_id, seed or reward_spec; this has {list(row)}.")
        observation, info = self.env.reset(seed=row.get("seed"), options=options)
        self.reward, self.done = 0.0, False
        return None if from_row else f"{info['instructions']}\n\n{observation}".lstrip()

    def act(self, action: str) -> str:
        """Takes one action and returns what it led to.

        Args:
            action: The action, in the form that the instructions ask for.
        """
        if self.done:
            raise ValueError("The episode is over.")
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.reward, self.done = self.reward + float(reward), terminated or truncated
        return observation or "The episode is over."

    def get_reward(self) -> float:
        return self.reward


def environment_factory(env_id: str, **kwargs: Any) -> Callable[[], TextEnvironment]:
    """A factory of environments; the arguments are those of gymnasium.make."""
    return partial(TextEnvironment, env_id, **kwargs)
