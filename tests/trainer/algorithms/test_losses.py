"""The GRPO loss against TRL's, PPO's clip against its closed-form gradient, and the edges of both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer as TRLTrainer

from skyrl_trainer.algorithms.kl import k1, k2, k3
from skyrl_trainer.algorithms.losses import SampledTokens, ppo_clip, sequence_mean, token_ratio


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
        "advantages": advantages,
        "mask": mask,
    }


def trl_loss(case: dict[str, torch.Tensor], logprobs: torch.Tensor, beta: float) -> torch.Tensor:
    """`trl.GRPOTrainer._compute_loss` on given log-probabilities; a namespace stands for the trainer."""
    mask = case["mask"].double()
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(mask), None),
        accelerator=accelerator,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": {}},
    )
    trainer._metrics["train"] = {name: [] for name in ("kl", "entropy")}
    for part in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        trainer._metrics["train"][f"clip_ratio/{part}"] = []
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": case["advantages"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["ref"],
    }
    return TRLTrainer._compute_loss(trainer, trainer.model, inputs)


def our_loss(case: dict[str, torch.Tensor], logprobs: torch.Tensor, beta: float) -> torch.Tensor:
    mask = case["mask"]
    rows = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    tokens = SampledTokens(
        logprobs[mask], case["old"][mask], case["old"][mask], case["advantages"][rows], trajectory_N=rows
    )
    loss, _ = ppo_clip(token_ratio(tokens), tokens.advantages_N, 0.2, 0.28)
    loss = loss + beta * k3(tokens.logprobs_N, case["ref"][mask])
    return (loss * sequence_mean(mask.sum(1))[rows]).sum()


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_trl(seed: int, beta: float) -> None:
    case = ragged(seed)
    results = []
    for loss_of in (trl_loss, our_loss):
        logprobs = case["logprobs"].clone().requires_grad_()
        loss = loss_of(case, logprobs, beta)
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
    (expected, expected_grad), (actual, grad) = results
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert (grad - expected_grad).norm() <= 1e-6 * expected_grad.norm()


def test_clip_has_the_closed_form_gradient() -> None:
    """d loss / d logp is -r A, and 0 where the clip holds: A > 0 above the range, A < 0 below it."""
    draw = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(2000, generator=draw, dtype=torch.float64)
    logprobs = (old + torch.randn(2000, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(2000, generator=draw, dtype=torch.float64)
    tokens = SampledTokens(logprobs, old, old, advantages, torch.zeros(2000, dtype=torch.long))
    ratio = token_ratio(tokens)
    loss, clipped = ppo_clip(ratio, advantages, 0.2, 0.3)
    loss.sum().backward()
    r = ratio.detach()
    held = ((advantages > 0) & (r > 1.3)) | ((advantages < 0) & (r < 0.8))
    assert torch.equal(clipped, held)
    torch.testing.assert_close(logprobs.grad, torch.where(held, 0.0, -r * advantages), rtol=1e-10, atol=1e-10)


def test_ratio_stays_finite_however_far_apart_the_policies_are() -> None:
    logprobs, old = torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0])
    ratio = token_ratio(SampledTokens(logprobs, old, old, old, torch.zeros(2, dtype=torch.long)))
    torch.testing.assert_close(ratio, torch.tensor([20.0, -20.0]).exp())


def test_sequence_mean_weighs_every_trajectory_alike_and_survives_an_empty_one() -> None:
    assert sequence_mean(torch.tensor([4, 1, 0])).tolist() == pytest.approx([1 / 12, 1 / 3, 1 / 3])


def test_kl_estimators_have_their_values() -> None:
    logprobs, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])
    assert k1(logprobs, reference).tolist() == [0.0, 2.0]
    assert k2(logprobs, reference).tolist() == [0.0, 2.0]
    assert k3(logprobs, reference).tolist() == pytest.approx([0.0, 2.718281828**-2 + 2 - 1])
