"""Which groups may be drawn and which are learned from next, so that no token is older than `max_staleness` updates.

A group is the tries of one task, numbered as it is drawn. While the engines hold version v of the weights there may be
`(v + max_staleness + 1) * size` in all, and batches take the oldest: fewer than `(max_staleness + 1) * size` stand
before a new one, so that at most `max_staleness` updates are made before it is learned from.
"""

from collections import Counter
from dataclasses import dataclass, field

from skyrl_trainer.types import StepMetrics, Trajectory

Group = list[Trajectory]


@dataclass
class Flow:
    """Knows numbers, not processes. Example: Flow(size=32, max_staleness=2, steps=100, max_draws=4)."""

    size: int
    """Groups of a batch."""
    max_staleness: int
    steps: int
    """Of the whole run: nothing is drawn beyond them."""
    max_draws: int
    """Batches that one may cost where groups are refused; then it is learned from as it is."""
    drawn: int = 0
    given_back: int = 0
    """Places of refused groups, for others."""
    redraws: int = 0
    """Of these, since the last batch."""
    lost: int = 0
    """Places of refused groups not given back, since the last batch."""
    groups: dict[int, Group | None] = field(default_factory=dict)
    """By number, oldest first, all that are drawn and neither taken nor refused; None while one plays."""

    def room(self, version: int) -> int:
        """How many groups may be drawn while the engines hold this version."""
        batches = min(version + self.max_staleness + 1, self.steps)
        return max(0, batches * self.size + self.given_back - self.drawn)

    def draw(self, count: int) -> range:
        """The numbers of so many new groups, which play from now on."""
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        self.groups |= dict.fromkeys(numbers)
        return numbers

    def finish(self, number: int, group: Group, accepted: bool) -> None:
        """A group has ended. A refused one gives its place back, as often as `max_draws` allows."""
        if accepted:
            self.groups[number] = group
            return
        del self.groups[number]
        if self.redraws == (self.max_draws - 1) * self.size:
            self.lost += 1
            return
        self.redraws += 1
        self.given_back += 1

    def take(self, version: int) -> dict[int, Group] | None:
        """The next batch, by number; None while one that belongs to it plays or is still to be drawn."""
        oldest = {number: self.groups[number] for number in list(self.groups)[: self.size]}
        taken = {number: group for number, group in oldest.items() if group is not None}
        if len(taken) < len(oldest) or (len(taken) < self.size and self.room(version)):
            return None
        for number in taken:
            del self.groups[number]
        # A batch uses up `size` places: those that it lacks are lost, the others belong to batches that come.
        self.given_back += max(0, self.lost - (self.size - len(taken)))
        self.redraws = self.lost = 0
        return taken

    def metrics(self) -> StepMetrics:
        """What stands behind the batch that was taken last."""
        playing = sum(group is None for group in self.groups.values())
        return {"flow/playing": float(playing), "flow/waiting": float(len(self.groups) - playing)}


def staleness(batch: list[Trajectory], version: int, bound: int) -> StepMetrics:
    """How many updates old what step `version` + 1 learns from is: the mean over its sampled tokens, the oldest and
    the share of each age; `span`: updates that came in during an episode, on average."""
    episodes = [sum((Counter(turn.weight_versions) for turn in each.turns), Counter[int]()) for each in batch]
    ages = Counter({version - each: count for each, count in sum(episodes, Counter[int]()).items()})
    if not ages:
        return {}
    oldest, tokens = max(ages), ages.total()
    spans = [max(each) - min(each) for each in episodes if each]
    assert oldest <= bound, f"a token is {oldest} updates old, beyond trainer.max_staleness={bound}"
    metrics = {f"staleness/{age}": ages[age] / tokens for age in range(bound + 1)}
    mean = sum(age * count for age, count in ages.items()) / tokens
    return metrics | {"staleness/mean": mean, "staleness/max": oldest, "staleness/span": sum(spans) / len(spans)}
