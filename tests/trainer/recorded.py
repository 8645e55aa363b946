"""Episodes of the real environments as a rollout records them, without a policy and without tokens."""

from __future__ import annotations

import random
from typing import Any

import gymnasium

import skyrl_gym  # noqa: F401  # registers its environments
from skyrl_trainer.agent.prompt import first_messages
from skyrl_trainer.rollout.env_process import plain
from skyrl_trainer.types import Sample, Trajectory, Turn

CLOCK = '<tool_call>{"tool": "python_exec", "args": {"code": "import time; print(time.time_ns())"}}</tool_call>'
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("skyrl/text_math-v0", {"difficulty": 2, "lang": "zh"}),
    ("skyrl/alfworld_lite-v0", {"split": "val"}),
    ("skyrl/webshop_lite-v0", {}),
    *(("skyrl/tool_use-v0", {"difficulty": level}) for level in (1, 3, 5, 6)),
]


def act(env: Any, info: dict[str, Any], rng: random.Random, expert: bool) -> str:
    """The expert's action; or, often, any that is possible, a look at the clock, or nonsense."""
    choices = [*info.get("admissible_actions", []), CLOCK, "\ud800 <tool_call>{</tool_call>", "search[red shoes]"]
    return str(env.unwrapped.expert_action()) if expert or rng.random() < 0.4 else rng.choice(choices)


def record(sample: Sample, number: int, expert: bool) -> Trajectory:
    """An episode as a rollout records it, without tokens."""
    rng, env = random.Random(number), gymnasium.make(sample.env_id)
    observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
    trajectory = Trajectory(f"1/{number}/0", sample, 0, 0, prompt=first_messages(info["instructions"], observation))
    done = False
    while not done:
        action = act(env, info, rng, expert)
        observation, reward, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        turn = Turn([], [], [], [], action, observation, float(reward), plain(info.pop("reward_parts")))
        turn.terminated, turn.truncated = terminated, truncated
        turn.tool_calls, turn.info = plain(info.pop("tool_calls", [])), plain(info)
        trajectory.turns.append(turn)
    env.close()
    return trajectory
