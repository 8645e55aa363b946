"""What a trajectory is worth: the env's reward, reward functions and the penalty for length, each with its weight."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import replace
from numbers import Real
from typing import Any

from skyrl_trainer.algorithms.roles import by_role
from skyrl_trainer.errors import UserError
from skyrl_trainer.protocols import RewardFunction
from skyrl_trainer.registry import Registry, load
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch, StepMetrics, StopReason, Trajectory
from skyrl_trainer.user_file import cause

OWN_REWARDS = {"env": 1.0, "success": 0.0, "overlong": 0.0}
"""With the weights by default: the env's reward, 1 for a solved task, and the penalty for length."""
_REWARDS: Registry[RewardFunction] = Registry("trainer.algorithm.reward_funcs", dict.fromkeys(OWN_REWARDS, ""))
reward_function = _REWARDS.get


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """A decorator for a reward function; a later one of the same name replaces it."""
    if name in (*OWN_REWARDS, "mean", "total"):  # our own, and two metrics
        raise UserError(f"A reward function cannot be called {name!r}, which means something else; rename it.")
    return _REWARDS.register(name)


class Rewards:
    """The rewards of a run. UserError for names that are not registered."""

    def __init__(self, config: Config, overlong_filter: bool) -> None:
        self.weights = {**OWN_REWARDS, **config.trainer.algorithm.reward_funcs}
        self.functions = {name: reward_function(name) for name in self.weights if name not in OWN_REWARDS}
        self.filter = overlong_filter
        self.budget = config.generator.max_completion_length

    def judge(self, trajectories: list[Trajectory]) -> bool:
        """Lets every function score what it has not scored yet; whether there was any."""
        asked = False
        for name, function in self.functions.items():
            if todo := [t for t in trajectories if not t.stop_reason.failed and name not in t.scores]:
                asked = True
                for trajectory, score in zip(todo, call(name, function, todo), strict=True):
                    trajectory.scores[name] = score
        return asked

    def judged(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Those that did not fail and, where the env gave no reward, that a function or the penalty judged."""
        alive = [t for t in group if not t.stop_reason.failed]
        marks = [{*t.scores.values()} - {None} for t in alive]
        own, success, overlong = (self.weights[name] for name in OWN_REWARDS)
        if not any(marks) or any(own * t.env_reward or success * t.success for t in alive):
            return alive
        return [t for t, mark in zip(alive, marks, strict=True) if mark or overlong * self._penalty(t)]

    def batch(self, rollouts: RolloutBatch, groups: Collection[int]) -> RewardBatch:
        """What was judged in these groups. With `overlong_filter`, what was cut off counts in baselines only."""
        kept = by_role([(i, t) for i in sorted(groups) for t in self.judged(rollouts.groups[i])])
        return RewardBatch(
            rollouts=rollouts,
            trajectories=[without_sampled_tokens(t) if self.cut_off(t) else t for _, t in kept],
            group_index=[i for i, _ in kept],
            rewards=[self.per_turn(t) for _, t in kept],
        )

    def per_turn(self, trajectory: Trajectory) -> list[float]:
        """The env's rewards, and at the last turn what success, the functions and the length add."""
        rewards = [turn.reward * self.weights["env"] for turn in trajectory.turns]
        if rewards:
            rewards[-1] += self.weights["success"] * trajectory.success
            rewards[-1] += sum(self.weights[name] * (trajectory.scores[name] or 0.0) for name in self.functions)
            rewards[-1] += self.weights["overlong"] * self._penalty(trajectory)
        return rewards

    def metrics(self, rollouts: RolloutBatch) -> StepMetrics:
        """`reward/...` and `overlong/...` of docs/metrics.md."""
        alive = [t for t in rollouts.trajectories if not t.stop_reason.failed]
        metrics = {"reward/total": mean([sum(self.per_turn(t)) for t in alive])}
        for name in self.functions:
            scores = [t.scores[name] for t in alive]
            metrics[f"reward/{name}"] = mean([score for score in scores if score is not None])
            metrics[f"reward/{name}/none"] = float(scores.count(None))
        if self.filter:
            metrics["overlong/filtered"] = float(sum(map(self.cut_off, alive)))
        if self.weights["overlong"]:
            metrics["overlong/penalty"] = mean([self._penalty(t) for t in alive])
        return metrics

    def cut_off(self, trajectory: Trajectory) -> bool:
        return self.filter and trajectory.stop_reason is StopReason.LENGTH

    # Of the longest turn; all of it where the trajectory was cut off.
    def _penalty(self, trajectory: Trajectory) -> float:
        longest = max((len(turn.output_ids) for turn in trajectory.turns), default=0)
        longest = self.budget if trajectory.stop_reason is StopReason.LENGTH else longest
        return soft_penalty(longest, self.budget, self.budget / 5)


def differ(returns: Sequence[float]) -> bool:
    """Whether any of these returns is better than another, by more than rounding (0.1 + 0.2 is 0.3)."""
    largest, least = max(returns, default=0.0), min(returns, default=0.0)
    return largest - least > 1e-9 * max(1.0, abs(largest), abs(least))


def soft_penalty(tokens: int, budget: int, cache: float) -> float:
    """From 0 to -1 over the last `cache` tokens of the budget (DAPO, arXiv 2503.14476, section 3.4)."""
    return max(-1.0, min(0.0, (budget - cache - tokens) / cache))


def without_sampled_tokens(trajectory: Trajectory) -> Trajectory:
    """The same episode as if every token had been given."""
    turns = [
        replace(turn, prompt_ids=[*turn.prompt_ids, *turn.output_ids], output_ids=[], logprobs=[], weight_versions=[])
        for turn in trajectory.turns
    ]
    return replace(trajectory, turns=turns)


def completion(trajectory: Trajectory) -> list[dict[str, str]]:
    """The policy's answers and, between them, what the env said."""
    messages = []
    for place in trajectory.by_time():
        messages.append({"role": "assistant", "content": trajectory.turns[place].action})
        messages.append({"role": "user", "content": trajectory.turns[place].observation})
    return messages[:-1]


def call(name: str, function: RewardFunction, trajectories: list[Trajectory]) -> list[float | None]:
    """What the function says of these trajectories, checked."""
    samples = [deepcopy(t.sample) for t in trajectories]
    ours = [{"ground_truth": s.ground_truth, "sample_id": s.sample_id, "env_id": s.env_id} for s in samples]
    columns: dict[str, Any] = {name: [each[name] for each in ours] for name in ours[0]}  # a row's own come first
    rows = [row if isinstance(row := each.options.get("task"), dict) else {} for each in samples]
    of_row = load("skyrl_gym.adapters.trl_env:columns")
    for told in ([of_row(row) for row in rows], [each.options for each in samples]):
        names = sorted({name for each in told for name in each} - {"prompt", "completion"})
        columns |= {name: [x.get(name, own.get(name)) for x, own in zip(told, ours, strict=True)] for name in names}
    columns |= {
        "prompts": [[dict(message) for message in t.prompt] for t in trajectories],
        "completions": [completion(t) for t in trajectories],
        "trajectories": trajectories,
        "completion_ids": [t.token_ids()[len(t.turns[0].prompt_ids) :] if t.turns else [] for t in trajectories],
    }
    who = f"The reward function {name!r}"
    span = f"{len(trajectories)} trajectories ({trajectories[0].trajectory_id} to {trajectories[-1].trajectory_id})"
    try:
        values = function(**columns)
        if inspect.iscoroutine(values):
            values = load("skyrl_gym.openenv:result_of")(values)
        values = list(values) if isinstance(values, Iterator) else values  # which may raise only now
    except Exception as error:
        raise UserError(f"{who} failed on {span}: {cause(error)}.") from error
    wanted = "return a list with one number, or None where it does not apply, for each"
    try:
        if isinstance(values, Mapping | Set):  # no rewards, or in no order
            raise TypeError
        values = [value.item() if hasattr(value, "item") else value for value in values]
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{who} returned {values!r} for {span}: {wanted}.") from None
    if len(values) != len(trajectories):
        raise UserError(f"{who} returned {len(values)} values for {span}: {wanted}.")
    for trajectory, value in zip(trajectories, values, strict=True):
        if value is not None and not (isinstance(value, Real) and abs(value) < 1e30):  # type: ignore[operator]
            raise UserError(f"{who} returned {value!r:.60} for trajectory {trajectory.trajectory_id}: {wanted}.")
    return [None if value is None else float(value) for value in values]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
