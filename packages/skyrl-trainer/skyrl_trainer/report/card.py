"""`skyrl-trainer export --card`: README.md as Hugging Face reads it, with a run's figures, settings and curve."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

from skyrl_trainer import __version__
from skyrl_trainer.config import Config, flatten, load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.report.history import read_metrics
from skyrl_trainer.report.page import asset
from skyrl_trainer.types import StepMetrics

SUCCESS, REWARD, STEP = "eval/success", "reward/total", "skyrl_step"


def check_card(run: Path, policy: Path) -> None:
    """UserError where no card can be made, before anything is copied."""
    if find_spec("matplotlib") is None:
        raise UserError("--card draws a curve, which needs matplotlib: run `pip install 'skyrl-trainer[card]'`.")
    if not (run / "config.yaml").is_file() or not any(REWARD in row for row in read_metrics(run)):
        raise UserError(f"--card needs a run of reinforcement learning: config.yaml and metrics.jsonl in {run}.")
    if STEP not in json.loads((policy / "config.json").read_bytes()):
        raise UserError(f"--card needs the step of {policy}, which an older version did not note: train one more step.")


def write_card(run: Path, which: str, folder: Path) -> None:
    """Writes README.md and curve.png beside the policy in `folder`; which: "last" or "best"."""
    rows, values = read_metrics(run), flatten(load_config(str(run / "config.yaml"), []))
    step = json.loads((folder / "config.json").read_text())[STEP]
    chosen = next((row for row in rows if row["step"] == step), {"step": step})
    start = rows[0] if rows[0]["step"] == 0 else {}
    first = {**start, REWARD: next(row[REWARD] for row in rows if REWARD in row)}
    figures = [
        f"| `{key}` |" + "".join(f" {row[key]:.4g} |" if key in row else " |" for row in (first, chosen))
        for key in (*sorted(key for key in chosen if key.startswith("eval/")), REWARD)
    ]
    default, model = flatten(Config()), values["trainer.policy.model.path"]
    text = asset("card.txt").format(
        values=values,
        version=__version__,
        which=which,
        step=int(step),
        **{name: ", ".join(f"`{source}`" for source in values[f"data.{name}_data"]) for name in ("train", "val")},
        figures="\n".join(figures),
        settings="\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items() if value != default[key]),
    )
    data = load("huggingface_hub:ModelCardData")(
        base_model=None if model == "tiny" or Path(model).exists() else model,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", values["trainer.algorithm.name"], "skyrl-trainer"],
    )
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}", encoding="utf-8")
    _draw(rows, folder / "curve.png")


def _draw(rows: list[StepMetrics], out: Path) -> None:
    figure = load("matplotlib.figure:Figure")(figsize=(9, 3.2), layout="constrained")
    for axis, key in zip(figure.subplots(1, 2), (SUCCESS, REWARD), strict=True):
        points = [row for row in rows if math.isfinite(row.get(key, math.nan))]
        axis.plot([row["step"] for row in points], [row[key] for row in points])
        axis.set(title=key, xlabel="step")
    figure.savefig(out, dpi=120)
