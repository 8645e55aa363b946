"""Attempts: what is missing of a run is played by the project's agent loop, and written down as each try ends.

There is no loop here: `play` is the one that trains (rollout.episode), given the benchmark's env as a Sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from skyrl_eval import benchmarks
from skyrl_eval.store import Run
from skyrl_eval.types import Attempt, Item
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample, StopReason, Trajectory

STOPS = {
    StopReason.TERMINATED: "done",
    StopReason.TRUNCATED: "max_steps",
    StopReason.MAX_TURNS: "max_steps",
    StopReason.LENGTH: "length",
    StopReason.TIMEOUT: "timeout",
    StopReason.ENV_ERROR: "error",
    StopReason.ENGINE_ERROR: "error",
}
Play = Callable[[Sample, int], Awaitable[Trajectory]]
"""One episode of a sample; the number is the try's, and decides the seed with the sample's id."""


async def solve(run: Run, samples: int, play: Play, concurrency: int) -> int:
    """Plays what the run lacks, `concurrency` episodes at a time; returns how many ended in an error.

    An episode that raises is an attempt with an error, to be tried again by the next call; a UserError ends everything.
    """
    queue = iter(run.missing(samples))
    errors = 0

    async def work() -> None:
        nonlocal errors
        for item, number in queue:
            try:
                attempt = attempt_of(await play(benchmarks.find(item.bench).env(item), number), item, number)
            except UserError:
                raise
            except Exception as error:
                attempt = Attempt(item.bench, item.item_id, number, "", "error", f"{type(error).__name__}: {error}")
            errors += attempt.stop == "error"
            await asyncio.to_thread(run.add, attempt)  # it waits for the disk

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return errors


def attempt_of(trajectory: Trajectory, item: Item, number: int) -> Attempt:
    """The attempt that an episode was. Its answer is the env's last `submission`, or else the last message."""
    turns = trajectory.turns
    submission = next((t.info["submission"] for t in reversed(turns) if "submission" in t.info), None)
    calls = [call for turn in turns for call in turn.tool_calls if call.get("tool")]
    messages = list(trajectory.prompt)
    for turn in turns:
        messages.append({"role": "assistant", "content": turn.action})
        messages += [{"role": "user", "content": turn.observation}] if turn.observation else []
    return Attempt(
        item.bench,
        item.item_id,
        number,
        answer=submission if submission is not None else turns[-1].action if turns else "",
        stop=STOPS[trajectory.stop_reason],
        error=trajectory.error,
        steps=len(turns),
        tool_calls=len(calls),
        tool_errors=sum("error" in call for call in calls),
        seconds=round(trajectory.metrics.get("seconds", 0.0), 3),
        messages=messages,
        urls=[url for turn in turns for url in turn.info.get("urls", ())],
        **_tokens(trajectory),
    )


def _tokens(trajectory: Trajectory) -> dict[str, int]:
    """As the endpoint says; where none was asked, the ids that the engine read, again in every turn, and wrote."""
    if "prompt_tokens" in trajectory.metrics:
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        return {name: int(trajectory.metrics[name]) for name in names}
    read = written = 0
    for segment in trajectory.segments():
        context = 0
        for turn in segment:
            read += context + len(turn.prompt_ids)
            written += len(turn.output_ids)
            context += len(turn.prompt_ids) + len(turn.output_ids)
    return {"prompt_tokens": read, "completion_tokens": written}
