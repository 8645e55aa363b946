"""Which tasks come next. A sampler is pure: a few numbers are its whole state, and a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from skyrl_trainer.algorithms.registry import Registry
from skyrl_trainer.errors import UserError
from skyrl_trainer.protocols import Sampler
from skyrl_trainer.types import Sample, Trajectory

_SAMPLERS: Registry[Callable[[Sequence[Sample], int], Sampler]] = Registry("trainer.algorithm.options.sampler")
register_sampler = _SAMPLERS.register
"""On a class, or anything else that makes a protocols.Sampler from (all samples, trainer.seed)."""
sampler_class = _SAMPLERS.get


def permuted(index: int, size: int, key: str) -> int:
    """Where `index` goes in a pseudo-random permutation of range(size) that `key` names.

    A four-round Feistel network over the next even number of bits, walked until it lands inside: no list of `size`
    numbers is kept (a generated data source may have billions of tasks), and no library's stream is relied upon.
    """
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
    """Every task once an epoch, in an order of the epoch's own; the next epoch follows without a gap."""

    def __init__(self, source: Sequence[Sample], seed: int) -> None:
        if len(source) == 0:
            raise UserError("data.train_data holds no task; name an env or a file with at least one row.")
        self.source = source
        self.seed = seed
        self.drawn = 0

    def next_tasks(self, n: int) -> list[Sample]:
        """The next n samples."""
        size = len(self.source)
        places = range(self.drawn, self.drawn + n)
        self.drawn += n
        return [self.source[permuted(i % size, size, f"{self.seed}/{i // size}")] for i in places]

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        """Every group is learned from."""
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "seed": self.seed, "size": len(self.source)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError when the state belongs to other data."""
        if (state["size"], state["seed"]) != (len(self.source), self.seed):
            raise UserError(
                f"The checkpoint was drawing from {state['size']} tasks with trainer.seed={state['seed']}, but now "
                f"data.train_data holds {len(self.source)} and trainer.seed={self.seed}; restore them to resume."
            )
        self.drawn = int(state["drawn"])


@register_sampler("dynamic")
class DynamicSampler(UniformSampler):
    """DAPO's dynamic sampling (arXiv 2503.14476, equation 11): a group whose returns are all equal teaches nothing.

    The loop draws again in place of the groups that are refused, up to `max_draws` batches a step.
    """

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        """Not a group of one either, nor one of which everybody failed."""
        return len(set(returns)) > 1
