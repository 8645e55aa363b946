"""What random, first, the expert, and models behind endpoints reach in every family, difficulty and language.

    python -m benchmarks.baselines [--family sql_lite ...] [--episodes 200] [--write]
    python -m benchmarks.baselines --agent http://127.0.0.1:8000/v1 --model NAME --write    # adds a column

The agents are those of `python -m skyrl_gym baseline` (skyrl_gym/baseline.py); the seeds from 0 draw tasks of the val
split. `--write` puts what was measured into docs/environments/baselines.json, with date, machine and commit, and makes
baselines.md of that file anew. What policies have learned is of docs/figures, which scripts/write_figures.py puts
into every page. The last line is one JSON object: {agent: {family: {"<lang>:<difficulty>": figures}}}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

from benchmarks.cheats import HIGHEST, LANGS, place
from scripts import write_figures
from skyrl_gym.baseline import episodes, figures, make_agent

DOCS = Path(__file__).parents[1] / "docs"
FOUND = DOCS / "environments/baselines.json"
SIMPLE = ("random", "first", "expert")
HEAD = """# Baselines

What agents reach that learn nothing here, on tasks of the val split that the seeds 0, 1, ... draw. `random` takes any
admissible action, and `first` the first. Where an environment lists none, they do what its expert does in another task,
any or always the first one: the form of their actions is right, and what they say is not. Harder opponents, which know
a family's words and forms, are the [cheats](cheats.md). A cell is the success with its 95 % interval, the mean reward,
and the steps of an episode.

```bash
python -m skyrl_gym baseline text_math --agent random --split val --difficulty 3 --lang zh --episodes 200
python -m benchmarks.baselines --write                                                           # all of them
python -m benchmarks.baselines --agent http://127.0.0.1:8000/v1 --model NAME --write              # a model's column
```
"""
TAIL = """
## Policies that learned

The tiny policies that training makes: the clone of an expert that was stopped half-way, and what reinforcement learning
made of it. The [quick start](../figures.md#the-quick-start) (text_math) and the
[training notes](../agents/training-notes.md#results) say on which tasks and in which version of an environment.

| text_math, seed | clone | after reinforcement learning |
| --- | --- | --- |
| 0 | 0<!--quickstart.clone--> | 0<!--quickstart.trained--> |
| 1 | 0<!--quickstart.clone_1--> | 0<!--quickstart.trained_1--> |
| 2 | 0<!--quickstart.clone_2--> | 0<!--quickstart.trained_2--> |

<!-- table ../figures/agents_tool_use.json by_seed -->
<!-- end -->

<!-- table ../figures/agents.json by_seed -->
<!-- end -->

<!-- table ../figures/agents_webshop_lite.json by_seed -->
<!-- end -->
"""


def measured(agent: str, model: str | None, family: str, n: int) -> dict[str, dict[str, Any]]:
    """{"<lang>:<difficulty>": figures} of one family."""
    found = {}
    for lang in LANGS:
        for level in range(1, HIGHEST[family] + 1):
            env_id, options = place(family, level, lang)
            player = make_agent(agent, model, env_id, options)
            cell = figures(list(episodes(gym.make(env_id), player, range(n), options)))
            found[f"{lang}:{level}"] = {name: _short(value) for name, value in cell.items()}
            print(f"{family:<16}{model or agent:<24}{lang:<4}{level}{cell['success']:>8.3f}", flush=True)
    return found


def _short(value: Any) -> Any:
    return [_short(each) for each in value] if isinstance(value, list) else round(value, 4)


def made_by() -> dict[str, str]:
    """Date, machine and commit of a measurement."""
    names = re.findall(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    machine = f"{len(os.sched_getaffinity(0))} cores, {names[0] if names else 'unknown'}"
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=DOCS, text=True).strip()
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "commit": commit}


def page(agents: dict[str, Any]) -> str:
    """baselines.md."""
    parts = [HEAD]
    for family, highest in HIGHEST.items():
        columns = {name: each[family]["cells"] for name, each in agents.items() if family in each}
        lines = [["tasks", *columns], ["---"] * (1 + len(columns))]
        for cell in (f"{lang}:{level}" for lang in LANGS for level in range(1, highest + 1)):
            lines.append([cell.replace(":", ", "), *(_cell(found[cell]) for found in columns.values())])
        parts.append(f"\n## {family}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    runs = {", ".join(each["made"].values()): None for families in agents.values() for each in families.values()}
    return "".join([*parts, write_figures.written(TAIL), "\n## When and where\n\n", *(f"- {run}\n" for run in runs)])


def _cell(found: dict[str, Any]) -> str:
    low, high = found["success_95"]
    return f"{found['success']:.3f} ({low:.3f} to {high:.3f}); {found['reward']:.3f}; {found['steps']:.1f}"


def one_line_a_cell(agents: dict[str, Any]) -> str:
    text = json.dumps(agents, indent=1)
    return (
        re.sub(r'\{\s+("(?:episodes|date)"[^{}]+?)\s+\}', lambda match: f"{{{' '.join(match[1].split())}}}", text)
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="What simple agents, and models behind endpoints, reach.")
    parser.add_argument("--family", nargs="+", choices=HIGHEST, default=list(HIGHEST))
    parser.add_argument("--agent", nargs="+", default=SIMPLE, help="random, first, expert, or an endpoint's http://...")
    parser.add_argument("--model", help="an endpoint's")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="into docs/environments/baselines.json and .md")
    args = parser.parse_args()
    written = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    result: dict[str, Any] = {}
    try:
        for agent in args.agent:
            for family in args.family:
                found = measured(agent, args.model, family, args.episodes)
                result.setdefault(args.model or agent, {})[family] = found
                written.setdefault(args.model or agent, {})[family] = {"made": made_by(), "cells": found}
                if args.write:  # at once, as what follows may fail
                    FOUND.write_text(one_line_a_cell(written))
                    FOUND.with_suffix(".md").write_text(page(written), encoding="utf-8")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
