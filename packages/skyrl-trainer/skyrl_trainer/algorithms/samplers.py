"""Which tasks come next. A sampler is pure: its state is a few numbers, which a checkpoint holds."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from skyrl_trainer.algorithms.rewards import differ
from skyrl_trainer.data import SampleSource
from skyrl_trainer.errors import UserError
from skyrl_trainer.protocols import Sampler
from skyrl_trainer.registry import Registry
from skyrl_trainer.types import Sample, Trajectory

_SAMPLERS: Registry[Callable[[Sequence[Sample], int], Sampler]] = Registry(
    "trainer.algorithm.options.sampler", {"curriculum": "skyrl_trainer.algorithms.curriculum:CurriculumSampler"}
)
register_sampler = _SAMPLERS.register
"""On a class, or anything else that makes a protocols.Sampler from (all samples, trainer.seed)."""
sampler_class = _SAMPLERS.get


def permuted(index: int, size: int, key: str) -> int:
    """Where `index` goes in a pseudo-random permutation of range(size) that `key` names: a four-round Feistel network,
    walked until it lands inside, for a data source may have billions of tasks, too many for a list."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half | right
        if index < size:
            return index


@register_sampler("uniform")
class UniformSampler:
    """Every task once per epoch, in an order of the epoch's own; the next epoch follows without a gap.
    Sources with weights (`text_math?weight=2`) have epochs of their own and take turns: after any number of draws none
    is further than one from its share of them (Tijdeman, The chairman assignment problem, 1980).
    """

    by_source = False
    """Whether sources take turns without weights, too."""

    def __init__(self, source: Sequence[Sample], seed: int) -> None:
        if len(source) == 0:
            raise UserError("data.train_data holds no task; name an env or a file with at least one row.")
        sources = source if isinstance(source, SampleSource) else SampleSource([source])
        if max(sources.tries) > 1:
            raise UserError("data.train_data: `tries` are held-out data's; here generator.num_generations says it.")
        self.source, self.seed = source, seed
        self.parts = sources.parts if sources.weights or self.by_source else [source]
        self.weights = sources.weights or [1.0] * len(self.parts)
        self.drawn = [0] * len(self.parts)
        self.owed = [0.0] * len(self.parts)
        """By source: its share of all draws so far, less what it had of them."""

    def next_tasks(self, n: int) -> list[Sample]:
        return [self._next() for _ in range(n)]

    def _next(self) -> Sample:
        turn = self._turn()
        part, place = self.parts[turn], self.drawn[turn]
        self.drawn[turn] += 1
        return part[permuted(place % len(part), len(part), f"{self.seed}/{place // len(part)}")]

    def _turn(self) -> int:
        if len(self.parts) == 1:
            return 0
        shares, slack = self.shares(), 1 / (2 * len(self.parts) - 2)
        self.owed = [owed + share for owed, share in zip(self.owed, shares, strict=True)]
        due = [i for i, owed in enumerate(self.owed) if owed >= slack - 1e-9]
        turn = min(due, key=lambda i: (1 - slack - self.owed[i]) / shares[i])
        self.owed[turn] -= 1
        return turn

    def shares(self) -> list[float]:
        """Of the next draw, by source; they sum to 1."""
        return [weight / sum(self.weights) for weight in self.weights]

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "owed": self.owed, "seed": self.seed, "size": len(self.source)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError when the state belongs to other data."""
        if (state["size"], state["seed"]) != (len(self.source), self.seed):
            raise UserError(
                f"The checkpoint was drawing from {state['size']} tasks with trainer.seed={state['seed']}, but now "
                f"data.train_data holds {len(self.source)} and trainer.seed={self.seed}; restore them to resume."
            )
        self.drawn = list(state["drawn"])
        self.owed = list(state["owed"])


@register_sampler("dynamic")
class DynamicSampler(UniformSampler):
    """DAPO's dynamic sampling (arXiv 2503.14476, equation 11), by returns: groups of equal ones are drawn again."""

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        return differ(returns)
