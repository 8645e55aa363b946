"""Answers that are too long (DAPO, arXiv 2503.14476, sections 3.4 and 4.1): not learned from, or worth less.

    penalty(y) = 0                               where y <= L_max - L_cache
                 (L_max - L_cache - y) / L_cache  up to L_max
                 -1                               beyond

y counts the tokens that the policy sampled in the whole trajectory. The paper has L_max 20480 and L_cache 4096.
"""

from dataclasses import replace

from skyrl_trainer.config import GeneratorConfig
from skyrl_trainer.types import Trajectory


def token_budget(generator: GeneratorConfig) -> int:
    """L_max: most tokens that a trajectory may sample."""
    return min(generator.max_completion_length * generator.max_turns, generator.max_model_len)


def soft_penalty(tokens: int, budget: int, cache: int) -> float:
    """From 0 to -1 over the last `cache` tokens of the budget; 0 with `cache` 0, which turns it off."""
    return max(-1.0, min(0.0, (budget - cache - tokens) / cache)) if cache else 0.0


def without_sampled_tokens(trajectory: Trajectory) -> Trajectory:
    """The same episode as if every token had been given to the policy: its loss mask is zero everywhere."""
    turns = [
        replace(turn, prompt_ids=[*turn.prompt_ids, *turn.output_ids], output_ids=[], logprobs=[], weight_versions=[])
        for turn in trajectory.turns
    ]
    return replace(trajectory, turns=turns)
