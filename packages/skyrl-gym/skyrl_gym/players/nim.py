"""Nim: two players in turn take things from one of several heaps; who takes the last thing wins."""

from functools import cache, reduce
from hashlib import blake2b
from itertools import product
from operator import xor

import numpy as np

from skyrl_gym.core import SPLITS, Options, Task
from skyrl_gym.data import beside
from skyrl_gym.players.env import PlayersEnv
from skyrl_gym.players.game import ILLEGAL, ROLES, Game

LEVELS = {1: (3, 4), 2: (3, 5), 3: (3, 7), 4: (4, 7), 5: (5, 9)}
"""By difficulty: how many heaps there are, and how much the largest may hold."""
SHARES = (6, 8, 10)
"""Of ten positions, where the splits end."""
NAMES = "ABCDE"
WORDS = beside(__file__, "words.yaml")["nim"]


def nim_sum(heaps: tuple[int, ...]) -> int:
    """The exclusive or: 0 where whoever moves loses against perfect play (Bouton, 1901)."""
    return reduce(xor, heaps, 0)


class Nim(Game):
    """A deal is the heaps. A move is a heap's letter and how many are taken: "B 2"."""

    metadata = Game.metadata | {"name": "nim_v0"}
    rules = WORDS["rules"]

    def draw(self, generator: np.random.Generator) -> list[int]:
        return [int(heap) for heap in generator.integers(1, 6, size=3)]

    @property
    def heaps(self) -> tuple[int, ...]:
        heaps = list(self.deal)
        for move in self.moves:
            if move != ILLEGAL:
                name, taken = move.split()
                heaps[NAMES.index(name)] -= int(taken)
        return tuple(heaps)

    def legal(self) -> list[str]:
        heaps = zip(NAMES, self.heaps, strict=False)
        return [f"{name} {taken}" for name, heap in heaps for taken in range(1, heap + 1)]

    def payoff(self) -> float:
        return 1.0 if self.mover(len(self.moves)) == ROLES[1] else -1.0

    def perfect(self, generator: np.random.Generator) -> str:
        """A winning move; where there is none, one from the largest heap, which leaves most to think about."""
        heaps, total = self.heaps, nim_sum(self.heaps)
        for name, heap in zip(NAMES, heaps, strict=False):
            if heap ^ total < heap:
                return f"{name} {heap - (heap ^ total)}"
        return f"{NAMES[heaps.index(max(heaps))]} 1"

    def opening(self, role: str) -> str:
        return WORDS[self.lang][ROLES.index(role)]

    def news(self, number: int, role: str) -> str:
        name, taken = self.moves[number].split()
        return WORDS[self.lang][2].format(taken, name)

    def table(self, role: str) -> str:
        heaps = zip(NAMES, self.heaps, strict=False)
        return WORDS[self.lang][3].format(", ".join(f"{name} {heap}" for name, heap in heaps))


@cache
def positions(split: str, difficulty: int) -> list[tuple[int, ...]]:
    """The heaps of a split, in order. A hash of the sorted heaps decides, so that no two splits share a position."""
    count, most = LEVELS[difficulty]
    place = SPLITS.index(split)
    mine = range((0, *SHARES)[place], SHARES[place])
    ways = product(range(1, most + 1), repeat=count)
    return [heaps for heaps in ways if blake2b(bytes(sorted(heaps)), digest_size=8).digest()[0] % SHARES[-1] in mine]


class NimEnv(PlayersEnv):
    """One role of Nim: the one that wins if it makes no mistake."""

    game_class = Nim
    choices = PlayersEnv.choices | {"difficulty": tuple(LEVELS)}

    def count_tasks(self, options: Options) -> int:
        return len(positions(options["split"], options["difficulty"]))

    def make_task(self, options: Options, index: int) -> Task:
        heaps = positions(options["split"], options["difficulty"])[index]
        role = ROLES[0] if nim_sum(heaps) else ROLES[1]
        return self.task_of(options, index, list(heaps), role, f"nim-sum {nim_sum(heaps)}")
