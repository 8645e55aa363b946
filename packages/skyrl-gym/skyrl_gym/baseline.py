"""What `random`, `first`, `expert` (docs/environments/baselines.md) or a model behind an endpoint reach in an env."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import gymnasium

from skyrl_gym.chat_client import Unanswered, reply
from skyrl_gym.core import Info, TextEnv

Z = 1.959964
"""Standard deviations in a 95 % interval of the normal distribution."""
ANSWER_SECONDS = 300.0
"""Limit of an endpoint's answer."""
History = list[tuple[str, Info]]
"""Observation and info, of the reset and of every step since."""
Agent = Callable[[Any, History], str]
"""From an environment and its episode's history to the next action."""
Episode = tuple[bool, float, int]
"""Success, the sum of its rewards, steps."""


def episodes(env: Any, agent: Agent, seeds: Iterable[int], options: dict[str, Any] | None = None) -> Iterator[Episode]:
    """Unanswered ends its episode, and is told, where the episode had begun: it may be too long for the model."""
    for seed in seeds:
        history, total, over = [env.reset(seed=seed, options=options)], 0.0, False
        while not over:
            try:
                action = agent(env, history)
            except Unanswered as error:
                if len(history) == 1:
                    raise
                print(f"Seed {seed}, after {len(history) - 1} steps: {error}", file=sys.stderr)
                break
            observation, reward, terminated, truncated, info = env.step(action)
            history.append((observation, info))
            total, over = total + float(reward), terminated or truncated
        yield bool(history[-1][1].get("success")), total, len(history) - 1


def wilson(p: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share p of n. Example: wilson(0.2, 200) == (0.150, 0.261)."""
    if n == 0:
        return 0.0, 1.0
    centre, scale = p + Z * Z / (2 * n), 1 + Z * Z / n
    half = Z * (p * (1 - p) / n + Z * Z / (4 * n * n)) ** 0.5
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def figures(played: Sequence[Episode]) -> dict[str, Any]:
    """Means of two episodes or more, with 95 % intervals: Wilson's of success, the normal one of reward."""
    success, reward, steps = (list(map(float, column)) for column in zip(*played, strict=True))
    n, p, mean = len(played), fmean(success), fmean(reward)
    error = Z * stdev(reward) / n**0.5
    found = {"success": p, "success_95": list(wilson(p, n)), "reward": mean, "reward_95": [mean - error, mean + error]}
    return {"episodes": n, **found, "steps": fmean(steps)}


def expert(env: Any, history: History) -> str:
    if getattr(type(env.unwrapped), "expert_action", TextEnv.expert_action) is TextEnv.expert_action:
        raise ValueError(f"{env.spec.id} has no expert: ask a model, --agent http://... --model NAME.")
    return str(env.unwrapped.expert_action())


def make_agent(name: str, model: str | None, env_id: str, options: dict[str, Any]) -> Agent:
    if name.startswith(("http://", "https://")) != bool(model):
        raise ValueError("An endpoint and a model go together: --agent http://127.0.0.1:8000/v1 --model NAME.")
    if model:
        return _endpoint(name, model)
    others = {option: value for option, value in options.items() if option != "task_id"}
    agents = {"expert": expert, "first": _unseeing(lambda actions: actions[0], env_id, others)}
    agents["random"] = _unseeing(random.Random(0).choice, env_id, others)
    if name not in agents:
        raise ValueError(f"--agent is {name!r}, expected random, first, expert, or an endpoint's address, http://...")
    return agents[name]


def _unseeing(pick: Callable[[Sequence[Any]], Any], env_id: str, options: dict[str, Any]) -> Agent:
    other, over = gymnasium.make(env_id), True

    def agent(env: Any, history: History) -> str:
        nonlocal over
        if actions := history[-1][1].get("admissible_actions"):
            return str(pick(actions))
        if (over or len(history) == 1) and isinstance(text_env := other.unwrapped, TextEnv):
            index = pick(range(text_env.num_tasks(options)))
            other.reset(options=options | {"task_id": text_env.task_id(text_env.defaults | options, index)})
        action = expert(other, history)
        _, _, terminated, truncated, _ = other.step(action)
        over = terminated or truncated
        return action

    return agent


def _endpoint(url: str, model: str) -> Agent:
    messages: list[dict[str, str]] = []

    def agent(env: Any, history: History) -> str:
        observation, info = history[-1]
        if len(history) == 1:
            told = info.get("instructions")
            messages[:] = [{"role": "system", "content": told}] if told else []
        messages.append({"role": "user", "content": observation})
        own = (info.get("request") or {}).get("messages")  # of the role that acts, which knows no other's cards
        said = reply(url, model, own or messages, ANSWER_SECONDS)
        messages.append({"role": "assistant", "content": said})
        return said

    return agent
