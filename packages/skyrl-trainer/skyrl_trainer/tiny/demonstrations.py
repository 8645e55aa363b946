"""What experts say and do in a source's tasks."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import skyrl_gym
from skyrl_trainer.data import SampleSource, first_envs, first_texts
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample

Conversation = list[dict[str, Any]]


def demonstrations(source: Sequence[Sample], count: int, seed: int) -> Iterator[Conversation]:
    """`count` expert episodes (all, where there are fewer) of the source, as chat messages."""
    for sample in _drawn(source, count, Random(seed)):
        try:
            yield skyrl_gym.expert_trajectory(sample.env_id, sample.seed, sample.options)
        except (NotImplementedError, AttributeError) as error:
            raise UserError(
                f"{sample.env_id} has no expert to clone (its env defines no expert_action): set trainer.policy.model."
                "warmstart.num_demonstrations=0, or name a pretrained model in trainer.policy.model.path."
            ) from error


def _drawn(source: Sequence[Sample], count: int, rng: Random) -> Iterator[Sample]:
    weights = source.weights if isinstance(source, SampleSource) else ()
    parts = source.parts if isinstance(source, SampleSource) and weights else [source]
    for part, weight in zip(parts, weights or [1.0], strict=True):
        share = round(count * weight / sum(weights or [1.0]))
        for index in rng.sample(range(len(part)), min(share, len(part))):
            yield part[index]


def conversation_texts(source: Sequence[Sample], count: int, seed: int, experts: bool = True) -> Iterator[str]:
    """What envs and their experts say in `count` episodes, or envs alone in first turns."""
    if experts:
        yield from (each["content"] for talk in demonstrations(source, count, seed) for each in talk)
        return
    with first_envs() as envs:
        for sample in _drawn(source, count, Random(seed)):
            observation, info = first_texts(sample, envs)
            yield from (info.get("instructions") or "", observation)
