"""`GRPO.update`: the gradient does not depend on the cut, and every odd batch has a defined result."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_models import make_batch, make_config, save_model
from transformers import get_scheduler

from skyrl_trainer.errors import NothingLearned, UserError
from skyrl_trainer.learner import model as learner_module
from skyrl_trainer.learner.batch import Row, make_rows, set_advantages
from skyrl_trainer.learner.compose import algorithm_class, register_algorithm
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.model import Learner, Optimized, Scorer, make_learner
from skyrl_trainer.types import AdvantageBatch, RewardBatch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """float32 goes to oneDNN and float64 to MKL: in one process their threads wait for each other, a hundredfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_trainer(path: str, double: bool = False, algorithm: dict[str, Any] | None = None, **trainer: Any) -> GRPO:
    config = make_config(trainer={"algorithm": algorithm or {}, "max_grad_norm": 1e9, **trainer})
    made = algorithm_class(config.trainer.algorithm.name)(config)
    reference = Scorer(config, path) if made.beta > 0 else None
    learner = make_learner(config, path, 100)
    if double:
        learner.model.double()
    if reference is not None:  # another policy than the learner's, so that the KL is not zero
        reference.model.to(learner.dtype)
        with torch.no_grad():
            for parameter in reference.model.parameters():
                parameter.mul_(1.02)
    return made.start(learner, reference)


def gradient(trainer: GRPO, batch: Any, old: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The gradient that the first optimizer step would see."""
    seen: list[torch.Tensor] = []

    def stop() -> float:
        seen.append(torch.cat([p.grad.flatten().clone() for p in trainer.learner.parameters]))
        trainer.learner.clear_gradients()
        return 0.0

    trainer.learner.step = stop  # type: ignore[method-assign]
    trainer.update(batch, old_logprob=old)
    return seen[0]


@pytest.mark.parametrize("kind, double, tolerance", [("qwen3", False, 1e-5), ("gpt2", True, 1e-10)])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_gradient_does_not_depend_on_the_cut(
    tmp_path: Path, kind: str, double: bool, tolerance: float, beta: float
) -> None:
    """One micro-batch, about two and four, and one a trajectory; off-policy, so that the clip takes part."""
    path = save_model(tmp_path, kind)
    batch = make_batch(equal=(1,), turns=3, rewritten=(2,))
    old = [torch.tensor([x for turn in t.turns for x in turn.logprobs]) for t in batch.trajectories]
    budgets = (10**6, 400, 200, 1)
    cuts = [
        gradient(make_trainer(path, double, {"options": {"beta": beta}}, micro_batch_tokens=budget), batch, old)
        for budget in budgets
    ]
    assert cuts[0].norm() > 0
    for other in cuts[1:]:
        assert (other - cuts[0]).norm() <= tolerance * cuts[0].norm()


ALGORITHMS = ["sapo", "gspo", "gspo_token", "dapo", "dr_grpo", "cispo", "dual_clip"]


@pytest.mark.parametrize("name, estimator", [(name, "grpo") for name in ALGORITHMS] + [("gspo", "reinforce++")])
def test_no_algorithms_gradient_depends_on_the_cut(tmp_path: Path, name: str, estimator: str) -> None:
    """With a KL that is multiplied by the ratio, and a mask of whole trajectories; reinforce++ differs inside them."""
    path = save_model(tmp_path, "gpt2")
    batch = make_batch(equal=(1,), turns=2)
    old = [
        torch.tensor([x - 0.01 * (i % 2) for i, x in enumerate(t.rollout_logprobs()) if x]) for t in batch.trajectories
    ]
    options = {
        "kl_estimator": "k3_ratio",
        "correction": "sequence_mask",
        "correction_range": [0.9, 1.01],
        "beta": 0.1,
    } | ({"gamma": 0.9} if estimator == "reinforce++" else {})
    algorithm = {"name": name, "options": options, "advantage_estimator": estimator}
    trainer = make_trainer(path, True, algorithm, micro_batch_tokens=10**6)
    whole = gradient(trainer, batch, old)
    assert whole.norm() > 0
    for budget in (400, 200, 1):
        trainer.settings.micro_batch_tokens = budget
        assert (gradient(trainer, batch, old) - whole).norm() <= 1e-10 * whole.norm()


@pytest.mark.parametrize("correction", ["tis", "mis", "sequence_mask"])
def test_corrections_are_counted_and_nan_of_the_engine_stops_the_step(tmp_path: Path, correction: str) -> None:
    trainer = make_trainer(save_model(tmp_path), algorithm={"name": "gspo", "options": {"correction": correction}})
    batch = make_batch(step=7)
    assert 0 < trainer.update(batch)["correction/fraction"] <= 1
    batch.trajectories[5].turns[0].logprobs[0] = float("nan")
    with pytest.raises(UserError, match=r"loss of step 7 is not finite"):
        trainer.update(batch)


def test_rows_left_out_because_their_advantage_is_zero_have_no_gradient_and_still_count(tmp_path: Path) -> None:
    class Thorough(GRPO):
        def needs_gradient(self, row: Row) -> bool:
            return row.num_sampled > 0

    path = save_model(tmp_path, "gpt2")
    batch = make_batch(equal=(0, 2))
    quick = make_trainer(path, double=True)
    thorough = Thorough(quick.config).start(make_trainer(path, double=True).learner)
    expected, actual = gradient(thorough, batch), gradient(quick, batch)
    assert (actual - expected).norm() <= 1e-12 * expected.norm()


def test_logits_in_chunks_give_the_same_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(tmp_path, "gpt2")
    whole = gradient(make_trainer(path, double=True), make_batch())
    monkeypatch.setattr(learner_module, "LOGITS_AT_ONCE", {"cpu": 101 * 3})
    chunked = gradient(make_trainer(path, double=True), make_batch())
    assert (chunked - whole).norm() <= 1e-12 * whole.norm()


def test_one_optimizer_step_is_on_policy_and_reports_what_the_issue_names(tmp_path: Path) -> None:
    metrics = make_trainer(save_model(tmp_path)).update(make_batch(equal=(1,)))
    assert metrics["clip_fraction"] == 0.0 and metrics["ratio/max"] == 1.0
    assert metrics["advantage/zero_fraction"] == 0.25
    assert metrics["kl/engine_learner"] > 0 and metrics["logprobs/max_diff"] > 0
    assert metrics["lr"] == 1e-3 and metrics["grad_norm"] > 0 and 0 < metrics["entropy"] < 4.62  # ln 101
    assert abs(metrics["loss"]) < 1e-6


def test_the_engines_kl_is_zero_where_both_agree(tmp_path: Path) -> None:
    """Its logprobs are set to the learner's own: in every mode the distance is measured before the learner moves."""
    path = save_model(tmp_path)
    batch = make_batch(turns=2)
    probe = make_trainer(path)
    rows = make_rows(batch.trajectories)
    set_advantages(rows, probe.advantages(batch, None))
    for trajectory, row in zip(batch.trajectories, rows, strict=True):
        with torch.no_grad():
            values = probe.learner.logprobs(probe._collate([row], [0]))[0].tolist()
        for turn in trajectory.turns:
            turn.logprobs, values = values[: len(turn.output_ids)], values[len(turn.output_ids) :]
    for trainer in ({}, {"num_mini_batches": 2, "num_iterations": 2}):
        for correction in ("none", "bypass"):
            metrics = make_trainer(
                path, algorithm={"options": {"correction": correction}}, learning_rate=0.01, **trainer
            ).update(batch)
            assert metrics["kl/engine_learner"] < 1e-9 and metrics["logprobs/max_diff"] < 1e-5
            assert (metrics["ratio/max"] > 1.01) == bool(trainer)


def test_mini_batches_and_epochs_take_their_optimizer_steps_and_clip(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path), num_mini_batches=4, num_iterations=3, learning_rate=0.05)
    metrics = trainer.update(make_batch())
    assert trainer.learner.optimizer_steps == 12
    assert metrics["clip_fraction"] > 0
    first, second = trainer._mini_batches(16), trainer._mini_batches(16)
    assert (
        first == second
        and sorted(i for part in first for i in part) == list(range(16))
        and {len(part) for part in first} == {4}
    )
    trainer.settings.seed += 1
    assert trainer._mini_batches(16) != first


@pytest.mark.parametrize(
    "schedule, warmup, rates",
    [
        ("constant_with_warmup", 3, [1 / 3, 2 / 3, 1, 1, 1]),
        ("constant_with_warmup", 0, [1, 1, 1, 1, 1]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1]),
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.8, 0.6, 0.4, 0.2]),
        ("linear", 2, [0.5, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_no_step_of_a_schedule_has_the_rate_zero(
    tmp_path: Path, schedule: str, warmup: int, rates: list[float]
) -> None:
    """A rollout that is learned from at a rate of 0 is a rollout for nothing."""
    config = make_config(trainer={"lr_scheduler_type": schedule, "warmup_steps": warmup})
    trainer = GRPO(config).start(make_learner(config, save_model(tmp_path), 5))
    assert [trainer.update(make_batch())["lr"] for _ in range(5)] == pytest.approx([rate * 1e-3 for rate in rates])


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize(
    "schedule", ["linear", "constant_with_warmup", "cosine_with_min_lr?min_lr_rate=0.25&num_cycles=2"]
)
def test_our_schedules_are_transformers_own(schedule: str, warmup: int) -> None:
    optimized, parameter = Optimized(), torch.nn.Parameter(torch.zeros(1))
    optimized.config = make_config(trainer={"lr_scheduler_type": schedule, "warmup_steps": warmup})
    optimized.make_optimizer([[parameter]], 0.1, 7)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 0.1)
    name, own = schedule.partition("?")[0], {"min_lr_rate": 0.25, "num_cycles": 2} if "?" in schedule else {}
    theirs = get_scheduler(name, other, warmup, 7 + (warmup > 0), own)
    for step in range(9):  # the last is behind the end
        if step or warmup:
            other.step()
            theirs.step()
        assert optimized.scheduler.get_last_lr() == theirs.get_last_lr()
        optimized.optimizer.step()
        optimized.scheduler.step()


def test_an_optimizer_is_made_without_the_import_of_peft() -> None:
    """It brings bitsandbytes and inductor: five seconds of every start."""
    code = """
import sys, torch
from skyrl_trainer.learner.model import Optimized
from skyrl_trainer.settings import Config
learner = Optimized()
learner.config = Config()
learner.make_optimizer([[torch.nn.Parameter(torch.zeros(1))]], 0.1, 7)
assert not {"peft", "bitsandbytes"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_a_launcher_of_processes_has_left_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's, MPI's and accelerate's: it is a learner alone, or one whose peers we know."""
    left = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "4"}
    for name, value in (left | {"ACCELERATE_USE_DEEPSPEED": "true"}).items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    path = save_model(tmp_path)
    assert Scorer(make_config(), path).token_logprobs([1, 2, 3]).isfinite().all()  # as `replay --recompute` makes it
    assert make_trainer(path).update(make_batch())["grad_norm"] > 0
    assert not {"WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys()


def test_rewards_rise_along_the_gradient(tmp_path: Path) -> None:
    """The sign: after updates the better half of each group is likelier than before, the worse half less."""
    trainer = make_trainer(save_model(tmp_path), learning_rate=3e-3)
    batch = make_batch()
    rows = make_rows(batch.trajectories)
    set_advantages(rows, trainer.advantages(batch, None))

    def weighted() -> float:
        with torch.no_grad():
            return sum(
                float(trainer.learner.logprobs(trainer._collate([row], [0]))[0].mean()) * float(row.advantages[-1])
                for row in rows
            )

    before = weighted()
    for _ in range(5):
        trainer.update(batch)
    assert weighted() > before + 1


def test_a_batch_without_signal_has_zero_gradient_and_still_measures_entropy(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path))
    metrics = trainer.update(make_batch(equal=(0, 1, 2, 3)))
    assert metrics["grad_norm"] == 0.0 and metrics["advantage/zero_fraction"] == 1.0
    assert metrics["tokens/trained"] == 0 and metrics["entropy"] > 0 and "kl/engine_learner" in metrics
    assert trainer.learner.optimizer_steps == 1


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"entropy_coef": 0.01}], ids=str)
def test_tries_of_equal_reward_are_counted_where_another_term_learns_from_them(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = make_trainer(save_model(tmp_path), algorithm={"options": options})
    batch = make_batch(equal=(0, 1))
    metrics = trainer.update(batch)
    assert metrics["advantage/zero_fraction"] == 0.5
    assert metrics["tokens/trained"] == sum(each.num_output_tokens for each in batch.trajectories)


def test_a_batch_in_which_every_episode_failed_changes_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path))
    before = [tensor.clone() for _, tensor in trainer.learner.named_tensors()]
    metrics = trainer.update(make_batch(groups=0))
    assert metrics["tokens/trained"] == 0 and trainer.learner.optimizer_steps == 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.learner.named_tensors(), strict=True))


def test_a_trajectory_without_a_sampled_token_counts_and_does_no_harm(tmp_path: Path) -> None:
    batch = make_batch()
    batch.trajectories[0].turns[0].output_ids, batch.trajectories[0].turns[0].logprobs = [], []
    metrics = make_trainer(save_model(tmp_path)).update(batch)
    assert metrics["grad_norm"] > 0 and metrics["advantage/zero_fraction"] == 1 / 16


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_and_says_where(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path), algorithm={"options": {"correction": "bypass"}}, micro_batch_tokens=1)
    batch = make_batch(step=7)
    batch.trajectories[5].turns[0].logprobs[0] = float("nan")
    before = [tensor.clone() for _, tensor in trainer.learner.named_tensors()]
    with pytest.raises(NothingLearned, match=r"loss of step 7 is not finite, .* 7/1/1;.*/trajectories holds them"):
        trainer.update(batch)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.learner.named_tensors(), strict=True))
    assert trainer.learner.optimizer_steps == 0
    batch.trajectories[5].turns[0].logprobs[0] = -1.0
    assert trainer.update(batch)["grad_norm"] > 0  # nothing of the broken batch is left in the gradients


def test_memory_that_runs_out_before_the_first_optimizer_step_costs_no_step(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path))

    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.surrogate = full
    with pytest.raises(NothingLearned, match=r"^CUDA out of memory\. \(lower trainer\.micro_batch_tokens\)$"):
        trainer.update(make_batch())


def test_an_update_that_is_refused_behind_its_first_optimizer_step_has_moved_the_weights(tmp_path: Path) -> None:
    """So that nobody saves them as a step's, where those of an update refused before it are."""
    trainer = make_trainer(save_model(tmp_path), num_iterations=2)
    surrogate, calls = trainer.surrogate, []

    def second_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise UserError("once only")
        return surrogate(*arguments)

    trainer.surrogate = second_fails
    with pytest.raises(UserError, match="once only") as raised:
        trainer.update(make_batch())
    assert trainer.learner.optimizer_steps == 1 and not isinstance(raised.value, NothingLearned)


def test_who_earned_a_reward_that_is_no_number_is_named_and_nobody_else(tmp_path: Path) -> None:
    """Its group's advantages are NaN as well, and so is the loss of everybody in their micro-batches."""
    trainer, batch = make_trainer(save_model(tmp_path)), make_batch(step=7)
    batch.rewards[5] = [float("inf")]
    with pytest.raises(UserError, match=r"The reward of step 7 is not finite in trajectories 7/1/1: mend "):
        trainer.update(batch)
    estimate = trainer.advantages

    def spoiled(batch: RewardBatch, value: Any) -> AdvantageBatch:
        result = estimate(batch, value)
        result.advantages[2][-1] = float("nan")
        return result

    trainer.advantages = spoiled  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"The advantage of step 7 is not finite in trajectories 7/0/2: mend "):
        trainer.update(make_batch(step=7))


@pytest.mark.parametrize("part", ["ratio", "surrogate", "reduction", "correction", "kl"])
def test_a_loss_of_the_wrong_shape_is_refused(tmp_path: Path, part: str) -> None:
    """It would be broadcast, and every token would weigh like all of them together."""

    class Mean(GRPO):
        def __getattribute__(self, name: str) -> Any:
            method = super().__getattribute__(name)
            if name != part:
                return method

            def mean(*given: Any) -> Any:
                answer = method(*given)
                return (answer[0].mean(), answer[1]) if isinstance(answer, tuple) else answer.mean()

            return mean

    config = make_config(trainer={"algorithm": {"options": {"beta": 0.1}}})
    path = save_model(tmp_path)
    trainer = Mean(config).start(make_learner(config, path, 10), Scorer(config, path))
    sentence = rf"{part} of Mean gave a tensor of shape \(\), but .* of shape \(\d+,\)"
    with pytest.raises(UserError, match=sentence):
        trainer.update(make_batch())


@pytest.mark.parametrize("gave, sentence", [(1.0, "1.0"), (None, "None")])
@pytest.mark.parametrize("part", ["ratio", "surrogate", "reduction", "correction"])
def test_a_method_of_a_loss_that_gives_no_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, gave: Any, sentence: str
) -> None:
    """A forgotten `return`, a number, or a tensor where another one and what is reported were due."""
    trainer = GRPO(make_config()).start(make_learner(make_config(), save_model(tmp_path), 10))
    monkeypatch.setattr(trainer, part, lambda *given: gave)
    with pytest.raises(UserError, match=rf"{part}.* gave {sentence}, but "):
        trainer.update(make_batch())


@pytest.mark.parametrize(
    "part, gave, sentence",
    [
        ("surrogate", (torch.ones(9), {}, {}), r"surrogate of GRPO gave \(tensor\(.*a pair"),
        ("correction", (torch.ones(9), None), r"correction of GRPO gave \(tensor\(.*a pair"),
        ("surrogate", (torch.ones(9), {"entropy": torch.ones(9)}), "surrogate of GRPO reports 'entropy'"),
        ("correction", (torch.ones(9), {"kl/mine": torch.ones(9)}), "correction of GRPO reports 'kl/mine'"),
    ],
)
def test_a_pair_that_is_none_or_a_metric_whose_name_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, gave: Any, sentence: str
) -> None:
    """A mean of `entropy` would be one of both."""
    trainer = GRPO(make_config()).start(make_learner(make_config(), save_model(tmp_path), 10))
    monkeypatch.setattr(trainer, part, lambda *given: gave)
    with pytest.raises(UserError, match=sentence):
        trainer.update(make_batch())


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_loss_without_a_gradient_is_refused(tmp_path: Path, beta: float) -> None:
    """Beside a KL, which has one, the run would go on and learn nothing from its rewards."""

    class Detached(GRPO):
        def surrogate(self, ratio_N: Any, tokens: Any) -> Any:
            loss_N, reports = super().surrogate(ratio_N, tokens)
            return loss_N.detach(), reports

    config, path = make_config(trainer={"algorithm": {"options": {"beta": beta}}}), save_model(tmp_path)
    trainer = Detached(config).start(make_learner(config, path, 10), Scorer(config, path) if beta else None)
    with pytest.raises(UserError, match="surrogate of Detached gave numbers without a gradient"):
        trainer.update(make_batch())


def one_each(batch: RewardBatch) -> Any:
    return AdvantageBatch(batch, [1.0] * len(batch.trajectories))  # type: ignore[list-item]


def all_tokens(batch: RewardBatch) -> Any:
    return AdvantageBatch(batch, [[1.0] * len(t.loss_mask()) for t in batch.trajectories])


def one_too_few(batch: RewardBatch) -> Any:
    return AdvantageBatch(batch, [[0.0] * t.num_output_tokens for t in batch.trajectories[1:]])


def returns_too_short(batch: RewardBatch) -> Any:
    laid_out = [[0.0] * t.num_output_tokens for t in batch.trajectories]
    return AdvantageBatch(batch, laid_out, [row[1:] for row in laid_out])


@pytest.mark.parametrize("gives", [one_each, all_tokens, one_too_few, returns_too_short, lambda batch: None])
def test_advantages_that_are_not_laid_out_over_the_sampled_tokens_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: Any
) -> None:
    trainer = GRPO(make_config()).start(make_learner(make_config(), save_model(tmp_path), 10))
    monkeypatch.setattr(trainer, "_estimate", lambda batch, options, value: gives(batch))
    with pytest.raises(UserError, match="The estimator gave no AdvantageBatch with a list for each trajectory"):
        trainer.update(make_batch())


@pytest.mark.parametrize(
    "algorithm, generator, sentence",
    [
        ({}, {"num_generations": 1}, r"generator\.num_generations=1 .*advantage_estimator=grpo .* at least 2"),
        ({"advantage_estimator": "rloo"}, {"num_generations": 1}, "advantage_estimator=rloo"),
        ({"options": {"gamma": 0.9}}, {}, r"options\.gamma has no effect .*=grpo, which reads scale_rewards"),
        (
            {"advantage_estimator": "rloo", "options": {"scale_rewards": "none"}},
            {},
            r"scale_rewards has no effect .*=rloo, which reads none",
        ),
        ({"name": "ppo", "options": {"scale_rewards": "none"}}, {}, r"scale_rewards .* reads gae_lambda and gamma"),
        ({"name": "cispo", "options": {"epsilon_high": None}}, {}, r"options\.epsilon_high is null"),
        ({"name": "ppo", "advantage_estimator": "rloo"}, {}, r"advantage_estimator=rloo has no effect .* always gae"),
        (
            {"advantage_estimator": "reinforce++", "options": {"sampler": "dynamic"}},
            {"num_generations": 1},
            r"options\.sampler=dynamic .* at least 2",
        ),
    ],
)
def test_what_would_train_nothing_or_change_nothing_is_refused(
    algorithm: dict[str, Any], generator: dict[str, Any], sentence: str
) -> None:
    config = make_config(trainer={"algorithm": algorithm}, generator=generator)
    with pytest.raises(UserError, match=sentence):
        algorithm_class(config.trainer.algorithm.name)(config)


def test_the_engines_logprobs_as_the_old_ones_beside_a_kl(tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path), algorithm={"options": {"beta": 0.1, "correction": "bypass"}})
    metrics = trainer.update(make_batch(turns=2))
    assert all(value == value for value in metrics.values()) and metrics["kl/reference"] > 0


def test_given_rewards_replace_the_batchs_own(tmp_path: Path) -> None:
    path, batch = save_model(tmp_path), make_batch()
    flat = make_trainer(path).update(batch, reward=[[1.0] for _ in batch.trajectories])
    assert flat["advantage/zero_fraction"] == 1.0


def test_a_trainer_is_chosen_by_name_and_a_mixin_makes_another(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.algorithm\.name='gpro'.*grpo"):
        algorithm_class("gpro")
    for name, wrong in (("a_function", len), ("another_class", dict)):
        register_algorithm(name)(wrong)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"name={name} is .*: it should be a class over PolicyLoss"):
            algorithm_class(name)

    class TokenMeanMixin:
        def reduction(self, lengths_M: torch.Tensor) -> torch.Tensor:
            return torch.full_like(lengths_M, 1 / lengths_M.sum(), dtype=torch.float64)

    @register_algorithm("token_mean")
    class TokenMean(TokenMeanMixin, GRPO):
        pass

    path, batch = save_model(tmp_path), make_batch()
    ours = make_trainer(path)
    other = algorithm_class("token_mean")(ours.config).start(make_trainer(path).learner)
    assert other.update(batch)["grad_norm"] != ours.update(batch)["grad_norm"]


@pytest.mark.parametrize(
    "trainer, generator, sentence",
    [
        ({"algorithm": {"options": {"beta": 0.1}}}, {}, "reference policy"),
        ({"algorithm": {"options": {"correction": "bypass"}}}, {"top_p": 0.9}, r"bypass needs generator\.top_p=1"),
        ({"algorithm": {"options": {"correction": "sequence_tis"}}}, {"top_p": 0.9}, r"_tis needs generator\.top_p=1"),
        ({"algorithm": {"options": {"correction": "sequence_mask"}}}, {"top_p": 0.9}, r"_mask needs generator\.top_p"),
        ({}, {"temperature": 0.0}, r"generator\.temperature=0"),
        ({"optimizer_kwargs": {"beta": 1}}, {}, r"trainer\.optimizer_kwargs"),
        ({"lr_scheduler_type": "cosin"}, {}, r"lr_scheduler_type='cosin'.*cosine"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, r"reduce_lr_on_plateau' cannot be used: it goes by a met"),
        ({"lr_scheduler_type": "greedy", "warmup_steps": 2}, {}, r"greedy' cannot be used: it goes by a metric"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, trainer: dict[str, Any], generator: dict[str, Any], sentence: str
) -> None:
    config = make_config(trainer=trainer, generator=generator)
    with pytest.raises(UserError, match=sentence):
        GRPO(config).start(Learner(config, save_model(tmp_path), 10))


def test_a_missing_model_and_one_with_capped_logits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.policy\.model\.path='/nowhere'"):
        Learner(make_config(), "/nowhere", 1)
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    capped = Gemma2Config(**sizes, vocab_size=32, num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.01)
    Gemma2ForCausalLM(capped).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"changes its logits after the output layer"):
        Scorer(make_config(), str(tmp_path))


def test_a_learner_leaves_cores_to_engines_that_go_on_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never takes more threads than the user allows."""
    path = save_model(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for staleness, engines, given, wanted in ((0, 3, 8, 8), (2, 3, 8, 5), (2, 3, 4, 4), (2, 9, 8, 1)):
        torch.set_num_threads(given)
        make_learner(
            make_config(trainer={"max_staleness": staleness}, generator={"num_inference_engines": engines}), path, 1
        )
        assert torch.get_num_threads() == wanted


def test_an_update_leaves_no_tensor_to_the_garbage_collector(tmp_path: Path) -> None:
    """Which a run calls seldom (run/run.py): a GPU's memory must not wait for it."""
    trainer = make_trainer(save_model(tmp_path), algorithm={"options": {"beta": 0.1}})

    def tensors() -> int:
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    trainer.update(make_batch(step=1))  # makes what stays: the optimizer's state
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        for step in range(2, 6):
            trainer.update(make_batch(seed=step, step=step))
        assert tensors() <= before
    finally:
        gc.enable()


def test_of_stale_tries_the_engines_error_is_measured_on_tokens_of_the_newest_weights_alone(tmp_path: Path) -> None:
    path, batch = save_model(tmp_path), make_batch(step=2)
    metrics = make_trainer(path, max_staleness=1).update(batch)
    assert "kl/engine_learner" not in metrics and metrics["kl/behaviour"] > 0
    for turn in batch.trajectories[0].turns:
        turn.weight_versions = [1] * len(turn.output_ids)
    metrics = make_trainer(path, max_staleness=1).update(batch)
    assert metrics["kl/engine_learner"] != metrics["kl/behaviour"]
