"""What a policy remembers of an episode (docs/agents/README.md): the ids that stand before its next output.

A context that does not begin with the one before it is a new segment.
"""

from bisect import bisect_left
from typing import Any

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.registry import load
from skyrl_trainer.settings import AgentConfig
from skyrl_trainer.types import Turn

THOUGHT_END = "</think>"
SUMMARY_CHARS = 80
"""Characters that a summary keeps of an observation."""


class Memory:
    """One episode's. Example (full): after each turn `advance(turns)` is ([ids of the last observation], False)."""

    most: int | None = None
    """Tokens that an output may have, beside the run's own limit."""
    at_stop = False  # whether the last output ended at one of `stops`
    marks: tuple[()] = ()  # for a turn's info

    def __init__(self, prompt: ChatPrompt, options: AgentConfig, first_ids: list[int], stop: Any = None) -> None:
        self._prompt, self._first = prompt, first_ids
        self.stops: tuple[str, ...] = load("skyrl_trainer.engine.stops:read_stops")(stop) if stop else ()
        self._kind, _, turns = options.memory.partition(":")
        self._turns = int(turns or 4)
        self.context = list(first_ids)
        """What the next output follows."""

    def said(self, turn: Turn) -> str:
        """What the env is told: the answer, up to and with one of `stops`."""
        if self.stops:
            stop = load("skyrl_trainer.engine.stops:cut_at_stop")(self._prompt.decode, turn, self.stops)
            self.at_stop, turn.action = stop is not None, turn.action + (stop or "")
        return turn.action

    def refusal(self, info: dict[str, Any]) -> str | None:
        """None: what our own agent asks is cut where it ends."""

    def advance(self, turns: list[Turn]) -> tuple[list[int], bool]:
        """After the last of `turns` has been answered by its env: the next turn's `prompt_ids` and `new_segment`."""
        seen = self.context + turns[-1].output_ids
        if self._kind == "full":
            self.context = seen + self._prompt.observation(turns[-1].observation, turns[-1].output_ids)
        else:
            self.context = self._rewritten(turns)
        if self.context[: len(seen)] == seen:
            return self.context[len(seen) :], False
        return list(self.context), True

    def _rewritten(self, turns: list[Turn]) -> list[int]:
        ids, memory, window = list(self._first), self._kind, self._turns
        for age, turn in zip(range(len(turns) - 1, -1, -1), turns, strict=True):  # 0: the last turn
            if memory == "window" and age >= window:
                continue
            text = turn.observation
            if memory == "summary" and age >= window and len(text) > SUMMARY_CHARS:
                text = text[:SUMMARY_CHARS] + " [...]"
            ids += without_thinking(self._prompt, turn.output_ids) if memory == "no_thinking" else turn.output_ids
            ids += self._prompt.observation(text, turn.output_ids)
        return ids


def without_thinking(prompt: ChatPrompt, ids: list[int]) -> list[int]:
    """An output without its thoughts: the tokens behind the last `</think>` and white space; as it is without."""
    closings = prompt.decode(ids).count(THOUGHT_END)
    if not closings:
        return ids
    # The number of tags in a prefix's text only grows, so the first prefix that has them all can be bisected.
    end = bisect_left(range(len(ids)), closings, key=lambda n: prompt.decode(ids[:n]).count(THOUGHT_END))
    while end < len(ids) and ids[end] not in prompt.stop_token_ids and not prompt.decode(ids[end : end + 1]).strip():
        end += 1
    return ids[end:]
