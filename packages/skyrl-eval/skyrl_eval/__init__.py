"""Evaluation of agents and of code: shipped inside the distribution skyrl-trainer.

Importing it registers its environments, so that `gymnasium.make("skyrl_eval:skyrl/question-v0")` works anywhere.
"""

from pathlib import Path
from typing import Any

from skyrl_gym import load_registry
from skyrl_trainer.registry import load

load_registry(Path(__file__).with_name("envs-registry.yaml"))


def exam(name: str, options: dict[str, Any], folder: Path) -> Any:
    """What `skyrl_eval:gsm8k?n=50` among held-out data stands for (skyrl_trainer.data.take_exams)."""
    return load("skyrl_eval.training:Exam")(name, options, folder)
