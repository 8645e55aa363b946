"""Attempts: what is missing of a run is played by the project's rollouts, and written down as each try ends."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from skyrl_eval import benchmarks, metrics
from skyrl_eval.store import Run
from skyrl_eval.types import Attempt, Item
from skyrl_trainer.rollout.episode import derive_seed
from skyrl_trainer.types import SamplingOptions, StopReason, Trajectory

STOPS = {
    StopReason.TERMINATED: "done",
    StopReason.TRUNCATED: "max_steps",
    StopReason.MAX_TURNS: "max_steps",
    StopReason.LENGTH: "length",
    StopReason.TIMEOUT: "timeout",
    StopReason.ENV_ERROR: "error",
    StopReason.ENGINE_ERROR: "error",
}


def solve(
    run: Run,
    samples: int,
    rollouts: Any,
    sampling: SamplingOptions,
    seed: int,
    more: dict[str, Any] | None = None,
    env_file: str | None = None,
) -> int:
    """Plays what the run lacks, within its limits; returns how many tries ended in an error.
    rollouts: rollout.manager.Rollouts, or what has its `play`. more: joins every task. env_file: registers envs.
    """
    asked: dict[str, tuple[Item, int]] = {}

    def still_empty() -> Iterator[Trajectory]:
        for item, number in run.missing(samples):
            if metrics.limit_reached(run.facts.get("limits"), run.tries):
                return
            sample = benchmarks.find(item.bench).env(item)
            options = dict(sample.options)
            if "task" in options:
                options["task"] = options["task"] | (more or {})
            sample = replace(sample, options=options, env_file=env_file)
            name = f"{sample.sample_id}/{number}"
            asked[name] = item, number
            yield Trajectory(name, sample, number, derive_seed(seed, name))

    errors = 0
    for played in rollouts.play(still_empty(), sampling, seeded=sampling.temperature > 0):
        attempt = attempt_of(played, *asked.pop(played.trajectory_id))
        errors += attempt.stop == "error"
        run.add(attempt)
    return errors


def attempt_of(trajectory: Trajectory, item: Item, number: int) -> Attempt:
    turns = trajectory.turns
    said = "<think>" * ("thinks" in trajectory.metrics) + turns[-1].action if turns else ""  # the template's
    answer = next((t.info["submission"] for t in reversed(turns) if "submission" in t.info), said)
    stop = STOPS[trajectory.stop_reason] if turns else "error"  # also where nobody spoke
    last = f"ended/{len(turns) - 1}/"  # no plain answer
    odd = [name.removeprefix(last) for name in trajectory.metrics if name.startswith(last)]
    calls = [call for turn in turns for call in turn.tool_calls if call.get("tool")]
    messages = list(trajectory.prompt)
    for turn in turns:
        messages.append({"role": "assistant", "content": turn.action})
        messages += [{"role": "user", "content": turn.observation}] if turn.observation else []
    return Attempt(
        *item.key(number),
        answer,
        stop=odd[-1] if odd and stop == "done" else stop,
        error=trajectory.error,
        steps=len(turns),
        tool_calls=len(calls),
        tool_errors=sum("error" in call for call in calls),
        seconds=round(trajectory.metrics.get("seconds", 0.0), 3),
        messages=messages,
        urls=[url for turn in turns for url in turn.info.get("urls", ())],
        **_tokens(trajectory),
    )


def _tokens(trajectory: Trajectory) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    counted = {name: int(trajectory.metrics[name]) for name in names if name in trajectory.metrics}
    if "uncounted" in trajectory.metrics:
        return dict.fromkeys(names[:2])
    if "prompt_tokens" in counted:
        return counted
    read = context = 0
    for turn in trajectory.turns:
        context = len(turn.prompt_ids) + (0 if turn.new_segment else context)
        read += context
        context += len(turn.output_ids)
    return {"prompt_tokens": read, "completion_tokens": trajectory.num_output_tokens} | counted
