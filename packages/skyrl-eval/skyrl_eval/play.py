"""Plays one try at an item with the agent loop that trains (rollout.episode), on an endpoint over HTTP."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from skyrl_eval.endpoint import Endpoint, MessagePrompt
from skyrl_trainer.agent.memory import AgentOptions
from skyrl_trainer.rollout.env_client import EnvClient
from skyrl_trainer.rollout.env_worker import EnvReply, plain
from skyrl_trainer.rollout.episode import EpisodeSettings, derive_seed, run_episode
from skyrl_trainer.rollout.rollout_worker import NoSlot
from skyrl_trainer.types import GenerationOutput, GenerationRequest, Sample, SamplingOptions, Trajectory

TOOL_STEPS, CODE_STEPS = 50, 100
EPISODE_SECONDS, STEP_SECONDS, CODE_STEP_SECONDS = 7200.0, 120.0, 600.0


class LocalEnv:
    """An env in this process, for those that run nothing that a model wrote; has RemoteEnv's methods."""

    replays, close_error = 0, None

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    async def reset(self) -> EnvReply:
        import gymnasium

        self._env = gymnasium.make(self._sample.env_id, disable_env_checker=True)
        observation, info = self._env.reset(seed=self._sample.seed, options=dict(self._sample.options))
        return EnvReply(observation, info=plain(info))

    async def step(self, action: str) -> EnvReply:
        call = asyncio.to_thread(self._env.step, action)  # its tools wait for other machines
        observation, reward, terminated, truncated, info = await asyncio.wait_for(call, STEP_SECONDS)
        return EnvReply(observation, float(reward), terminated, truncated, plain(info))

    async def close(self) -> None:
        pass


class Player:
    """`play` is what `solve` takes. `envs` makes envs in processes of their own; None: they are made here."""

    def __init__(
        self,
        endpoint: Endpoint,
        temperature: float,
        max_tokens: int,
        seed: int,
        more: dict[str, Any],
        envs: EnvClient | None = None,
    ) -> None:
        """more: joins every item's options["task"]: tools, executor."""
        self._endpoint, self._seed, self._more, self._envs = endpoint, seed, more, envs
        stops = (endpoint.prompt or MessagePrompt).stop_token_ids
        sampling = SamplingOptions(max_tokens, temperature, stop_token_ids=stops)
        steps = CODE_STEPS if envs else TOOL_STEPS if more.get("tools") else 1
        length, seeded = endpoint.max_model_len, temperature > 0
        self._settings = EpisodeSettings(sampling, steps, length, EPISODE_SECONDS, seeded, AgentOptions())

    async def play(self, sample: Sample, number: int) -> Trajectory:
        task = sample.options["task"] | self._more
        name = f"{sample.sample_id}/{number}"
        sample = replace(sample, options={"task": task})
        trajectory = Trajectory(name, sample, number, derive_seed(self._seed, name))
        prompt: Any = self._endpoint.prompt or MessagePrompt(task.get("image", ""))
        env: Any = self._envs.make(name, sample) if self._envs else LocalEnv(sample)
        usage: Counter[str] = Counter(prompt_tokens=0, completion_tokens=0, cached_tokens=0)

        async def generate(request: GenerationRequest) -> GenerationOutput:
            return await self._endpoint.generate(request, prompt, usage)

        await run_episode(trajectory, env, prompt, generate, NoSlot(), self._settings)
        trajectory.metrics |= usage
        return trajectory


@contextmanager
def env_processes(concurrency: int) -> Iterator[list[Any]]:
    """EnvWorkers, for envs that run what a model wrote: killed with all that they started when they hang."""
    import ray

    from skyrl_trainer.learner.guardian import start_guardian
    from skyrl_trainer.rollout.pool import EnvPool

    start_guardian()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=os.cpu_count())
    try:
        pool = EnvPool(min(concurrency, 2 * (os.cpu_count() or 1)), CODE_STEP_SECONDS)
        try:
            yield pool.handles
        finally:
            pool.close()
    finally:
        ray.shutdown()
