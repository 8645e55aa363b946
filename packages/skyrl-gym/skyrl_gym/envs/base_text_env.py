"""SkyRL's environment interface under SkyRL's names; `skyrl_gym.register` makes subclasses playable."""

import copy
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

from skyrl_gym.data import ground_truth
from skyrl_gym.tools.core import ToolGroup

ConversationType = list[dict[str, str]]  # chat messages, each with `role` and `content`
ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class BaseTextEnvStepOutput(TypedDict):
    """`observations` are new messages for the agent, none at the end; the agent does not see `metadata`."""

    observations: ConversationType
    reward: float
    done: bool
    metadata: NotRequired[dict[str, Any]]
    postprocessed_action: NotRequired[str | None]
    """The action as the environment would have it. It is recorded; what is learned is what the agent wrote."""


class Env(Generic[ObsType, ActType]):
    """What `skyrl_gym.make` makes; one instance is one episode."""

    def init(self, prompt: ObsType) -> tuple[ObsType, dict[str, Any]]:
        """The first messages for the agent, and metadata."""
        raise NotImplementedError(f"{type(self).__name__} does not define init(prompt).")

    def step(self, action: ActType) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define step(action).")

    def close(self) -> None:
        """Frees what the episode holds."""

    def get_metrics(self) -> dict[str, Any]:
        """The episode's figures so far."""
        return {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class BaseTextEnv(Env[ConversationType, str]):
    """A subclass gives `step`, and where it needs more a constructor with `env_config` and `extras`, a dataset row."""

    turns = 0
    max_turns = 1
    _recorded: Any = ()
    _executed: tuple[dict[str, Any], ...] = ()
    """Of tools: the calls that a replay answers, and those of this step."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.tool_groups: Sequence[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}
        self.env_config = env_config
        if extras is not None:  # a subclass's own constructor reads them itself
            self.extras, self.ground_truth = extras, ground_truth(extras)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        return prompt, {}

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Takes the groups whose tools `_execute_tool` calls."""
        self.tool_groups, self.tool_to_toolgroup = tool_groups, {}
        for group in tool_groups:
            self.tool_to_toolgroup |= group.get_tool_to_group_mapping()

    # What the tool returns, kept where it is plain data; in a replay of a class that waits, what is kept.
    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        groups = {group.name: group for group in self.tool_groups}
        if tool_group_name not in groups:
            raise ValueError(f"There is no tool group {tool_group_name!r}, only {', '.join(groups) or 'none'}.")
        call: dict[str, Any] = {"tool": f"{tool_group_name}.{tool_name}", "args": list(tool_input)}
        if past := [made for made in self._recorded if call.items() <= made.items()]:
            self._recorded.remove(past[0])
            result = copy.deepcopy(past[0]["result"])
        else:
            result = groups[tool_group_name].execute_tool(tool_name, *call["args"])
        with suppress(TypeError, ValueError):  # not JSON
            made = json.loads(json.dumps(call | {"result": result}))
            self._executed += (made,) if made == call | {"result": result} else ()
        return result
