"""Advantages against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_trainer.algorithms.advantages import estimator, register_estimator
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import AdvantageBatch, RewardBatch, RolloutBatch, Sample, Trajectory, Turn


def options(**changes: Any) -> PolicyLoss.Options:
    return PolicyLoss.Options(**changes)


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
    result = estimator("grpo")(batch, options(), None)
    second = 2 / (8**0.5 + 1e-4)
    assert per_trajectory(result) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001, -second, second], abs=1e-12)


def test_grpo_scales_by_the_batch_or_not_at_all() -> None:
    batch = batch_of([[[1.0], [2.0], [3.0]], [[0.0], [4.0]]])
    std = 2.5**0.5  # of 1, 2, 3, 0, 4
    scaled = estimator("grpo")(batch, options(scale_rewards="batch"), None)
    centred = estimator("grpo")(batch, options(scale_rewards="none"), None)
    assert per_trajectory(centred) == pytest.approx([-1, 0, 1, -2, 2])
    assert per_trajectory(scaled) == pytest.approx([a / (std + 1e-4) for a in (-1, 0, 1, -2, 2)])


def test_rloo_takes_the_mean_of_the_others() -> None:
    batch = batch_of([[[1.0], [2.0], [6.0]]])
    assert per_trajectory(estimator("rloo")(batch, options(), None)) == pytest.approx([-3.0, -1.5, 4.5])


def test_maxrl_divides_by_the_groups_mean_and_refuses_negative_returns() -> None:
    result = estimator("maxrl")(batch_of([[[1.0], [0.0], [0.0], [0.0]], [[0.0], [0.0]]]), options(), None)
    assert per_trajectory(result) == pytest.approx([0.75 / 0.2501, *[-0.25 / 0.2501] * 3, 0.0, 0.0])
    with pytest.raises(UserError, match=r"advantage_estimator=maxrl.*one is -0\.5"):
        estimator("maxrl")(batch_of([[[1.0], [-0.5]]]), options(), None)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_whitens_discounted_returns_to_go(gamma: float) -> None:
    """Every turn is one prompt token and two sampled ones: prompts do not discount, rewards sit on the second one."""
    rewards = [[[1.0, 0.5, -2.0]], [[0.0]], [[3.0, 0.0]]]
    to_go = []
    for (turns,) in rewards:
        per_token = [x for reward in turns for x in (0.0, reward)]
        to_go.append(
            [sum(gamma ** (k - t) * r for k, r in enumerate(per_token) if k >= t) for t in range(len(per_token))]
        )
    everything = torch.tensor([x for row in to_go for x in row], dtype=torch.float64)
    result = estimator("reinforce++")(batch_of(rewards), options(gamma=gamma), None)
    for row, expected in zip(result.advantages, to_go, strict=True):
        whitened = (torch.tensor(expected, dtype=torch.float64) - everything.mean()) / (everything.std() + 1e-4)
        assert row[::3] == [0.0] * (len(row) // 3)  # prompts and observations
        assert [x for i, x in enumerate(row) if i % 3] == pytest.approx(whitened.tolist())


def test_reinforce_pp_survives_turns_and_batches_without_tokens() -> None:
    batch = batch_of([[[1.0]], [[2.0, 4.0]]])
    silent = Turn([1], [], [], [], "")
    batch.trajectories[1].turns[1] = silent  # its reward goes to the token before it
    result = estimator("reinforce++")(batch, options(), None).advantages
    scale = torch.tensor([1.0, 1.0, 6.0, 6.0], dtype=torch.float64).std().item() + 1e-4
    assert result[0] == pytest.approx([0.0, *[-2.5 / scale] * 2])
    assert result[1] == pytest.approx([0.0, *[2.5 / scale] * 2, 0.0])
    assert estimator("reinforce++")(batch_of([]), options(), None).advantages == []


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++"])
@pytest.mark.parametrize("group", [[[1.1]], [[1.1]] * 7])
def test_a_group_of_one_or_of_equal_rewards_gives_exactly_zero(name: str, group: list[list[float]]) -> None:
    """The mean of seven times 1.1 is not 1.1 in floating point."""
    result = estimator(name)(batch_of([group]), options(), None)
    assert set(per_trajectory(result)) == {0.0}


def test_rewards_of_all_turns_count_and_land_on_sampled_tokens_only() -> None:
    """Advantages are computed once a trajectory, however many turns it has, wherever its reward was given."""
    batch = batch_of([[[1.0, 0.0], [0.0]]])
    result = estimator("grpo")(batch, options(scale_rewards="none"), None)
    assert result.advantages == [[0.0, 0.5, 0.5, 0.0, 0.5, 0.5], [0.0, -0.5, -0.5]]


def test_an_unknown_estimator_is_named_with_the_valid_ones_and_a_users_own_is_found() -> None:
    with pytest.raises(UserError, match=r"advantage_estimator='gpro'.*grpo, maxrl, reinforce"):
        estimator("gpro")

    @register_estimator("ones")
    def ones(rewards: RewardBatch, config: Any, values: object) -> AdvantageBatch:
        return AdvantageBatch(rewards, [[1.0] * len(t.token_ids()) for t in rewards.trajectories])

    assert estimator("ones") is ones
