"""Evaluation of agents and of code: shipped inside the distribution skyrl-trainer."""
