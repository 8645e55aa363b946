"""What a policy learns from a teacher's word on each token, and from rewards, by the tokens that it has sampled.

    python benchmarks/distillation.py [--steps 200]

The quick start trains the teacher; examples/distill.py then trains the same clone of the expert again, without a reward
and with one try in place of eight. Success is of the same 500 held-out tasks. The last line is one JSON object:
`reward` and `teacher` are lists of (tokens sampled so far, success), and `alike` is success at about as many tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from skyrl_trainer.report.history import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "distill.py"


def train(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "skyrl_trainer", "train", *words], check=True)


def curve(folder: Path) -> list[tuple[int, float]]:
    tokens, found = 0.0, []
    for row in read_metrics(folder):
        tokens += row.get("tokens", 0.0)
        if "eval/success" in row:
            found.append((int(tokens), row["eval/success"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Distillation beside reinforcement, by sampled tokens.")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as place:
        rewarded, taught = Path(place, "rewarded"), Path(place, "taught")
        shared = ["quickstart", f"trainer.max_steps={steps}", "trainer.logger=none"]
        train(*shared, f"trainer.run_dir={rewarded}")
        own = [f"trainer.algorithm.plugin_file={EXAMPLE}", "trainer.algorithm.name=distill"]
        own += ["trainer.algorithm.advantage_estimator=teacher", "generator.num_generations=1"]
        own += [f"trainer.algorithm.options.teacher={rewarded / 'model' / 'best'}", f"trainer.run_dir={taught}"]
        train(*shared, *own)
        reward, teacher = curve(rewarded), curve(taught)
    most = teacher[-1][0]
    nearest = min(reward, key=lambda point: abs(point[0] - most))
    figures = {"teachers_success": max(success for _, success in reward), "start": teacher[0][1]}
    figures |= {"taught": teacher[-1][1], "taught_tokens": most, "alike": nearest[1], "alike_tokens": nearest[0]}
    print(json.dumps(figures | {"reward": reward, "teacher": teacher}))


if __name__ == "__main__":
    main()
