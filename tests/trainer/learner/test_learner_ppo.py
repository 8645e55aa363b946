"""PPO: its losses against formulas written out, the critic's kinds, the state, and what KL and entropy do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, make_config, save_model

from skyrl_trainer.algorithms.dapo import DAPOLossMixin
from skyrl_trainer.algorithms.dr_grpo import DrGRPOLossMixin
from skyrl_trainer.algorithms.dual_clip import DualClipLossMixin
from skyrl_trainer.algorithms.options import LossOptions, options_class
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import collate, make_rows, set_advantages
from skyrl_trainer.learner.compose import ALGORITHMS, algorithm_class
from skyrl_trainer.learner.grpo import GRPO, Meter
from skyrl_trainer.learner.model import Scorer, make_learner
from skyrl_trainer.learner.ppo import PPO, Critic
from skyrl_trainer.run.trainers import PPOTrainer
from skyrl_trainer.types import RewardBatch, RolloutBatch, StopReason


def start(path: str, name: str = "ppo", double: bool = True, **options: Any) -> GRPO:
    trainer = options.pop("trainer", {})
    algorithm = {"name": name, "options": options}
    config = make_config(trainer={"algorithm": algorithm, "max_grad_norm": 1e9, "learning_rate": 1e-2, **trainer})
    learner = make_learner(config, path, 100)
    if double:
        learner.model.double()
    made = algorithm_class(name)(config)
    reference = None
    if made.beta > 0:
        reference = Scorer(config, path)
        reference.model.to(learner.dtype)
        with torch.no_grad():
            for parameter in reference.model.parameters():
                parameter.mul_(1.05)
    made.start(learner, reference)
    if double:
        made.models[-1].model.double()  # the critic's own
    return made


def gradients(trainer: GRPO, batch: Any, **given: Any) -> list[torch.Tensor]:
    """Of each model, as the first optimizer step would see them."""
    seen: list[torch.Tensor] = []
    for model in trainer.models:

        def stop(model: Any = model) -> float:
            parameters = model.parameters.values() if isinstance(model, Critic) else model.parameters
            seen.append(torch.cat([p.grad.flatten().clone() for p in parameters]))
            model.clear_gradients()
            return 0.0

        model.step = stop
    trainer.update(batch, **given)
    return seen


@pytest.mark.parametrize("critic", ["model", "backbone"])
def test_the_gradient_is_that_of_the_paper_and_does_not_depend_on_the_cut(tmp_path: Path, critic: str) -> None:
    """Against the loss of the whole batch, written out; entropy and KL included."""
    path, batch = save_model(tmp_path, "gpt2"), make_batch(turns=3, rewritten=(1,))
    old = [torch.tensor([x for turn in t.turns for x in turn.logprobs]) for t in batch.trajectories]
    draw = torch.Generator().manual_seed(5)
    values = [torch.randn(t.num_output_tokens, generator=draw, dtype=torch.float64) for t in batch.trajectories]
    options = {"critic": critic, "entropy_coef": 0.01, "beta": 0.1, "correction": "none"}
    found = [
        gradients(start(path, **options, trainer={"micro_batch_tokens": n}), batch, old_logprob=old, value=values)
        for n in (10**6, 300, 1)
    ]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).norm() <= 1e-10 * a.norm()

    trainer = start(path, **options)
    assert isinstance(trainer, PPO) and trainer.reference is not None
    advantages = trainer.advantages(batch, values)
    rows = make_rows(batch.trajectories)
    set_advantages(rows, advantages, values)
    tensors = collate(rows, range(len(rows)), trainer.learner.device, trainer.learner.dtype)
    hidden_NH = trainer.learner.hidden(tensors)
    logprobs_N, entropy_N = trainer.learner.logprobs(tensors, hidden_NH, entropy_gradient=True)
    with torch.no_grad():
        reference_N, _ = trainer.reference.logprobs(tensors)
    ratio_N, advantage_N = (logprobs_N - torch.cat(old).double()).exp(), tensors.advantages_N
    policy_N = -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(0.8, 1.2) * advantage_N)
    minus_d_N = reference_N - logprobs_N
    value_N, old_N, returns_N = trainer.critic.values(tensors, hidden_NH), tensors.values_N, tensors.returns_N
    assert old_N is not None and returns_N is not None
    near_N = old_N + (value_N - old_N).clamp(-0.2, 0.2)
    value_loss_N = torch.maximum((value_N - returns_N) ** 2, (near_N - returns_N) ** 2) / 2
    loss_N = policy_N - 0.01 * entropy_N + 0.1 * (minus_d_N.exp() - minus_d_N - 1) + 0.1 * value_loss_N
    loss_N.mean().backward()
    expected = [
        torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
        for parameters in (trainer.learner.parameters, trainer.critic.parameters.values())
    ]
    for a, b in zip(found[0], expected, strict=True):
        assert b.norm() > 0 and (a - b).norm() <= 1e-10 * b.norm()


CRITICS = {"model": ["ppo"], "backbone": ["sapo_ppo", "dapo_ppo"], "adapter": ["gspo_ppo"]}
"""With the names that a sample pairs them with; FULL=1: with all four."""


@pytest.mark.parametrize(
    ("name", "critic"),
    [
        pytest.param(name, critic, marks=() if name in sampled else pytest.mark.full)
        for critic, sampled in CRITICS.items()
        for name in ("ppo", "sapo_ppo", "gspo_ppo", "dapo_ppo")
    ],
)
def test_the_critic_learns_what_the_rollouts_return(
    tmp_path: Path, name: str, critic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rollout again and again, whose rewards the prompts tell: the critic comes to explain its returns."""
    monkeypatch.setattr(PPO, "value_clip", 9.0)
    monkeypatch.setattr(PPO, "value_coef", 1.0)
    options: dict[str, Any] = {"critic_learning_rate": 3e-3, "gae_lambda": 1.0}
    settings: dict[str, Any] = {"learning_rate": 1e-3}
    if critic == "adapter":  # of a role of its own, on the policy's weights
        settings["policy"] = {"model": {"lora": {"rank": 8}}}
        options |= {"critic": "model", "critic_learning_rate": 1e-2}
    else:
        options["critic"] = critic
    trainer = start(save_model(tmp_path), name, double=False, trainer=settings, **options)
    batch = make_batch()
    batch.rewards = [[float(group % 2)] for group in batch.group_index]
    for trajectory in batch.trajectories:
        trajectory.turns[-1].terminated = True
    first = trainer.update(batch)
    assert first["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # the head starts at zero
    for _ in range(30):
        last = trainer.update(batch)
    assert last["value/explained_variance"] > 0.5 and last["value/loss"] < first["value/loss"]


def test_the_critic_learns_five_times_as_fast_as_the_policy(tmp_path: Path) -> None:
    """By default, as SkyRL's (5e-6 to 1e-6)."""
    trainer = start(save_model(tmp_path), double=False, trainer={"learning_rate": 1e-4})
    assert isinstance(trainer, PPO)
    assert [group["lr"] for group in trainer.critic.optimizer.param_groups] == [pytest.approx(5e-4)] * 2


def test_a_critics_own_learning_rate_is_taken(tmp_path: Path) -> None:
    trainer = start(save_model(tmp_path), double=False, trainer={"learning_rate": 1e-4}, critic_learning_rate=3e-3)
    assert isinstance(trainer, PPO)
    assert [group["lr"] for group in trainer.critic.optimizer.param_groups] == [pytest.approx(3e-3)] * 2


def test_a_value_that_has_not_moved_is_not_counted_as_clipped(tmp_path: Path) -> None:
    """In float32 old + (new - old) is not new."""
    trainer, batch = start(save_model(tmp_path), double=False), make_batch()
    draw = torch.Generator().manual_seed(5)
    values = [0.1 * torch.rand(t.num_output_tokens, generator=draw) for t in batch.trajectories]
    assert isinstance(trainer, PPO)
    with torch.no_grad():
        trainer.critic.head.bias.fill_(0.09)
    assert trainer.update(batch, value=values)["value/clip_fraction"] == 0.0


def test_what_a_critic_explains_is_a_number_however_few_tokens_there_are(tmp_path: Path) -> None:
    trainer, batch = start(save_model(tmp_path), double=False), make_batch(groups=1, generations=1)
    turn = batch.trajectories[0].turns[0]
    turn.output_ids, turn.logprobs = turn.output_ids[:1], turn.logprobs[:1]
    assert trainer.update(batch)["value/explained_variance"] == 0.0
    assert trainer.update(make_batch(groups=0))["value/explained_variance"] == 0.0


def test_of_equal_returns_there_is_nothing_to_explain(tmp_path: Path) -> None:
    """As in a batch of which all or nothing is solved: the ratio of two roundings would be anything."""
    trainer, nothing_solved = start(save_model(tmp_path), double=False), make_batch()
    nothing_solved.rewards = [[0.0] * len(turns) for turns in nothing_solved.rewards]
    for batch in (nothing_solved, make_batch(), make_batch(), nothing_solved):  # the first critics say 0 of everything
        knows = trainer.critic.head.weight.abs().max() > 0  # type: ignore[attr-defined]
        explained = trainer.update(batch)["value/explained_variance"]
        assert (explained != 0.0) == (knows and batch is not nothing_solved)
    assert knows


def test_a_run_goes_on_to_the_byte(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    """Under a schedule, whose rate the first step after a resume must have, the critic's too."""
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 3}
    options: dict[str, Any] = {"beta": 0.1, "kl_estimator": "k1_in_reward", "kl_target": 0.01, "trainer": schedule}
    there = start(path, double=False, **copy.deepcopy(options))
    there.update(make_batch(seed=1))
    state = copy.deepcopy(there.state_dict())
    there.update(make_batch(seed=2))
    resumed = start(path, double=False, **copy.deepcopy(options))
    resumed.load_state_dict(state)
    resumed.update(make_batch(seed=2))
    mine, theirs = there.state_dict(), resumed.state_dict()
    assert mine.numbers == theirs.numbers and mine.numbers["beta"] != 0.1
    assert mine.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in mine.tensors)


def test_kl_in_the_reward_is_taken_off_token_by_token_and_not_counted_in_the_loss(tmp_path: Path) -> None:
    """The gradient is the one that rewards less k1 give; the reference has no part in the loss. With rloo, which
    divides neither."""
    path, batch = save_model(tmp_path, "gpt2"), make_batch(turns=2)

    def rloo(**options: Any) -> GRPO:
        return start(path, "grpo", trainer={"algorithm": {"advantage_estimator": "rloo", "options": options}})

    in_reward = rloo(beta=0.1, kl_estimator="k1_in_reward")
    found = gradients(in_reward, batch)
    assert in_reward.reference is not None
    rows = make_rows(batch.trajectories)
    in_reward._score(in_reward.learner, rows, range(len(rows)), "old_logprobs", Meter())
    in_reward._score(in_reward.reference, rows, range(len(rows)), "ref_logprobs", Meter())
    rewards = [list(turns) for turns in batch.rewards]
    for row, turns in zip(rows, rewards, strict=True):
        turns[-1] -= 0.1 * (row.old_logprobs - row.ref_logprobs).sum().item()
    expected = gradients(rloo(), batch, reward=rewards)
    assert (found[0] - expected[0]).norm() <= 1e-9 * expected[0].norm()


def test_the_kl_that_moves_beta_is_never_below_zero(tmp_path: Path) -> None:
    """The mean of k1 is, where the policy has become less likely than the reference to write what it learns from."""
    algorithm = {"advantage_estimator": "rloo", "options": {"beta": 0.1, "kl_estimator": "k1_in_reward"}}
    trainer = start(save_model(tmp_path, "gpt2"), "grpo", trainer={"algorithm": algorithm})
    means = list[float]()
    assert trainer.reference is not None
    for seed in range(8):
        batch = make_batch(seed=seed, turns=2)
        rows = make_rows(batch.trajectories)
        trainer._score(trainer.learner, rows, range(len(rows)), "old_logprobs", Meter())
        trainer._score(trainer.reference, rows, range(len(rows)), "ref_logprobs", Meter())
        old_N, ref_N = (torch.cat([getattr(row, f"{name}_logprobs") for row in rows]) for name in ("old", "ref"))
        means.append((old_N - ref_N).mean().item())
        expected = (torch.expm1(ref_N - old_N) - (ref_N - old_N)).mean().item()
        assert trainer.update(batch)["kl/reference"] == pytest.approx(expected, abs=1e-12)
    assert min(means) < 0 < expected


def test_an_entropy_bonus_keeps_the_policy_open(tmp_path: Path) -> None:
    entropies = {}
    for coef in (0.0, 0.5):
        trainer = start(save_model(tmp_path / str(coef)), "grpo", double=False, entropy_coef=coef)
        for _ in range(15):
            entropies[coef] = trainer.update(make_batch())["entropy"]
    assert entropies[0.5] > entropies[0.0] + 0.1


def test_any_algorithm_goes_over_ppo_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO's loss over PPO is PPO itself; a subclass of GRPO, as one of yours may be, is put over it as a mixin is."""

    class Mine(GRPO): ...

    class Critical(PPO): ...

    monkeypatch.setitem(ALGORITHMS._entries, "mine", Mine)
    monkeypatch.setitem(ALGORITHMS._entries, "critical", Critical)
    assert algorithm_class("grpo_ppo") is PPO is algorithm_class("ppo") and algorithm_class("grpo") is GRPO
    assert algorithm_class("mine") is Mine
    assert algorithm_class("mine_ppo").__mro__[1:4] == (Mine, PPO, GRPO)
    assert algorithm_class("critical") is Critical is algorithm_class("critical_ppo")


def test_running_out_of_turns_is_worth_what_it_earns(tmp_path: Path) -> None:
    """On the same rollout again and again: tries that were right (1), wrong (0) and out of turns (0)."""
    trainer = start(save_model(tmp_path), "ppo", double=False, trainer={"learning_rate": 1e-3})
    trajectories = make_batch().trajectories[:3]
    for trajectory, stop in zip(trajectories, ("TERMINATED", "TERMINATED", "MAX_TURNS"), strict=True):
        trajectory.stop_reason = StopReason[stop]
    rewards = [[0.0] * (len(each.turns) - 1) + [float(not n)] for n, each in enumerate(trajectories)]
    batch = RewardBatch(RolloutBatch(1, [trajectories]), trajectories, [0, 0, 0], rewards)
    for _ in range(40):
        trainer.update(batch)
    advantages = [each.turns[-1].advantages[-1] for each in trajectories]
    assert advantages[0] > 0 > max(advantages[1:])


def test_a_loss_over_ppo_has_the_same_options_from_python_as_by_name() -> None:
    class Bounded(DAPOLossMixin, PPOTrainer): ...

    class Own(DAPOLossMixin, PPOTrainer):
        class Options(LossOptions):
            sampler: str = "curriculum"

    class Further(Own, PPOTrainer): ...

    class Twice(DualClipLossMixin, Bounded): ...

    kinds = (algorithm_class("dapo_ppo"), Bounded, Twice, Own, Further, algorithm_class("dapo"))
    samplers = [options_class(kind)().sampler for kind in kinds]
    assert samplers == ["uniform", "uniform", "uniform", "curriculum", "curriculum", "dynamic"]


def test_a_loss_behind_ppo_is_refused_for_half_of_it_would_be_hidden() -> None:
    for name, bases in {"Dr": (PPOTrainer, DrGRPOLossMixin), "Deep": (DAPOLossMixin, PPO, DrGRPOLossMixin)}.items():
        with pytest.raises(UserError, match=rf"^{name}: put DrGRPOLossMixin before PPO, which hides it\.$"):
            type(name, bases, {})
    mine = type("Mine", (DrGRPOLossMixin,), {})
    with pytest.raises(UserError, match=r"^Mine2: put Mine before PPO"):  # the one that was named, not its base
        type("Mine2", (PPOTrainer, mine), {})
    type("Logged", (DrGRPOLossMixin, PPOTrainer, Mapping), {})  # which is no loss


def test_an_adaptive_beta_needs_one_to_start_at(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kl_target adapts beta, which is 0"):
        start(save_model(tmp_path), "grpo", kl_target=0.1)
