"""What a policy remembers of an episode: the ids that stand before its next output.

    full          everything (the default): each context begins with the one before it
    window        the first messages and the last `window` turns
    summary       everything, but of observations older than `window` turns only the first `summary_chars` characters
    no_thinking   everything but the thoughts of earlier turns, as Qwen3's template has it

What the policy wrote is never encoded again: a policy leaves tokens out, it does not make new ones. Where a context
does not begin with the one before it, a new segment of the trajectory begins.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.config import GeneratorConfig
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Turn


class AgentOptions(BaseModel):
    """Entries of `generator.agent`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    memory: Literal["full", "window", "summary", "no_thinking"] = "full"
    window: int = Field(4, gt=0)  # turns that window keeps, and whose observations summary leaves whole
    summary_chars: int = Field(80, gt=0)
    max_episode_tokens: int | None = Field(None, gt=0)  # sampled tokens, over all turns
    tools: Literal["env", "template"] = "env"  # who tells the policy of its tools: the env's instructions, in the env's
    # own words, or the model's chat template, from the tools' schemas


def read_options(generator: GeneratorConfig) -> AgentOptions:
    """Raises UserError with what there is."""
    try:
        return AgentOptions.model_validate(generator.agent)
    except ValidationError as error:
        name, wanted = error.errors()[0]["loc"][0], error.errors()[0]["msg"].removeprefix("Input should be ")
        names = sorted(AgentOptions.model_fields)
        problem = f"is {generator.agent[str(name)]!r}, but should be {wanted}" if name in names else "is not an option"
        raise UserError(f"generator.agent.{name} {problem}; it has {', '.join(names)}.") from None


class Memory:
    """One episode's. Example (full): `Memory(prompt, options, first_ids)`, then after each turn
    `advance(turns)` is ([ids of the last observation], False)."""

    def __init__(self, prompt: ChatPrompt, options: AgentOptions, first_ids: list[int]) -> None:
        self._prompt, self._options, self._first = prompt, options, first_ids
        self.context = list(first_ids)
        """What the next output follows."""

    def advance(self, turns: list[Turn]) -> tuple[list[int], bool]:
        """After the last of `turns` has been answered by its env: the next turn's `prompt_ids` and `new_segment`."""
        seen = self.context + turns[-1].output_ids
        if self._options.memory == "full":
            self.context = seen + self._observation(turns[-1].observation, turns[-1])
        else:
            self.context = self._rewritten(turns)
        if self.context[: len(seen)] == seen:
            return self.context[len(seen) :], False
        return list(self.context), True

    def _rewritten(self, turns: list[Turn]) -> list[int]:
        ids, memory, window = list(self._first), self._options.memory, self._options.window
        for age, turn in zip(range(len(turns) - 1, -1, -1), turns, strict=True):  # 0: the last turn
            if memory == "window" and age >= window:
                continue
            text = turn.observation
            if memory == "summary" and age >= window and len(text) > self._options.summary_chars:
                text = text[: self._options.summary_chars] + " [...]"
            ids += self._prompt.without_thinking(turn.output_ids) if memory == "no_thinking" else turn.output_ids
            ids += self._observation(text, turn)
        return ids

    def _observation(self, text: str, turn: Turn) -> list[int]:
        return self._prompt.observation(text, turn.output_ids)
