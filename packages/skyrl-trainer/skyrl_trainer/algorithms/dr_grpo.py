"""Dr. GRPO, GRPO done right (arXiv 2503.20783, section 3.2): nothing divides by a length or a standard deviation.

loss = sum over tokens of PPO's clipped loss / (trajectories * a constant length),  A = R - mean_g
"""

from typing import Literal

import torch

from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss


class DrGRPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        scale_rewards: Literal["group", "batch", "none"] = "none"

    def reduction(self, lengths_M: torch.Tensor) -> torch.Tensor:
        generator = self.config.generator
        most = generator.agent.max_episode_tokens or generator.max_model_len
        longest = min(generator.max_completion_length * generator.max_turns, generator.max_model_len, most)
        return torch.full_like(lengths_M, 1.0 / (max(1, len(lengths_M)) * longest), dtype=torch.float64)
