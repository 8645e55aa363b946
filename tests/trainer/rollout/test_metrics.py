"""The figures of a batch, from examples small enough to be counted by hand."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import mean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyrl_trainer.rollout.metrics import MAX_KINDS, kind, rollout_metrics
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn

FITS = {"tool": "calculator", "args": {"expression": "1+1"}, "result": "2"}
FAILS = {"tool": "calculator", "args": {"expression": "1/0"}, "error": "division by zero"}
UNREADABLE = {"tool": None, "args": None, "error": "not JSON"}
INVENTED = {"tool": "telephone", "args": None, "error": "There is no tool 'telephone'."}


def turn(tokens: int, calls: tuple[dict[str, Any], ...] = (), reward: float = 0.0, **info: Any) -> Turn:
    return Turn([1], [2] * tokens, [-0.5] * tokens, [0] * tokens, "", reward=reward, tool_calls=list(calls), info=info)


def tried(
    name: str, turns: list[Turn], reason: StopReason = StopReason.TERMINATED, env: str = "tool_use", **options: Any
) -> Trajectory:
    return Trajectory(name, Sample(name, f"skyrl/{env}-v0", 0, options), 0, 0, turns, reason)


def figures(*trajectories: Trajectory) -> dict[str, float]:
    return rollout_metrics(RolloutBatch(1, [[trajectory] for trajectory in trajectories]))


SOLVED = tried("a", [turn(5, (FITS, FAILS), valid_action=True), turn(3, reward=1.0, valid_action=True, success=True)])
CONFUSED = tried(
    "b", [turn(4, (UNREADABLE, INVENTED), valid_action=False), turn(4), turn(4, (FITS,))], StopReason.MAX_TURNS
)
FAILED = tried("c", [turn(10, (FAILS,), valid_action=False, success=True)], StopReason.ENV_ERROR)


def test_agency_of_a_batch_of_three() -> None:
    found = figures(SOLVED, CONFUSED, FAILED)
    expected = {
        "episodes": 3, "failed": 1, "success": 1 / 3, "reward/mean": 0.5, "turns/mean": 2.5, "tokens": 30,
        "length/mean": 10, "length/max": 12, "tools/calls": 2.5, "tools/errors": 3 / 5, "invalid_actions": 1 / 5,
        "tools/calculator/calls": 1.5, "tools/calculator/errors": 1 / 3, "tools/unknown/calls": 1.0,
        "tools/unknown/errors": 1.0, "tokens/per_success": 30, "stop/terminated": 1, "stop/max_turns": 1,
        "stop/env_error": 1, "stop/truncated": 0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in found if name.startswith("agency/")], "one kind of task has no figures of its own"


def test_an_envs_own_metrics_are_averaged_over_the_episodes_that_have_them() -> None:
    told = [{"searches": 1, "found": True, "last": "a"}, {"searches": 2, "found": False}, {"hops": 3.0}, "odd"]
    told += [{"hops": 10**400, "searches": math.nan}]
    episodes = [tried(str(i), [turn(2, metrics={"searches": 9}), turn(2, metrics=own)]) for i, own in enumerate(told)]
    failed = tried("f", [turn(2, metrics={"hops": 8.0})], StopReason.ENV_ERROR)
    found = figures(*episodes, failed, tried("none", []))
    own = {name: value for name, value in found.items() if name.startswith("env/")}
    assert own == {"env/searches": 1.5, "env/found": 0.5, "env/hops": 3.0}
    many = figures(tried("many", [turn(2, metrics={f"m{i}": 1 for i in range(999)})]))
    assert len([name for name in many if name.startswith("env/")]) == MAX_KINDS


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_pass_at_k_is_the_mean_over_all_choices_of_k_tries(solved: list[list[bool]]) -> None:
    """Against its definition: of every k of a task's tries, whether one solved it; over the tasks with so many. k:
    powers of two, and the most."""
    groups = [
        [tried(f"{g}/{t}", [turn(2, success=each)]) for t, each in enumerate(tries)] for g, tries in enumerate(solved)
    ]
    found = rollout_metrics(RolloutBatch(1, groups))
    most = max(map(len, solved))
    sizes = [k for k in (2, 3, 4, 5, 6) if k in (2, 4, most) and k <= most]
    expected = {k: [mean(map(any, combinations(tries, k))) for tries in solved if len(tries) >= k] for k in sizes}
    wanted = {f"pass_at/{k}": mean(of_tasks) for k, of_tasks in expected.items()}
    assert {name: value for name, value in found.items() if name.startswith("pass_at/")} == pytest.approx(wanted)


def test_a_failed_try_has_not_passed() -> None:
    failed = tried("c", [turn(1, success=True)], StopReason.ENV_ERROR)
    assert rollout_metrics(RolloutBatch(1, [[SOLVED, CONFUSED], [failed, CONFUSED]]))["pass_at/2"] == 0.5


def test_files_of_rows_of_one_env_have_figures_of_their_own() -> None:
    """Named by folder and name, for data sets' files are called alike."""
    of = {"aime.jsonl#0": "gsm8k/aime", "math/test.parquet#3": "gsm8k/math_test", "/data/a/b.jsonl#1": "gsm8k/a_b"}
    for name, expected in {**of, "o/n?split=test#2": "gsm8k/o_n?split=test", "exam/7": "gsm8k"}.items():
        assert kind(Sample(name, "skyrl/gsm8k-v0", 0, {"task": {"prompt": "1"}})) == expected


def test_figures_by_env_and_difficulty() -> None:
    easy = tried("e1", [turn(2, success=True)], difficulty=1)
    hard = tried("h1", [turn(6), turn(2, (FITS,))], StopReason.LENGTH, difficulty=4)
    lost = tried("h2", [], StopReason.TIMEOUT, difficulty=4)
    shop = tried("s1", [turn(7, valid_action=False)], StopReason.TRUNCATED, env="webshop_lite")
    found = figures(easy, hard, lost, shop)
    agency = {name.removeprefix("agency/"): value for name, value in found.items() if name.startswith("agency/")}
    zeros = dict.fromkeys(
        ("failed", "success", "reward/mean", "tools/calls", "tools/errors", "invalid_actions"), 0.0
    )  # fmt: skip
    expected = {
        "tool_use/1": {"episodes": 1, "success": 1, "turns/mean": 1, "tokens/per_success": 2, "stop/terminated": 1},
        "tool_use/4": {"episodes": 2, "failed": 1, "turns/mean": 2, "tools/calls": 1, "stop/length": 1,
                       "stop/timeout": 1},
        "webshop_lite": {"episodes": 1, "turns/mean": 1, "invalid_actions": 1, "stop/truncated": 1},
    }  # fmt: skip
    assert agency == {f"{name}/{key}": value for name, own in expected.items() for key, value in (zeros | own).items()}
    assert found["success"] == 1 / 4


def test_a_batch_of_failures_has_figures_without_a_division_by_zero() -> None:
    found = figures(FAILED)
    assert found["failed"] == found["episodes"] == 1 and found["success"] == found["turns/mean"] == 0.0
    assert "tokens/per_success" not in found and "tools/calculator/calls" not in found
    assert figures()["success"] == 0.0


def test_names_of_envs() -> None:
    assert kind(Sample("a", "skyrl/text_math-v0", 0, {"difficulty": 3})) == "text_math/3"
    assert kind(Sample("a", "mine/Shop-v2", 0)) == "mine_Shop-v2"


@given(st.lists(st.tuples(st.text(max_size=6), st.integers(0, 60)), max_size=80))
@example([("", number) for number in range(MAX_KINDS)])
@example([("", number) for number in range(MAX_KINDS + 1)])
def test_the_number_of_names_is_bounded_whatever_a_policy_writes(calls: list[tuple[str, int]]) -> None:
    """Only tools with a fitting call have names, too many kinds have none, and parts of rewards beyond as many."""
    batch = [
        tried(str(i), [turn(1, ({"tool": name, "args": None, "error": "no"}, FITS))], difficulty=difficulty)
        for i, (name, difficulty) in enumerate(calls)
    ]
    parts = [Turn([1], [2], [0.0], [0], "", reward_parts={f"p{n}": 1.0}) for n in range(MAX_KINDS + 1)]
    batch.append(tried("parts", parts, difficulty=0))  # a kind without a number would be counted by its figures' names
    found = figures(*batch)
    assert len([key for key in found if key.startswith("reward/p")]) <= MAX_KINDS
    named = {key.split("/")[1] for key in found if key.count("/") == 2 and key.startswith("tools/")}
    assert named <= {"calculator", "unknown"}
    kinds = {key.split("/")[2] for key in found if key.startswith("agency/")}
    assert len(kinds) <= MAX_KINDS
    assert sum(value for key, value in found.items() if key.startswith("stop/")) == len(batch)
