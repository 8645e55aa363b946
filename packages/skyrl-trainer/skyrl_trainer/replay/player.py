"""Plays stored episodes again: the env, made anew in an EnvWorker, gets the recorded actions.

Tools with effects outside answer from the record, unless `live`.
"""

import asyncio
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import ray

from skyrl_gym.openenv import result_of
from skyrl_trainer.rollout.env_client import Host
from skyrl_trainer.rollout.env_worker import CRASHED, START_LIMIT, Call, EnvReply
from skyrl_trainer.rollout.pool import close_env_workers, start_env_workers
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.processes import start_ray
from skyrl_trainer.settings import Config
from skyrl_trainer.types import StopReason, Trajectory, Turn

OWN_FAILURES = ("The env's ", "The agent ", CRASHED, "environment.env_file")
"""How errors begin that an env causes again."""
EXCERPT = 60
"""Characters of a text that a difference shows."""
KEY = "replay"


@dataclass(frozen=True, slots=True)
class Difference:
    """Example: Difference(2, "reward", 1.0, 0.0) says "turn 2, reward: 1.0 was recorded, now it is 0.0"."""

    turn: int | None
    """None: the reset."""
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = "reset" if self.turn is None else f"turn {self.turn}"
        then, now, at = self.recorded, self.replayed, ""
        if isinstance(then, str) and isinstance(now, str):
            same = len(commonprefix([then, now]))  # noqa: RUF071
            at, start = f" from character {same}", max(0, same - EXCERPT // 3)
            then, now = then[start : start + EXCERPT], now[start : start + EXCERPT]
        return f"{where}, {self.field}{at}: {then!r} was recorded, now it is {now!r}"


def repeated(trajectory: Trajectory) -> tuple[list[Turn], str | None]:
    """The turns that the env answered, as they were sampled, or all of them and the error in the last, its own."""
    turns = [trajectory.turns[place] for place in trajectory.by_time()]
    error = trajectory.error or ""
    if trajectory.stop_reason is StopReason.ENV_ERROR and error.startswith(OWN_FAILURES):
        return turns, error
    if trajectory.stop_reason.failed and turns and not (turns[-1].info or turns[-1].reward_parts):
        turns.pop()
    return turns, None


def compare(trajectory: Trajectory, replies: list[EnvReply]) -> Difference | None:
    """replies: to the reset and the steps, up to the first that failed or ended the episode."""
    turns, failure = repeated(trajectory)
    for number, reply in enumerate(replies, -1):
        turn = None if number < 0 else number
        expected = failure if number == len(turns) - 1 else None
        if expected is not None or reply.error is not None:
            crashed = all((each or "").startswith(CRASHED) for each in (expected, reply.error))
            return None if crashed or reply.error == expected else Difference(turn, "error", expected, reply.error)
        for field, then, now in _pairs(trajectory.prompt if number < 0 else turns[number], reply):
            if then != now and not (then != then and now != now):  # a NaN is no difference
                return Difference(turn, field, then, now)
    if len(replies) <= len(turns):
        return Difference(len(replies) - 1, "observation", turns[len(replies) - 1].observation, None)
    return None


def _pairs(turn: Turn | list[dict[str, str]], reply: EnvReply) -> list[tuple[str, Any, Any]]:
    parts = reply.info.get("reward_parts")
    if isinstance(turn, list):
        said = {"user": reply.observation, "system": reply.info.get("instructions", "")}
        without = reply.info.get("instructions_without_tools")  # where the chat template shows them
        read = {each["role"]: each["content"] for each in turn}
        names = {"user": "observation", "system": "instructions"}
        return [(names[role], text, text if text == without else said[role]) for role, text in read.items()]
    return [
        ("observation", turn.observation, reply.observation),
        *((name, getattr(turn, name), getattr(reply, name)) for name in ("reward", "terminated", "truncated")),
        ("reward_parts", turn.reward_parts, parts if isinstance(parts, dict) else {}),
        ("success", bool(turn.info.get("success")), bool(reply.info.get("success"))),
    ]


class Player(AbstractContextManager["Player"]):
    """An EnvWorker as rollouts have them. No wait is without limit."""

    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        # A call's own limits (env_worker.py), and as long again for the close that follows it.
        self._limit = START_LIMIT + 4 * (step_timeout + 2)
        self._worker: Any = None
        self._stack = ExitStack()

    def play(self, trajectory: Trajectory, live: bool) -> list[EnvReply]:
        """Replies to the reset and the actions; the last has an error where the env failed."""
        turns, _ = repeated(trajectory)
        calls = [("reset", KEY, trajectory.sample)]
        for turn in turns:
            said = turn.info.get("skyrl/answer", turn.action)
            calls.append(("step", KEY, said, *(() if live else (turn.tool_calls,))))
        agent = trajectory.sample.agent
        if self._worker is None:
            if not ray.is_initialized():
                self._stack.enter_context(guarded())
                start_ray(Config())
                self._stack.callback(ray.shutdown)
            [self._worker] = start_env_workers(1, self._step_timeout, agent)
        return result_of(self._answers(calls, agent is not None))

    async def _answers(self, calls: list[Call], alone: bool) -> list[EnvReply]:
        """alone: in a process of its own, as in rollouts."""
        host, replies = Host(self._worker), list[EnvReply]()
        try:
            for call in calls:
                reply = await asyncio.wait_for(host.call(alone, *call), self._limit)
                replies.append(reply)
                if reply.error is not None or reply.terminated or reply.truncated:
                    return replies
            await asyncio.wait_for(host.call(alone, "close", KEY), self._limit)
        except TimeoutError:
            ray.kill(self._worker, no_restart=False)
            replies.append(EnvReply(error=CRASHED))
        return replies

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self._worker is not None:
                close_env_workers([self._worker])
