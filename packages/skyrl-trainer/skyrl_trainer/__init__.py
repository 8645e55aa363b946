"""Reinforcement learning of language models as agents: vLLM rollouts across Ray actors, TRL-style trainers."""

__version__ = "0.1.0"
