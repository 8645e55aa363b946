"""RolloutWorker: an asyncio Ray actor that plays many episodes at once with one engine.

One coroutine per trajectory, and no barrier between turns: each waits for its own tokens and its own env only. But in
rounds (rollout/rounds.py) all episodes start together.
"""

import asyncio
import gc
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.errors import EngineDied
from skyrl_trainer.registry import load
from skyrl_trainer.rollout.env_client import EnvClient, RemoteEnv
from skyrl_trainer.rollout.episode import Episode, How
from skyrl_trainer.rollout.store import encoded
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.types import PLAYED, Trajectory


def places(generator: GeneratorConfig) -> tuple[int, int]:
    """How many episodes an engine has at a time, and how many are begun: more are reset ahead, lest a slot waits for an
    env. With one turn as many again wait in the engine's queue: its batch is full before we know of an answer."""
    slots = generator.max_concurrency * (2 if generator.max_turns == 1 else 1)
    return slots, slots + generator.max_concurrency


class Episodes:
    """Plays trajectories on an engine client (`generate`, `generate_round`) and envs; bounds how many at a time."""

    def __init__(
        self, prompt_of: Callable[[Trajectory], Any], engine: Any, envs: EnvClient, generator: GeneratorConfig
    ) -> None:
        """prompt_of: what builds a trajectory's prompts, a ChatPrompt for example."""
        self._prompt_of, self._engine, self._envs, self._generator = prompt_of, engine, envs, generator
        slots, started = places(generator)
        # An evaluation has places of its own: it does not wait for the episodes that play already.
        self._places = [(asyncio.Semaphore(slots), asyncio.Semaphore(started)) for _ in range(2)]
        traced = "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ
        self._episode = load("skyrl_trainer.rollout.tracing:TracedEpisode") if traced else Episode
        self._in_play, self._held = set[Episode](), False

    async def play(
        self, trajectories: list[Trajectory], how: How, over: Callable[[Trajectory], object] = lambda trajectory: None
    ) -> list[Trajectory]:
        """Plays every given (still empty) trajectory to its end and returns them all, in the same order.
        One that fails comes back with its reason; the engine's death (EngineDied) or a UserError cancels all.
        over: called with each that has ended.
        """
        generator = self._generator
        # In rounds everybody waits for everybody, so the limit covers as many waves as the engine needs for all.
        waves = math.ceil(len(trajectories) / generator.max_concurrency) if how.in_rounds else 1
        timeout = generator.episode_timeout * waves
        (slot, started), rounds = self._places[how.first], None
        if how.in_rounds:  # all are in flight, and the engine bounds what it runs
            rounds = load("skyrl_trainer.rollout.rounds:Rounds")(self._engine, len(trajectories))
            slot, started = (asyncio.Semaphore(len(trajectories)) for _ in range(2))

        async def play(order: int, trajectory: Trajectory) -> Trajectory:
            generate = partial(rounds.generate, order) if rounds else self._engine.generate
            async with started:
                env = RemoteEnv(self._envs, trajectory.trajectory_id, trajectory.sample)
                prompt = self._prompt_of(trajectory)
                stands = int(self._held)
                episode = self._episode(trajectory, env, prompt, generate, slot, how, generator, timeout, stands)
                self._in_play.add(episode)
                PLAYED.set(episode)
                try:
                    await episode.run()
                finally:
                    self._in_play.discard(episode)
                    if rounds:
                        rounds.episode_over()
            over(trajectory)
            return trajectory

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play(order, each)) for order, each in enumerate(trajectories)]
        except ExceptionGroup as errors:
            died, _ = errors.split(EngineDied)
            raise (died or errors).exceptions[0] from None
        return [task.result() for task in tasks]

    def hold(self, held: bool) -> None:
        """Every episode's clock stands still from hold(True) to hold(False): the engines are asleep."""
        if held != self._held:
            self._held = held
            for episode in self._in_play:
                episode.hold() if held else episode.go_on()


class RolloutWorker:
    """`start` hands it trajectories to play; `finished` gives back those that have ended."""

    def __init__(self, tokenizer_path: str, generator: GeneratorConfig, client_id: str) -> None:
        kwargs = generator.chat_template_kwargs
        self._prompt = load_chat_prompt(tokenizer_path, kwargs) if tokenizer_path else None
        self._generator = generator
        # A restarted worker must not get what its predecessor asked for.
        self._client_id = f"{client_id}-{os.getpid()}"
        self._episodes: Episodes | None = None
        self._ended = list[Trajectory]()
        self._here = set[str]()  # ids of what plays or was not collected
        self._error: Exception | None = None
        self._env_workers: list[Any] | None = None  # newer than those that come with a call (rollout/elastic.py)
        self._tasks, self._news = set[Any](), asyncio.Event()
        gc.freeze()  # else a full collection takes 0.25 s

    async def stop_token_ids(self) -> tuple[int, ...]:
        return (self._prompt or load("skyrl_trainer.agent.message_prompt:MessagePrompt")).stop_token_ids

    async def start(self, engine: Any, env_workers: list[Any], trajectories: list[Trajectory], how: How) -> None:
        """Begins to play those that are not here yet. `engine`: an actor's handle, or an Endpoint."""
        # Handles come with every call, the same ones: Ray does not restart an actor that it made with them.
        new = [each for each in trajectories if each.trajectory_id not in self._here]
        self._here |= {each.trajectory_id for each in new}
        self._tasks.add(asyncio.create_task(self._play(engine, env_workers, (new, how, self._over))))

    async def finished(self, at_least: int, timeout: float, started: None) -> list[Trajectory] | None:
        """Waits until so many trajectories have ended, and returns all that have; [] after `timeout` seconds. None: so
        many were never started here. `started`: from `start`. EngineDied or UserError when no more will come."""
        try:
            async with asyncio.timeout(timeout):
                while len(self._ended) < at_least and self._tasks and self._error is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return []
        if self._error is not None and not self._ended:  # else next time
            error, self._error = self._error, None
            self._here.clear()
            raise error
        if len(self._ended) < at_least and self._error is None:
            return None
        ended, self._ended = self._ended, []
        self._here -= {each.trajectory_id for each in ended}
        return ended

    async def hold(self, held: bool) -> None:
        """Episodes.hold."""
        if self._episodes is not None:
            self._episodes.hold(held)

    def _connect(self, engine: Any, envs: EnvClient) -> Episodes:
        if isinstance(engine, ray.actor.ActorHandle):
            with_parsers = load("skyrl_trainer.agent.parsers:with_parsers")
            prompt = self._prompt and with_parsers(self._prompt, self._generator.agent)
            client = load("skyrl_trainer.engine.client:EngineClient")(engine, self._client_id)
            return Episodes(lambda trajectory: prompt, client, envs, self._generator)
        client = load("skyrl_trainer.engine.endpoint:EndpointClient")(engine)
        message_prompt = load("skyrl_trainer.agent.message_prompt:MessagePrompt")

        def prompt_of(trajectory: Trajectory) -> Any:
            if self._prompt is not None:
                return self._prompt
            task = trajectory.sample.options.get("task") or {}
            prompt = client.conversations[trajectory.trajectory_id] = message_prompt(task.get("image", ""))
            return prompt

        return Episodes(prompt_of, client, envs, self._generator)

    def _over(self, trajectory: Trajectory) -> None:
        trajectory.encoded = encoded(trajectory)  # here is a core of its own for it
        self._ended.append(trajectory)
        self._news.set()

    async def _play(self, engine: Any, env_workers: list[Any], share: tuple[Any, ...]) -> None:
        try:
            if self._episodes is None:
                self._episodes = self._connect(engine, EnvClient(self._env_workers or env_workers))
            await self._episodes.play(*share)
        except Exception as error:
            self._error = error
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()
        finally:
            self._tasks.discard(asyncio.current_task())
            self._news.set()
