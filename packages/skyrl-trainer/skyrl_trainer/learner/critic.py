"""A critic: the value of each state, V(prompt and tokens so far), from a body's last layer and one linear head.

The body is a model of its own that starts as the policy's copy; with LoRA an adapter of its own on the policy's
weights; or, with `critic=backbone`, the policy itself, which the value loss then trains too. The head starts at zero:
a new critic expects nothing, whatever the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import lora
from skyrl_trainer.learner.checkpoint import State
from skyrl_trainer.learner.learner import Learner, Optimized, Scorer
from skyrl_trainer.learner.ranks import reshard, whole
from skyrl_trainer.types import TrainingBatch


class Critic(Optimized):
    """`values(batch, hidden_NH)` with a gradient; then `clip_gradients()` and `step()` as a Learner's.

    learning_rate: None for the policy's.
    """

    def __init__(
        self, config: Config, learner: Learner, kind: Literal["model", "backbone"], learning_rate: float | None
    ) -> None:
        self.config = config
        self.ranks = learner.ranks
        self.shares_hidden = kind == "backbone"
        self.body: Scorer = learner
        self.role: Callable[[], AbstractContextManager[object]] = nullcontext
        body_parameters: list[tuple[str, torch.nn.Parameter]] = []
        if kind == "model" and learner.lora is not None:
            if config.trainer.gradient_checkpointing:
                raise UserError(
                    "trainer.gradient_checkpointing computes layers again after the critic's adapter was switched off: "
                    "set it to false, or trainer.algorithm.options.critic=backbone."
                )
            lora.add_role(learner.model, "critic", learner.lora, config.trainer.seed)
            body_parameters = list(lora.parameters_of(learner.model, "critic").items())
            self.role = partial(lora.role, learner.model, "critic")
        elif kind == "model":
            self.body = Scorer(config, learner.model_path)
            self.body.model.to(learner.dtype)
            learner.ranks.shard(self.body.model)
            body_parameters = list(self.body.model.base_model.named_parameters())  # an untied output layer has no part
        hidden_size = learner.model.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(hidden_size, 1, bias=True).to(learner.device, learner.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.parameters = dict([*body_parameters, *((f"value.{n}", p) for n, p in self.head.named_parameters())])
        head, body = list(self.head.parameters()), [p for _, p in body_parameters]
        # Groups of their own, because sharded and whole weights cannot be in one fused step.
        self.parts = [part for part in (head, body) if part]
        groups = [{"params": part} for part in self.parts]
        self.make_optimizer(
            config, groups, learning_rate or config.trainer.learning_rate, learner.total_optimizer_steps
        )

    def values(self, batch: TrainingBatch, hidden_NH: torch.Tensor | None = None) -> torch.Tensor:
        """[N]: what is expected from the state before each sampled token on. hidden_NH: the policy's, if known."""
        if hidden_NH is None or not self.shares_hidden:
            with self.role():
                hidden_NH = self.body.hidden(batch)
        return self.head(hidden_NH.to(self.head.weight.dtype)).squeeze(-1)

    def clip_gradients(self) -> torch.Tensor:
        """Clips to `trainer.max_grad_norm`, apart from the policy's; returns the norm before."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter, DTensor):  # every learner has all of it, and the gradient of its own rows
                self.ranks.sum(parameter.grad)
        norms = [whole(get_total_norm([p.grad for p in part if p.grad is not None])) for part in self.parts]
        norm = torch.stack([each.to(self.head.weight.device) for each in norms]).norm()
        for part in self.parts:
            clip_grads_with_norm_(part, self.config.trainer.max_grad_norm, norm)
        return norm

    def step(self) -> float:
        learning_rate = super().step()
        reshard(self.body.model)
        return learning_rate

    def state_dict(self) -> State:
        reshard(self.body.model)
        tensors = self.state_tensors("critic_", self.parameters)
        return State(tensors, {"critic_scheduler": self.scheduler.state_dict()})

    def load_state_dict(self, state: State) -> None:
        reshard(self.body.model)
        self.load_state_tensors("critic_", self.parameters, state, self.ranks)
