"""Evaluation of agents and of code: shipped inside the distribution skyrl-trainer.

Importing it registers its environments, so that `gymnasium.make("skyrl_eval:skyrl/question-v0")` works anywhere.
"""

from pathlib import Path

from skyrl_gym import load_registry

load_registry(Path(__file__).with_name("envs-registry.yaml"))
