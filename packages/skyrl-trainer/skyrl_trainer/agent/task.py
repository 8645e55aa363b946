"""What a user's agent gets: the task, the endpoint to ask, and the task's own env to play."""

from dataclasses import dataclass, field
from typing import Any

import gymnasium

from skyrl_trainer.agent.streaming import Json
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample

MODEL = "policy"
"""Its name, at the endpoint."""


@dataclass
class Task:
    """What the agent gets. Example: Task("text_math#3", "skyrl/text_math-v0", 3, {"split": "train"}, ...)."""

    sample_id: str
    env_id: str
    seed: int
    options: Json
    """Of the task's env; {"task": row} holds the row of a data file."""
    ground_truth: Any
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    model: str = MODEL
    play: "Play" = field(repr=False, kw_only=True)

    def told(self) -> Json:
        """All of it that JSON can hold."""
        return {name: value for name, value in vars(self).items() if name != "play"}

    def reset(self) -> tuple[str, Json]:
        """Begins the task's own env: its first observation, and an info whose `instructions` are for the system."""
        return self.play.reset()

    def step(self, action: str) -> tuple[str, float, bool, bool, Json]:
        """As gymnasium has it: observation, reward, terminated, truncated, info."""
        return self.play.step(action)


class Play:
    """The task's own env while the agent plays it, and what it has earned since the model was last asked."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._env: gymnasium.Env[Any, Any] | None = None
        self.recorded: list[Json] | None = None
        """Of a replay: the calls of tools to answer from."""
        self.truncated, self.success = False, None
        self._forget()

    def _forget(self) -> None:
        self._reward, self._parts, self._info = 0.0, dict[str, float](), Json()
        self._calls: list[Json] = []

    def reset(self) -> tuple[str, Json]:
        self.close()
        sample = self._sample
        self._env = gymnasium.make(sample.env_id, disable_env_checker=True)
        return self._env.reset(seed=sample.seed, options=dict(sample.options))

    @property
    def env(self) -> Any:
        """Without its wrappers; None before it has begun."""
        return self._env and self._env.unwrapped

    def step(self, action: str) -> tuple[str, float, bool, bool, Json]:
        if self._env is None:
            raise UserError("The agent steps its task's env before task.reset().")
        if self.recorded is not None and (feed := getattr(self.env, "feed_external", None)):
            feed(self.recorded)
        stepped = self._env.step(action)
        if not (isinstance(stepped, tuple) and len(stepped) == 5 and hasattr(stepped[1], "__float__")):
            raise UserError(f"the task's env gave {stepped!r:.80} in step, not observation, reward and so on")
        observation, reward, terminated, truncated, info = stepped
        self._reward += float(reward)
        calls = info.get("tool_calls") or []
        self._calls += calls
        if self.recorded is not None:  # the rest is for the steps to come, until the next answer
            self.recorded = self.recorded[len(calls) :]
        for part, value in (info.get("reward_parts") or {}).items():
            self._parts[part] = self._parts.get(part, 0.0) + value
        self._info = {key: value for key, value in info.items() if key not in ("tool_calls", "reward_parts")}
        self.truncated, self.success = truncated and not terminated, info.get("success", self.success)
        return observation, float(reward), terminated, truncated, info

    def feed(self, recorded: list[Json] | None) -> None:
        """The calls of tools since the last answer, to answer from; None: they are made."""
        self.recorded = recorded and recorded[len(self._calls) :]

    def earned(self) -> tuple[float, Json]:
        """The reward and the info for the record."""
        info = self._info | {"reward_parts": self._parts, "tool_calls": self._calls}
        earned = self._reward, {key: info[key] for key in info if not isinstance(info[key], dict | list) or info[key]}
        self._told = self._reward, self._parts, self._calls, self._info
        self._forget()
        return earned

    def recall(self) -> None:
        """A refusal goes on with the last answer: what was earned by it is told again, with what comes."""
        reward, parts, calls, info = self._told
        self._reward, self._calls, self._info = reward + self._reward, calls + self._calls, self._info or info
        for part, value in parts.items():
            self._parts[part] = value + self._parts.get(part, 0.0)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
