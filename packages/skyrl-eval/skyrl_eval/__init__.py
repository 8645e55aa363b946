"""Evaluation of agents and of code: shipped inside the distribution skyrl-trainer."""

from pathlib import Path

from skyrl_gym.registry import load_registry

load_registry(Path(__file__).with_name("envs-registry.yaml"))
