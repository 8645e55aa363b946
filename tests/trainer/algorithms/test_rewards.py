"""Rewards: the env's, reward functions with TRL's signature, care for overlong answers; what is wrong is a sentence."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from trl.rewards import get_soft_overlong_punishment

from skyrl_trainer.algorithms import rewards
from skyrl_trainer.algorithms.advantages import estimator
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.algorithms.rewards import Rewards, register_reward, soft_penalty
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.run.trainers import DAPOTrainer, GRPOTrainer
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn
from tests.trainer.learner.tiny_models import make_config, save_model


def rewards_of(funcs: dict[str, float] | None = None, **options: Any) -> Rewards:
    algorithm = {"reward_funcs": funcs or {}, "options": options}
    generator = {"max_completion_length": 10, "max_turns": 2, "max_model_len": 100}
    config = Config.model_validate({"trainer": {"algorithm": algorithm}, "generator": generator})
    return Rewards(config, PolicyLoss(config).options.overlong_filter)


def tried(number: int = 0, lengths: tuple[int, ...] = (2, 3), **changes: Any) -> Trajectory:
    """A turn of each length, which earns 1 and hears "no" until the end."""
    turns = [Turn([1, 2], [5] * n, [-1.0] * n, [0] * n, f"try {i}", "no", 1.0) for i, n in enumerate(lengths)]
    sample = Sample(f"s{number}", "env", number, {"level": number} if number else {}, ground_truth=7 * number)
    prompt = [{"role": "user", "content": f"question {number}"}]
    return Trajectory(f"1/{number}/0", sample, 0, 0, turns, StopReason.TERMINATED, prompt=prompt, **changes)


def test_success_can_take_the_place_of_the_envs_reward() -> None:
    solved, half_done = tried(0), tried(1)
    solved.turns[-1].info = {"success": True}
    group = RolloutBatch(1, [[solved, half_done]])
    assert rewards_of({"env": 0.0, "success": 1.0}).batch(group, [0]).rewards == [[0.0, 1.0], [0.0, 0.0]]
    assert rewards_of({"success": 0.5}).batch(group, [0]).rewards == [[1.0, 1.5], [1.0, 1.0]]
    assert rewards_of().batch(group, [0]).rewards == [[1.0, 1.0]] * 2
    with pytest.raises(UserError, match="cannot be called 'success'"):
        register_reward("success")


def test_a_reward_functions_client_outlives_a_call() -> None:
    """What it makes in one step, a connection or a lock, belongs to the loop of that step."""
    loops = list[asyncio.AbstractEventLoop]()

    @register_reward("connected")
    async def connected(**columns: Any) -> list[float | None]:
        loops.append(asyncio.get_running_loop())
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]))
        return [0.5]

    rewards = rewards_of({"connected": 1.0})
    assert rewards.judge([tried(0)]) and rewards.judge([tried(1)])
    assert loops[0] is loops[1]


def test_a_reward_function_gets_what_trl_gives_and_is_asked_once() -> None:
    calls: list[dict[str, Any]] = []

    @register_reward("half")
    async def half(**columns: Any) -> list[float | None]:
        calls.append(columns)
        return [0.5, None]

    async def cell() -> object:
        """As in a notebook, where a loop runs already."""
        return rewards.judge(group)

    rewards, group = rewards_of({"half": 2.0, "env": 3.0}), [tried(0), tried(1), tried(2)]
    group[2].stop_reason = StopReason.TIMEOUT
    assert asyncio.run(cell()) and not rewards.judge(group)
    assert len(calls) == 1 and calls[0]["prompts"][1] == [{"role": "user", "content": "question 1"}]
    said = [("assistant", "try 0"), ("user", "no"), ("assistant", "try 1")]
    assert [(m["role"], m["content"]) for m in calls[0]["completions"][0]] == said
    assert calls[0]["completion_ids"] == [[5, 5, 1, 2, 5, 5, 5]] * 2
    assert calls[0]["trajectories"] == group[:2]
    columns = {"ground_truth": [0, 7], "sample_id": ["s0", "s1"], "env_id": ["env"] * 2, "level": [None, 1]}
    assert columns.items() <= calls[0].items()
    batch = rewards.batch(RolloutBatch(1, [group]), [0])
    assert batch.rewards == [[3.0, 4.0], [3.0, 3.0]]
    metrics = rewards.metrics(RolloutBatch(1, [group]))
    assert (metrics["reward/half"], metrics["reward/half/none"], metrics["reward/total"]) == (0.5, 1.0, 6.5)


def test_a_function_may_change_what_it_gets() -> None:
    """The tries of a group share their row, which is stored with them."""

    @register_reward("pops")
    def pops(task: list[dict[str, Any]], **columns: Any) -> list[float]:
        return [float(row.pop("truth")) for row in task]

    group = [tried(0), tried(0)]
    group[0].sample = group[1].sample = replace(group[0].sample, options={"task": {"truth": 6}})
    rewards_of({"pops": 1.0}).judge(group)
    assert [each.scores["pops"] for each in group] == [6.0, 6.0] and group[0].sample.options["task"] == {"truth": 6}


def test_a_rows_columns_come_by_name_as_in_trl() -> None:
    """A task of an env has none, and an option of an env that is called `task` is no row."""
    tries = [tried(0), tried(1), tried(2)]
    row = {"prompt": "p", "target": "a", "level": 3, "grade": "b", "reward_spec": {"ground_truth": 9}, "sample_id": 5}
    tries[1].sample.options["task"], tries[2].sample.options["task"] = row, "sort"

    @register_reward("of_rows")
    def of_rows(completions: Any, target: Any, grade: Any, level: Any, **others: Any) -> list[float]:
        assert (target, grade, level) == ([None, "a", None], [None, "b", None], [None, 1, 2])
        assert others["task"] == [None, row, "sort"] and others["sample_id"] == ["s0", 5, "s2"]
        assert others["ground_truth"] == [0, 7, 14] and not {"prompt", "reward_spec"} & others.keys()
        return [1.0] * len(completions)

    assert rewards_of({"of_rows": 1.0}).judge(tries)


def test_a_conversation_is_told_in_the_order_of_its_turns() -> None:
    """An agent's stand segment by segment in the record."""
    trajectory = tried(1, (2, 3, 1))
    trajectory.turns[0].info["skyrl/call"], trajectory.turns[1].info["skyrl/call"] = 1, 0
    said = [message["content"] for message in rewards.completion(trajectory)]
    assert said == ["try 1", "no", "try 0", "no", "try 2"]


@pytest.mark.parametrize(
    "answer, sentence",
    [
        ([1.0], r"'bad' returned 1 values for 2 trajectories \(1/0/0 to 1/1/0\)"),
        ([1, 2, 3], "returned 3 values"),
        ([1.0, "good"], "returned 'good' for trajectory 1/1/0: return a list with one number, or None"),
        ([float("nan"), 1.0], "returned nan for trajectory 1/0/0"),
        (0.5, "returned 0.5 for 2 trajectories"),
        ({1.0, 2.0}, "returned {1.0, 2.0} for 2 trajectories"),
        ([10**400, 1.0], "returned 1000.* for trajectory 1/0/0: return a list with one number"),
        ([1e200, 1.0], r"returned 1e\+200 for trajectory 1/0/0"),
        ({0: 1.0, 1: 2.0}, r"returned \{0: 1.0, 1: 2.0\} for 2 trajectories"),
        (ZeroDivisionError("by zero"), r"failed on 2 .*ZeroDivisionError: by zero \(.*test_rewards.py, line \d+\)"),
        (map(lambda text: int("x"), "ab"), r"failed on 2 .*ValueError: invalid literal .*test_rewards.py, line \d+\)"),
    ],
)
def test_a_reward_function_that_misbehaves_is_named(answer: Any, sentence: str) -> None:
    @register_reward("bad")
    def bad(completions: Any, **columns: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(UserError, match=sentence):
        rewards_of({"bad": 1.0}).judge([tried(0), tried(1)])


def test_names_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"trainer\.algorithm\.reward_funcs='brevty' is not registered"):
        rewards_of({"brevty": 1.0})
    with pytest.raises(
        UserError,
        match=r"reward_funcs='brevty' is not registered; choose one of env, .*success, or register your own\.",
    ):
        monkeypatch.setattr(rewards._REWARDS, "_entries", {})
        rewards_of({"brevty": 1.0})
    with pytest.raises(UserError, match="cannot be called 'env'"):
        register_reward("env")


def test_the_soft_overlong_penalty_is_trls_and_sits_on_the_last_turn() -> None:
    trl = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    lengths = range(25)
    assert [soft_penalty(n, 20, 8) for n in lengths] == trl(completion_ids=[[0] * n for n in lengths])
    batch = RolloutBatch(1, [[tried(0, (9, 9)), tried(1)]])  # 18 tokens of 20, where the last fifth costs up to 1
    assert rewards_of({"overlong": 1.0}).batch(batch, [0]).rewards == [[1.0, 0.5], [1.0, 1.0]]
    assert rewards_of({"overlong": 2.0}).batch(batch, [0]).rewards == [[1.0, 0.0], [1.0, 1.0]]
    assert rewards_of({"overlong": 1.0}).metrics(batch)["overlong/penalty"] == -0.25
    assert "overlong/penalty" not in rewards_of().metrics(batch)


def test_a_turn_that_is_cut_or_a_full_context_costs_the_whole_penalty() -> None:
    """However few tokens the episode sampled in all, of the 20 that it might have."""
    one_cut, full, short = tried(0, (10, 1)), tried(1, (1, 1)), tried(2, (8, 8))
    full.stop_reason = StopReason.LENGTH
    rewards = rewards_of({"overlong": 1.0, "env": 0.0})
    assert rewards.batch(RolloutBatch(1, [[one_cut, full, short]]), [0]).rewards == [
        [0.0, -1.0],
        [0.0, -1.0],
        [0.0, 0.0],
    ]


def test_a_weight_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValidationError, match="finite"):
        rewards_of({"env": float("nan")})


def test_a_try_that_nobody_judged_is_left_out_of_a_group_that_only_functions_judge() -> None:
    """As in TRL: a judge that gave no mark in time has not marked the answer as the worst."""

    def kept(scores: list[float | None], gave: float, success: bool = False, **weights: float) -> list[int]:
        group = [tried(i, (2,), scores={"marks": score}) for i, score in enumerate(scores)]
        for each in group:
            each.turns[0].reward = 0.0
        group[-1].turns[0].reward, group[-1].turns[0].info = gave, {"success": success}
        group[1].stop_reason = StopReason.LENGTH
        batch = rewards_of({"marks": 1.0} | weights).batch(RolloutBatch(1, [group]), [0])
        return [each.sample.seed for each in batch.trajectories]

    register_reward("marks")(lambda **_: [])
    assert kept([1.0, None, 1.0, None], 0.0) == [0, 2]
    assert kept([None] * 4, 0.0) == [0, 1, 2, 3], "no function applies to this env"
    assert kept([None] * 4, 0.0, overlong=1.0) == [0, 1, 2, 3]
    assert kept([1.0, None, 1.0, 0.5], 1.0) == [0, 1, 2, 3], "the env judges, too: None adds nothing"
    weightless = {"env": 0.0}
    assert kept([1.0, None, 1.0, 0.5], 1.0, **weightless) == [0, 2, 3], "what it says counts for nothing"
    assert kept([1.0, None, 1.0, 0.5], 0.0, True) == [0, 2, 3]
    assert kept([1.0, None, None, 0.5], 0.0, overlong=1.0) == [0, 1, 3], "its length is judged"


def test_a_filtered_trajectory_counts_in_the_baseline_and_has_no_gradient() -> None:
    rewards, group = rewards_of(overlong_filter=True), [tried(0), tried(1, (1,)), tried(2)]
    group[1].stop_reason = StopReason.LENGTH
    batch = rewards.batch(RolloutBatch(1, [group]), [0])
    assert [t.num_output_tokens for t in batch.trajectories] == [5, 0, 5] and group[1].num_output_tokens == 1
    assert batch.trajectories[1].token_ids() == group[1].token_ids()
    assert rewards.metrics(RolloutBatch(1, [group]))["overlong/filtered"] == 1
    for name in ("grpo", "rloo", "maxrl", "reinforce++"):
        advantages = estimator(name)(batch, GRPOTrainer(Config()).options, None).advantages
        assert not any(advantages[1]) and any(advantages[0])


def test_a_batch_of_which_everything_is_filtered_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    group = [tried(i, (1 + i, 2)) for i in range(2)]
    for trajectory in group:
        trajectory.stop_reason = StopReason.LENGTH
        trajectory.turns[0].reward = float(trajectory.sample.seed)
    path, config = save_model(tmp_path), make_config(trainer={"algorithm": {"name": "dapo"}})
    trainer = DAPOTrainer(config).start(Learner(config, path, 10))
    before = [tensor.clone() for _, tensor in trainer.learner.named_tensors()]
    metrics = trainer.update(rewards_of(overlong_filter=True).batch(RolloutBatch(1, [group]), [0]))
    assert metrics["grad_norm"] == metrics["tokens/trained"] == 0 and metrics["advantage/zero_fraction"] == 1
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.learner.named_tensors(), strict=True))


def short(**columns: Any) -> list[float]:
    return [0.0]


def long(**columns: Any) -> list[float]:
    return [1.0]


def test_python_arguments_become_settings() -> None:
    args = Config.model_validate({"trainer": {"algorithm": {"reward_funcs": {"short": 0.5, "env": 0.0}}}})
    config = GRPOTrainer("here", [short, long], args, "a.jsonl").config
    assert config.trainer.algorithm.reward_funcs == {"short": 0.5, "env": 0.0, "long": 1.0}
    assert config.trainer.policy.model.path == "here" and config.data.train_data == ["a.jsonl"]
    assert args.data.train_data != ["a.jsonl"], "what was given is not changed"
    assert GRPOTrainer(reward_funcs={short: 3}).config.trainer.algorithm.reward_funcs == {"short": 3.0}
    with pytest.raises(UserError, match="two functions of one name"):
        GRPOTrainer(reward_funcs=[lambda **columns: [], lambda **columns: []])
