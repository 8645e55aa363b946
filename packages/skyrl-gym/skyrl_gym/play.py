"""Episodes as a whole: the expert's, and a person's in the terminal."""

from __future__ import annotations

import sys
from typing import Any, cast

import gymnasium

from skyrl_gym.core import TextEnv
from skyrl_gym.registry import resolve_env_id


def num_tasks(env_id: str, options: dict[str, Any] | None = None) -> int:
    """How many distinct tasks an environment has under reset options, for example {"split": "val"}.

    Their ids are "<split>:<difficulty>:<lang>:<index>" with 0 <= index < the number.
    """
    env = gymnasium.make(resolve_env_id(env_id))
    try:
        return cast(TextEnv, env.unwrapped).num_tasks(options)
    finally:
        env.close()


def expert_trajectory(
    env_id: str, seed: int | None = None, options: dict[str, Any] | None = None
) -> list[dict[str, str]]:
    """An episode of the environment's expert, as chat messages.

    Returns: [{"role": "system", ...} if there are instructions, {"role": "user", ...}, {"role": "assistant", ...}, ...]
    """
    env = gymnasium.make(resolve_env_id(env_id))
    try:
        observation, info = env.reset(seed=seed, options=options)
        messages = [{"role": "system", "content": info["instructions"]}] if info["instructions"] else []
        done = False
        while not done:
            action = cast(TextEnv, env.unwrapped).expert_action()
            messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": action}]
            observation, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        return messages
    finally:
        env.close()


def play(env_id: str, seed: int | None, options: dict[str, Any]) -> None:
    """Lets a person play one episode: actions are lines of standard input; the end of input stops."""
    env = gymnasium.make(resolve_env_id(env_id))
    try:
        observation, info = env.reset(seed=seed, options=options)
        print(f"{env_id}, task {info['task_id']}\n{info['instructions']}".rstrip())
        done = False
        while not done:
            print(f"\n{observation}")
            if "admissible_actions" in info:
                print("You may:", ", ".join(info["admissible_actions"]))
            print("> ", end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                print("\nStopped.")
                return
            observation, reward, terminated, truncated, info = env.step(line.rstrip("\n"))
            parts = ", ".join(f"{name} {value:g}" for name, value in info["reward_parts"].items())
            print(f"reward {reward:g} ({parts})")
            done = terminated or truncated
        print(observation, "Solved." if info["success"] else "Not solved.", sep="\n" if observation else "")
    finally:
        env.close()
