"""What the cheapest policies score: a panel of cheats per family, beside random and the expert.

    python -m benchmarks.cheats [--family webshop_lite ...] [--episodes 1000] [--write]

Every cheat of cheat_policies.py plays the same episodes (seeds from 0, val split) at every difficulty in both
languages, through gym.make with its default wrappers. `--write` puts the tables into docs/environments/cheats.md. The
last line is one JSON object: {family: {policy: {"<lang>:<difficulty>": success}}}.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import gymnasium as gym

import skyrl_gym  # noqa: F401  # registers the environments
from benchmarks.cheat_policies import CHEATS, PLAYERS, Policy, at_random, best_constants
from benchmarks.cheat_programs import PROGRAMS, QUERIES, any_query, random_program, sql
from skyrl_gym.baseline import episodes as play
from skyrl_gym.baseline import expert

PAGE = Path(__file__).parents[1] / "docs/environments/cheats.md"
LANGS = ("en", "zh")
HIGHEST = {
    "alfworld_lite": 3,
    "arithmetic": 8,
    "code_lite": 5,
    "logic": 5,
    "sql_lite": 5,
    "tool_use": 6,
    "webshop_lite": 3,
    "words": 5,
}
"""Of each family, the highest difficulty; the lowest is 1."""
ACTED = ("alfworld_lite", "code_lite", "webshop_lite")
"""Where no answer is given, so that there is no constant one."""
PANELS = CHEATS | {"code_lite": PROGRAMS, "sql_lite": QUERIES}
CHANCE: dict[str, Policy] = {
    "alfworld_lite": at_random,
    "code_lite": random_program,
    "sql_lite": sql(any_query),
    "webshop_lite": at_random,
}
"""What it is to do anything at all, where there is more to do than to answer a question."""


def place(family: str, difficulty: int, lang: str) -> tuple[str, dict[str, Any]]:
    """The environment's id and its options, on the val split; some families are an option of text_math."""
    options = {"split": "val", "difficulty": difficulty, "lang": lang}
    if f"skyrl/{family}-v0" in gym.registry:
        return f"skyrl/{family}-v0", options
    return "skyrl/text_math-v0", options | {"family": family}


def made(family: str, difficulty: int, lang: str) -> Any:
    env_id, options = place(family, difficulty, lang)
    return gym.make(env_id, **options)


def cheats(family: str, difficulty: int, lang: str, episodes: int) -> dict[str, Policy]:
    """A cell's cheats by name; of questions, also the best constants, which hindsight over these episodes finds."""
    if family in ACTED:
        return PANELS[family]
    env = made(family, difficulty, lang)
    tasks = [(env.reset(seed=seed)[0], str(env.unwrapped.task.ground_truth)) for seed in range(episodes)]
    return {"best constant, with hindsight": best_constants(tasks), **PANELS[family]}


def success(family: str, difficulty: int, lang: str, policy: Policy | None, episodes: int) -> float:
    """The share of episodes that a policy solves; None is the expert."""
    agent = expert if policy is None else lambda _, history: policy(history)
    played = play(made(family, difficulty, lang), agent, range(episodes))
    return sum(solved for solved, _, _ in played) / episodes


def measured(family: str, episodes: int) -> dict[str, dict[str, float]]:
    """{policy: {"<lang>:<difficulty>": success}}, of random, the cheats, players and the expert."""
    scores: dict[str, dict[str, float]] = {}
    for lang in LANGS:
        for level in range(1, HIGHEST[family] + 1):
            panel = {"random": CHANCE[family]} if family in CHANCE else {}
            panel |= cheats(family, level, lang, episodes) | PLAYERS.get(family, {})
            for name, policy in {**panel, "expert": None}.items():
                share = success(family, level, lang, policy, episodes)
                scores.setdefault(name, {})[f"{lang}:{level}"] = share
                print(f"{family:<16}{name:<64}{lang:<4}{level}{share:>8.3f}", flush=True)
    return scores


def table(found: dict[str, dict[str, float]]) -> str:
    cells = list(next(iter(found.values())))
    lines = [["policy", *(cell.replace(":", ", ") for cell in cells)], ["---", *("---:" for _ in cells)]]
    lines += [[name, *(f"{scores[cell]:.3f}" for cell in cells)] for name, scores in found.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(family: str, found: dict[str, dict[str, float]], episodes: int) -> None:
    """Puts the family's section into the page, in place of the one there."""
    head, *sections = re.split(r"(?m)^(?=## )", PAGE.read_text(encoding="utf-8"))
    kept = [each.rstrip() for each in sections if not each.startswith(f"## {family}\n")]
    said = f"Success in {episodes:,} episodes of the val split, by language and difficulty."
    new = f"## {family}\n\n{said}\n\n{table(found)}"
    PAGE.write_text("\n\n".join([head.rstrip(), *sorted([*kept, new])]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="What cheats, random and the expert score.")
    parser.add_argument("--family", nargs="+", choices=HIGHEST, default=list(HIGHEST))
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/environments/cheats.md")
    args = parser.parse_args()
    result = {}
    for family in args.family:
        result[family] = measured(family, args.episodes)
        if args.write:
            write(family, result[family], args.episodes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
