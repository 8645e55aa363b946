"""Games of two roles in text, in the shape of PettingZoo's AEC: one role at a time observes and acts.

    game = Nim()
    game.reset(seed=0)
    for role in game.agent_iter():
        observation, reward, terminated, truncated, info = game.last()
        game.step(None if terminated else policy(role, observation))

A game is a deal, what chance has decided before the first move, and the moves made since; all else follows from them.
"""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from skyrl_gym.spaces import UnicodeText

ROLES = ("player_0", "player_1")
ILLEGAL = "illegal"
"""Stands in the moves for a text that is none: it ends the game, and whoever said it loses `stake`."""


class Game:
    """A zero-sum game whose roles move by turns. A subclass gives `stake`, `rules` and the first seven methods."""

    metadata: ClassVar[dict[str, Any]] = {"name": "game", "render_modes": []}
    stake = 1.0
    """The most that a role can lose."""
    rules: ClassVar[dict[str, str]] = {}
    """By language: the system message of both roles."""

    def draw(self, generator: np.random.Generator) -> Any:
        """A deal, as plain data."""
        raise NotImplementedError

    def legal(self) -> list[str]:
        """The moves that there are, as `moves` holds them; none when the game is over."""
        raise NotImplementedError

    def payoff(self) -> float:
        """What player_0 has won when the game is over."""
        raise NotImplementedError

    def perfect(self, generator: np.random.Generator) -> str:
        """A move of a player who cannot be beaten in the long run."""
        raise NotImplementedError

    def opening(self, role: str) -> str:
        """What the role is told once, before its first move."""
        raise NotImplementedError

    def news(self, number: int, role: str) -> str:
        """What the role is told of move `number`, the other's."""
        raise NotImplementedError

    def table(self, role: str) -> str:
        """What the role sees at all times; when the game is over, how it ended."""
        raise NotImplementedError

    def parse(self, action: str) -> str:
        """The move that a text ends in, or ILLEGAL. Chinese needs no blank before it."""
        end = " ".join(action[-100:].lower().split()).rstrip(" .。")
        forms = {move: rf"(?<![a-z0-9]){re.escape(self.spelled(move).lower())}$" for move in self.legal()}
        return next((move for move, form in forms.items() if re.search(form, end)), ILLEGAL)

    def spelled(self, move: str) -> str:
        """A move as the roles write it."""
        return move

    def said(self, move: str) -> str:
        """What an expert says for it: a clone learns to look at what is said first."""
        return self.spelled(move)

    def __init__(self, lang: str = "en") -> None:
        self.lang, self.possible_agents = lang, list(ROLES)
        self._observations = UnicodeText(1 << 16)
        self._actions = UnicodeText(1 << 20)
        self._generator = np.random.default_rng()

    def observation_space(self, agent: str) -> UnicodeText:
        return self._observations

    def action_space(self, agent: str) -> UnicodeText:
        return self._actions

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """options: `deal`, where chance is not to draw it, and `moves` that were made already."""
        options = options or {}
        if seed is not None:  # else it goes on from the last one
            self._generator = np.random.default_rng(seed)
        self.deal = options["deal"] if "deal" in options else self.draw(self._generator)
        self.moves = list(options.get("moves", ()))
        self.agents, self.agent_selection = list(ROLES), self.mover(len(self.moves))
        self.rewards = dict.fromkeys(ROLES, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.terminations = dict.fromkeys(ROLES, self.over)
        self.truncations = dict.fromkeys(ROLES, False)
        self.infos: dict[str, dict[str, Any]] = {role: {} for role in ROLES}

    def step(self, action: str | None) -> None:
        role = self.agent_selection
        if self.terminations[role]:
            if action is not None:
                raise ValueError("The game is over: the only action left is None.")
            for of_role in (self.rewards, self._cumulative_rewards, self.terminations, self.truncations, self.infos):
                del of_role[role]
            self.agents.remove(role)
            self.rewards = dict.fromkeys(self.rewards, 0.0)
            self.agent_selection = self.agents[0] if self.agents else role
            return
        assert action is not None
        self._cumulative_rewards[role] = 0.0
        self.moves.append(self.parse(action))
        self.agent_selection = self.mover(len(self.moves))
        if self.over:
            self.terminations = dict.fromkeys(ROLES, True)
            self.rewards = self.payoffs()
            self._cumulative_rewards = {each: self._cumulative_rewards[each] + self.rewards[each] for each in ROLES}

    def observe(self, agent: str) -> str:
        """What the role reads before its next move: the opening or how its last one was answered, and the table."""
        told = [] if agent in map(self.mover, range(len(self.moves))) else [self.opening(agent)]
        if self.moves and self.mover(len(self.moves) - 1) != agent:
            gave_up = "对方认输。" if self.lang == "zh" else "The other gives up."
            told.append(gave_up if self.moves[-1] == ILLEGAL else self.news(len(self.moves) - 1, agent))
        return " ".join([*told, self.table(agent)])

    def last(self, observe: bool = True) -> tuple[str | None, float, bool, bool, dict[str, Any]]:
        role = self.agent_selection
        earned = self._cumulative_rewards[role], self.terminations[role], self.truncations[role]
        return self.observe(role) if observe else None, *earned, self.infos[role]

    def agent_iter(self, max_iter: int = 1 << 63) -> Iterator[str]:
        while self.agents and max_iter:
            max_iter -= 1
            yield self.agent_selection

    def mover(self, number: int) -> str:
        """Who makes move `number`."""
        return ROLES[number % 2]

    @property
    def over(self) -> bool:
        return self.moves[-1:] == [ILLEGAL] or not self.legal()

    def payoffs(self) -> dict[str, float]:
        """What each role has won when the game is over."""
        if self.moves[-1:] == [ILLEGAL]:
            won = self.stake if self.mover(len(self.moves)) == ROLES[0] else -self.stake
        else:
            won = self.payoff()
        return {ROLES[0]: won, ROLES[1]: -won}

    def well_played(self, role: str) -> bool:
        """Whether the role has reached what it could, when the game is over."""
        return self.payoffs()[role] > 0
