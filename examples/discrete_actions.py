"""Text environments for agents whose actions and observations are numbers: RLlib, Stable-Baselines.

An observation is a vector of numbers from 0 to 1. Reshaped to (3 + n, width), its rows are:

- 0, 1, 2: the words of the first observation, of the last one, and of all actions so far;
- 3 + i: admissible action i, first the numbers of `Column`, then its words; zeros where there is no action i.

A word is a 1 at the place that its CRC-32 gives, the same in every process.
"""

import enum
import re
from functools import lru_cache
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from skyrl_gym.core import Info, TextEnv

Features = NDArray[np.float32]
Reset = tuple[Features, Info]

_WORD = re.compile(r"[a-z][a-z0-9-]*(?: [0-9]+)?|[0-9][0-9.]*|[\u4e00-\u9fff]")


class Column(enum.IntEnum):
    """The first numbers of an action's row. THERE is 1 for an action and 0 for none. The others are counts in quarters,
    at most 1: of its words that the first observation has, where tasks are told; of those that the last one has; and of
    the times that it was taken in this episode."""

    THERE, ASKED, SEEN, TAKEN = range(4)


class DiscreteActions(gymnasium.Wrapper[Features, np.int64, str, str], RecordConstructorArgs):
    """Action i is `actions[i]`, an admissible one; an index that has none is "", which is invalid.

    n: the number of indices. width: of a row of the observation; the fewer, the more words share a place.
    ValueError where the environment lists no admissible actions, or more than n.
    """

    def __init__(self, env: gymnasium.Env[str, str], n: int = 64, width: int = 64) -> None:
        if n < 1 or width <= len(Column):
            raise ValueError(f"DiscreteActions: n is {n}, width is {width}; expected at least 1 and {len(Column) + 1}.")
        name = type(env.unwrapped).__name__
        listing = getattr(type(env.unwrapped), "admissible_actions", None)
        if listing in (None, TextEnv.admissible_actions):
            raise ValueError(f"DiscreteActions: {name} lists no admissible actions, as alfworld_lite does.")
        RecordConstructorArgs.__init__(self, n=n, width=width)
        super().__init__(env)
        self.action_space = Discrete(n)
        self.observation_space = Box(0.0, 1.0, ((3 + n) * width,), np.float32)
        self.actions: list[str] = []
        self._n, self._width = n, width

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        observation, info = self.env.reset(seed=seed, options=options)
        self._asked, self._taken = _words(observation), list[str]()
        return self._features(observation, info), info

    def step(self, action: np.int64) -> tuple[Features, Any, bool, bool, Info]:
        text = self.actions[action] if 0 <= action < len(self.actions) else ""
        observation, reward, terminated, truncated, info = self.env.step(text)
        self._taken.append(text)
        return self._features(observation, info), reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which indices have an action; sb3-contrib's MaskablePPO looks for this name."""
        return np.arange(self._n) < len(self.actions)

    def _features(self, observation: str, info: Info) -> Features:
        self.actions = info.get("admissible_actions", [])
        if (count := len(self.actions)) > self._n:
            raise ValueError(f"DiscreteActions: n is {self._n}, but this state has {count} actions; raise n.")
        rows, seen = np.zeros((3 + self._n, self._width), np.float32), _words(observation)
        for row, words in zip(rows, (self._asked, seen, _words("\n".join(self._taken))), strict=False):
            row[_places(words, self._width)] = 1
        for row, text in zip(rows[3:], self.actions, strict=False):
            words = _words(text) | {word.split()[0] for word in _words(text)}
            counts = len(words & self._asked), len(words & seen), self._taken.count(text)
            row[: len(Column)] = [1, *(min(count / 4, 1) for count in counts)]
            row[len(Column) :][_places(words, self._width - len(Column))] = 1
        return rows.reshape(-1)


@lru_cache(maxsize=1 << 12)
def _words(text: str) -> frozenset[str]:
    """A name with its number is one word, "mug 1", and not its kind, "mug", which a task names. So is a Chinese
    character."""
    return frozenset(_WORD.findall(text.lower()))


def _places(words: frozenset[str], width: int) -> list[int]:
    return [crc32(word.encode()) % width for word in words]
