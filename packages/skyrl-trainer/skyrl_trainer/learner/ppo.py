"""PPO (arXiv 1707.06347) for agents: a critic's values, GAE over sampled tokens, the clipped policy and value losses.

    loss = policy loss + value_coef * 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2),   mean over tokens

R is the return that GAE gives, V_old the critic before the rollout's first update. A critic with a body of its own has
its own optimizer and clipping, so that `value_coef` matters only where the critic is the policy's own backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field

from skyrl_trainer.algorithms.losses import token_mean
from skyrl_trainer.algorithms.options import LossOptions
from skyrl_trainer.learner.batch import Row, with_end
from skyrl_trainer.learner.checkpoint import State
from skyrl_trainer.learner.critic import Critic
from skyrl_trainer.learner.grpo import GRPOTrainer, Meter, register_trainer
from skyrl_trainer.learner.learner import Learner, Scorer
from skyrl_trainer.types import AdvantageBatch, RewardBatch, StepMetrics, TrainingBatch


@register_trainer("ppo")
class PPOTrainer(GRPOTrainer):
    """The estimator is GAE, the reduction the mean over all tokens; the rest is GRPO's, and loss mixins fit."""

    class Options(LossOptions):
        critic: Literal["model", "backbone"] = "model"  # a model (with LoRA an adapter) of its own, or the policy's
        critic_learning_rate: float | None = Field(None, gt=0)  # None: the policy's
        gae_lambda: float = Field(0.95, ge=0, le=1)
        value_clip: float = Field(0.2, gt=0)
        value_coef: float = Field(0.1, gt=0)

    estimator_name = "gae"
    reduction = staticmethod(token_mean)
    critic: Critic
    explained_variance = 0.0

    def start(self, learner: Learner, reference: Scorer | None = None) -> Self:
        self.critic = Critic(self.config, learner, self.options.critic, self.options.critic_learning_rate)
        return super().start(learner, reference)

    def needs_gradient(self, row: Row) -> bool:
        """The critic learns from every token."""
        return row.num_sampled > 0

    @torch.no_grad()
    def values(self, rows: list[Row]) -> Sequence[torch.Tensor]:
        """V before each sampled token of each trajectory and behind its last one, float64 [n + 1]."""
        longer = [with_end(row) if row.num_sampled else row for row in rows]
        known: dict[int, torch.Tensor] = {}
        for indices, counts in self._passes(longer, range(len(longer))):
            values_N = self.critic.values(self._collate(longer, indices)).double().cpu()
            if counts:
                known |= zip(indices, values_N.split([longer[i].num_sampled for i in indices]), strict=True)
        everyones = self.learner.ranks.exchange(known)
        return [everyones.get(i, torch.zeros(1, dtype=torch.float64)) for i in range(len(rows))]

    def advantages(self, batch: RewardBatch, value: Sequence[torch.Tensor] | None) -> AdvantageBatch:
        """GAE's; also says how much of the returns' variance the critic explained."""
        result = super().advantages(batch, value)
        if value and result.returns is not None:
            masks = [torch.tensor(t.loss_mask(), dtype=torch.bool) for t in batch.trajectories]
            returns_N = torch.cat([torch.tensor(r)[m] for r, m in zip(result.returns, masks, strict=True)])
            error_N = returns_N - torch.cat([values_N1[:-1] for values_N1 in value])
            self.explained_variance = 1 - (error_N.var() / returns_N.var().clamp(min=1e-12)).item()
        return result

    def update(self, *args: Any, **kwargs: Any) -> StepMetrics:
        metrics = super().update(*args, **kwargs)
        return metrics | {"value/explained_variance": self.explained_variance}

    def value_loss(self, batch: TrainingBatch, hidden_NH: torch.Tensor, meter: Meter) -> torch.Tensor:
        assert batch.values_N is not None and batch.returns_N is not None
        value_N, old_N, returns_N = self.critic.values(batch, hidden_NH), batch.values_N, batch.returns_N
        clip = self.options.value_clip
        error_N = (value_N - returns_N).square()
        clipped_error_N = (old_N + (value_N - old_N).clamp(-clip, clip) - returns_N).square()
        loss_N = torch.maximum(error_N, clipped_error_N) / 2
        meter.mean("value/loss", loss_N)
        meter.mean("value/clip_fraction", clipped_error_N > error_N)
        return self.options.value_coef * loss_N

    @property
    def models(self) -> list[Learner | Critic]:
        return [self.learner, self.critic]

    def state_dict(self) -> State:
        mine, critic = super().state_dict(), self.critic.state_dict()
        return State(mine.tensors | critic.tensors, mine.numbers | critic.numbers)

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.critic.load_state_dict(state)
