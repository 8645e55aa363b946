"""RolloutWorker: an asyncio Ray actor that plays many episodes at once with one engine.

One coroutine a trajectory, and no barrier between turns: each waits for its own tokens and its own env only. The
exception is a deterministic rollout, where the engine must see the same requests in the same order in every run:
there all episodes start together and their requests leave in rounds.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
from functools import partial
from typing import Any

from skyrl_trainer.agent.prompt import load_chat_prompt
from skyrl_trainer.errors import EngineDied
from skyrl_trainer.rollout.env_client import EnvClient, settle
from skyrl_trainer.rollout.episode import EpisodeSettings, Slot, run_episode
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions, Trajectory


class NoSlot:
    """For deterministic rollouts: all episodes are in flight, and the engine bounds what it runs."""

    async def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Rounds:
    """Sends requests in rounds: when every living episode waits for tokens, all go at once, in trajectory order.

    So the engine's batches, and with them the last bit of every logit, do not depend on how fast an env answers.
    """

    def __init__(self, client: Any, living: int) -> None:
        self._client = client
        self._living = living
        self._waiting: dict[int, tuple[GenerationRequest, asyncio.Future[GenerationOutput]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, order: int, request: GenerationRequest) -> GenerationOutput:
        """`order`: the trajectory's place in the batch."""
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._waiting[order] = (request, future)
        self._leave_if_complete()
        try:
            return await future
        finally:
            if self._waiting.get(order, (None, None))[1] is future:  # timed out before the round left
                del self._waiting[order]

    def episode_over(self) -> None:
        self._living -= 1
        self._leave_if_complete()

    def _leave_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._living:
            round_ = [self._waiting[order] for order in sorted(self._waiting)]
            self._waiting = {}
            requests, futures = [request for request, _ in round_], [future for _, future in round_]
            task = asyncio.create_task(settle(futures, self._client.generate_round(requests)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class RolloutWorker:
    """Plays the episodes that the driver hands it; holds no state between two rollouts."""

    def __init__(self, tokenizer_path: str, generator: GeneratorConfig, client_id: str) -> None:
        self._prompt = load_chat_prompt(tokenizer_path)
        self._generator = generator
        # A restarted worker must not get what its predecessor asked for.
        self._client_id = f"{client_id}-{os.getpid()}"
        self._actors: tuple[Any, EnvClient] | None = None
        gc.freeze()  # a full collection would go through all that the libraries made, a quarter of a second

    async def pid(self) -> int:
        return os.getpid()

    async def stop_token_ids(self) -> tuple[int, ...]:
        return self._prompt.stop_token_ids

    async def rollout(
        self,
        engine: Any,
        env_workers: list[Any],
        trajectories: list[Trajectory],
        sampling: SamplingOptions,
        max_turns: int,
        deterministic: bool,
    ) -> list[Trajectory]:
        """Plays every given (still empty) trajectory to its end and returns them all, in the same order.

        An episode that fails comes back with its reason. Only the engine's death (EngineDied) ends the whole
        rollout; the other episodes are then cancelled and their envs closed.
        """
        # Handles of actors come with every call, the same ones: Ray does not restart an actor that it made with them.
        if self._actors is None:
            from skyrl_trainer.engine.client import EngineClient

            self._actors = EngineClient(engine, self._client_id), EnvClient(env_workers)
        client, envs = self._actors
        return await play_all(
            trajectories, self._prompt, client, envs, self._generator, sampling, max_turns, deterministic
        )


async def play_all(
    trajectories: list[Trajectory],
    prompt: Any,
    engine: Any,
    envs: EnvClient,
    generator: GeneratorConfig,
    sampling: SamplingOptions,
    max_turns: int,
    deterministic: bool,
) -> list[Trajectory]:
    """The rollout itself, on an engine client (`generate`, `generate_round`) and envs that a test can choose."""
    # In rounds everybody waits for everybody, so the limit covers as many waves as the engine needs for all.
    waves = math.ceil(len(trajectories) / generator.max_concurrency) if deterministic else 1
    timeout = generator.episode_timeout * max(1, waves)
    settings = EpisodeSettings(sampling, max_turns, generator.max_model_len, timeout, deterministic, generator.agent)
    rounds = Rounds(engine, len(trajectories))
    # With one turn, as many requests again wait in the engine's queue: the batch is full again before we know that an
    # answer is there. And as many episodes are reset ahead of their turn, so that no slot waits for an env.
    slots = generator.max_concurrency * (2 if max_turns == 1 else 1)
    slot: Slot = NoSlot() if deterministic else asyncio.Semaphore(slots)
    started = asyncio.Semaphore(len(trajectories) if deterministic else slots + generator.max_concurrency)

    async def play(order: int, trajectory: Trajectory) -> Trajectory:
        generate = partial(rounds.generate, order) if deterministic else engine.generate
        async with started:
            try:
                env = envs.make(trajectory.trajectory_id, trajectory.sample)
                return await run_episode(trajectory, env, prompt, generate, slot, settings)
            finally:
                rounds.episode_over()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(order, trajectory)) for order, trajectory in enumerate(trajectories)]
    except ExceptionGroup as errors:
        died, _ = errors.split(EngineDied)
        raise (died or errors).exceptions[0] from None
    return [task.result() for task in tasks]
