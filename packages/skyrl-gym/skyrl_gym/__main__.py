"""`python -m skyrl_gym` lists the environments; `python -m skyrl_gym play text_math --seed 3` plays one."""

from __future__ import annotations

import argparse
import sys

from skyrl_gym.play import play
from skyrl_gym.registry import list_envs


def _table() -> str:
    rows = [("id", "steps", "reward", "splits", "description")]
    for entry in list_envs():
        steps = str(entry.max_episode_steps or "-")
        reward = "{:g} to {:g}".format(*entry.reward_range) if entry.reward_range else "-"
        rows.append((entry.id, steps, reward, " ".join(entry.splits) or "-", entry.description))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m skyrl_gym", description="Lists the environments, or plays one.")
    commands = parser.add_subparsers(dest="command", metavar="{play}")
    player = commands.add_parser("play", help="play an environment in the terminal")
    player.add_argument("env", help="an id, or a short name such as text_math")
    player.add_argument("--seed", type=int, help="picks the task")
    player.add_argument("--difficulty", type=int)
    for option in ("split", "lang", "task_id"):
        player.add_argument(f"--{option.replace('_', '-')}")
    chosen = vars(parser.parse_args(arguments))
    if chosen.pop("command") is None:
        print(_table())
        return 0
    env, seed = chosen.pop("env"), chosen.pop("seed")
    try:
        play(env, seed, {name: value for name, value in chosen.items() if value is not None})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
