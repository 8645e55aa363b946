"""SkyRL's environment interface under SkyRL's names; `skyrl_gym.envs.register` makes subclasses playable.

Tool groups and postprocessed actions are not supported: an action stays what the agent wrote.
"""

from __future__ import annotations

from typing import Any, TypedDict

Conversation = list[dict[str, str]]  # chat messages, each with `role` and `content`


class BaseTextEnvStepOutput(TypedDict):
    """`observations` are new messages for the agent, none at the end; the agent does not see `metadata`."""

    observations: Conversation
    reward: float
    done: bool
    metadata: dict[str, Any]


class BaseTextEnv:
    """One instance is one episode; subclasses' constructors take `env_config` and `extras` (a dataset row)."""

    turns = 0
    max_turns = 1

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """The first messages for the agent, and metadata."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        raise NotImplementedError(f"{type(self).__name__} does not define step(action).")

    def close(self) -> None:
        """Frees what the episode holds."""
