"""Texts that end an answer, such as `</search>`: an env names them (`info["stop"]`), or an agent's request."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from skyrl_trainer.types import Turn

Decode = Callable[[list[int]], str]


def read_stops(said: Any) -> tuple[str, ...]:
    """An env's; TypeError where it is no list of texts."""
    if not (isinstance(said, list | tuple) and all(isinstance(stop, str) and stop for stop in said)):
        raise TypeError(f'info["stop"] is {said!r:.60}, but should be a list of texts such as ["</search>"]')
    return tuple(said)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the one begins that is whole first, and which it is. Example: (5, "</a>") in "<a>17</a>."."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


def cut_at_stop(decode: Decode, turn: Turn, stops: Sequence[str]) -> str | None:
    """Ends the turn with the token that completes one of `stops`, and its action before that text, which it returns."""
    if (found := first_stop(turn.action, stops)) is None:
        return None
    (until, stop), ids = found, turn.output_ids
    size = 1 + bisect_left(range(1, len(ids)), True, key=lambda n: stop in decode(ids[:n]))
    turn.action, turn.output_ids, turn.logprobs = turn.action[:until], ids[:size], turn.logprobs[:size]
    turn.weight_versions = turn.weight_versions[:size]
    return stop


class StopCheck:
    """Whether the newest of a request's tokens completes a stop."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._text = cache(lambda token: decode([token]))

    def __call__(self, ids: list[int], stops: Sequence[str]) -> bool:
        newest = self._text(ids[-1])  # most tokens end no stop
        ends = [stop for stop in stops if stop[-1] in newest or "\ufffd" in newest]  # part of a character
        return any(stop in self._decode(ids[-len(stop.encode()) :]) for stop in ends)
