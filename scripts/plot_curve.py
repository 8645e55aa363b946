"""The README's picture: held-out success and reward of one or more runs, as a PNG or SVG.

    python scripts/plot_curve.py runs/quickstart --out docs/curve.svg

Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from skyrl_trainer.report.metrics import read_metrics


def plot(run_dirs: list[Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colors = ("#3067d6", "#d9722e", "#1f9d74", "#a04fc4")
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "axes.grid": True}
    with pyplot.rc_context({**style, "grid.alpha": 0.25, "svg.hashsalt": "skyrl"}):
        figure, (success, reward) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        for index, run in enumerate(run_dirs):
            rows, color = read_metrics(run), colors[index % len(colors)]
            for axis, key, marker in ((success, "eval/success", "o"), (reward, "reward/mean", "")):
                points = [(row["step"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
                if not points:
                    continue
                steps, values = zip(*points, strict=True)
                label = f"{run.name}: {values[0]:.2f} to {values[-1]:.2f}"
                axis.plot(steps, values, color=color, marker=marker, markersize=4, linewidth=1.8, label=label)
        success.set(title="Held-out success", xlabel="step", ylim=(0, 1.08))
        reward.set(title="Mean reward in training", xlabel="step")
        success.legend(frameon=False, loc="lower right")
        metadata = {"Date": None} if out.suffix == ".svg" else None
        figure.savefig(out, dpi=160, metadata=metadata)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    plot(args.runs, args.out)


if __name__ == "__main__":
    main()
