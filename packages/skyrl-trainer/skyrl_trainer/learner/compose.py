"""What `trainer.algorithm.name` can name: a loss over GRPO or, with `_ppo` behind its name, over PPO."""

from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.registry import Registry, load

PPO_SUFFIX = "_ppo"
LOSSES = "skyrl_trainer.algorithms"
ALGORITHMS: Registry[type[PolicyLoss]] = Registry(
    "trainer.algorithm.name",
    {
        "grpo": "skyrl_trainer.learner.grpo:GRPO",
        "ppo": "skyrl_trainer.learner.ppo:PPO",
        "sapo": f"{LOSSES}.sapo:SAPOLossMixin",
        "gspo": f"{LOSSES}.gspo:GSPOLossMixin",
        "gspo_token": f"{LOSSES}.gspo:GSPOTokenLossMixin",
        "dapo": f"{LOSSES}.dapo:DAPOLossMixin",
        "dr_grpo": f"{LOSSES}.dr_grpo:DrGRPOLossMixin",
        "cispo": f"{LOSSES}.cispo:CISPOLossMixin",
        "dual_clip": f"{LOSSES}.dual_clip:DualClipLossMixin",
    },
)
register_algorithm = ALGORITHMS.register


def algorithm_class(name: str) -> type[GRPO]:
    """The class of this name, put together where need be. UserError with the names that there are."""
    over_ppo = name.endswith(PPO_SUFFIX) and name not in ALGORITHMS.names
    loss = ALGORITHMS.get(name.removesuffix(PPO_SUFFIX) if over_ppo else name)
    if not (isinstance(loss, type) and issubclass(loss, PolicyLoss)):
        raise UserError(f"trainer.algorithm.name={name} is {loss!r:.60}: it should be a class over PolicyLoss.")
    over = load("skyrl_trainer.learner.ppo:PPO") if over_ppo else GRPO
    if issubclass(loss, over):
        return loss
    if issubclass(over, loss):  # grpo_ppo is PPO
        return over
    return type(f"{loss.__name__}Over{over.__name__}", (loss, over), {})
