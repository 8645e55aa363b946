"""The figures of a batch of trajectories and, as `agency/<env>/<difficulty>/...`, of each kind of task in it.

Names come from settings and tools, never from what a model wrote: their number is bounded.
"""

from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

from skyrl_trainer.algorithms.rewards import mean
from skyrl_trainer.types import RewardBatch, RolloutBatch, Sample, StepMetrics, StopReason, Trajectory

MAX_KINDS = 32
"""A batch with more kinds of tasks has no figures by kind; more tools are `unknown`, more parts left out."""
UNKNOWN = "unknown"
"""In place of a tool's name: calls that could not be read, or whose tool no call of the batch fits."""


def rollout_metrics(batch: RolloutBatch) -> StepMetrics:
    """Figures of a batch (docs/metrics.md): means over the episodes that did not fail; `success` counts failed ones
    as unsolved. Example: {"success": 0.5, "turns/mean": 3.0, "tools/search/calls": 1.5, "stop/terminated": 4.0, ...}"""
    everyone = batch.trajectories
    alive = _alive(everyone)
    lengths = [each.num_output_tokens for each in alive]
    metrics = _figures(everyone) | {
        "length/mean": mean(lengths),
        "length/max": float(max(lengths, default=0)),
        "tokens": float(sum(each.num_output_tokens for each in everyone)),
    }
    for name in ("env_replays", "env_close_errors"):
        metrics[name] = sum(each.metrics.get(name, 0.0) for each in everyone)
    parts = {part for each in alive for turn in each.turns for part in turn.reward_parts}
    for part in sorted(parts)[:MAX_KINDS]:
        sums = [sum(turn.reward_parts.get(part, 0.0) for turn in each.turns) for each in alive]
        metrics[f"reward/{part}"] = mean(sums)
    told = [own for each in alive if each.turns and isinstance(own := each.turns[-1].info.get("metrics"), dict)]
    for name in sorted({str(name) for own in told for name in own})[:MAX_KINDS]:
        if found := [value for own in told if isinstance(value := own.get(name), int | float) and abs(value) < 1e30]:
            metrics[f"env/{name}"] = mean(found)
    return metrics | _by_tool(alive) | _by_kind(everyone) | _pass_at(batch.groups)


def group_metrics(batch: RewardBatch, accepted: int, wanted: int) -> StepMetrics:
    """Of a batch whose first `accepted` groups are learned from, where `wanted` were asked for."""
    drawn = len(batch.rollouts.groups)
    sampled = sum(each.num_output_tokens for each in batch.rollouts.trajectories)
    learned = sum(each.num_output_tokens for each in batch.trajectories)
    return {
        "groups/drawn": float(drawn),
        "groups/rejected": float(drawn - accepted),
        "groups/missing": float(wanted - accepted),
        "tokens/wasted": 1.0 - learned / max(1, sampled),
    }


def kind(sample: Sample) -> str:
    """What sort of task: "tool_use/2", or "text_math" where the sample names no difficulty; "a_b" for the env a/b;
    "gsm8k/math_test" for rows of math/test.jsonl."""
    env = sample.env_id.removeprefix("skyrl/").removesuffix("-v0").replace("/", "_")
    sort = sample.options.get("difficulty")
    if "task" in sample.options:
        file = Path(sample.sample_id.rpartition("#")[0])
        sort = "_".join(filter(None, (file.parent.name.strip("."), file.stem)))
    return env if sort in (None, "") else f"{env}/{sort}"


def _figures(everyone: Sequence[Trajectory]) -> StepMetrics:
    alive = _alive(everyone)
    solved = sum(each.success for each in alive)
    turns = [turn for each in alive for turn in each.turns]
    calls = _calls(alive)
    figures = {
        "episodes": float(len(everyone)),
        "failed": float(len(everyone) - len(alive)),
        "success": solved / len(everyone) if everyone else 0.0,
        "reward/mean": mean([each.env_reward for each in alive]),
        "turns/mean": mean([len(each.turns) for each in alive]),
        "tools/calls": len(calls) / len(alive) if alive else 0.0,
        "tools/errors": mean(["error" in call for call in calls]),
        "invalid_actions": mean([turn.info.get("valid_action") is False for turn in turns]),
    }
    if solved:
        figures["tokens/per_success"] = sum(each.num_output_tokens for each in everyone) / solved
    for reason in StopReason:
        figures[f"stop/{reason.value}"] = float(sum(each.stop_reason is reason for each in everyone))
    return figures


def _by_tool(alive: Sequence[Trajectory]) -> StepMetrics:
    calls = _calls(alive)
    known = sorted({str(call.get("tool")) for call in calls if call.get("args") is not None})[:MAX_KINDS]
    failures: dict[str, list[bool]] = {}
    for call in calls:
        name = str(call.get("tool"))
        failures.setdefault(name if name in known else UNKNOWN, []).append("error" in call)
    metrics: StepMetrics = {}
    for name, failed in sorted(failures.items()):
        metrics[f"tools/{name}/calls"] = len(failed) / len(alive)
        metrics[f"tools/{name}/errors"] = mean(failed)
    return metrics


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased: the chance that k of n tries hold one of the c correct ones (arXiv 2107.03374, equation 1)."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def _pass_at(groups: Sequence[Sequence[Trajectory]]) -> StepMetrics:
    most = max(map(len, groups), default=0)
    tries = [(len(group), sum(each.success for each in _alive(group))) for group in groups]
    sizes = {2**power for power in range(1, most.bit_length())} | ({most} - {0, 1})
    return {f"pass_at/{k}": mean([pass_at_k(n, c, k) for n, c in tries if n >= k]) for k in sorted(sizes)}


def _by_kind(everyone: Sequence[Trajectory]) -> StepMetrics:
    kinds: dict[str, list[Trajectory]] = {}
    for trajectory in everyone:
        kinds.setdefault(kind(trajectory.sample), []).append(trajectory)
    if not 1 < len(kinds) <= MAX_KINDS:
        return {}
    return {
        f"agency/{name}/{figure}": value
        for name, members in sorted(kinds.items())
        for figure, value in _figures(members).items()
        if value or not figure.startswith("stop/")
    }


def _alive(everyone: Sequence[Trajectory]) -> list[Trajectory]:
    return [each for each in everyone if not each.stop_reason.failed]


def _calls(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    calls = [call for each in trajectories for turn in each.turns for call in turn.tool_calls]
    return [call for call in calls if isinstance(call, dict)]  # a user's env may report anything
