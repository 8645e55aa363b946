"""The figures of an update, put together over its micro-batches and over all learners."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from skyrl_trainer.learner.ranks import Ranks
from skyrl_trainer.types import StepMetrics


class Meter:
    """Sums and maxima over the sampled tokens of an update; a mean is formed once, at its end."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values_N: Tensor) -> None:
        values_N = torch.as_tensor(values_N)  # a plug-in may report a number
        self._sums[name] = self._sums.get(name, 0.0) + values_N.detach().double().sum()
        self._counts[name] += values_N.numel()

    def maximum(self, name: str, values_N: Tensor) -> None:
        if values_N.numel():
            largest = values_N.detach().max()
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def knows(self, name: str) -> bool:
        return name in self._sums

    def result(self, ranks: Ranks) -> StepMetrics:
        sums: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        maxima: dict[str, float] = {}
        for meter in ranks.gather(self):
            sums.update({name: total.item() for name, total in meter._sums.items()})
            counts.update(meter._counts)
            maxima |= {name: max(x.item(), maxima.get(name, x.item())) for name, x in meter._maxima.items()}
        return {name: total / max(1, counts[name]) for name, total in sums.items()} | maxima
