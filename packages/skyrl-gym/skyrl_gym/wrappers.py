"""Wrappers for text environments: a window of history, a budget of invalid actions, episodes recorded and replayed."""

import json
from pathlib import Path
from typing import Any

from gymnasium import Env, Wrapper, make
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import RecordConstructorArgs

from skyrl_gym.data import plain, read_jsonl
from skyrl_gym.spaces import UnicodeText

TextWrapper = Wrapper[str, str, str, str]
Reset = tuple[str, dict[str, Any]]
Step = tuple[str, Any, bool, bool, dict[str, Any]]
FIELDS = ("observation", "reward", "terminated", "truncated")


class HistoryWindow(TextWrapper, RecordConstructorArgs):
    """The observation becomes a transcript: the first observation, which holds the task, and the last `turns` turns,
    each as "> action" and what it led to. A line "[...]" stands for turns that are left out."""

    def __init__(self, env: Env[str, str], turns: int) -> None:
        if turns < 1:
            raise ValueError(f"HistoryWindow: turns is {turns}, expected at least 1.")
        RecordConstructorArgs.__init__(self, turns=turns)
        super().__init__(env)
        self.observation_space = UnicodeText(1 << 40)
        self._limit = turns

    def reset(self, **kwargs: Any) -> Reset:
        self._first, info = self.env.reset(**kwargs)
        self._turns: list[str] = []
        return self._first, info

    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turns.append(f"> {action}\n{observation}")
        left_out = ["[...]"] if len(self._turns) > self._limit else []
        return "\n".join([self._first, *left_out, *self._turns[-self._limit :]]), reward, terminated, truncated, info


class InvalidActionBudget(TextWrapper, RecordConstructorArgs):
    """Ends an episode, truncated, at its `budget`-th invalid action; `info["invalid_actions"]` counts them."""

    def __init__(self, env: Env[str, str], budget: int) -> None:
        if budget < 1:
            raise ValueError(f"InvalidActionBudget: budget is {budget}, expected at least 1.")
        RecordConstructorArgs.__init__(self, budget=budget)
        super().__init__(env)
        self._budget = budget

    def reset(self, **kwargs: Any) -> Reset:
        observation, info = self.env.reset(**kwargs)
        self._invalid = 0
        return observation, info | {"invalid_actions": 0}

    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._invalid += not info.get("valid_action", True)
        truncated = truncated or (self._invalid >= self._budget and not terminated)
        return observation, reward, terminated, truncated, info | {"invalid_actions": self._invalid}


class RecordEpisodes(TextWrapper, RecordConstructorArgs):
    """Appends each episode to a jsonl file when it ends, the next begins, or at `close`: the spec with the
    wrappers below this one, the arguments of `reset`, actions, observations, rewards and calls. `replay` reads it."""

    def __init__(self, env: Env[str, str], path: str | Path) -> None:
        if env.spec is None:
            raise ValueError("RecordEpisodes takes environments of gymnasium.make only: replay needs their spec.")
        RecordConstructorArgs.__init__(self, path=str(path))
        super().__init__(env)
        try:
            self._path, self._spec = Path(path), json.loads(env.spec.to_json())
        except TypeError as error:
            raise ValueError(f"RecordEpisodes writes the arguments of gymnasium.make as JSON: {error}.") from error
        self._episode: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        # Without a seed, the generator goes on from where earlier episodes left it.
        generator = self.unwrapped.np_random.bit_generator.state if seed is None else None
        observation, info = self.env.reset(seed=seed, options=options)
        self._write()
        self._episode = {"env": self._spec, "np_random": generator, "reset": {"seed": seed, "options": options}}
        self._episode["steps"] = [[None, observation]]  # the first is the reset
        return observation, info

    def step(self, action: str) -> Step:
        outcome = self.env.step(action)
        if self._episode:
            self._episode["steps"].append([action, *outcome[:4], outcome[4].get("tool_calls")])
            if outcome[2] or outcome[3]:
                self._write()
        return outcome

    def close(self) -> None:
        self._write()
        super().close()

    def _write(self) -> None:
        episode, self._episode = self._episode, {}
        if episode:
            with self._path.open("a", encoding="utf-8") as file:  # ASCII: a lone surrogate has no UTF-8
                file.write(json.dumps(episode, default=plain) + "\n")


def replay(path: str | Path) -> int:
    """Plays a RecordEpisodes file again: how many episodes, or ValueError with line, step and field that differ."""
    episodes = list(read_jsonl(Path(path)))
    for where, episode in episodes:
        try:
            env: Any = make(EnvSpec.from_json(json.dumps(episode["env"])))
            if episode["np_random"] is not None:
                env.unwrapped.np_random.bit_generator.state = episode["np_random"]
            arguments, steps = episode["reset"], [(action, told) for action, *told in episode["steps"]]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: not an episode of RecordEpisodes ({error!r}).") from None
        for index, (action, recorded) in enumerate(steps):
            calls = recorded[4] if len(recorded) > 4 else None
            if calls and (feed := getattr(env.unwrapped, "feed_external", None)):
                feed(calls)
            outcome = env.step(action) if index else env.reset(**arguments)
            for name, then, now in zip(FIELDS, recorded, outcome, strict=False):
                if then != now:
                    raise ValueError(f"{where}, step {index}: {name} is {now!r}, but {then!r} was recorded.")
        env.close()
    return len(episodes)
