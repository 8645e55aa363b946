"""Held-out success of agents over several turns: the tiny policy on each family's small difficulty, from its recipe.

    python benchmarks/agents.py [--env tool_use webshop_lite alfworld_lite] [--seeds 0 1] [--out runs/agents]

Each recipe is trained with each seed, one run after the other, through the real command line. A run's figures are its
success on the 200 held-out tasks (val split, greedy) at the warm start, and at its last evaluation within 20 minutes of
reinforcement learning; minutes are those of the steps up to there: rollouts, learning, weight syncs and evaluations,
not the cloning before. A run is a folder, `OUT/tool_use/seed0`: a finished one is not run again, an unfinished one goes
on, one of other settings is refused; so families can be run one by one, and the table has those that were asked for.

The last line is one JSON object: {env: {"warmstart": x, "final": y, "minutes": m}}, means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

from skyrl_trainer.config import flatten, load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import read_metrics

WANTED = {"tool_use": 0.3, "webshop_lite": 0.3, "alfworld_lite": 0.2}
"""By how much success is to rise above the warm start."""
SEEDS = [0, 1]
TASKS = 200
LIMIT = 20 * 60.0
"""Seconds of reinforcement learning."""
SLACK = 130 * 60.0
"""Seconds for all else: the start, cloning, the last evaluation."""


def settings(env: str, seed: int, run: Path) -> list[str]:
    values = {"seed": seed, "run_name": f"{env}-{seed}", "run_dir": run.resolve(), "logger": "none"}
    return [f"data.val_size={TASKS}", *(f"trainer.{name}={value}" for name, value in values.items())]


def check(env: str, seed: int, run: Path) -> None:
    """Raises UserError if the folder holds a run of other settings."""
    if not (run / "config.yaml").is_file():
        return
    found = flatten(load_config(str(run / "config.yaml"), []))
    asked = flatten(load_config(env, settings(env, seed, run)))
    if other := [f"{name} was {found[name]!r}, is {asked[name]!r}" for name in asked if found[name] != asked[name]]:
        raise UserError(f"{run} has other settings ({'; '.join(other)}): give another --out, or delete it.")


def learning_seconds(run: Path) -> float:
    return sum(row["time/step"] for row in read_metrics(run) if row["step"])


def finished(env: str, run: Path) -> bool:
    steps = load_config(env, []).trainer.max_steps
    rows = read_metrics(run)
    return learning_seconds(run) > LIMIT or bool(rows and rows[-1]["step"] == steps and "eval/success" in rows[-1])


def train(env: str, seed: int, run: Path) -> None:
    """Trains, or goes on, until the recipe's end or the limit. Raises UserError when the run fails."""
    run.parent.mkdir(parents=True, exist_ok=True)
    log = run.parent / f"seed{seed}.log"
    command = [sys.executable, "-m", "skyrl_trainer", "train", env, *settings(env, seed, run)]
    until = time.monotonic() + LIMIT + SLACK
    with open(log, "ab") as out:
        # A session of its own: a terminal's Ctrl-C would reach it twice, and the second stops without saving.
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            while child.poll() is None and learning_seconds(run) <= LIMIT and time.monotonic() < until:
                time.sleep(1.0)
        finally:
            ended = child.poll() is not None
            if not ended:
                child.send_signal(signal.SIGTERM)  # a job in the background ignores SIGINT
            code = child.wait(SLACK)
    if not (finished(env, run) or (ended and code == 0)):
        last = [log, *log.read_text(errors="replace").splitlines()][-1]
        raise UserError(f"{env}, seed {seed}: stopped before the recipe's end and the limit ({last}); see {log}.")


def figures(run: Path) -> dict[str, float]:
    """{"warmstart", "final", "minutes"} of one run."""
    seconds, evaluations = 0.0, list[tuple[float, float]]()
    for row in read_metrics(run):
        seconds += row["time/step"] if row["step"] else 0.0
        if "eval/success" in row and seconds <= LIMIT:
            evaluations.append((row["eval/success"], seconds))
    return {"warmstart": evaluations[0][0], "final": evaluations[-1][0], "minutes": round(evaluations[-1][1] / 60, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", nargs="+", choices=WANTED, default=list(WANTED))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/agents"))
    args = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    try:
        for env in args.env:
            found = []
            for seed in args.seeds:
                run = args.out / env / f"seed{seed}"
                check(env, seed, run)
                if not finished(env, run):
                    print(f"{env}, seed {seed}", flush=True)
                    train(env, seed, run)
                found.append(figures(run))
                print(json.dumps({"env": env, "seed": seed, **found[-1]}), flush=True)
            result[env] = {key: round(mean(one[key] for one in found), 4) for key in found[0]}
            rise = result[env]["final"] - result[env]["warmstart"]
            print(f"{env}: {rise:+.3f}, wanted at least {WANTED[env]:+.1f}", flush=True)
    except UserError as error:
        print(f"agents: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("agents: stopped; the same command goes on.", file=sys.stderr)
        return 130
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
