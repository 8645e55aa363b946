"""Every loss against TRL's, the closed-form gradients, the engine's corrections, and the edges of all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer as TRLTrainer

from skyrl_trainer.algorithms.dapo import DAPOLossMixin
from skyrl_trainer.algorithms.dual_clip import DualClipLossMixin
from skyrl_trainer.algorithms.losses import SampledTokens, k1, k2, k3, ppo_clip, sequence_mean, token_mean, token_ratio
from skyrl_trainer.algorithms.policy_loss import PolicyLoss
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.grpo import Meter
from skyrl_trainer.run.trainers import GRPOTrainer
from skyrl_trainer.settings import Config

TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon_high": 0.2},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": 0.2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "dual_clip": {"loss_type": "grpo", "epsilon_high": 0.2, "delta": 3.0},
}
"""What makes TRL compute the loss that we call so, by our own defaults; bnpo is our dapo."""


def sampled(
    logprobs_N: torch.Tensor,
    old_N: torch.Tensor,
    rollout_N: torch.Tensor,
    advantages_N: torch.Tensor,
    trajectory_N: torch.Tensor,
) -> SampledTokens:
    """Tokens of one turn and one group."""
    return SampledTokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        rollout_logprobs_N=rollout_N,
        advantages_N=advantages_N,
        trajectory_N=trajectory_N,
        turn_N=torch.zeros_like(trajectory_N),
        group_N=torch.zeros_like(trajectory_N),
        entropy_N=torch.zeros_like(old_N),
    )


def make_loss(name: str, model: dict[str, Any] | None = None, **options: Any) -> GRPOTrainer:
    """A registered trainer without a model: only its loss is used."""
    settings = {"algorithm": {"name": name, "options": options}, "policy": {"model": model or {}}}
    return algorithm_class(name)(Config.model_validate({"trainer": settings}))


def ragged(seed: int, rows: int = 6, width: int = 11) -> dict[str, torch.Tensor]:
    """Float64 log-probabilities up to 15 apart, ragged masks, and advantages of both signs and zero."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64)

    logprobs = uniform(-16, 0, rows, width)
    far = (uniform(0, 1, rows, width) < 0.2).double()
    advantages = uniform(-2, 2, rows)
    advantages[0] = 0.0
    mask = torch.rand(rows, width, generator=draw) < 0.6
    mask[:, 0] = True
    return {
        "logprobs": logprobs,
        "old": logprobs - uniform(-0.6, 0.6, rows, width) - far * uniform(-14, 14, rows, width),
        "ref": logprobs - uniform(-3, 3, rows, width),
        "rollout_gap": uniform(-2, 2, rows, width),
        "advantages": advantages,
        "mask": mask,
    }


def trl_loss(
    case: dict[str, torch.Tensor], logprobs: torch.Tensor, beta: float, biased: bool, tis: bool, **changes: Any
) -> torch.Tensor:
    """`trl.GRPOTrainer._compute_loss` on given log-probabilities; a namespace stands for the trainer."""
    mask = case["mask"].double()
    settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, "importance_sampling_level": "token"} | changes
    delta = settings.pop("delta", None)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(mask), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(
            use_bias_correction_kl=biased,
            delta=delta,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=torch.tensor(1.05, dtype=torch.float64),  # a float would become float32 in its where()
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=beta,
        use_vllm=tis,
        vllm_importance_sampling_correction=True,
        max_completion_length=Config().generator.max_completion_length,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        **settings,
    )
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": case["advantages"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["ref"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": case["rollout_gap"].exp().clamp(max=2.0),
    }
    return TRLTrainer._compute_loss(trainer, trainer.model, inputs)


def our_loss(case: dict[str, torch.Tensor], logprobs: torch.Tensor, loss: GRPOTrainer) -> torch.Tensor:
    """The whole of what the trainer does with a micro-batch; a namespace stands for the model."""
    mask = case["mask"]
    rows = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    batch: Any = SimpleNamespace(
        old_logprobs_N=case["old"][mask],
        rollout_logprobs_N=(case["old"] - case["rollout_gap"])[mask],
        ref_logprobs_N=case["ref"][mask],
        advantages_N=case["advantages"][rows],
        trajectory_N=rows,
        turn_N=torch.zeros_like(rows),
        group_N=rows,
    )
    model: Any = SimpleNamespace(
        hidden=lambda batch: None, logprobs=lambda *_, **__: (logprobs[mask], torch.zeros(len(rows)))
    )
    loss.learner = model
    return loss._micro_loss(batch, loss.reduction(mask.sum(1)), Meter(), False)


@pytest.mark.parametrize("beta, biased, tis", [(0.0, False, False), (0.04, False, True), (0.04, True, False)])
@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_are_those_of_trl(name: str, beta: float, biased: bool, tis: bool) -> None:
    options = {"kl_estimator": "k3_ratio" if biased else "k3", "correction": "tis" if tis else "none"}
    loss = make_loss("dapo" if name == "bnpo" else name, beta=beta, **options)
    for case in map(ragged, range(5)):
        results = []
        for loss_of in (
            lambda case, logprobs: trl_loss(case, logprobs, beta, biased, tis, **TRL[name]),
            lambda case, logprobs: our_loss(case, logprobs, loss),
        ):
            logprobs = case["logprobs"].clone().requires_grad_()
            value = loss_of(case, logprobs)
            value.backward()
            results.append((value.detach(), logprobs.grad))
        (expected, expected_grad), (actual, grad) = results
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        assert expected_grad.norm() > 0
        assert (grad - expected_grad).norm() <= 1e-6 * expected_grad.norm()


def random_tokens(size: int = 2000, trajectories: int = 1, one_advantage: bool = False) -> SampledTokens:
    """Ratios from about e^-4 to e^4, float64, in trajectories of unlike lengths."""
    draw = torch.Generator().manual_seed(0)
    trajectory_N = torch.randint(trajectories, (size,), generator=draw).square() // max(1, trajectories - 1)
    old_N = -3 * torch.rand(size, generator=draw, dtype=torch.float64)
    logprobs_N = (old_N + torch.randn(size, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages_N = torch.randn(size, generator=draw, dtype=torch.float64)
    advantages_N = advantages_N[trajectory_N] if one_advantage else advantages_N
    return sampled(logprobs_N, old_N, old_N, advantages_N, trajectory_N)


def token_gradient(loss: PolicyLoss, tokens: SampledTokens, weight_N: torch.Tensor | float = 1.0) -> torch.Tensor:
    loss_N, _ = loss.surrogate(loss.ratio(tokens), tokens)
    return torch.autograd.grad((loss_N * weight_N).sum(), tokens.logprobs_N)[0]


@pytest.mark.parametrize("gate", ["paper", "sigmoid"])
def test_sapo_has_the_closed_form_gradient(gate: str) -> None:
    """-w r A: w = 4 p (1 - p), p = sigmoid(tau (r - 1)); the other gate: p (1 - p) / tau, p = sigmoid((r - 1) / tau).

    And w is what the paper's curve says: 1 at a ratio of 1, 0.79 at 2, 0.42 at 3.
    """
    tokens = random_tokens()
    r, A = token_ratio(tokens).detach(), tokens.advantages_N
    if gate == "paper":
        tau = torch.where(A > 0, torch.tensor(1.0, dtype=r.dtype), torch.tensor(1.05, dtype=r.dtype))
        w = 1 / torch.cosh(tau * (r - 1) / 2) ** 2
    else:
        p = ((r - 1) / 1.3).sigmoid()
        w = p * (1 - p) / 1.3
    options = {"sapo_gate": gate} | ({} if gate == "paper" else {"sapo_temperature_pos": 1.3})
    grad = token_gradient(make_loss("sapo", **options), tokens)
    torch.testing.assert_close(grad, -w * r * A, rtol=1e-10, atol=1e-10)
    logprobs = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().requires_grad_()
    zero, one = torch.zeros_like(logprobs).detach(), torch.ones_like(logprobs).detach()
    curve = token_gradient(make_loss("sapo"), sampled(logprobs, zero, zero, one, zero.long()))
    assert (-curve / logprobs.exp()).tolist() == pytest.approx([1.0, 0.79, 0.42], abs=5e-3)


def test_dual_clip_has_the_closed_form_gradient() -> None:
    tokens = random_tokens()
    loss = make_loss("dual_clip", delta=2.5)
    r, A = token_ratio(tokens).detach(), tokens.advantages_N
    held = ((A > 0) & (r > 1.2)) | ((A < 0) & ((r < 0.8) | (r > 2.5)))
    torch.testing.assert_close(token_gradient(loss, tokens), torch.where(held, 0.0, -r * A), rtol=1e-10, atol=1e-10)
    assert torch.equal(loss.surrogate(r, tokens)[1]["clip_fraction"], held) and ((A < 0) & (r > 2.5)).any()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("one_advantage", [True, False])
def test_gspo_has_the_closed_form_gradient(name: str, one_advantage: bool) -> None:
    """-s A_t / n where the clip does not hold: with one advantage a trajectory, and, in the token form, with many."""
    tokens = random_tokens(400, 60, one_advantage)
    A, trajectory = tokens.advantages_N, tokens.trajectory_N
    n, s = torch.zeros_like(A), torch.zeros_like(A)
    for i in trajectory.unique():
        own = trajectory == i
        n[own] = own.sum().double()
        s[own] = (tokens.logprobs_N.detach() - tokens.old_logprobs_N)[own].mean().exp()
    held = ((A > 0) & (s > 1.3)) | ((A < 0) & (s < 0.9))
    assert held.any() and not held.all()
    grad = token_gradient(make_loss(name, epsilon=0.1, epsilon_high=0.3), tokens, 1 / n)
    torch.testing.assert_close(grad, torch.where(held, 0.0, -s * A / n), rtol=1e-10, atol=1e-10)


def test_clip_has_the_closed_form_gradient() -> None:
    """d loss / d logp is -r A, and 0 where the clip holds: A > 0 above the range, A < 0 below it."""
    tokens = random_tokens()
    r, A = token_ratio(tokens).detach(), tokens.advantages_N
    held = ((A > 0) & (r > 1.3)) | ((A < 0) & (r < 0.8))
    assert torch.equal(ppo_clip(r, A, 0.2, 0.3)[1]["clip_fraction"], held)
    grad = token_gradient(make_loss("grpo", epsilon_high=0.3), tokens)
    torch.testing.assert_close(grad, torch.where(held, 0.0, -r * A), rtol=1e-10, atol=1e-10)


def test_ratio_stays_finite_however_far_apart_the_policies_are() -> None:
    logprobs, old = torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0])
    ratio = token_ratio(sampled(logprobs, old, old, old, torch.zeros(2, dtype=torch.long)))
    torch.testing.assert_close(ratio, torch.tensor([20.0, -20.0]).exp())


def test_sequence_mean_weighs_every_trajectory_alike_and_survives_an_empty_one() -> None:
    assert sequence_mean(torch.tensor([4, 1, 0])).tolist() == pytest.approx([1 / 12, 1 / 3, 1 / 3])


def test_kl_estimators_have_their_values() -> None:
    logprobs, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])
    assert k1(logprobs, reference).tolist() == [0.0, 2.0]
    assert k2(logprobs, reference).tolist() == [0.0, 2.0]
    assert k3(logprobs, reference).tolist() == pytest.approx([0.0, 2.718281828**-2 + 2 - 1])


def test_k3_pulls_back_a_token_however_unlikely_the_reference_holds_it() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    values = k3(logprobs, torch.tensor([-19.0, -40.0, 400.0]))
    values.sum().backward()
    assert values[:2].tolist() == pytest.approx([18.0, 39.0]) and bool(values.isfinite().all())
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_token_mean_and_dr_grpo_do_not_divide_by_a_trajectorys_own_length() -> None:
    lengths = torch.tensor([4, 1, 0])
    assert token_mean(lengths).tolist() == [0.2] * 3 and token_mean(torch.zeros(2)).tolist() == [1.0] * 2
    assert make_loss("dr_grpo").reduction(lengths).tolist() == pytest.approx([1 / (3 * 64)] * 3)
    several = make_loss("dr_grpo")
    several.config.generator.max_turns = 4
    assert several.reduction(lengths).tolist() == pytest.approx([1 / (3 * 4 * 64)] * 3)
    several.config.generator.agent.max_episode_tokens = 100  # of all turns together
    assert several.reduction(lengths).tolist() == pytest.approx([1 / (3 * 100)] * 3)


def test_the_kl_estimator_is_chosen_and_k2_has_the_kls_own_gradient() -> None:
    logprobs, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-3.0])
    kl = make_loss("grpo", kl_estimator="k2").kl(torch.ones(1), logprobs, reference)
    kl.backward()
    assert kl.item() == 2.0 and logprobs.grad is not None and logprobs.grad.item() == 2.0


def test_corrections_weigh_by_the_engines_error() -> None:
    """Two trajectories; the second one's geometric mean is inside 0.99..1.01 though its tokens are not."""
    old = torch.zeros(5)
    rollout = -torch.tensor([3.0, 0.4, 1.0, 4.0, 0.25]).log()
    tokens = sampled(old, old, rollout, old, torch.tensor([0, 0, 0, 1, 1]))
    expected = {
        "none": ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        "tis": ([2, 0.4, 1, 2, 0.25], [1, 0, 0, 1, 0]),
        "mis": ([3, 0, 1, 4, 0], [0, 1, 0, 0, 1]),
        "sequence_tis": ([1.2, 1.2, 1.2, 1, 1], [0, 0, 0, 0, 0]),
        "sequence_mask": ([0, 0, 0, 1, 1], [1, 1, 1, 0, 0]),
    }
    for name, (weights, cut) in expected.items():
        weights_N, reports = make_loss("grpo", correction=name).correction(tokens)
        assert weights_N.tolist() == pytest.approx(weights) and (name == "none") == (reports == {})
        assert reports.get("correction/fraction", torch.zeros(5).bool()).tolist() == [bool(bit) for bit in cut]
    narrow = make_loss("grpo", correction="mis", correction_range=[0.3, 3.5])
    assert narrow.correction(tokens)[0].tolist() == pytest.approx([3, 0.4, 1, 0, 0])
    spoiled = sampled(old, old, rollout * torch.nan, old, tokens.trajectory_N)
    for name in ("tis", "mis", "sequence_mask"):  # the step has to stop: a masked NaN would hide it
        assert make_loss("grpo", correction=name).correction(spoiled)[0].isnan().all()


@pytest.mark.parametrize("engine_is_likelier", [True, False])
def test_sequence_tis_weighs_a_long_answer_by_its_probability(engine_is_likelier: bool) -> None:
    """The importance weight of a sequence is the product of its tokens': 1 % per token is e^10 over 1,000 of them."""
    old = torch.zeros(1000, dtype=torch.float64)
    rollout = old + (0.01 if engine_is_likelier else -0.01)
    tokens = sampled(old, old, rollout, old, torch.zeros(1000, dtype=torch.long))
    weights_N, reports = make_loss("grpo", correction="sequence_tis").correction(tokens)
    expected = 4.539993e-05 if engine_is_likelier else 5.0
    assert weights_N.tolist() == pytest.approx([expected] * 1000, rel=1e-6)
    assert reports["correction/fraction"].all() == (not engine_is_likelier)


@pytest.mark.parametrize("correction, same", [("none", True), ("sequence_mask", True), ("tis", False)])
def test_both_forms_of_gspo_share_a_gradient_where_a_trajectory_has_one_weight(correction: str, same: bool) -> None:
    tokens = random_tokens(400, 60, one_advantage=True)
    draw = torch.Generator().manual_seed(1)
    tokens = replace(tokens, rollout_logprobs_N=tokens.old_logprobs_N - 0.1 * torch.rand(400, generator=draw))
    options = {"epsilon": 0.9, "epsilon_high": 9.0, "correction": correction, "correction_range": [0.5, 1.05]}
    if correction == "none":
        del options["correction_range"]
    forms = [make_loss(name, **options) for name in ("gspo", "gspo_token")]
    a, b = (token_gradient(loss, tokens, loss.correction(tokens)[0]) for loss in forms)
    assert ((a - b).norm() <= 1e-10 * a.norm()) == same


def test_the_correction_is_off_in_float32_and_where_nothing_is_left_to_correct() -> None:
    assert make_loss("grpo").correction_range[0] == "none"
    assert make_loss("grpo", model={"dtype": "bfloat16"}).correction_range == ("tis", 0.0, 2.0)
    assert make_loss("grpo", model={"dtype": "bfloat16"}, correction="bypass").correction_range[0] == "none"


def test_mixins_compose_and_bring_their_options_and_ranges() -> None:
    class Mine(DualClipLossMixin, DAPOLossMixin, GRPOTrainer):
        pass

    config = Config.model_validate({"trainer": {"algorithm": {"options": {"epsilon": 0.1, "delta": 4}}}})
    mine = Mine(config)
    assert (mine.epsilon, mine.epsilon_high, mine.options.delta) == (0.1, 0.28, 4.0)
    assert mine.reduction(torch.tensor([3, 1])).tolist() == [0.25, 0.25]
    assert make_loss("grpo", epsilon=0.3).epsilon_high == 0.3


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("sapo", {"sapo_temperature": 1.0}, r"options\.sapo_temperature is not an option of sapo, did you mean sapo_t"),
        ("grpo", {"sapo_gate": "paper"}, r"sapo_gate is not an option of grpo.*; grpo has beta, correction, "),
        ("sapo", {"sapo_temperature_neg": 0}, r"sapo_temperature_neg is 0, but should be greater than 0"),
        ("sapo", {"sapo_gate": "soft"}, r"sapo_gate is \"soft\", but should be 'paper' or 'sigmoid'"),
        ("dual_clip", {"delta": "3"}, r"delta is \"3\", but should be a valid number"),
        (
            "grpo",
            {"kl_estimator": "k1"},
            r"kl_estimator is \"k1\", but should be 'k2', 'k3', 'k3_ratio', 'k1_in_reward'",
        ),
        ("dr_grpo", {"scale_rewards": "std"}, r"scale_rewards is \"std\", but should be 'group', 'batch' or 'none'"),
        ("sapo", {"epsilon": 0.1}, r"epsilon is not an option of sapo"),
        ("grpo", {"correction_range": [0.5, 2.0]}, r"correction_range is .* should be left out"),
        ("grpo", {"correction": "bypass", "correction_range": [0.5, 2.0]}, r"range is .* should be left out"),
        ("grpo", {"correction": "tis", "correction_range": [3.0, 2.0]}, r"range is \[3.0, 2.0\], .* two weights"),
        ("grpo", {"correction": "tis", "correction_range": [0.5]}, r"range is \[0.5\], but should be two weights"),
        ("grpo", {"correction": "tis", "correction_range": [0.0, 0.0]}, r"range is \[0.0, 0.0\], .* two weights"),
        ("grpo", {"correction_range": [0.5, 2.0]}, r"should be left out: correction=auto has none"),
        ("cispo", {"epsilon_high": 0}, r"epsilon_high is 0, but should be greater than 0"),
    ],
)
def test_options_that_do_not_fit_are_named(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_loss(name, **options)


def test_stale_tokens_are_corrected_for_their_age_in_float32_too() -> None:
    stale = Config.model_validate({"trainer": {"max_staleness": 1}})
    assert algorithm_class("grpo")(stale).correction_range == ("tis", 0.0, 2.0)
