"""Pictures of learning curves, PNG or SVG, from the metrics.jsonl of run folders.

    python scripts/plot_curve.py runs/seed0 runs/seed1 --out docs/curve.svg
    python scripts/plot_curve.py --matrix runs/learning_matrix --out docs/algorithms
    python scripts/plot_curve.py --staleness runs/k0 runs/k2 runs/k8 --out docs/staleness.png

The first draws held-out success and reward of runs, the README's picture. The second draws what
benchmarks/learning_matrix.py made: learning.png, every algorithm's held-out success, and a picture of each algorithm.
The third draws what it made at several bounds of `trainer.max_staleness`, and prints the table.
Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import mean
from typing import Any

from skyrl_trainer.report.history import read_metrics

COLORS = ("#3067d6", "#d9722e", "#1f9d74", "#a04fc4", "#b8a01c", "#c2456b")
STYLE: dict[str, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "axes.grid": True}


def curve(run: Path, key: str) -> dict[float, float]:
    """Step -> value, where there is one."""
    return {row["step"]: row[key] for row in read_metrics(run) if math.isfinite(row.get(key, math.nan))}


def draw(out: Path, panels: int, fill: Any, width: float) -> None:
    """`fill(*axes)` draws into panels beside each other; the same curves give the same bytes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context({**STYLE, "grid.alpha": 0.25, "svg.hashsalt": "skyrl"}):
        figure, axes = pyplot.subplots(1, panels, figsize=(width, 3.2), layout="constrained", squeeze=False)
        fill(*axes[0])
        figure.savefig(out, dpi=160 if panels > 1 else 120, metadata={"Date": None} if out.suffix == ".svg" else None)
        pyplot.close(figure)


def plot_runs(runs: list[Path], out: Path) -> None:
    def fill(success: Any, reward: Any) -> None:
        for index, run in enumerate(runs):
            for axis, key, marker in ((success, "eval/success", "o"), (reward, "reward/mean", "")):
                if points := curve(run, key):
                    values = list(points.values())
                    label = f"{run.name}: {values[0]:.2f} to {values[-1]:.2f}"
                    color = COLORS[index % len(COLORS)]
                    axis.plot(points.keys(), values, color=color, marker=marker, ms=4, lw=1.8, label=label)
        success.set(title="Held-out success", xlabel="step", ylim=(0, 1.08))
        reward.set(title="Mean reward in training", xlabel="step")
        success.legend(frameon=False, loc="lower right")

    draw(out, 2, fill, 9)


def plot_matrix(folder: Path, out: Path) -> None:
    """learning.png has the mean over seeds and the range; <algorithm>.png each seed, sampled success as a thin line."""
    runs: dict[str, list[Path]] = {}
    for metrics in sorted(folder.glob("*/seed*/metrics.jsonl")):
        if metrics.parents[1].name != "clone" and curve(metrics.parent, "eval/success"):
            runs.setdefault(metrics.parents[1].name, []).append(metrics.parent)

    def all_algorithms(axis: Any) -> None:
        for color, (name, folders) in zip(COLORS, runs.items(), strict=False):
            curves = [curve(run, "eval/success") for run in folders]
            steps = sorted(set.intersection(*(set(points) for points in curves)))
            values = [[points[step] for points in curves] for step in steps]
            axis.plot(steps, list(map(mean, values)), color=color, marker="o", ms=3, lw=1.8, label=name)
            axis.fill_between(steps, list(map(min, values)), list(map(max, values)), color=color, alpha=0.1, lw=0)
        axis.set(title="Held-out success: mean and range over seeds", xlabel="step", ylim=(0, 1.03))
        axis.legend(frameon=False, loc="lower right")

    def one(name: str) -> Any:
        def fill(axis: Any) -> None:
            for color, run in zip(COLORS, runs[name], strict=False):
                points, sampled = curve(run, "eval/success"), curve(run, "success")
                label = f"{run.name.replace('seed', 'seed ')}: {next(iter(points.values())):.2f} to "
                label += f"{list(points.values())[-1]:.2f}"
                axis.plot(points.keys(), points.values(), color=color, marker="o", ms=3, lw=1.8, label=label)
                axis.plot(sampled.keys(), sampled.values(), color=color, lw=0.7, alpha=0.6)
            axis.set(title=f"{name}: success, held-out (dots) and sampled (thin)", xlabel="step", ylim=(0, 1.03))
            axis.legend(frameon=False, loc="lower right")

        return fill

    draw(out / "learning.png", 1, all_algorithms, 7)
    for name in runs:
        draw(out / f"{name}.png", 1, one(name), 6)


def plot_staleness(matrices: list[Path], out: Path) -> None:
    """Held-out success by algorithm, a panel for each matrix; the table has the mean at the end and each seed's."""
    found: list[dict[str, list[dict[float, float]]]] = []
    for matrix in matrices:
        runs = sorted(path.parent for path in matrix.glob("*/seed*/metrics.jsonl") if path.parents[1].name != "clone")
        curves: dict[str, list[dict[float, float]]] = {}
        for run in runs:
            curves.setdefault(run.parent.name, []).append(curve(run, "eval/success"))
        found.append(curves)
    for name in found[0]:
        ends = [[list(points.values())[-1] for points in curves[name]] for curves in found]
        cells = [f"{mean(each):.3f} ({', '.join(f'{end:.3f}' for end in each)})" for each in ends]
        print(f"| {name} | {' | '.join(cells)} |")

    def fill(*axes: Any) -> None:
        for axis, matrix, curves in zip(axes, matrices, found, strict=True):
            for color, (name, seeds) in zip(COLORS, sorted(curves.items()), strict=False):
                steps = sorted(set.intersection(*map(set, seeds)))
                means = [mean(points[step] for points in seeds) for step in steps]
                axis.plot(steps, means, color=color, marker="o", ms=3, lw=1.6, label=name)
            axis.set(title=f"{matrix.name}: held-out success", xlabel="step", ylim=(0, 1.03))
        axes[-1].legend(frameon=False, loc="lower right")

    draw(out, len(matrices), fill, 4.2 * len(matrices))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or one folder of a matrix")
    parser.add_argument(
        "--matrix", action="store_true", help="what benchmarks/learning_matrix.py made; --out: a folder"
    )
    parser.add_argument("--staleness", action="store_true", help="matrices at several bounds, one folder for each")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.matrix:
        plot_matrix(args.runs[0], args.out)
    elif args.staleness:
        plot_staleness(args.runs, args.out)
    else:
        plot_runs(args.runs, args.out)


if __name__ == "__main__":
    main()
