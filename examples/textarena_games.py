"""TextArena's games of one player (pip install textarena) as environments: docs/environments/task_sets.md.

TextArena seeds and uses Python's own generator, which all of a process share: while a call of it runs, that has the
episode's state. The games that download lists of words when they are imported are left out.
"""

import random
from contextlib import contextmanager

import gymnasium
import textarena

from skyrl_gym import Outcome, Task, TextEnv

GAMES = [
    *("2048", "Bandit", "Blackjack", "Countdown", "Crosswords", "Cryptarithm", "FifteenPuzzle", "FrozenLake"),
    *("GuessTheNumber", "LightsOut", "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump", "RushHour", "Secretary"),
    *("Set", "Slitherlink", "Sokoban", "Sudoku", "ThreeCardMonte", "TowerOfHanoi"),
]
SPLITS = ("train", "val", "test")
TASKS = 1_000_000
"""Of a split: the game's seeds."""


class TextArenaGame(TextEnv):
    choices = {"split": SPLITS}
    id_options = ("split",)
    kept = ("actions",)  # a state is what was done: the game is played again

    def __init__(self, game, **options):
        super().__init__(**options)
        self._name = game

    def count_tasks(self, options):
        return TASKS

    def make_task(self, options, index):
        seed = index * len(SPLITS) + SPLITS.index(options["split"])
        return Task(self.task_id(options, index), self._name, None, data={"seed": seed}, split=options["split"])

    def begin(self, task):
        seed, self.actions = task.data["seed"], []
        self._state = random.Random(seed).getstate()
        with self._own_generator():
            self._game = textarena.make(self._name)
            self._game.reset(num_players=1, seed=seed)
            self._read = self._game.get_observation()[1]
        return self._read.strip()

    def act(self, action):
        self.actions.append(action)
        with self._own_generator():
            over, _ = self._game.step(action)
            if not over:
                before, self._read = self._read, self._game.get_observation()[1]
                return Outcome(self._read.removeprefix(before).strip(), {"game": 0.0}, valid_action=True)
            rewards, told = self._game.close()
        # Some games give a sentence in place of the reward of a wrong move.
        reward = float(rewards[0]) if isinstance(rewards[0], int | float) else 0.0
        invalid, why = bool(told[0].get("invalid_move")), str(told[0].get("reason", ""))
        return Outcome(why, {"game": reward}, not invalid, reward >= 1, terminated=True)

    def set_env_state(self, state):
        self.begin(self.task)
        for action in state["actions"]:
            self.act(action)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_game"}

    def __setstate__(self, state):
        vars(self).update(state)
        if "actions" in state:
            self.set_env_state(state)

    @contextmanager
    def _own_generator(self):
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)


for game in GAMES:
    gymnasium.register(f"textarena/{game}-v0", TextArenaGame, kwargs={"game": f"{game}-v0"})
