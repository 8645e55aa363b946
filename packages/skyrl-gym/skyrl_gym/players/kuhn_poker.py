"""Kuhn poker (Kuhn, 1950): three cards, two players, one bet. With it what a policy is worth, exactly.

A policy is {information set: {move: probability}}; an information set is the role's card and the moves so far:

    {"Q": {"check": 1.0, "bet": 0.0}, "Q check bet": {"call": 0.5, "fold": 0.5}, ...}      12 of them, 6 of each role
"""

from collections.abc import Mapping
from itertools import permutations, product

import numpy as np

from skyrl_gym.core import Options, Task
from skyrl_gym.data import beside
from skyrl_gym.players.env import PlayersEnv
from skyrl_gym.players.game import ROLES, Game

Policy = Mapping[str, Mapping[str, float]]

CARDS = "JQK"
DEALS = list(permutations(CARDS, 2))
MOVES = {"": "check bet", "check": "check bet", "bet": "call fold", "check bet": "call fold"}
"""By the moves so far: what there is to choose from."""
SETS = [" ".join([card, *moves.split()]) for moves in MOVES for card in CARDS]
VALUE = -1 / 18
"""What the first player wins when both play best."""
WORDS = beside(__file__, "words.yaml")["kuhn_poker"]


class KuhnPoker(Game):
    """A deal is the two cards, the first player's first."""

    metadata = Game.metadata | {"name": "kuhn_poker_v0"}
    stake = 2.0
    rules = WORDS["rules"]

    def draw(self, generator: np.random.Generator) -> list[str]:
        return list(DEALS[int(generator.integers(len(DEALS)))])

    def legal(self) -> list[str]:
        return MOVES.get(" ".join(self.moves), "").split()

    def spelled(self, move: str) -> str:
        return WORDS["chinese"][move] if self.lang == "zh" else move

    def said(self, move: str) -> str:
        """With the card before it, on which the move depends."""
        return f"{self.deal[len(self.moves) % 2]} {self.spelled(move)}"

    def payoff(self) -> float:
        return _payoff(tuple(self.deal), self.moves)

    def information_set(self, number: int) -> str:
        """What the mover knows before move `number`."""
        return " ".join([self.deal[number % 2], *self.moves[:number]])

    def perfect(self, generator: np.random.Generator) -> str:
        chances = equilibrium()[self.information_set(len(self.moves))]
        return str(generator.choice(list(chances), p=list(chances.values())))

    def opening(self, role: str) -> str:
        return WORDS[self.lang][ROLES.index(role)]

    def news(self, number: int, role: str) -> str:
        return WORDS[self.lang][2].format(self.spelled(self.moves[number]))

    def table(self, role: str) -> str:
        own = ROLES.index(role)
        shown = self.over and self.moves[-1] in ("check", "call")
        return WORDS[self.lang][4 if shown else 3].format(self.deal[own], self.deal[1 - own])

    def well_played(self, role: str) -> bool:
        """Whether each move is one that an equilibrium makes: the cards decide who wins."""
        own = [number for number in range(len(self.moves)) if self.mover(number) == role]
        return all(equilibrium()[self.information_set(number)].get(self.moves[number]) for number in own)


def _payoff(deal: tuple[str, ...], moves: list[str]) -> float:
    if moves[-1] == "fold":
        return 1.0 if len(moves) == 2 else -1.0
    pot = 2.0 if moves[-1] == "call" else 1.0
    return pot if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -pot


def equilibrium(alpha: float = 1 / 6) -> Policy:
    """The one in which the first player bluffs with J this often; there is one for each alpha from 0 to 1/3."""
    bets = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "J check": 1 / 3, "Q check": 0.0, "K check": 1.0}
    calls = {"J bet": 0.0, "Q bet": 1 / 3, "K bet": 1.0}
    calls |= {"J check bet": 0.0, "Q check bet": alpha + 1 / 3, "K check bet": 1.0}
    passive = {name: {"check": 1 - chance, "bet": chance} for name, chance in bets.items()}
    return passive | {name: {"call": chance, "fold": 1 - chance} for name, chance in calls.items()}


def value(first: Policy, second: Policy) -> float:
    """What the first player wins in the mean over all deals, in units of the ante."""

    def expected(deal: tuple[str, ...], moves: list[str]) -> float:
        if " ".join(moves) not in MOVES:
            return _payoff(deal, moves)
        chances = (first, second)[len(moves) % 2][" ".join([deal[len(moves) % 2], *moves])]
        return sum(chance * expected(deal, [*moves, move]) for move, chance in chances.items() if chance)

    return sum(expected(deal, []) for deal in DEALS) / len(DEALS)


def best_response(policy: Policy, role: str) -> tuple[float, Policy]:
    """What `role` wins in the mean at its best, and how: one of the 64 policies that never mix is best."""
    own = [name for name in SETS if len(name.split()) % 2 == 1 - ROLES.index(role)]
    found: list[tuple[float, Policy]] = []
    for choice in product((0, 1), repeat=len(own)):
        response = {name: {MOVES[name[2:]].split()[pick]: 1.0} for name, pick in zip(own, choice, strict=True)}
        found.append((value(response, policy) if role == ROLES[0] else -value(policy, response), response))
    return max(found, key=lambda pair: pair[0])


def exploitability(policy: Policy) -> float:
    """What a best response wins in the mean against a policy that plays both roles: 0 for an equilibrium alone."""
    return sum(best_response(policy, role)[0] for role in ROLES) / 2


class KuhnPokerEnv(PlayersEnv):
    """One role of Kuhn poker. There is nothing to hold out: each split has all twelve tasks, a deal and a role."""

    game_class = KuhnPoker

    def count_tasks(self, options: Options) -> int:
        return len(DEALS) * len(ROLES)

    def make_task(self, options: Options, index: int) -> Task:
        deal, role = DEALS[index // 2], index % 2
        return self.task_of(options, index, list(deal), ROLES[role], {deal[1 - role]: ROLES[1 - role]})
