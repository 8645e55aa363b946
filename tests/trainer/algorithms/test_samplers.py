"""Samplers: every task once an epoch, a state of a few numbers, and the draws that fill a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from skyrl_trainer.algorithms.curriculum import CurriculumSampler
from skyrl_trainer.algorithms.rewards import register_reward
from skyrl_trainer.algorithms.samplers import UniformSampler, permuted, sampler_class
from skyrl_trainer.data import SampleSource
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.ranks import Ranks
from skyrl_trainer.report.table import LiveTable
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.loop import Loop
from skyrl_trainer.run.run import Run
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.settings import Config
from skyrl_trainer.types import Sample, StepMetrics, Trajectory, Turn


def source(size: int) -> list[Sample]:
    return [Sample(str(i), "env", i) for i in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permuted_is_a_permutation(size: int) -> None:
    assert sorted(permuted(i, size, "key") for i in range(size)) == list(range(size))


def test_permutations_are_even() -> None:
    """Over many keys each place holds each task about equally often (chi-squared, 49 cells of 7 x 7)."""
    counts = [[0] * 7 for _ in range(7)]
    for key in range(2100):
        for i in range(7):
            counts[i][permuted(i, 7, str(key))] += 1
    assert sum((cell - 300) ** 2 / 300 for row in counts for cell in row) < 80


def test_every_task_comes_once_an_epoch_in_a_new_order_each() -> None:
    sampler = UniformSampler(source(10), seed=3)
    drawn = [sample.sample_id for _ in range(5) for sample in sampler.next_tasks(4)]
    first, second = drawn[:10], drawn[10:20]
    assert sorted(first) == sorted(second) == sorted(str(i) for i in range(10))
    assert first != second
    assert drawn != [s.sample_id for s in UniformSampler(source(10), seed=4).next_tasks(20)]


def test_the_state_is_json_and_continues_exactly() -> None:
    sampler = UniformSampler(source(10), seed=3)
    sampler.next_tasks(7)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = sampler.next_tasks(9)
    resumed = UniformSampler(source(10), seed=3)
    resumed.load_state_dict(state)
    assert resumed.next_tasks(9) == expected
    assert resumed.accept([], [])


WEIGHTS = st.lists(st.integers(1, 40).map(lambda tenths: tenths / 10), min_size=1, max_size=6)


def mixture(weights: Sequence[float], size: int = 7) -> SampleSource:
    return SampleSource([[Sample(f"{n}#{i}", "env", i) for i in range(size)] for n in range(len(weights))], weights)


def names(samples: Sequence[Sample]) -> list[str]:
    return [sample.sample_id.partition("#")[0] for sample in samples]


@given(WEIGHTS, st.integers(1, 300))
def test_shares_are_the_weights_to_within_one_after_any_number_of_draws(weights: list[float], n: int) -> None:
    drawn = names(UniformSampler(mixture(weights), seed=1).next_tasks(n))
    for source, weight in enumerate(weights):
        assert abs(drawn.count(str(source)) - n * weight / sum(weights)) < 1 + 1e-6


def test_the_schedule_of_a_mixture_is_this_one() -> None:
    """2 : 1 : 1, and each source goes through its own tasks once an epoch."""
    drawn = UniformSampler(mixture([2.0, 1.0, 1.0], size=4), seed=1).next_tasks(16)
    assert "".join(names(drawn)) == "0120" * 4
    for source, epochs in (("0", 2), ("1", 1)):
        ids = [sample.sample_id for sample in drawn if names([sample]) == [source]]
        assert sorted(ids) == sorted([f"{source}#{i}" for i in range(4)] * epochs)


@given(WEIGHTS, st.integers(0, 40), st.integers(1, 40), st.sampled_from(["uniform", "dynamic", "curriculum"]))
def test_a_resumed_mixture_goes_on_with_the_same_tasks(weights: list[float], before: int, n: int, name: str) -> None:
    sampler = sampler_class(name)(mixture(weights), 3)
    for i, sample in enumerate(sampler.next_tasks(before)):
        sampler.accept([tried(sample, i % 3 == 0)], [0.0])
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = sampler.next_tasks(n)
    resumed = sampler_class(name)(mixture(weights), 3)
    resumed.load_state_dict(state)
    assert resumed.next_tasks(n) == expected


def tried(sample: Sample, success: bool) -> Trajectory:
    return Trajectory("t", sample, 0, 0, [Turn([1], [2], [-0.5], [0], "x", info={"success": success})])


def test_the_curriculum_prefers_what_succeeds_half_of_the_time_and_starves_nothing() -> None:
    """Source 0 is always solved, 1 never, 2 every other time; 3 weighs half as much, and its groups all fail to end."""
    sampler = CurriculumSampler(mixture([1.0, 1.0, 1.0, 0.5]), seed=0)
    assert sampler.shares() == [2 / 7, 2 / 7, 2 / 7, 1 / 7]
    for i, sample in enumerate(sampler.next_tasks(400)):
        kind = names([sample])[0]
        assert sampler.accept([] if kind == "3" else [tried(sample, kind == "0" or (kind == "2" and i % 2 == 0))], [])
    always, never, half, unknown = sampler.rates
    assert always > 0.97 and never < 0.03 and 0.3 < half < 0.7 and unknown == 0.5
    floor = CurriculumSampler.FLOOR
    drawn = names(sampler.next_tasks(1000))
    for source, wanted in enumerate((floor, floor, 4 * half * (1 - half), 0.5)):
        share = wanted / (2 * floor + 4 * half * (1 - half) + 0.5)
        assert abs(drawn.count(str(source)) - 1000 * share) < 5


def test_a_success_moves_a_tenth_of_the_way() -> None:
    sampler = CurriculumSampler(mixture([1.0, 1.0]), seed=0)
    task = mixture([1.0, 1.0]).parts[1][0]
    sampler.accept([tried(task, True), tried(task, False), tried(task, True), tried(task, True)], [])
    assert sampler.rates == [0.5, 0.525]
    earlier = replace(task, sample_id=f"then/{task.sample_id}")  # a version before had other names for the sources
    assert sampler.accept([tried(earlier, True)], []) and sampler.rates == [0.5, 0.525]


def test_sources_without_weights_are_one_for_the_uniform_sampler_and_several_for_the_curriculum() -> None:
    source = SampleSource(mixture([1.0, 1.0]).parts)
    assert len(UniformSampler(source, 0).parts) == 1 and len(CurriculumSampler(source, 0).parts) == 2
    assert CurriculumSampler(mixture([1.0]).parts[0], 0).accept([], [])


def test_other_data_and_no_data_are_refused() -> None:
    state = UniformSampler(source(10), seed=3).state_dict()
    with pytest.raises(UserError, match=r"10 tasks.*holds 11"):
        UniformSampler(source(11), seed=3).load_state_dict(state)
    with pytest.raises(UserError, match=r"data\.train_data"):
        UniformSampler([], seed=3)


@pytest.mark.parametrize(
    "returns, taken",
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([0.5], False),
        ([], False),
        ([0.1 + 0.2, 0.3], False),
        ([float("nan")] * 2, False),
    ],
)
def test_dynamic_sampling_refuses_groups_that_teach_nothing(returns: list[float], taken: bool) -> None:
    """Returns that are equal but for rounding, groups of one, and those of which everybody failed."""
    assert sampler_class("dynamic")(source(3), 0).accept([], returns) is taken


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(UserError, match=r"options\.sampler='dynamc' is not registered; choose one of curriculum, dyn"):
        sampler_class("dynamc")


class MadeUp:
    """In place of rollout.manager.Rollouts: tries earn what their group's number says."""

    def __init__(self, reward: Callable[[int, int], float], size: int) -> None:
        self.reward, self.size, self.played = reward, size, list[str]()

    def new_group(self, name: str, sample: Sample, size: int) -> list[Trajectory]:
        return [Trajectory(f"{name}/{i}", sample, i, 0) for i in range(size)]

    def start(self, groups: list[list[Trajectory]]) -> None:
        self.played += [trajectory.trajectory_id for group in groups for trajectory in group]

    def finished(self, groups: dict[int, list[Trajectory]], wait_for_all: bool) -> dict[int, list[Trajectory]]:
        for number, group in groups.items():
            for i, trajectory in enumerate(group):
                trajectory.turns = [Turn([1], [2], [-0.5], [1], "x", reward=self.reward(number - self.size, i))]
        return dict(groups)


class DrawnRun(Run):
    """The parts of a loop without processes, at the checkpoint of step 1."""

    def __init__(self, config: Config, run: RunFolder, reward: Callable[[int, int], float]) -> None:
        super().__init__(config, run)
        self.table = LiveTable(1, console=Console(file=StringIO(), width=200))
        self.tries.rollouts = self.made_up = MadeUp(reward, config.trainer.train_batch_size)

    def resume(self) -> tuple[int, StepMetrics | None]:
        state = self.tries.state_dict()
        self.tries.load_state_dict(state | {"drawn": self.tries.flow.size}, step=1)
        return 1, None


def draw(folder: Path, reward: Callable[[int, int], float], learn: bool = False, **options: Any) -> Any:
    """The batch of step 2: (what is learned from, metrics, run). learn: as if an update were over."""
    algorithm = {"name": "dapo", "options": options, "reward_funcs": {"asked": 0.0}}
    config = Config.model_validate(
        {
            "data": {"val_size": 1},
            "trainer": {"run_dir": str(folder), "train_batch_size": 4, "algorithm": algorithm},
            "generator": {"num_generations": 2},
        }
    )
    with RunFolder(config) as run_folder:
        run = DrawnRun(config, run_folder, reward)
        rewards, metrics = Loop(run, StopSignal()).next_batch()
        if learn:
            run.tries.learned(rewards.rollouts)
    return rewards, metrics, run


ASKED: list[int] = []


@register_reward("asked")
def asked(completions: Any, **columns: Any) -> list[float]:
    ASKED.append(len(completions))
    return [1.0] * len(completions)


def odd_differ(number: int, generation: int) -> float:
    return float(number % 2 and generation)


def test_refused_groups_are_replaced_one_by_one_and_nothing_is_lost(tmp_path: Path) -> None:
    rewards, metrics, run = draw(tmp_path, lambda number, i: float(number % 3 > 0 and i), learn=True)
    assert [rewards.rollouts.groups[i][0].trajectory_id for i in range(4)] == ["2/1/0", "2/2/0", "3/0/0", "3/1/0"]
    assert sorted(set(rewards.group_index)) == [0, 1, 2, 3] and len(rewards.trajectories) == 8
    assert [metrics[f"groups/{name}"] for name in ("drawn", "rejected", "missing")] == [6, 2, 0]
    assert len(run.made_up.played) == len(set(run.made_up.played)) == 12
    stored = [
        trajectory.trajectory_id for trajectory in JsonlTrajectoryStore(tmp_path / "trajectories").read(2).trajectories
    ]
    assert sorted(stored) == sorted(run.made_up.played) and not list(tmp_path.glob("trajectories/waiting/*"))


def test_the_bound_of_draws_is_said_and_an_update_of_nothing_changes_nothing(tmp_path: Path) -> None:
    rewards, metrics, run = draw(tmp_path, lambda number, i: 1.0, max_draws=3)
    assert metrics["groups/drawn"] == metrics["groups/rejected"] == 12 and metrics["groups/missing"] == 4
    said = run.table.console.file.getvalue()
    assert "step 2: only 0 of 4 groups accepted (trainer.algorithm.options.max_draws=3)" in said
    assert rewards.trajectories == []
    # It has no model at all.
    run.alone.learner = SimpleNamespace(ranks=Ranks(), optimizer_steps=0)  # type: ignore[assignment]
    learned = run.algorithm.update(rewards)
    assert learned["grad_norm"] == learned["lr"] == learned["tokens/trained"] == 0


@pytest.mark.parametrize("lost", [0, 1])
def test_a_resumed_step_takes_the_stored_groups_again_and_judges_none_twice(tmp_path: Path, lost: int) -> None:
    """Killed before it learned, with all groups stored or without those that were collected last."""
    first, metrics, run = draw(tmp_path, odd_differ)
    waiting = sorted(tmp_path.glob("trajectories/waiting/*"))
    assert len(waiting) == 4
    for path in waiting[len(waiting) - lost :]:
        path.unlink()
    ASKED.clear()
    again, same_metrics, resumed = draw(tmp_path, odd_differ)
    assert again == first and same_metrics == metrics
    made = len(resumed.made_up.played)
    assert sum(ASKED) == made and resumed.made_up.played == run.made_up.played[len(run.made_up.played) - made :]
    assert (made > 0) is bool(lost)


def test_a_resumed_step_does_not_take_stored_tries_whose_reward_is_no_number(tmp_path: Path) -> None:
    """They were stored before anybody looked at them; when the env is mended they are made again."""
    draw(tmp_path, odd_differ)
    waiting = JsonlTrajectoryStore(tmp_path / "trajectories" / "waiting")
    spoiled = waiting.read(4)
    spoiled.groups[1][0].turns[0].reward = float("nan")
    waiting.write(spoiled)
    rewards, _, resumed = draw(tmp_path, odd_differ)
    assert resumed.made_up.played == ["2/1/0", "2/1/1"]
    assert all(math.isfinite(turn.reward) for t in rewards.trajectories for turn in t.turns)
