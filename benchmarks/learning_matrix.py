"""Learning curves: the tiny policy on the quick-start task by PPO, GRPO, SAPO, GSPO, DAPO and CISPO, three seeds each.

    python benchmarks/learning_matrix.py [--seeds 0 1 2] [--algorithms ...] [--out runs/learning_matrix] [--report-only]
    python benchmarks/learning_matrix.py --seeds 100 --set sapo:trainer.learning_rate=2e-4 --out runs/try1     (tuning)

One run after another through the real command line, four optimizer steps a rollout, 500 held-out tasks every 10 steps,
greedy. All algorithms of a seed start from one clone, `OUT/clone/seed0`. A run is a folder, `OUT/sapo/seed0`: a
finished one is not run again, an unfinished one goes on, and the table has every finished run of OUT. Ctrl-C saves and
stops; the same command goes on. A run that was made with other settings than these is refused.

Writes the figures of docs/algorithms/learning.md, between its two marks; with other settings or seeds than the frozen
ones, OUT/learning.md. `scripts/plot_curve.py --matrix` draws the pictures. The last line is one JSON object:
{algorithm: {"warmstart": [...], "final": [...], "clipped": x}}, one number per seed; clipped: a mean over steps, seeds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from skyrl_trainer.config import flatten, load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import read_metrics

STEPS, SEEDS = 60, [0, 1, 2]
COMMON: dict[str, Any] = {"trainer.num_mini_batches": 4, "trainer.eval_interval": 10, "data.val_size": 500}
TUNED: dict[str, dict[str, Any]] = {
    "ppo": {"trainer.learning_rate": 2e-4, "trainer.algorithm.options": {"critic_learning_rate": 1e-3}},
    "grpo": {"trainer.learning_rate": 2e-4},
    "sapo": {
        "trainer.learning_rate": 2e-4,
        "trainer.algorithm.options": {"sapo_temperature_pos": 4.0, "sapo_temperature_neg": 4.2},
    },
    "gspo": {"trainer.learning_rate": 2e-4, "trainer.algorithm.options": {"epsilon": 0.05, "epsilon_high": 0.05}},
    "dapo": {"trainer.learning_rate": 2e-4},
    "cispo": {"trainer.learning_rate": 2e-4},
}
"""Tuned on seed 100 (but for cispo, which has what most have), then frozen; on top of the recipe and of COMMON."""
PLACES = {"trainer.run_dir", "trainer.policy.model.path"}
"""Settings that say where things are, and do not count when settings are compared."""
RUN_SECONDS = 4 * 3600.0  # limit of one run
PAGE = Path(__file__).parents[1] / "docs/algorithms/learning.md"
MARKS = ("<!-- figures -->", "<!-- end of figures -->")


def settings(name: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The command line of a run, or of the clone that a seed's runs start from, as overrides of the quick start."""
    values = COMMON | {"trainer.seed": seed, "trainer.run_name": f"{name}-{seed}", "trainer.logger": "none"}
    values |= {"trainer.run_dir": (args.out / name / f"seed{seed}").resolve(), "trainer.max_steps": args.steps}
    if name == "clone":
        values["trainer.max_steps"] = 0
    else:
        values["trainer.policy.model.path"] = (args.out / "clone" / f"seed{seed}" / "init/cloned").resolve()
        values |= {"trainer.algorithm.name": name, **TUNED[name]}
    given = [text.partition(":")[2] for text in args.set if text.partition(":")[0] in ("all", name)]
    return [f"{setting}={value}" for setting, value in values.items()] + given


def finished(run: Path, words: list[str]) -> bool:
    """Whether a run is complete. Raises UserError if its folder holds a run of other settings."""
    wanted = load_config("quickstart", words)
    if (run / "config.yaml").is_file():
        found, asked = flatten(load_config(str(run / "config.yaml"), [])), flatten(wanted)
        other = [f"{n} was {found[n]!r}, is {asked[n]!r}" for n in asked if n not in PLACES and found[n] != asked[n]]
        if other:
            raise UserError(f"{run} has other settings ({'; '.join(other)}): give another --out, or delete it.")
    rows = read_metrics(run)
    return bool(rows) and rows[-1]["step"] == wanted.trainer.max_steps and "eval/success" in rows[-1]


def train(words: list[str], log: Path) -> int:
    """Runs the command line; its exit code. A Ctrl-C is passed on, once: the run saves, then KeyboardInterrupt."""
    children: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def stop(number: int, frame: object) -> None:
        signals.append(number)
        for child in children:
            child.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with open(log, "ab") as out:
            command = [sys.executable, "-m", "skyrl_trainer", "train", "quickstart", *words]
            # A session of its own: otherwise a terminal's Ctrl-C would reach it twice, and the second stops at once.
            children.append(subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
            if signals:
                children[0].send_signal(signal.SIGINT)
            code = children[0].wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        children[0].kill()
        raise UserError(f"A run was not complete after {RUN_SECONDS:.0f} s: see {log}.") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals:
        raise KeyboardInterrupt
    return code


def run_all(args: argparse.Namespace) -> list[str]:
    """Trains what is not finished; returns a sentence for each run that failed. The others are run all the same."""
    names = [(name, seed) for seed in args.seeds for name in ("clone", *args.algorithms)]
    todo = [pair for pair in names if not finished(args.out / pair[0] / f"seed{pair[1]}", settings(*pair, args))]
    failures = []
    for number, (name, seed) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {name}, seed {seed}", flush=True)
        log = args.out / name / f"seed{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if train(settings(name, seed, args), log):
            failures.append(f"{name}, seed {seed}: {[log, *log.read_text(errors='replace').splitlines()][-1]}")
            print(failures[-1], file=sys.stderr)
    return failures


def results(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Of every finished run in OUT, one number per seed. Raises UserError where one seed has several warm starts."""
    found: dict[str, dict[str, list[float]]] = {}
    starts: dict[int, float] = {}
    for name in TUNED:
        for run in sorted(args.out.glob(f"{name}/seed*/"), key=lambda run: int(run.name[4:])):
            seed = int(run.name[4:])
            if not finished(run, settings(name, seed, args)):
                continue
            rows = read_metrics(run)
            start, *_, final = [row["eval/success"] for row in rows if "eval/success" in row]
            if starts.setdefault(seed, start) != start:
                raise UserError(f"{run} started at {start:g}, but another algorithm's at {starts[seed]:g}.")
            clipped = mean(row["clip_fraction"] for row in rows[1:])
            numbers = (seed, start, final, clipped, sum(row["time/step"] for row in rows) / 60)
            for key, value in zip(("seeds", "warmstart", "final", "clipped", "minutes"), numbers, strict=True):
                found.setdefault(name, {}).setdefault(key, []).append(value)
    return found


def figures(found: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> str:
    """The table, SAPO against the others, and the settings, as markdown."""
    lines = ["| algorithm | seeds | warm start | final | rise | mean rise | clip fraction | minutes per run |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    finals = {name: dict(zip(x["seeds"], x["final"], strict=True)) for name, x in found.items()}
    for name, x in found.items():
        rise = [final - start for start, final in zip(x["warmstart"], x["final"], strict=True)]
        cells = [f"[{name}]({name}.md)", ", ".join(f"{seed:.0f}" for seed in x["seeds"])]
        cells += [", ".join(f"{value:.3f}" for value in values) for values in (x["warmstart"], x["final"], rise)]
        cells += [f"{mean(rise):.3f}", f"{mean(x['clipped']):.4f}", f"{mean(x['minutes']):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "SAPO's final success, less that of another on the same seeds:", ""]
    sapo = finals.pop("sapo", {})
    for name, final in finals.items():
        if gaps := [sapo[seed] - final[seed] for seed in final if seed in sapo]:
            each, ahead = ", ".join(f"{gap:+.3f}" for gap in gaps), sum(gap > 0 for gap in gaps)
            lines.append(f"- {name}: {mean(gaps):+.3f} on average ({each}); ahead on {ahead} of {len(gaps)} seeds")
    shared = {"trainer.max_steps": args.steps} | COMMON
    words = [f"`{text}`" for text in (*(f"{key}={value}" for key, value in shared.items()), *args.set)]
    lines += ["", f"Settings on top of the recipe: {', '.join(words)}; of each algorithm:", ""]
    lines += ["| algorithm | settings |", "|---|---|"]
    for name, own in TUNED.items():
        lines.append(f"| {name} | {', '.join(f'`{key}={value}`' for key, value in own.items()) or 'as the recipe'} |")
    return "\n".join(lines) + "\n"


def write(text: str, args: argparse.Namespace, seeds: set[float]) -> Path:
    """Into the documentation if these are the frozen settings, and all seeds are its own."""
    if args.set or args.steps != STEPS or not seeds <= set(SEEDS):
        target = args.out / "learning.md"
    else:
        target = PAGE
        before, mark, rest = PAGE.read_text().partition(MARKS[0])
        text = f"{before}{mark}\n\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"
    target.write_text(text)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--algorithms", nargs="+", choices=TUNED, default=list(TUNED))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/learning_matrix"))
    parser.add_argument("--set", action="append", default=[], metavar="ALGORITHM:a.b=c", help="`all:` for every one")
    parser.add_argument("--report-only", action="store_true", help="train nothing")
    args = parser.parse_args()
    if wrong := [text for text in args.set if text.partition(":")[0] not in ("all", *TUNED)]:
        parser.error(f"--set {wrong[0]}: begin with all: or the name of an algorithm and a colon.")
    try:
        failures = [] if args.report_only else run_all(args)
        found = results(args)
    except UserError as error:
        print(f"learning_matrix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("learning_matrix: stopped; the same command goes on.", file=sys.stderr)
        return 130
    if found:
        print(write(figures(found, args), args, {seed for x in found.values() for seed in x["seeds"]}))
    kept = {name: {key: x[key] for key in ("warmstart", "final")} for name, x in found.items()}
    print(json.dumps({name: kept[name] | {"clipped": mean(x["clipped"])} for name, x in found.items()}))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
