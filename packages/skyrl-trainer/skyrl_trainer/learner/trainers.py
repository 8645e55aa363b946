"""The algorithms that a recipe can name: mixins over GRPOTrainer and PPOTrainer."""

from __future__ import annotations

from skyrl_trainer.algorithms.cispo import CISPOLossMixin
from skyrl_trainer.algorithms.dapo import DAPOLossMixin
from skyrl_trainer.algorithms.dr_grpo import DrGRPOLossMixin
from skyrl_trainer.algorithms.dual_clip import DualClipLossMixin
from skyrl_trainer.algorithms.gspo import GSPOLossMixin, GSPOTokenLossMixin
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.sapo import SAPOLossMixin
from skyrl_trainer.learner.grpo import GRPOTrainer, register_trainer, trainer_class
from skyrl_trainer.learner.ppo import PPOTrainer

__all__ = ["register_trainer", "trainer_class"]


@register_trainer("sapo")
class SAPOTrainer(SAPOLossMixin, GRPOTrainer): ...


@register_trainer("gspo")
class GSPOTrainer(GSPOLossMixin, GRPOTrainer): ...


@register_trainer("gspo_token")
class GSPOTokenTrainer(GSPOTokenLossMixin, GRPOTrainer): ...


@register_trainer("dapo")
class DAPOTrainer(DAPOLossMixin, GRPOTrainer): ...


@register_trainer("dr_grpo")
class DrGRPOTrainer(DrGRPOLossMixin, GRPOTrainer): ...


@register_trainer("cispo")
class CISPOTrainer(CISPOLossMixin, GRPOTrainer): ...


@register_trainer("dual_clip")
class DualClipTrainer(DualClipLossMixin, GRPOTrainer): ...


@register_trainer("sapo_ppo")
class SAPOPPOTrainer(SAPOLossMixin, PPOTrainer): ...  # type: ignore[misc]


@register_trainer("gspo_ppo")
class GSPOPPOTrainer(GSPOLossMixin, PPOTrainer): ...  # type: ignore[misc]


@register_trainer("dapo_ppo")
class DAPOPPOTrainer(DAPOLossMixin, PPOTrainer):  # type: ignore[misc]
    class Options(LossOptions):
        sampler: str = "uniform"  # with a critic a group of equal returns teaches, too, even a group of one
