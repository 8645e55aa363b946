"""All that a plug-in file needs, in one import: docs/plug-ins.md has an example of each kind."""

from skyrl_trainer.algorithms.advantages import by_group, register_estimator, spread_over_tokens, trajectory_returns
from skyrl_trainer.algorithms.cispo import CISPOLossMixin
from skyrl_trainer.algorithms.dapo import DAPOLossMixin
from skyrl_trainer.algorithms.dr_grpo import DrGRPOLossMixin
from skyrl_trainer.algorithms.dual_clip import DualClipLossMixin
from skyrl_trainer.algorithms.gspo import GSPOLossMixin, GSPOTokenLossMixin
from skyrl_trainer.algorithms.losses import Reports, SampledTokens
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.algorithms.rewards import register_reward
from skyrl_trainer.algorithms.samplers import DynamicSampler, UniformSampler, register_sampler
from skyrl_trainer.algorithms.sapo import SAPOLossMixin
from skyrl_trainer.engine.actor import register_engine
from skyrl_trainer.engine.stepped import SteppedEngine
from skyrl_trainer.learner.compose import register_algorithm
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.ppo import PPO
from skyrl_trainer.learner.reward_model import RewardModel

__all__ = ["GRPO", "PPO", "LossOptions", "PolicyLoss", "Reports", "SampledTokens", "SteppedEngine", "register_engine"]
__all__ += ["CISPOLossMixin", "DAPOLossMixin", "DrGRPOLossMixin", "DualClipLossMixin", "GSPOLossMixin", "SAPOLossMixin"]
__all__ += ["DynamicSampler", "GSPOTokenLossMixin", "RewardModel", "UniformSampler", "by_group", "register_algorithm"]
__all__ += ["register_estimator", "register_reward", "register_sampler", "spread_over_tokens", "trajectory_returns"]
