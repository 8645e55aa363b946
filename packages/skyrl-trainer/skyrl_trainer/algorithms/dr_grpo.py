"""Dr. GRPO, GRPO done right (arXiv 2503.20783, section 3.2): nothing divides by a length or a standard deviation.

    loss = sum over tokens of PPO's clipped loss / (trajectories * most tokens a trajectory may have),  A = R - mean_g

The most is max_completion_length * max_turns, or max_model_len where that is less. `scale_rewards` is none, and
another is refused; TRL 1.16's loss_type "dr_grpo" leaves that to the user.
"""

from typing import Literal

import torch

from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.algorithms.rewards import token_budget


class DrGRPOLossMixin(PolicyLoss):
    class Options(LossOptions):
        scale_rewards: Literal["none"] = "none"

    def reduction(self, lengths_M: torch.Tensor) -> torch.Tensor:
        longest = token_budget(self.config.generator)
        return torch.full_like(lengths_M, 1.0 / (max(1, len(lengths_M)) * longest), dtype=torch.float64)
