"""One role of a game as a Gymnasium environment, the other played by `opponent`; or both, which is self-play.

With opponent=self each action is that of the role whose turn it is: info has `role`, who has acted, and `rewards`, what
each role got by it; info["request"]["messages"] are the messages of the role that is to act, its own context.
"""

import copy
from typing import Any, ClassVar

import numpy as np

from skyrl_gym.core import Info, Options, Outcome, Task, TextEnv
from skyrl_gym.players import pool
from skyrl_gym.players.game import ILLEGAL, ROLES, Game


class PlayersEnv(TextEnv):
    """A subclass gives `game_class`, `count_tasks` and `make_task`, whose tasks are `task_of`."""

    game_class: ClassVar[type[Game]]
    choices = TextEnv.choices | {"opponent": ("random", "perfect", "self"), "expert": ("perfect", "random")}

    # `opponent` may be several, with commas, of which the seed draws one, and addresses (pool.py) among them.
    def _checked(self, options: Options) -> dict[str, Any]:
        given = options.get("opponent")
        several = given.split(",") if isinstance(given, str) else []
        for each in several:
            if not each.startswith(("http://", "https://")):
                super()._checked({"opponent": each})
        rest = {name: value for name, value in options.items() if name != "opponent" or not several}
        return super()._checked(rest) | ({"opponent": given} if several else {})

    def task_of(self, options: Options, index: int, deal: Any, role: str, truth: Any) -> Task:
        """Plays `role` of a game with this deal. truth: what the role is not to be told."""
        game = self.game_class(options["lang"])
        game.reset(options={"deal": deal})
        data, rules = {"deal": deal, "role": role}, game.rules[options["lang"]]
        return Task(self.task_id(options, index), game.observe(role), truth, instructions=rules, data=data)

    def begin(self, task: Task) -> str:
        opponents = self.options["opponent"].split(",")
        talks = {role: [{"role": "system", "content": task.instructions}] for role in ROLES}
        drawn = opponents[self.np_random.integers(len(opponents))]
        self.set_env_state({"moves": [], "talks": talks, "opponent": drawn})
        return self._next()

    def act(self, action: str) -> Outcome:
        mover = self.game.agent_selection
        if not self.game.over:  # or else the other gave up before our first move
            self._say(action)
        valid = self.game.moves[-1] != ILLEGAL
        observation, over = self._next(), self.game.over
        rewards = self.game.payoffs() if over else self.game.rewards
        both = self._opponent == "self"
        info = {"role": mover, "rewards": rewards} | self.reset_info() if both else {}
        parts = {"game": rewards[ROLES[0] if both else self.role]}
        played = not both or self.role in map(self.game.mover, range(len(self.game.moves)))
        return Outcome(observation, parts, valid, over and played and self.game.well_played(self.role), over, info)

    def _say(self, action: str) -> None:
        mover = self.game.agent_selection
        self.game.step(action)
        said = action if self.game.moves[-1] != ILLEGAL else ""
        self._talks[mover].append({"role": "assistant", "content": said})

    def _next(self) -> str:
        if self.game.over:
            return self.game.observe(self.role)
        mover = self.game.agent_selection
        told = self.game.observe(mover)
        self._talks[mover].append({"role": "user", "content": told})
        if mover == self.role or self._opponent == "self":
            return told
        self._say(self._move(self._opponent))
        return self._next()

    def _move(self, player: str) -> str:
        if player in ("random", "perfect"):
            legal = self.game.legal()
            chosen = legal[self.np_random.integers(len(legal))] if player == "random" else None
            return self.game.said(chosen or self.game.perfect(self.np_random))
        return pool.ask(player, self._talks[self.game.agent_selection], int(self.np_random.integers(1 << 31)))

    def expert_action(self) -> str:
        if self.task and self.game.over:
            return ""
        # To ask changes nothing, and the draws are others than those with which the opponent will answer.
        generator, moves = self.np_random, len(self.game.moves)
        bits: Any = generator.bit_generator
        self._np_random = np.random.Generator(bits.jumped(1 + moves))
        try:
            return self._move(self.options["expert"])
        finally:
            self._np_random = generator

    def admissible_actions(self) -> list[str]:
        return [] if self.task and self.game.over else [self.game.spelled(move) for move in self.game.legal()]

    def reset_info(self) -> Info:
        if self._opponent != "self" or self.game.over:
            return {}
        mover = self.game.agent_selection
        return {"request": {"messages": copy.deepcopy(self._talks[mover]), "role": mover}}

    def get_env_state(self) -> dict[str, Any]:
        return {"moves": self.game.moves, "talks": self._talks, "opponent": self._opponent}

    def set_env_state(self, state: dict[str, Any]) -> None:
        self.game = self.game_class(self.task.lang)
        self.role = self.task.data["role"]
        self.game.reset(options={"deal": self.task.data["deal"], "moves": state["moves"]})
        self._talks = state["talks"]
        self._opponent = state["opponent"]
