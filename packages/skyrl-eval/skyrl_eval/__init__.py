"""Evaluation of agents and of code: shipped inside the distribution skyrl-trainer.

`import skyrl_eval` registers the environments of envs.yaml with Gymnasium.
"""

from pathlib import Path

from skyrl_gym.registry import load_registry

load_registry(Path(__file__).with_name("envs.yaml"))
