"""What imitation gets in the minutes that reinforcement learning took: cloning continued, from the same clone.

    python benchmarks/cloning.py runs/seed0 runs/seed1 ...

For each finished run of the quick start its first policy, the half-trained clone, goes on cloning the expert (other
demonstrations of the same training tasks) for as many seconds as the run's steps took, and is evaluated on the run's
held-out tasks. The last line is one JSON object: lists over the runs of `warmstart`, `reinforced`, `cloned`, `seconds`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from skyrl_trainer.config import load_config
from skyrl_trainer.report.history import read_metrics

DEMONSTRATIONS = 40_000
"""At most; gone through again and again until the time is up."""


def skyrl(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "skyrl_trainer", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def continued(run: Path, seconds: float, folder: Path) -> float:
    """Held-out success of the run's first policy after `seconds` more of cloning."""
    recipe = str(run / "config.yaml")
    seed = load_config(recipe, []).trainer.seed
    settings = {
        "trainer.seed": 1000 + seed,  # other demonstrations than the first time
        "trainer.policy.model.path": run / "init/cloned",
        "trainer.policy.model.warmstart.num_demonstrations": DEMONSTRATIONS,
        "trainer.policy.model.warmstart.epochs": 1000,
        "trainer.policy.model.warmstart.target_exact_match": 1,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    skyrl("warmstart", str(folder / "cloned"), recipe, *words, "--seconds", str(seconds))
    shown = skyrl("eval", str(folder / "cloned"), recipe)
    found = re.search(r"success\D+([\d.]+)", shown)
    assert found, shown
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    result: dict[str, list[float]] = {"warmstart": [], "reinforced": [], "cloned": [], "seconds": []}
    for run in parser.parse_args().runs:
        rows = read_metrics(run)
        evaluated = [row["eval/success"] for row in rows if "eval/success" in row]
        seconds = sum(row.get("time/step", 0.0) for row in rows)
        with tempfile.TemporaryDirectory() as folder:
            success = continued(run, seconds, Path(folder))
        for name, value in zip(result, (evaluated[0], evaluated[-1], success, seconds), strict=True):
            result[name].append(value)
        print(f"{run}: clone {evaluated[0]}, reinforced {evaluated[-1]}, cloned on {success}, {seconds:.0f} s each")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
