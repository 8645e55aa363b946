"""LoRA and QLoRA: what learns, what stays, what is published, and who computes with which adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_models import make_batch, make_config, save_model
from transformers import AutoModelForCausalLM

from skyrl_trainer.dry_run.limits import ModelShape, memory
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner import lora, model
from skyrl_trainer.learner.batch import collate, make_rows
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.model import Learner, Scorer
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.types import TrainingBatch
from skyrl_trainer.weight_sync.colocation import sync_backend
from skyrl_trainer.weight_sync.lora import adapter_kwargs, check_adapter

IDS = list(range(3, 60))
NF4 = {"quantization": "nf4"}


def make_learner(path: str, options: dict[str, Any] | None = None, **trainer: Any) -> Learner:
    lora = {"rank": 4} | (options or {})
    return model.make_learner(make_config(trainer=trainer | {"policy": {"model": {"lora": lora}}}), path, 10)


def micro_batch(learner: Scorer) -> TrainingBatch:
    rewards = make_batch()
    rows = make_rows(rewards.trajectories)
    return collate(rows, range(8), learner.device, learner.dtype)


@torch.no_grad()
def spread(parameters: list[torch.nn.Parameter], scale: float = 0.1) -> None:
    """Away from the start, where B is 0 and the adapter does nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("options", [{}, NF4])
def test_an_update_changes_the_adapter_and_nothing_else(tmp_path: Path, options: dict[str, Any]) -> None:
    path = save_model(tmp_path)
    state = torch.get_rng_state()
    learner = make_learner(path, options)
    assert torch.equal(torch.get_rng_state(), state)
    before = {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}
    start = learner.token_logprobs(IDS)
    for step in range(3):  # A has no gradient while B is 0
        GRPO(learner.config).start(learner).update(make_batch(seed=step))
    changed = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == learner.trainable().keys() and len(changed) == 2 * 7 * 2
    assert not torch.equal(learner.token_logprobs(IDS), start)
    if not options:
        assert torch.equal(start, Scorer(make_config(), path).token_logprobs(IDS))


@pytest.mark.parametrize("options", [{}, NF4, NF4 | {"target_modules": ["q_proj", "mlp.down_proj"]}])
@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_the_same_policy_in_a_plain_model(
    tmp_path: Path, options: dict[str, Any], tied: bool
) -> None:
    path = save_model(tmp_path / "base", tie_word_embeddings=tied)
    learner = make_learner(path, options)
    spread(learner.parameters)
    ours = learner.token_logprobs(IDS)
    merged = dict(learner.named_tensors())
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert [(n, p.shape) for n, p in plain.named_parameters()] == [(n, t.shape) for n, t in merged.items()]
    learner.save_pretrained(tmp_path / "out")
    assert (Scorer(make_config(), str(tmp_path / "out")).token_logprobs(IDS) - ours).abs().max() < 2e-5
    assert torch.equal(learner.token_logprobs(IDS), ours)
    with torch.no_grad():  # the adapter's own folder, on the base that it is for
        for (_, parameter), (_, tensor) in zip(plain.named_parameters(), learner.base_tensors(), strict=True):
            parameter.copy_(tensor)
        loaded = PeftModel.from_pretrained(plain, tmp_path / "out" / "adapter")
        theirs = loaded(torch.tensor([IDS])).logits[0].log_softmax(-1)
    assert (theirs - ours).abs().max() < 2e-5


@pytest.mark.parametrize("at_once", [2**24, 101 * 3])
@pytest.mark.parametrize("tied", [True, False])
def test_the_frozen_head_gives_the_adapter_the_gradients_of_autograd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, at_once: int
) -> None:
    monkeypatch.setattr(model, "LOGITS_AT_ONCE", {"cpu": at_once})
    path = save_model(tmp_path, tie_word_embeddings=tied)
    settings = {"trainer": {"policy": {"model": {"lora": {"rank": 4}}}}, "generator": {"temperature": 0.7}}
    learner = model.make_learner(make_config(**settings), path, 10)
    learner.model.double()
    spread(learner.parameters)
    batch, found = micro_batch(learner), []
    factors_N = torch.linspace(-1, 2, len(batch.target_ids_N), dtype=torch.float64)
    for of_learner in (lora.LoRALearner.scoring, Learner.scoring):
        monkeypatch.setattr(lora.LoRALearner, "scoring", of_learner)
        logprobs_N, entropies_N = learner.logprobs(batch)
        (factors_N * logprobs_N).sum().backward()
        found.append([logprobs_N.detach(), entropies_N.detach(), *(p.grad for p in learner.parameters)])
        learner.clear_gradients()
    assert len(found[0]) == 2 + 2 * 7 * 2
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == torch.float64 and expected.abs().max() > 0
        assert (ours - expected).abs().max() < 1e-12 * expected.abs().max()


def test_the_reference_is_the_same_model_without_its_adapter(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    learner = make_learner(path, algorithm={"options": {"beta": 0.1}})
    reference, start = learner.reference(), Scorer(make_config(), path)
    assert reference.model is learner.model
    trainer = GRPO(learner.config).start(learner, reference)
    first = trainer.update(make_batch(seed=0))
    spread(learner.parameters)
    second = trainer.update(make_batch(seed=1))
    assert first["kl/reference"] == 0 < second["kl/reference"]
    with torch.no_grad():
        batch = micro_batch(learner)
        assert torch.equal(reference.logprobs(batch)[0], start.logprobs(batch)[0])
        assert not torch.equal(learner.logprobs(batch)[0], start.logprobs(batch)[0])


def test_training_one_role_leaves_the_others_outputs_as_they_were(tmp_path: Path) -> None:
    learner = make_learner(save_model(tmp_path))
    spread(learner.parameters)
    policy = learner.token_logprobs(IDS)
    assert learner.lora is not None
    critic = lora.add_role(learner.model, "critic", learner.lora, seed=1)
    assert torch.equal(learner.token_logprobs(IDS), policy)
    optimizer = torch.optim.AdamW(critic.values(), lr=0.1)
    for _ in range(2):
        with lora.role(learner.model, "critic"):
            values_N = learner.hidden(micro_batch(learner)).sum(-1)
        values_N.square().mean().backward()
        assert all(parameter.grad is None for parameter in learner.parameters)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(learner.token_logprobs(IDS), policy)
    with lora.role(learner.model, "critic"):
        other = learner.token_logprobs(IDS)
    GRPO(learner.config).start(learner).update(make_batch())
    assert all(parameter.grad is None for parameter in critic.values())
    assert not torch.equal(learner.token_logprobs(IDS), policy) and not torch.equal(other, policy)
    with lora.role(learner.model, "critic"):
        assert torch.equal(learner.token_logprobs(IDS), other)
    assert not any("critic" in name for name in learner.state_dict().tensors)


@pytest.mark.parametrize("options", [{}, NF4])
def test_a_checkpoint_holds_the_adapter_alone_and_resumes_to_the_byte(tmp_path: Path, options: dict[str, Any]) -> None:
    path = save_model(tmp_path / "model")

    def run(folder: Path, *spans: range) -> bytes:
        for span in spans:
            learner, checkpoints = make_learner(path, options), Checkpoints(folder, keep=1)
            if loaded := checkpoints.load_latest():
                learner.load_state_dict(loaded.learner)
            for step in span:
                GRPO(learner.config).start(learner).update(make_batch(seed=step))
            checkpoints.save(span.stop, learner.state_dict(), {})
        assert all("lora_" in name for name in learner.state_dict().tensors)
        return (folder / "checkpoints" / "step_000004" / "learner.safetensors").read_bytes()

    assert run(tmp_path / "alone", range(4)) == run(tmp_path / "halves", range(2), range(2, 4))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"target_modules": ["q_prj"]},
            r"q_prj is no torch.nn.Linear of Qwen3ForCausalLM, which has down_proj, .*v_proj",
        ),
        ({"target_modules": ["lm_head"]}, r"lm_head is no .*not the output layer"),
        ({"target_modules": []}, r"target_modules: \[\] is no torch.nn.Linear"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_learner(save_model(tmp_path), options)


def test_what_lora_does_not_go_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"all-linear is no torch.nn.Linear of GPT2LMHeadModel, which has none"):
        make_learner(save_model(tmp_path, "gpt2"))
    config = make_config(trainer={"policy": {"model": {"lora": NF4 | {"rank": 0}}}})
    with pytest.raises(UserError, match=r"lora\.rank is 0, which trains all weights without adapters: give a rank"):
        lora.checked(config)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"generator": {"weight_sync_backend": "adapter"}},
            r"needs an adapter: set trainer\.policy\.model\.lora\.rank",
        ),
        ({"lora": NF4 | {"rank": 513}}, "goes up to rank 512"),
        (
            {
                "lora": NF4,
                "trainer": {"placement": {"policy_num_nodes": 2}},
                "generator": {"weight_sync_backend": "adapter"},
            },
            "needs a single learner",
        ),
        ({"lora": NF4, "generator": {"backend": "transformers"}}, "needs generator.backend=vllm or openai_server"),
        ({"lora": NF4, "generator": {"inference_engine_tensor_parallel_size": 2}}, "needs one GPU per engine"),
        (  # vLLM's kernels for adapters take half precision only
            {"lora": NF4, "trainer": {"placement": {"policy_num_gpus_per_node": 1}}},
            r"needs trainer\.policy\.model\.dtype=bfloat16 on a GPU",
        ),
    ],
)
def test_what_hot_loading_does_not_go_with_is_refused(settings: dict[str, Any], sentence: str) -> None:
    """NF4 asks for it where nothing else is said."""
    model = {"policy": {"model": {"lora": settings.get("lora", {})}}}
    config = make_config(trainer=model | settings.get("trainer", {}), generator=settings.get("generator", {}))
    with pytest.raises(UserError, match=rf"weight_sync_backend: adapter {sentence}; or set it to shared_memory"):
        sync_backend(config)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (8, 8), (9, 16), (512, 512)])
def test_an_engine_has_room_for_the_rank_and_for_no_more_than_it_must(rank: int, room: int) -> None:
    config = make_config(trainer={"policy": {"model": {"lora": {"rank": rank}}}}, generator={"backend": "vllm"})
    check_adapter(config)
    assert adapter_kwargs(config)["max_lora_rank"] == room


@pytest.mark.parametrize("options", [{}, NF4])
def test_the_memory_estimate_counts_what_is_trained(tmp_path: Path, options: dict[str, Any]) -> None:
    learner = make_learner(save_model(tmp_path), options)
    shape = ModelShape.of(learner.model.config.to_dict(), "float32")
    rows = dict(memory(learner.config, shape))
    adapter = sum(parameter.numel() for parameter in learner.parameters)
    assert rows["learner: adapter, gradients, AdamW's two moments"] == 16 * adapter
    in_four_bits = shape.matrices if options else 0
    assert rows["learner: frozen weights"] == 4 * (shape.parameters - in_four_bits) + in_four_bits / 2
