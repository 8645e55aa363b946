"""Self-play: an episode's roles have their own rewards, groups and advantages, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from skyrl_trainer.algorithms.advantages import estimator
from skyrl_trainer.algorithms.options import CommonOptions
from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.algorithms.roles import NEXT_ROLE
from skyrl_trainer.learner.batch import make_rows, record_advantages, set_advantages
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch, Sample, StopReason, Trajectory, Turn

A, B = "player_0", "player_1"


def turn(call: int | None, role: str, a: float, b: float, new_segment: bool = False) -> Turn:
    """It reads one token and says two; a and b: what the roles get by it. call: None for the last one."""
    info = {"role": role, "rewards": {A: a, B: b}, "success": False}
    info |= {} if call is None else {"skyrl/call": call}
    who = 10 if role == A else 20
    return Turn([who], [who + 1, who + 2], [0.0, 0.0], [0, 0], "", reward=a, info=info, new_segment=new_segment)


def episode(number: int, turns: list[Turn]) -> Trajectory:
    return Trajectory(f"0/0/{number}", Sample("s", "e", 0), number, 0, turns)


def batch(groups: list[list[Trajectory]], **weights: float) -> RewardBatch:
    config = Config.model_validate({"trainer": {"algorithm": {"reward_funcs": weights}}})
    return Rewards(config, False).batch(RolloutBatch(0, groups), range(len(groups)))


def two_tries() -> list[Trajectory]:
    """A wins 2 by B's last word, so that it earned them by its second turn; then B wins 1 by A's."""
    first = [turn(0, A, 0, 0), turn(2, A, 0, 0), turn(1, B, 0.5, -0.5, True), turn(None, B, 2, -2)]
    second = [turn(1, B, 0, 0, True), turn(0, A, 0, 0, True), turn(None, A, -1, 1)]
    return [episode(0, first), episode(1, second)]


def test_each_role_is_a_trajectory_in_a_group_of_its_role() -> None:
    found = batch([two_tries()])
    assert found.group_index == [0, NEXT_ROLE, 0, NEXT_ROLE]
    assert found.rewards == [[0.5, 2.0], [-0.5, -2.0], [0.0, -1.0], [1.0]]
    ids = [part.token_ids() for part in found.trajectories]
    assert ids == [[10, 11, 12] * 2, [20, 21, 22] * 2, [10, 11, 12] * 2, [20, 21, 22]]
    assert [len(part.segments()) for part in found.trajectories] == [1, 1, 1, 1]
    assert [part.success for part in found.trajectories] == [True, False, False, True]
    assert batch([two_tries()], success=1.0, env=0.0).rewards == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0]]


def test_a_role_with_two_conversations_keeps_the_turns_of_each_together() -> None:
    """A asks itself something beside, between its two moves; what it got by the last of them is that turn's."""
    aside = turn(1, A, 0.25, 0)
    talk = [aside, turn(0, A, 0, 0, True), turn(2, B, 0.5, 0, True), turn(None, A, 1, 0)]
    talk[3], talk[2] = talk[2], talk[3]  # A's first conversation goes on, and B's is the last
    talk[2].info["skyrl/call"] = 3
    found = batch([[episode(0, talk)]])
    (first, _) = found.trajectories
    assert [len(segment) for segment in first.segments()] == [1, 2] and first.turns[0].output_ids == aside.output_ids
    assert found.rewards == [[0.75, 0.0, 1.0], [0.0]] and first.success


def test_the_baseline_is_the_roles_and_the_record_gets_the_advantages() -> None:
    tries = two_tries()
    rewards = batch([tries])
    advantages = estimator("grpo")(rewards, CommonOptions(scale_rewards="none"), None)
    rows = make_rows(rewards.trajectories, rewards.group_index)
    set_advantages(rows, advantages)
    # A: 2.5 and -1, mean 0.75; B: -2.5 and 1, mean -0.75.
    assert [row.advantages[row.mask][0] for row in rows] == pytest.approx([1.75, -1.75, -1.75, 1.75])
    assert [row.group for row in rows] == [0, NEXT_ROLE] * 2
    record_advantages(advantages)
    recorded = [[each.advantages for each in trajectory.turns] for trajectory in tries]
    assert recorded == [[[1.75] * 2] * 2 + [[-1.75] * 2] * 2, [[1.75] * 2, [-1.75] * 2, [-1.75] * 2]]
    loo = estimator("rloo")(rewards, CommonOptions(), None)
    assert [max(values, key=abs) for values in loo.advantages] == [3.5, -3.5, -3.5, 3.5]


def test_a_role_that_never_acted_failed_episodes_and_other_envs() -> None:
    alone = episode(0, [turn(None, A, 1, -1)])
    failed = episode(1, [turn(0, A, 0, 0)])
    failed.stop_reason = StopReason.ENV_ERROR
    plain = Trajectory("0/1/0", Sample("t", "e", 0), 0, 0, [Turn([1], [2], [0.0], [0], "", reward=3.0)])
    found = batch([[alone, failed], [plain]])
    assert found.group_index == [0, 1] and found.rewards == [[1.0], [3.0]]
    assert found.trajectories[1] is plain
    reordered = batch([[plain], [alone]])
    assert reordered.group_index == [0, 1] and reordered.rewards == [[3.0], [1.0]]


def test_an_answer_that_was_too_long_is_held_against_its_own_role_alone() -> None:
    cut = two_tries()[0]
    cut.stop_reason = StopReason.LENGTH  # in B's last turn
    found = batch([[cut]], env=0.0, overlong=1.0)
    assert [part.stop_reason for part in found.trajectories] == [StopReason.TERMINATED, StopReason.LENGTH]
