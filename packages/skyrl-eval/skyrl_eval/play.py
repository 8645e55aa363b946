"""Plays one try at an item with the agent loop that trains (rollout.episode), on an endpoint over HTTP."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gymnasium

from skyrl_eval.benchmarks.common import SWE_ENV
from skyrl_eval.endpoint import Endpoint, MessagePrompt
from skyrl_trainer.rollout.env_client import EnvClient
from skyrl_trainer.rollout.env_worker import EnvReply, plain
from skyrl_trainer.rollout.episode import EpisodeSettings, derive_seed, run_episode
from skyrl_trainer.rollout.rollout_worker import NoSlot
from skyrl_trainer.settings import AgentConfig
from skyrl_trainer.types import GenerationOutput, GenerationRequest, Sample, SamplingOptions, Trajectory

TOOL_STEPS, CODE_STEPS = 50, 100
EPISODE_SECONDS, STEP_SECONDS, CODE_STEP_SECONDS = 7200.0, 180.0, 600.0


class LocalEnv:
    """An env in this process, for those that run nothing that a model wrote; has RemoteEnv's methods."""

    replays, close_error = 0, None

    def __init__(self, sample: Sample) -> None:
        self._sample, self._env = sample, gymnasium.make(sample.env_id, disable_env_checker=True)
        self._calls_tools = bool(sample.options["task"].get("tools"))

    async def reset(self) -> EnvReply:
        observation, info = self._env.reset(seed=self._sample.seed, options=dict(self._sample.options))
        return EnvReply(observation, info=info)

    async def step(self, action: str) -> EnvReply:
        try:  # in a thread where tools wait for other machines
            call = asyncio.to_thread(self._env.step, action) if self._calls_tools else None
            done = await asyncio.wait_for(call, STEP_SECONDS) if call else self._env.step(action)
        except TimeoutError:
            return EnvReply(error=f"The tools did not answer within {STEP_SECONDS:.0f} seconds.", kind="timeout")
        observation, reward, terminated, truncated, info = done
        return EnvReply(observation, float(reward), terminated, truncated, plain(info))

    async def close(self) -> None:
        self._env.close()


class Player:
    """`play` is what `solve` takes. `envs`: processes for envs that run what a model wrote."""

    def __init__(self, endpoint: Endpoint, options: dict[str, Any], more: dict[str, Any], envs: list[Any]) -> None:
        """options: temperature, max_tokens and seed. more: joins every task: tools, executor."""
        self._endpoint, self._more, self._seed = endpoint, more, options["seed"]
        self._envs = EnvClient(envs) if envs else None
        stops = (endpoint.prompt or MessagePrompt).stop_token_ids
        sampling = SamplingOptions(options["max_tokens"], options["temperature"], stop_token_ids=stops)
        steps, seeded = CODE_STEPS if envs else TOOL_STEPS if more.get("tools") else 1, sampling.temperature > 0
        length = endpoint.max_model_len
        self._settings = EpisodeSettings(sampling, steps, length, EPISODE_SECONDS, seeded, AgentConfig())

    async def play(self, sample: Sample, number: int) -> Trajectory:
        sample = replace(sample, options={"task": sample.options["task"] | self._more})
        name = f"{sample.sample_id}/{number}"
        trajectory = Trajectory(name, sample, number, derive_seed(self._seed, name))
        prompt: Any = self._endpoint.prompt or MessagePrompt(sample.options["task"].get("image", ""))
        env: Any = self._envs.make(name, sample) if self._envs else LocalEnv(sample)
        usage: Counter[str] = Counter()

        async def generate(request: GenerationRequest) -> GenerationOutput:
            return await self._endpoint.generate(request, prompt, usage)

        await run_episode(trajectory, env, prompt, generate, NoSlot(), self._settings)
        trajectory.metrics |= usage
        return trajectory


@contextmanager
def env_processes(env_ids: set[str], concurrency: int) -> Iterator[list[Any]]:
    """EnvWorkers where an env runs what a model wrote: killed with all that they started when they hang. Else none."""
    if SWE_ENV not in env_ids:
        yield []
        return
    import ray

    from skyrl_trainer.rollout.pool import EnvPool
    from skyrl_trainer.run.guardian import start_guardian

    start_guardian()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=os.cpu_count())
    try:
        pool = EnvPool(min(concurrency, 2 * (os.cpu_count() or 1)), CODE_STEP_SECONDS)
        yield pool.handles
        pool.close()
    finally:
        ray.shutdown()
