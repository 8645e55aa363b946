"""GRPO on a rollout: advantages, mini-batches, micro-batches, optimizer steps. `update` is all that the loop calls."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from skyrl_trainer.algorithms.advantages import estimator, gae
from skyrl_trainer.algorithms.losses import SampledTokens, adapted, k3
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.errors import NothingLearned, UserError
from skyrl_trainer.learner.batch import Row, collate, cut, make_rows, record_advantages, set_advantages
from skyrl_trainer.learner.checks import check_finite, check_layout, check_options, check_pair, check_shapes, not_finite
from skyrl_trainer.learner.meter import Meter
from skyrl_trainer.learner.model import Learner, Scorer
from skyrl_trainer.settings import Config
from skyrl_trainer.types import AdvantageBatch, LearnerState, RewardBatch, StepMetrics, TrainingBatch
from skyrl_trainer.user_file import blaming


class GRPO(PolicyLoss):
    """Group relative policy optimization (arXiv 2402.03300) with PPO's clip, and TRL's names."""

    learner: Learner
    reference: Scorer | None = None
    estimator_name: ClassVar[str | None] = None
    """The algorithm's own estimator; None where the recipe chooses."""

    def __init__(self, config: Config) -> None:
        """UserError for settings that contradict each other; nothing is loaded before `start`."""
        self.settings = config.trainer
        self._estimate = estimator(self.estimator_name or self.settings.algorithm.advantage_estimator)
        if self._estimate is gae and (type(self).values, type(self).update) == (GRPO.values, GRPO.update):
            gae(None, None)  # type: ignore  # raises
        super().__init__(config)
        check_options(config, self.options, self.estimator_name)
        if config.generator.temperature == 0:
            raise UserError("generator.temperature=0 leaves nothing to learn from; set it above 0 (1.0 is usual).")

    def start(self, learner: Learner, reference: Scorer | None = None) -> Self:
        """Takes the models. reference: the frozen policy that the run started from; needed when `beta` is above 0."""
        if self.beta > 0 and reference is None:
            raise UserError("trainer.algorithm.options.beta is above 0, which needs a reference policy: pass one.")
        self.learner, self.reference = learner, reference
        return self

    def advantages(self, batch: RewardBatch, value: Sequence[Tensor] | None) -> AdvantageBatch:
        return check_layout(self._estimate(batch, self.options, value), batch)

    def needs_gradient(self, row: Row) -> bool:
        """Where every advantage is 0 and nothing else is in the loss, the gradient is zero: no pass is made."""
        return row.num_sampled > 0 and (self.beta > 0 or self.options.entropy_coef != 0 or bool(row.advantages.any()))

    def update(
        self,
        batch: RewardBatch,
        old_logprob: Sequence[Tensor] | None = None,
        value: Sequence[Tensor] | None = None,
        reward: list[list[float]] | None = None,
    ) -> StepMetrics:
        """Learns from one rollout: `num_iterations` epochs of `num_mini_batches` optimizer steps.
        May be given, if known: old_logprob and a critic's value, [N] per trajectory; reward, per trajectory and turn.
        UserError for a loss or gradient that is not finite, NothingLearned before the first optimizer step.
        """
        before = self.learner.optimizer_steps
        try:
            with blaming():
                return self._update(batch, old_logprob, value, reward)
        except (UserError, torch.OutOfMemoryError) as error:
            if self.learner.optimizer_steps > before:
                raise
            hint = "" if isinstance(error, UserError) else " (lower trainer.micro_batch_tokens)"
            raise NothingLearned(f"{error}{hint}") from error

    def _update(self, batch: RewardBatch, old_logprob: Any, value: Any, reward: Any) -> StepMetrics:
        batch = batch if reward is None else replace(batch, rewards=reward)
        step, meter = batch.rollouts.step, Meter()
        newest = step - 1 if self.settings.max_staleness else None
        rows = make_rows(batch.trajectories, batch.group_index, newest)
        check_finite("reward", step, rows, batch.rewards)
        if old_logprob is not None:
            for row, values in zip(rows, old_logprob, strict=True):
                row.old_logprobs = values
        if self.beta > 0 and self.kl_form == "in_reward":
            batch = replace(batch, kl_penalties=self._kl_penalties(rows, meter))
        value = self.values(rows) if value is None else value
        advantages = self.advantages(batch, value)
        set_advantages(rows, advantages, value)
        check_finite("advantage", step, rows, [row.advantages for row in rows])
        record_advantages(advantages)
        self._prepare(rows, meter)
        learning_rate = 0.0
        engine_measured = any(self.learner.ranks.gather(meter.knows("kl/behaviour")))
        for _ in range(self.settings.num_iterations):
            for mini_batch in self._mini_batches(len(rows)):
                learning_rate = self._optimizer_step(rows, mini_batch, meter, step, not engine_measured)
                engine_measured = True  # the learner is no longer the policy that sampled
        trained = [row for row in rows if self.needs_gradient(row)]
        metrics = {
            "loss": 0.0,
            "lr": learning_rate,
            "grad_norm": 0.0,
            "clip_fraction": 0.0,
            **meter.result(self.learner.ranks),
            "advantage/zero_fraction": 1.0 - sum(bool(row.advantages.any()) for row in rows) / max(1, len(rows)),
            "tokens/trained": float(sum(row.num_sampled for row in trained)),
        }
        if self.options.kl_target is not None and "kl/reference" in metrics:
            self.beta = adapted(self.beta, metrics["kl/reference"], self.options.kl_target)
            metrics["kl/beta"] = self.beta
        return metrics

    def values(self, rows: list[Row]) -> Sequence[Tensor] | None:
        """Of a critic, for the estimator: PPO has one."""
        return None

    def value_loss(self, batch: TrainingBatch, hidden_NH: Tensor, meter: Meter) -> Tensor | float:
        """A critic's, per token."""
        return 0.0

    @property
    def models(self) -> list[Any]:
        """What takes an optimizer step: the learner first."""
        return [self.learner]

    def state_dict(self) -> LearnerState:
        state = self.learner.state_dict()
        return LearnerState(state.tensors, {**state.numbers, "beta": self.beta})

    def load_state_dict(self, state: LearnerState) -> None:
        """UserError when the state is another model's."""
        self.learner.load_state_dict(state)
        self.beta = float(state.numbers["beta"])

    # Splits the rows evenly, in an order that is a function of the seed and the optimizer steps so far.
    def _mini_batches(self, num_rows: int) -> list[list[int]]:
        parts = min(self.settings.num_mini_batches, num_rows)
        if parts <= 1:
            return [list(range(num_rows))] if num_rows else []
        order = np.random.default_rng([self.settings.seed, self.learner.optimizer_steps]).permutation(num_rows)
        return [part.tolist() for part in np.array_split(order, parts)]

    # Fills in the old and the reference log-probabilities, before the first optimizer step. Where the rollout is
    # one optimizer step the old policy is the present one: its pass is not made. Where no row has a gradient, entropy
    # and the engine are measured on one micro-batch.
    def _prepare(self, rows: list[Row], meter: Meter) -> None:
        chosen = [i for i, row in enumerate(rows) if self.needs_gradient(row)]
        if self.settings.num_iterations * self.settings.num_mini_batches > 1 or self.options.correction == "bypass":
            self._score_old(rows, chosen, meter)
        if self.reference is not None and self.beta > 0 and self.kl_form != "in_reward":
            self._score(self.reference, rows, chosen, "ref_logprobs", meter)
        if not chosen:
            for indices in cut(rows, range(len(rows)), self.settings.micro_batch_tokens)[:1]:
                batch = self._collate(rows, indices)
                with torch.no_grad():
                    logprobs_N, entropy_N = self.learner.logprobs(batch)
                meter.mean("entropy", entropy_N)
                self._measure_engine(logprobs_N, batch, meter)

    def _score_old(self, rows: list[Row], indices: Sequence[int], meter: Meter) -> None:
        if self.options.correction == "bypass":
            for row in (each for each in rows if each.old_logprobs is None):
                row.old_logprobs = torch.from_numpy(row.rollout_logprobs[row.mask])
        elif missing := [i for i in indices if rows[i].old_logprobs is None]:
            self._score(self.learner, rows, missing, "old_logprobs", meter)

    # beta times the KL to the reference at each sampled token, to be taken off the rewards.
    def _kl_penalties(self, rows: list[Row], meter: Meter) -> list[list[float]]:
        assert self.reference is not None
        everyone = [i for i, row in enumerate(rows) if row.num_sampled]
        self._score_old(rows, everyone, meter)
        self._score(self.reference, rows, everyone, "ref_logprobs", meter)
        penalties: list[list[float]] = [[] for _ in rows]
        for i in everyone:
            old_N, reference_N = rows[i].old_logprobs, rows[i].ref_logprobs
            assert old_N is not None and reference_N is not None
            pair = old_N.double(), reference_N.to(old_N.device).double()
            meter.mean("kl/reference", k3(*pair))  # k1's mean can be below 0
            penalties[i] = (self.beta * self.kl_estimator(*pair)).tolist()
            rows[i].ref_logprobs = None  # so that the loss does not count it once more
        return penalties

    @torch.no_grad()
    def _score(self, model: Scorer, rows: list[Row], indices: Sequence[int], name: str, meter: Meter) -> None:
        scored: dict[int, Tensor] = {}
        for micro_batch, counts in self._passes(rows, indices):
            batch = self._collate(rows, micro_batch)
            logprobs_N, _ = model.logprobs(batch)
            if not counts:
                continue
            if model is self.learner:
                self._measure_engine(logprobs_N, batch, meter)
            parts = logprobs_N.split([rows[i].num_sampled for i in micro_batch])
            scored |= zip(micro_batch, parts, strict=True)
        for i, values in self.learner.ranks.exchange(scored).items():
            setattr(rows[i], name, values)

    def _optimizer_step(
        self, rows: list[Row], mini_batch: list[int], meter: Meter, step: int, measure_engine: bool
    ) -> float:
        weights_M = torch.zeros(len(rows), dtype=torch.float64)  # rows without a gradient included
        lengths_M = torch.tensor([float(rows[i].num_sampled) for i in mini_batch])
        weights_M[mini_batch] = check_shapes(self, lengths_M, reduction=self.reduction(lengths_M))
        weights_M = weights_M.to(self.learner.device)
        losses = [torch.zeros((), device=self.learner.device)]
        passes = self._passes(rows, [i for i in mini_batch if self.needs_gradient(rows[i])])
        for indices, counts in passes:
            batch = self._collate(rows, indices)
            loss = self._micro_loss(batch, weights_M, meter if counts else Meter(), measure_engine)
            (loss if counts else 0.0 * loss).backward()
            losses.append(loss.detach() if counts else torch.zeros_like(loss))
        loss = self.learner.ranks.sum(torch.stack(losses).sum())
        grad_norms = [model.clip_gradients() for model in self.models]
        if not all(x.isfinite() for x in (loss, *grad_norms)):
            for model in self.models:
                model.clear_gradients()
            raise not_finite(rows, passes, losses[1:], step, self.learner.ranks, self.config)
        meter.mean("loss", loss)
        meter.mean("grad_norm", grad_norms[0])
        learning_rates = [model.step() for model in self.models]
        return learning_rates[0]

    def _micro_loss(self, batch: TrainingBatch, weights_M: Tensor, meter: Meter, measure_engine: bool) -> Tensor:
        hidden_NH = self.learner.hidden(batch)
        entropy_coef = self.options.entropy_coef
        logprobs_N, entropy_N = self.learner.logprobs(batch, hidden_NH, entropy_gradient=entropy_coef != 0)
        tokens = SampledTokens(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            old_logprobs_N=logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N,
            rollout_logprobs_N=batch.rollout_logprobs_N,
            advantages_N=batch.advantages_N,
            trajectory_N=batch.trajectory_N,
            turn_N=batch.turn_N,
            group_N=batch.group_N,
            reference_N=batch.ref_logprobs_N,
        )
        ratio_N = check_shapes(self, logprobs_N, ratio=self.ratio(tokens))
        loss_N, reports = check_pair(self, logprobs_N, surrogate=self.surrogate(ratio_N, tokens))
        correction_N, of_correction = check_pair(self, logprobs_N, correction=self.correction(tokens))
        loss_N = loss_N * correction_N - entropy_coef * entropy_N
        if batch.ref_logprobs_N is not None:
            kl_N = check_shapes(self, logprobs_N, kl=self.kl(ratio_N, logprobs_N, batch.ref_logprobs_N))
            loss_N = loss_N + self.beta * kl_N
            meter.mean("kl/reference", kl_N)
        loss_N = loss_N + self.value_loss(batch, hidden_NH, meter)
        meter.maximum("ratio/max", ratio_N)
        for name, values_N in {"entropy": entropy_N, **reports, **of_correction}.items():
            meter.mean(name, values_N)
        if measure_engine:
            self._measure_engine(logprobs_N, batch, meter)
        return (loss_N * weights_M[tokens.trajectory_N].to(loss_N.dtype)).sum()

    # How far what sampled is from the learner, before the learner moves: the engine itself, and older weights.
    def _measure_engine(self, logprobs_N: Tensor, batch: TrainingBatch, meter: Meter) -> None:
        # In float64: the KL of two implementations of one policy is far below float32's rounding of 1.
        rollout_N, logprobs_N = batch.rollout_logprobs_N.double(), logprobs_N.detach().double()
        kl_N = k3(rollout_N, logprobs_N)
        meter.mean("kl/behaviour", kl_N)
        if len(batch.fresh_F):
            meter.mean("kl/engine_learner", kl_N[batch.fresh_F])
            meter.maximum("logprobs/max_diff", (logprobs_N - rollout_N).abs()[batch.fresh_F])

    def _passes(self, rows: list[Row], indices: Sequence[int]) -> list[tuple[list[int], bool]]:
        return self.learner.ranks.passes(rows, indices, self.settings.micro_batch_tokens)

    def _collate(self, rows: list[Row], indices: list[int]) -> TrainingBatch:
        return collate(rows, indices, self.learner.device, self.learner.dtype)
