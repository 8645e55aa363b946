"""Advantages against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_trainer.algorithms.advantages import by_group, estimator, register_estimator
from skyrl_trainer.algorithms.losses import adapted
from skyrl_trainer.algorithms.options import CommonOptions
from skyrl_trainer.algorithms.rewards import without_sampled_tokens
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.trainers import PPOTrainer
from skyrl_trainer.settings import Config
from skyrl_trainer.types import AdvantageBatch, RewardBatch, RolloutBatch, Sample, StopReason, Trajectory, Turn


def options(**changes: Any) -> CommonOptions:
    return CommonOptions(**changes)


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
    return RewardBatch(RolloutBatch(0, rollouts), trajectories, index, rewards)


def per_trajectory(batch: AdvantageBatch) -> list[float]:
    return [advantages[0] for advantages in batch.advantages]


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
    estimator("maxrl")(batch_of([[[1.0, 0.0], [-0.1, -0.1, -0.1, 0.3]]]), options(), None)  # 0 but for rounding


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
        assert row == pytest.approx(whitened.tolist())


def test_reinforce_pp_survives_turns_and_batches_without_tokens() -> None:
    batch = batch_of([[[1.0]], [[2.0, 4.0]]])
    silent = Turn([1], [], [], [], "")
    batch.trajectories[1].turns[1] = silent  # its reward goes to the token before it
    result = estimator("reinforce++")(batch, options(), None).advantages
    scale = torch.tensor([1.0, 1.0, 6.0, 6.0], dtype=torch.float64).std().item() + 1e-4
    assert result[0] == pytest.approx([-2.5 / scale] * 2)
    assert result[1] == pytest.approx([2.5 / scale] * 2)
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
    assert result.advantages == [[0.5, 0.5, 0.5, 0.5], [-0.5, -0.5]]


def test_an_unknown_estimator_is_named_with_the_valid_ones_and_a_users_own_is_found() -> None:
    with pytest.raises(UserError, match=r"advantage_estimator='gpro'.*grpo, maxrl, reinforce"):
        estimator("gpro")

    @register_estimator("ones")
    def ones(rewards: RewardBatch, config: Any, values: object) -> AdvantageBatch:
        return AdvantageBatch(rewards, [[1.0] * t.num_output_tokens for t in rewards.trajectories])

    assert estimator("ones") is ones


def ragged_turns(seed: int, ended: StopReason) -> tuple[RewardBatch, list[torch.Tensor]]:
    """Three turns of 1 to 4 sampled tokens after prompts and observations of 1 to 3, and values of a critic."""
    draw = torch.Generator().manual_seed(seed)

    def count(high: int) -> int:
        return int(torch.randint(1, high, (1,), generator=draw))

    turns, rewards = [], []
    for _ in range(3):
        n = count(5)
        turns.append(Turn([1] * count(4), [2] * n, [0.0] * n, [0] * n, ""))
        rewards.append(float(torch.randn(1, generator=draw)))
    trajectory = Trajectory("0/0/0", Sample("0", "e", 0), 0, 0, turns, ended)
    batch = RewardBatch(RolloutBatch(0, [[trajectory]]), [trajectory], [0], [rewards])
    return batch, [torch.randn(trajectory.num_output_tokens, generator=draw, dtype=torch.float64)]


@pytest.mark.parametrize("ended", ["TERMINATED", "TRUNCATED", "MAX_TURNS", "LENGTH"])
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("penalty", [False, True])
def test_gae_is_the_sum_of_all_later_errors(ended: str, gamma: float, lam: float, penalty: bool) -> None:
    """Against the definition as a double sum: observations are no steps, and V is 0 behind every end.
    A KL penalty comes off beside what is whitened, and is not the critic's to predict."""
    for seed in range(5):
        batch, values = ragged_turns(seed, StopReason[ended])
        (trajectory,) = batch.trajectories
        r, v = [], [*values[0].tolist(), 0.0]
        for turn, reward in zip(trajectory.turns, batch.rewards[0], strict=True):
            r += [0.0] * (len(turn.output_ids) - 1) + [reward]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        raw = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
        kl = [0.1 * i * penalty for i in range(len(r))]
        kl_to_go = [sum(gamma ** (k - t) * kl[k] for k in range(t, len(r))) for t in range(len(r))]
        batch.kl_penalties = [kl] if penalty else None
        result = estimator("gae")(batch, options_of_ppo(gamma=gamma, gae_lambda=lam), values)
        assert result.returns is not None
        assert result.returns[0] == pytest.approx([a + b for a, b in zip(raw, v, strict=False)], abs=1e-12)
        mean, std = sum(raw) / len(raw), torch.tensor(raw, dtype=torch.float64).std().item()
        assert result.advantages[0] == pytest.approx(
            [(a - mean) / (std + 1e-4) - k + sum(kl_to_go) / len(r) for a, k in zip(raw, kl_to_go, strict=True)],
            abs=1e-12,
        )


def test_an_agents_turns_count_in_the_order_of_their_sampling() -> None:
    """They stand segment by segment: here the second call, of another conversation, comes first."""
    batch = batch_of([[[0.5, 1.0, -2.0]]])
    (forked,) = batch.trajectories
    straight = batch_of([[[1.0, 0.5, -2.0]]])
    turns = forked.turns = [replace(turn, info={}) for turn in forked.turns]
    turns[0].info["skyrl/call"], turns[1].info["skyrl/call"] = 1, 0
    values = torch.tensor([0.3, -0.1, 0.7, 0.2, -0.4, 0.6], dtype=torch.float64)
    in_time = values[[2, 3, 0, 1, 4, 5]]
    for name, algorithm in (("gae", options_of_ppo(gamma=0.9, gae_lambda=0.8)), ("reinforce++", options(gamma=0.9))):
        for kl in (None, [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]):
            batch.kl_penalties, straight.kl_penalties = kl, kl and [[0.3, 0.4, 0.1, 0.2, 0.5, 0.6]]
            found = estimator(name)(batch, algorithm, [values]).advantages[0]
            expected = estimator(name)(straight, algorithm, [in_time]).advantages[0]
            assert found[2:4] + found[:2] + found[4:] == pytest.approx(expected)


@pytest.mark.parametrize("calls", [[2, 1, 0], [{"tool": "search"}, {"tool": "answer"}, None], ["b", "a", 1]])
def test_an_env_may_report_a_call_of_its_own(calls: list[Any]) -> None:
    batch, plain = batch_of([[[0.5, 1.0, -2.0]]]), batch_of([[[0.5, 1.0, -2.0]]])
    own = batch.trajectories[0]
    own.turns = [replace(turn, info={"call": call}) for turn, call in zip(own.turns, calls, strict=True)]
    found, expected = (estimator("reinforce++")(each, options(gamma=0.9)).advantages for each in (batch, plain))
    assert found == expected and own.by_time() == [0, 1, 2]


def options_of_ppo(**changes: Any) -> Any:
    config = Config.model_validate({"trainer": {"algorithm": {"name": "ppo", "options": changes}}})
    return PPOTrainer(config).options


def test_a_group_whose_advantages_are_one_number_is_refused() -> None:
    """Broadcast, each try would get the group's mean, and the run learn something else, silently."""
    with pytest.raises(UserError, match=r"An estimator gave tensor\(1\.5.* by_group: it should give 2 advantages"):
        by_group(batch_of([[[1.0], [2.0]]]), lambda returns: returns.mean())


def test_advantages_may_be_of_any_number_type() -> None:
    batch = batch_of([[[1.0], [2.0]]])
    wanted = by_group(batch, lambda returns: returns.argsort().double() - 0.5).advantages
    assert by_group(batch, lambda returns: returns.argsort().float() - 0.5).advantages == wanted
    assert by_group(batch, lambda returns: returns > 1.5).advantages == [[0.0] * 2, [1.0] * 2]


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(UserError, match=r"gae needs a critic: take trainer\.algorithm\.name=ppo"):
        estimator("gae")(ragged_turns(0, True)[0], options_of_ppo(), None)


def test_kl_penalties_come_off_the_returns_of_a_group() -> None:
    batch = batch_of([[[1.0], [2.0]]])
    batch.kl_penalties = [[0.25, 0.25], [0.0, 1.5]]
    assert per_trajectory(estimator("rloo")(batch, options(), None)) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
def test_a_try_that_is_not_learned_from_has_no_kl_to_compare_with(name: str) -> None:
    """DAPO's overlong_filter takes the tokens of cut-off tries: a KL of 0 there would be a reward for the others."""
    batch = batch_of([[[1.0]] * 4, [[1.0]] * 4])
    cut = [1, 5, 6, 7]
    batch.trajectories = [without_sampled_tokens(t) if i in cut else t for i, t in enumerate(batch.trajectories)]
    batch.kl_penalties = [[] if i in cut else [0.1 * (i + 1), 0.1] for i in range(8)]
    found = estimator(name)(batch, options(), None).advantages
    first = [0.1 * (i + 1) + 0.1 for i in (0, 2, 3)]
    expected = [-(kl - (sum(first) - kl) / 2) for kl in first]
    assert [max(found[i], key=abs) for i in (0, 2, 3)] == pytest.approx(expected) and not any(found[4])


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++", "gae"])
@pytest.mark.parametrize("equal", [True, False])
def test_beta_weighs_the_kl_in_the_reward(name: str, equal: bool) -> None:
    """Whatever divides the rewards must not divide the KL: where they are equal its noise would get the size of one."""
    draw = torch.Generator().manual_seed(0)
    kl = torch.randn(6, 2, generator=draw, dtype=torch.float64)
    values = [torch.zeros(2, dtype=torch.float64)] * 6

    def advantages(beta: float) -> torch.Tensor:
        batch = batch_of([[[1.0]] * 6] if equal else [[[1.0], [0.0]] * 3])
        batch.kl_penalties = (beta * kl).tolist()
        result = estimator(name)(batch, options_of_ppo(), values)
        return torch.tensor(result.advantages, dtype=torch.float64)[:, 1:]

    without, little, much = advantages(0.0), advantages(1e-3), advantages(1.0)
    assert 0 < (little - without).abs().max() <= 1e-2
    torch.testing.assert_close(1000 * (little - without), much - without, rtol=1e-9, atol=1e-9)
    assert without.abs().max() == (0 if equal else pytest.approx(1, abs=0.5))


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce++"])
def test_returns_that_differ_by_rounding_are_equal(name: str) -> None:
    result = estimator(name)(batch_of([[[0.1 + 0.2], [0.3]]]), options(), None)
    assert set(per_trajectory(result)) == {0.0}


def test_credit_reaches_the_beginning_of_a_long_answer() -> None:
    """As PPO comes, with a critic that expects nothing yet: no token of a right answer is pushed down."""
    batch = batch_of([[[1.0], [0.0]]])
    for trajectory, length in zip(batch.trajectories, (200, 100), strict=True):
        trajectory.turns[0] = Turn([1], [2] * length, [0.0] * length, [0] * length, "", terminated=True)
    values = [torch.zeros(200, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)]
    right, wrong = estimator("gae")(batch, options_of_ppo(), values).advantages
    assert min(right) == max(right) > 0 > min(wrong) == max(wrong)


@pytest.mark.parametrize("turns", [[1.0], [0.0, 1.0]])
@pytest.mark.parametrize("ended", ["LENGTH", "TRUNCATED", "MAX_TURNS"])
def test_an_answer_that_a_budget_cut_is_over_in_one_turn_as_in_many(turns: list[float], ended: str) -> None:
    """Whether the env judged it or nobody did: a V behind its end, which no token teaches, would pay for the cut."""
    for judged in {False, ended == "LENGTH"}:
        batch = batch_of([[turns]])
        (trajectory,) = batch.trajectories
        trajectory.stop_reason = StopReason[ended]
        trajectory.turns[-1] = Turn([1], [2, 3], [0.0, 0.0], [0, 0], "", terminated=judged)
        values = [torch.tensor([0.5] * 2 * len(turns), dtype=torch.float64)]
        returns = estimator("gae")(batch, options_of_ppo(), values).returns
        assert returns is not None and returns[0][-1] == 1.0


def test_beta_adapts_by_at_most_a_fifth_of_a_tenth() -> None:
    assert adapted(1.0, kl=0.3, target=0.1) == pytest.approx(1.02)
    assert adapted(1.0, kl=0.0, target=0.1) == pytest.approx(0.98)
    assert adapted(2.0, kl=0.105, target=0.1) == pytest.approx(2.0 * 1.005)
