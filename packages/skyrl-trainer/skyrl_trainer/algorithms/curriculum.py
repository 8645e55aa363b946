"""The curriculum sampler: more of the sources that are neither solved nor hopeless."""

from collections.abc import Sequence
from typing import Any

from skyrl_trainer.algorithms.samplers import UniformSampler
from skyrl_trainer.types import Sample, Trajectory


class CurriculumSampler(UniformSampler):
    """Prefers the sources that the policy solves about half of the time: a source's share goes as its weight times
    4 p (1 - p), but at least FLOOR. Its success rate p, at first 0.5, moves a RATE of the way to each group's."""

    by_source = True
    RATE, FLOOR = 0.1, 0.1

    def __init__(self, source: Sequence[Sample], seed: int) -> None:
        super().__init__(source, seed)
        self.rates = [0.5] * len(self.parts)
        self._names = [_source_of(part[0]) for part in self.parts]

    def shares(self) -> list[float]:
        wanted = [w * max(self.FLOOR, 4 * p * (1 - p)) for w, p in zip(self.weights, self.rates, strict=True)]
        return [each / sum(wanted) for each in wanted]

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        if group and len(self.parts) > 1 and (source := _source_of(group[0].sample)) in self._names:
            number = self._names.index(source)
            self.rates[number] += self.RATE * (sum(each.success for each in group) / len(group) - self.rates[number])
        return True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rates": list(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rates = list(state["rates"])


def _source_of(sample: Sample) -> str:
    return sample.sample_id.rpartition("#")[0]
