"""Episodes as a whole: the expert's, and a person's in the terminal."""

import sys
from collections.abc import Iterator
from typing import Any

from gymnasium import Env, make
from gymnasium.spaces import Text

from skyrl_gym.core import TextEnv
from skyrl_gym.registry import resolve_env_id


def _text_env(env: Env[Any, Any]) -> TextEnv:
    if not isinstance(env.unwrapped, TextEnv):
        raise ValueError(f"{env.spec and env.spec.id} has no tasks and no expert: it is no TextEnv.")
    return env.unwrapped


def num_tasks(env_id: str, options: dict[str, Any] | None = None) -> int:
    """How many distinct tasks an environment has under reset options, for example {"split": "val"}."""
    with make(resolve_env_id(env_id)) as env:
        return _text_env(env).num_tasks(options)


def expert_trajectory(
    env_id: str, seed: int | None = None, options: dict[str, Any] | None = None
) -> list[dict[str, str]]:
    """An episode of the environment's expert, as chat messages; the instructions, if any, are the system's."""
    with make(resolve_env_id(env_id)) as env:
        return _expert_episode(env, seed, options or {})["messages"]


def demonstrations(env_id: str, n: int, options: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The expert's episodes of the first `n` tasks under reset options, always the same: {"messages": chat, "task_id",
    "env_id", "reward": the sum, "success"}; one that is hasty or searches may fail. ValueError if there are fewer."""
    with make(resolve_env_id(env_id)) as env:
        text_env, options = _text_env(env), options or {}
        count, chosen = text_env.num_tasks(options), text_env.defaults | options
        if not 0 < n <= count:
            raise ValueError(f"n is {n}, expected 1 to {count}: {env_id} has {count} tasks under these options.")
        for index in range(n):
            yield _expert_episode(env, index, options | {"task_id": text_env.task_id(chosen, index)})


def _expert_episode(env: Env[str, str], seed: int | None, options: dict[str, Any]) -> dict[str, Any]:
    if not {*str(options.get("opponent", "perfect")).split(",")} <= {"random", "perfect"}:  # a chat is one role's
        options = options | {"opponent": "random"}
    observation, info = env.reset(seed=seed, options=options)
    task_id, total, done = info.get("task_id"), 0.0, False
    messages = [{"role": "system", "content": told}] if (told := info.get("instructions")) else []
    while not done:
        action = _text_env(env).expert_action()
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": action}]
        observation, reward, terminated, truncated, info = env.step(action)
        total, done = total + float(reward), terminated or truncated
    episode = {"messages": messages, "task_id": task_id, "env_id": env.spec and env.spec.id}
    return episode | {"reward": total, "success": info.get("success", False)}


def play(env_id: str, seed: int | None, options: dict[str, Any]) -> None:
    with make(resolve_env_id(env_id)) as env:
        if not isinstance(env.action_space, Text):
            raise ValueError(f"{env_id} acts by {env.action_space}, and only text can be played.")
        observation, info = env.reset(seed=seed, options=options)
        print(f"{env_id}, task {info.get('task_id', '')}\n{info.get('instructions', '')}".rstrip())
        done = False
        while not done:
            print(f"\n{observation}")
            if "admissible_actions" in info:
                print("You may:", ", ".join(info["admissible_actions"]))
            print("> ", end="", flush=True)
            action = line = sys.stdin.readline() if sys.stdin else ""
            while line and action.count("```") % 2:
                action += (line := sys.stdin.readline())
            if not action:
                print("\nStopped.")
                return
            observation, reward, terminated, truncated, info = env.step(action.rstrip("\n"))
            parts = ", ".join(f"{name} {value:g}" for name, value in info.get("reward_parts", {}).items())
            print(f"reward {reward:g} ({parts})")
            done = terminated or truncated
        print(observation, "Solved." if info.get("success") else "Not solved.", sep="\n" if observation else "")
