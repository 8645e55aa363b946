"""PPO (arXiv 1707.06347) for agents: a critic's values, GAE over sampled tokens, the clipped policy and value losses.

    loss = policy loss + value_coef * 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2),   mean over tokens

R is the return that GAE gives, V_old the critic before the rollout's first update.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from skyrl_trainer.algorithms.losses import token_mean
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.algorithms.rewards import differ
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import lora
from skyrl_trainer.learner.batch import Row
from skyrl_trainer.learner.grpo import GRPO, Meter
from skyrl_trainer.learner.model import Learner, Optimized, Scorer
from skyrl_trainer.learner.ranks import reshard
from skyrl_trainer.settings import Config
from skyrl_trainer.types import AdvantageBatch, LearnerState, RewardBatch, StepMetrics, TrainingBatch


class OptionsOverPPO(LossOptions):
    """What a loss over PPO has by default, whatever it has over GRPO."""

    sampler: str = "uniform"  # with a critic a group of equal returns teaches, too, even a group of one


class PPO(GRPO):
    """The estimator is GAE, the reduction the mean over all tokens; the rest is GRPO's."""

    def __init_subclass__(cls) -> None:
        for late in cls.__mro__[cls.__mro__.index(PPO) :]:
            if issubclass(late, PolicyLoss) and late not in PPO.__mro__:
                raise UserError(f"{cls.__name__}: put {late.__name__} before PPO, which hides it.")
        if "Options" not in vars(cls) and not issubclass(cls.__mro__[1], GRPO):  # a mixin is first: a loss over PPO
            cls.Options = OptionsOverPPO  # type: ignore[misc,assignment]

    class Options(LossOptions):
        critic: Literal["model", "backbone"] = "model"
        """A model (with LoRA an adapter) of its own, or a head on the policy's backbone."""
        critic_learning_rate: float | None = Field(None, gt=0)
        """Learning rate of the critic; null: five times the policy's."""
        gae_lambda: float = Field(1.0, ge=0, le=1)
        """Lambda of generalized advantage estimation; 0.95 forgets a reward within some 60 tokens."""

    value_clip = 0.2
    """How far a value may move in a rollout before its loss is clipped."""
    value_coef = 0.1
    """Weight of the value loss, before a critic clips its own gradient."""
    estimator_name = "gae"
    reduction = staticmethod(token_mean)
    critic: "Critic"
    explained_variance = 0.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        trainer = config.trainer
        if trainer.gradient_checkpointing and trainer.policy.model.lora.rank and self.options.critic == "model":
            raise UserError(
                "trainer.gradient_checkpointing computes layers again after the critic's adapter was switched off: set "
                "it to false, or trainer.algorithm.options.critic=backbone."
            )

    def start(self, learner: Learner, reference: Scorer | None = None) -> Self:
        rate = self.options.critic_learning_rate or 5 * self.settings.learning_rate  # SkyRL's 5e-6 to 1e-6
        self.critic = Critic(self.config, learner, self.options.critic, rate)
        return super().start(learner, reference)

    def needs_gradient(self, row: Row) -> bool:
        """The critic learns from every token."""
        return row.num_sampled > 0

    @torch.no_grad()
    def values(self, rows: list[Row]) -> Sequence[Tensor]:
        """V before each sampled token of each trajectory, float64 [N]."""
        known: dict[int, Tensor] = {}
        for indices, counts in self._passes(rows, range(len(rows))):
            values_N = self.critic.values(self._collate(rows, indices)).double().cpu()
            if counts:
                known |= zip(indices, values_N.split([rows[i].num_sampled for i in indices]), strict=True)
        everyones = self.learner.ranks.exchange(known)
        return [everyones.get(i, torch.zeros(0, dtype=torch.float64)) for i in range(len(rows))]

    def advantages(self, batch: RewardBatch, value: Sequence[Tensor] | None) -> AdvantageBatch:
        result = super().advantages(batch, value)
        if value and result.returns is not None:
            returns_N = torch.tensor([each for row in result.returns for each in row], dtype=torch.float64)
            error_N = returns_N - torch.cat([*value])
            few = not differ(returns_N.tolist())  # whose variance is none
            self.explained_variance = 0.0 if few else 1 - (error_N.var() / returns_N.var().clamp(min=1e-12)).item()
        return result

    def update(self, *args: Any, **kwargs: Any) -> StepMetrics:
        return super().update(*args, **kwargs) | {"value/explained_variance": self.explained_variance}

    def value_loss(self, batch: TrainingBatch, hidden_NH: Tensor, meter: Meter) -> Tensor:
        assert batch.values_N is not None and batch.returns_N is not None
        value_N = self.critic.values(batch, hidden_NH)
        old_N, returns_N = batch.values_N, batch.returns_N
        moved_N, clip = value_N - old_N, self.value_clip
        error_N = (value_N - returns_N).square()
        clipped_error_N = (old_N + moved_N.clamp(-clip, clip) - returns_N).square()
        loss_N = torch.maximum(error_N, clipped_error_N) / 2
        meter.mean("value/loss", loss_N)
        meter.mean("value/clip_fraction", (moved_N.abs() > clip) & (clipped_error_N > error_N))
        return self.value_coef * loss_N

    @property
    def models(self) -> "list[Learner | Critic]":
        return [self.learner, self.critic]

    def state_dict(self) -> LearnerState:
        mine, critic = super().state_dict(), self.critic.state_dict()
        return LearnerState(mine.tensors | critic.tensors, mine.numbers | critic.numbers)

    def load_state_dict(self, state: LearnerState) -> None:
        super().load_state_dict(state)
        self.critic.load_state_dict(state)


class Critic(Optimized):
    """The value of each state, V(prompt and tokens so far), from a body's last layer and one linear head.
    The body is a model of its own that starts as the policy's copy; with LoRA an adapter of its own on the policy's
    weights; or, with `critic=backbone`, the policy itself, which the value loss then trains too. The head starts at 0.
    """

    prefix = "critic_"

    def __init__(self, config: Config, learner: Learner, kind: Literal["model", "backbone"], rate: float) -> None:
        """rate: the learning rate."""
        self.config, self.ranks = config, learner.ranks
        self.shares_hidden = kind == "backbone"
        self.body: Scorer = learner
        self.role: Callable[[], AbstractContextManager[object]] = nullcontext
        body: dict[str, nn.Parameter] = {}
        if kind == "model" and learner.lora is not None:
            body = lora.add_role(learner.model, "critic", learner.lora, config.trainer.seed)
            self.role = partial(lora.role, learner.model, "critic")
        elif kind == "model":
            self.body = Scorer(config, learner.model_path, learner.ranks)
            body = dict(self.body.model.base_model.named_parameters())  # an untied output layer has no part
        self.head = nn.Linear(learner.model.config.get_text_config().hidden_size, 1).to(learner.device, learner.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.model = self.body.model
        self.parameters = body | {f"value.{name}": each for name, each in self.head.named_parameters()}
        parts = [[*self.head.parameters()], [*body.values()]]
        self.make_optimizer([part for part in parts if part], rate, learner.total_optimizer_steps)

    def trainable(self) -> dict[str, nn.Parameter]:
        reshard(self.model)
        return self.parameters

    def values(self, batch: TrainingBatch, hidden_NH: Tensor | None = None) -> Tensor:
        """[N]: what is expected from the state before each sampled token on. hidden_NH: the policy's, if known."""
        if hidden_NH is None or not self.shares_hidden:
            with self.role():
                hidden_NH = self.body.hidden(batch)
        return self.head(hidden_NH.to(self.head.weight.dtype)).squeeze(-1)
