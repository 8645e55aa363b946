"""One episode, one coroutine: reset, then generate and step until somebody says that it is over."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from skyrl_trainer.agent.prompt import ChatPrompt, first_messages
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_client import RemoteEnv
from skyrl_trainer.rollout.env_worker import EnvReply
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions, StopReason, Trajectory, Turn


class Slot(Protocol):
    """A place in the engine: held from an episode's first request until it will ask for no other token."""

    async def acquire(self) -> object: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What all episodes of a rollout share."""

    sampling: SamplingOptions
    max_turns: int
    max_model_len: int
    """Tokens of prompts, outputs and observations together."""
    timeout: float
    """Wall-clock seconds of the whole episode: reset, queues, tokens, steps. Waiting for a slot does not count."""
    seeded: bool
    """Give every request a generator of its own."""


def derive_seed(*parts: object) -> int:
    """A 48-bit seed from names and numbers, the same on every machine. Example: derive_seed(0, "3/0/1")."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest(), "big")


async def run_episode(
    trajectory: Trajectory,
    env: RemoteEnv,
    prompt: ChatPrompt,
    generate: Callable[[GenerationRequest], Awaitable[GenerationOutput]],
    slot: Slot,
    settings: EpisodeSettings,
) -> Trajectory:
    """Fills in the trajectory's turns, stop reason and error, and returns it; what it raises is the engine's death.

    Whatever happens, the env is closed and the slot free at the end.
    """
    start = time.monotonic()
    episode = _Episode(trajectory, env, prompt, generate, slot, settings)
    try:
        async with asyncio.timeout(settings.timeout) as episode.clock:
            await episode.play()
    except TimeoutError:
        limit = f"generator.episode_timeout={settings.timeout:g} seconds"
        episode.stop(StopReason.TIMEOUT, f"The episode was not over after {limit}; it was {episode.doing}.")
    except UserError:
        raise
    except Exception as error:
        # For example a chat template that refuses this observation: the others may go on.
        episode.stop(StopReason.ENV_ERROR, f"{type(error).__name__} while the episode was {episode.doing}: {error}")
    finally:
        episode.release()
        await env.close()
    trajectory.metrics["seconds"] = time.monotonic() - start
    if env.replays:
        trajectory.metrics["env_replays"] = float(env.replays)
    if env.close_error is not None:
        trajectory.metrics["env_close_errors"] = 1.0
    return trajectory


class _Episode:
    """The state of one episode while it runs."""

    def __init__(
        self,
        trajectory: Trajectory,
        env: RemoteEnv,
        prompt: ChatPrompt,
        generate: Callable[[GenerationRequest], Awaitable[GenerationOutput]],
        slot: Slot,
        settings: EpisodeSettings,
    ) -> None:
        self.trajectory = trajectory
        self.env = env
        self.prompt = prompt
        self.generate = generate
        self.slot = slot
        self.settings = settings
        self.clock: asyncio.Timeout
        self.doing = "in its env's reset"
        self._held = False

    def stop(self, reason: StopReason, error: str | None = None) -> None:
        self.trajectory.stop_reason = reason
        self.trajectory.error = error

    def release(self) -> None:
        if self._held:
            self._held = False
            self.slot.release()

    async def play(self) -> None:
        began = time.monotonic()
        reply = await self.env.reset()
        reset_seconds = time.monotonic() - began
        if reply.error is not None:
            return self.stop(StopReason.ENV_ERROR, reply.error)
        instructions = reply.info.get("instructions", "")
        self.trajectory.prompt = first_messages(instructions, reply.observation)
        new_ids = self.prompt.first(instructions, reply.observation)
        if len(new_ids) >= self.settings.max_model_len:
            limit = f"generator.max_model_len={self.settings.max_model_len}"
            error = f"The first prompt has {len(new_ids)} tokens, too many for {limit}."
            return self.stop(StopReason.ENGINE_ERROR, error)
        await self._take_slot()
        context: list[int] = []
        for number in range(self.settings.max_turns):
            context += new_ids
            turn = await self._ask(number, context, new_ids)
            if turn is None:
                return None
            context += turn.output_ids
            reply = await self._act(turn, reset_seconds if number == 0 else 0.0)
            if reply.error is not None:
                return self.stop(StopReason.ENV_ERROR, reply.error)
            cut = turn.output_ids[-1] not in self.settings.sampling.stop_token_ids
            if reply.terminated or reply.truncated:
                over = StopReason.TERMINATED if reply.terminated else StopReason.TRUNCATED
                return self.stop(StopReason.LENGTH if cut else over)
            if number + 1 == self.settings.max_turns:
                return self.stop(StopReason.LENGTH if cut else StopReason.MAX_TURNS)
            new_ids = self.prompt.observation(reply.observation, turn.output_ids)
            if len(context) + len(new_ids) >= self.settings.max_model_len:
                return self.stop(StopReason.LENGTH)

    async def _take_slot(self) -> None:
        """Waiting for a place in the engine is the rollout's business, so the episode's clock stands still."""
        loop = asyncio.get_running_loop()
        left = self.clock.when() - loop.time()  # type: ignore[operator]
        self.clock.reschedule(None)
        await self.slot.acquire()
        self._held = True
        self.clock.reschedule(loop.time() + left)

    async def _ask(self, number: int, context: list[int], new_ids: list[int]) -> Turn | None:
        """One turn of the policy; None when the engine refused the request."""
        self.doing = f"waiting for the tokens of turn {number}"
        trajectory, sampling = self.trajectory, self.settings.sampling
        room = self.settings.max_model_len - len(context)
        if room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room, min_tokens=min(room, sampling.min_tokens))
        seed = derive_seed(trajectory.seed, number) if self.settings.seeded else None
        began = time.monotonic()
        output = await self.generate(
            GenerationRequest(f"{trajectory.trajectory_id}#{number}", list(context), sampling, seed)
        )
        if number + 1 == self.settings.max_turns:
            self.release()
        if output.finish_reason == "error" or output.error is not None:
            self.stop(StopReason.ENGINE_ERROR, output.error or "The engine failed without a message.")
            return None
        turn = Turn(
            prompt_ids=new_ids,
            output_ids=output.output_ids,
            logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            action=self.prompt.decode(output.output_ids),
            seconds={"generate": time.monotonic() - began},
        )
        trajectory.turns.append(turn)
        return turn

    async def _act(self, turn: Turn, reset_seconds: float) -> EnvReply:
        self.doing = f"in its env's step {len(self.trajectory.turns) - 1}"
        began = time.monotonic()
        reply = await self.env.step(turn.action)
        turn.seconds["env"] = time.monotonic() - began + reset_seconds
        turn.observation, turn.reward = reply.observation, reply.reward
        turn.terminated, turn.truncated = reply.terminated, reply.truncated
        turn.info = reply.info
        parts = reply.info.get("reward_parts")
        if isinstance(parts, dict):
            turn.reward_parts = parts
        return reply
