"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import pytest

from skyrl_trainer.algorithms.advantages import estimator, register_estimator
from skyrl_trainer.config import AlgorithmConfig
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import AdvantageBatch, RewardBatch, RolloutBatch, Sample, Trajectory, Turn


def batch_of(groups: list[list[list[float]]]) -> RewardBatch:
    """groups[g][i]: the rewards of the turns of try i of sample g; every turn is one prompt and two sampled tokens."""
    rollouts = [
        [
            Trajectory(f"0/{g}/{i}", Sample(str(g), "e", 0), i, 0, [Turn([1], [2, 3], [0.0, 0.0], [0, 0], "")] * len(r))
            for i, r in enumerate(group)
        ]
        for g, group in enumerate(groups)
    ]
    trajectories = [trajectory for group in rollouts for trajectory in group]
    index = [g for g, group in enumerate(groups) for _ in group]
    rewards = [rewards for group in groups for rewards in group]
    return RewardBatch(RolloutBatch(0, rollouts), trajectories, index, rewards, [{} for _ in rewards])


def per_trajectory(batch: AdvantageBatch) -> list[float]:
    return [advantages[1] for advantages in batch.advantages]


def test_grpo_centres_and_scales_by_the_group() -> None:
    batch = batch_of([[[1.0], [2.0], [3.0]], [[0.0], [4.0]]])
    result = estimator("grpo")(batch, AlgorithmConfig(), None)
    second = 2 / (8**0.5 + 1e-4)
    assert per_trajectory(result) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001, -second, second], abs=1e-12)


def test_grpo_scales_by_the_batch_or_not_at_all() -> None:
    batch = batch_of([[[1.0], [2.0], [3.0]], [[0.0], [4.0]]])
    std = 2.5**0.5  # of 1, 2, 3, 0, 4
    scaled = estimator("grpo")(batch, AlgorithmConfig(scale_rewards="batch"), None)
    centred = estimator("grpo")(batch, AlgorithmConfig(scale_rewards="none"), None)
    assert per_trajectory(centred) == pytest.approx([-1, 0, 1, -2, 2])
    assert per_trajectory(scaled) == pytest.approx([a / (std + 1e-4) for a in (-1, 0, 1, -2, 2)])


def test_rloo_takes_the_mean_of_the_others() -> None:
    batch = batch_of([[[1.0], [2.0], [6.0]]])
    assert per_trajectory(estimator("rloo")(batch, AlgorithmConfig(), None)) == pytest.approx([-3.0, -1.5, 4.5])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize("group", [[[1.1]], [[1.1]] * 7])
def test_a_group_of_one_or_of_equal_rewards_gives_exactly_zero(name: str, group: list[list[float]]) -> None:
    """The mean of seven times 1.1 is not 1.1 in floating point."""
    result = estimator(name)(batch_of([group]), AlgorithmConfig(), None)
    assert set(per_trajectory(result)) == {0.0}


def test_rewards_of_all_turns_count_and_land_on_sampled_tokens_only() -> None:
    """Advantages are computed once a trajectory, however many turns it has, wherever its reward was given."""
    batch = batch_of([[[1.0, 0.0], [0.0]]])
    result = estimator("grpo")(batch, AlgorithmConfig(scale_rewards="none"), None)
    assert result.advantages == [[0.0, 0.5, 0.5, 0.0, 0.5, 0.5], [0.0, -0.5, -0.5]]


def test_an_unknown_estimator_is_named_with_the_valid_ones_and_a_users_own_is_found() -> None:
    with pytest.raises(UserError, match=r"advantage_estimator='gpro'.*grpo, maxrl, reinforce"):
        estimator("gpro")

    @register_estimator("ones")
    def ones(rewards: RewardBatch, config: AlgorithmConfig, values: object) -> AdvantageBatch:
        return AdvantageBatch(rewards, [[1.0] * len(t.token_ids()) for t in rewards.trajectories])

    assert estimator("ones") is ones
