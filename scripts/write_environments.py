"""The table at the head of each environment's page in docs/environments: what its code and its registry entry say.

    python scripts/write_environments.py

An environment's page has the name of its module, and a line MARK, behind which the table is written.
"""

from __future__ import annotations

import inspect
import re
from html import escape
from pathlib import Path
from typing import Any

import gymnasium as gym

import skyrl_gym

PAGES = Path(__file__).parents[1] / "docs/environments"
MARK = "<!-- scripts/write_environments.py writes this table -->\n"


def page_of(entry: skyrl_gym.EnvEntry) -> str:
    """Example: skyrl_gym.envs.text_math.env:RowsEnv is on the page text_math.md"""
    return entry.entry_point.split(".")[-2] + ".md"


def options_text(env: skyrl_gym.TextEnv) -> str:
    """Each reset option with its values, the default in bold."""
    found = []
    for name, values in env.choices.items():
        first, *others = [f"`{value}`" for value in values]
        found.append(f"`{name}`: " + ", ".join([f"**{first}**" if others else first, *others]))
    return "<br>".join(found)


def arguments_text(env: skyrl_gym.TextEnv) -> str:
    """The constructor's own arguments, which `reset` does not take."""
    parameters = inspect.signature(type(env)).parameters.values()
    own = [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "render_mode"]
    return "<br>".join(f"`{each.name}`: **`{each.default}`**" for each in own) or "none"


def reward_parts(env: Any) -> str:
    """The names of the parts of the rewards in an episode of the expert."""
    env.reset(seed=1)
    parts: dict[str, float] = {}
    ended = False
    while not ended:
        _, _, terminated, truncated, info = env.step(env.unwrapped.expert_action())
        parts |= info["reward_parts"]
        ended = terminated or truncated
    return ", ".join(f"`{name}`" for name in parts)


def table(entries: list[skyrl_gym.EnvEntry]) -> str:
    """entries: those of one page, the one that has tasks of its own first."""
    entry, *rows_only = entries
    env: Any = gym.make(entry.id)
    low, high = entry.reward_range or (float("-inf"), float("inf"))
    others = [f"`{each.id}`, which plays rows of a data set only" for each in rows_only]
    grammar = escape(entry.action_grammar, quote=False).replace("`", "&#96;")
    version = entry.id.rpartition("-")[2]
    rows = {
        "Registered ids": "<br>".join([f"`{entry.id}`", *others]),
        "Import": f'`gym.make("skyrl_gym:{entry.id}")`',
        "Action space": f"`{env.action_space}`<br>{grammar}",
        "Observation space": f"`{env.observation_space}`",
        "Rewards": f"{low:g} to {high:g} in an episode: the sum, over its steps, of {reward_parts(env)}",
        "Episode limit": f"{entry.max_episode_steps} steps" if entry.max_episode_steps else "none but the rules",
        "Options of `gym.make` and `reset`": options_text(env.unwrapped),
        "Arguments of `gym.make` alone": arguments_text(env.unwrapped),
        "Version history": f"{version}: the first; a [change of behaviour](write-your-own.md) will be a new version",
    }
    env.close()
    cells = "".join(f"| {name} | {text.replace('|', chr(92) + '|')} |\n" for name, text in rows.items())
    return f"| | |\n|---|---|\n{cells}"


def page_texts() -> dict[Path, str]:
    """The pages as they should be."""
    pages: dict[str, list[skyrl_gym.EnvEntry]] = {}
    for entry in skyrl_gym.list_envs():
        if not (entry.id.startswith("skyrl/") and entry.entry_point.startswith("skyrl_gym.envs.")):  # games: by hand
            continue
        pages.setdefault(page_of(entry), []).append(entry)
    texts = {}
    for name, entries in pages.items():
        head, mark, rest = (PAGES / name).read_text(encoding="utf-8").partition(MARK)
        if not mark:
            raise ValueError(
                f"docs/environments/{name} has no line {MARK.strip()!r}: put it below the first paragraph."
            )
        texts[PAGES / name] = head + MARK + table(entries) + re.sub(r"^(\|.*\n)+", "", rest)
    return texts


def main() -> None:
    for path, text in page_texts().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
