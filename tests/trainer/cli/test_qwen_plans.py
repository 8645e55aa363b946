"""The Qwen recipes' dry runs, without a GPU and without the model; every number here was worked out by hand.

Qwen2.5-1.5B, norms and biases left out: 28 * 1536 * (2 * 1536 + 2 * 256 + 3 * 8960) + 151936 * 1536 parameters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from skyrl_trainer.config import load_config, resolve
from skyrl_trainer.dry_run import plan
from skyrl_trainer.dry_run.doctor import Gpu, Hardware
from skyrl_trainer.dry_run.limits import CARDS, ModelShape, adapter_size, card, gpu_memory, learner_memory, limits
from skyrl_trainer.run.cluster import buffer_bytes
from skyrl_trainer.run.model_shape import QWEN_1_5B, model_shape
from skyrl_trainer.weight_sync.colocation import shares_gpus, sync_backend

LAPTOP = Hardware(cores=2, memory=8 * 2**30, gpus=())
EIGHT_H200 = Hardware(96, 2**40, (Gpu("NVIDIA H200", 141 * 10**9),) * 8)
RECIPES = ("qwen_1gpu", "qwen_8gpu_colocated", "qwen_8gpu_split")
P, P_LORA = 1_543_569_408, 36_929_536
SHAPE = ModelShape.of(QWEN_1_5B, "bfloat16")


@pytest.fixture(autouse=True)
def nothing_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_trainer.engine.vllm_args.has_gpu", lambda: False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)


def test_the_shape_is_qwens() -> None:
    assert SHAPE.parameters == SHAPE.active == P and SHAPE.kv_bytes == 28 * 1024
    assert pytest.approx(1_543_714_304, rel=1e-4) == P, "as published, with norms and biases"
    config = load_config("qwen_1gpu", [])
    assert model_shape(config) == SHAPE
    assert adapter_size(config, SHAPE) == P_LORA == 28 * 32 * (2 * 3072 + 2 * 1792 + 3 * 10496)


def test_heads_need_not_divide_the_width() -> None:
    """Those of Qwen3-0.6B are of 128, and 16 of them are twice its width."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    shape = ModelShape.of({**sizes, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}, "bfloat16")
    assert shape.parameters == pytest.approx(596_049_920, rel=2e-4), "as published, with norms"
    assert shape.kv_bytes == 28 * 2 * 8 * 128 * 2


def test_the_buffer_of_a_weight_sync_is_as_large_as_the_weights() -> None:
    assert buffer_bytes(load_config("qwen_1gpu", ["generator.weight_sync_backend=shared_memory"])) == 2 * P
    assert buffer_bytes(load_config("qwen_1gpu", [])) == 0, "they stay on the GPU"


def test_a_split_engines_cache_holds_the_tokens_of_all_its_parts() -> None:
    halves = ["generator.inference_engine_tensor_parallel_size=2"]
    _, engine = gpu_memory(load_config("qwen_8gpu_split", halves), SHAPE, CARDS["H100"])
    (_, weights), (told, cache) = engine
    assert weights == P and f"(of {2 * cache // (28 * 1024):,} tokens at most)" in told


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_the_gpus_that_a_recipe_wants_nothing_stops_it(recipe: str) -> None:
    assert list(plan.obstacles(load_config(recipe, []), EIGHT_H200)) == []


@pytest.mark.parametrize(
    ("recipe", "gpus", "engine", "backend"),
    [
        ("qwen_1gpu", {0: "learner 0 and engine 0"}, "GPU 0, taking turns with the learner", "cuda_ipc"),
        (
            "qwen_8gpu_colocated",
            {n: f"learner {n} and engine {n}" for n in range(8)},
            "GPUs 0-7, taking turns with the learner",
            "shared_memory",
        ),
        (
            "qwen_8gpu_split",
            {**{n: f"engine {n}" for n in range(5)}, 5: "learner 0", 6: "learner 1", 7: "learner 2"},
            "GPUs 0-4",
            "nccl",
        ),
    ],
)
def test_placement(recipe: str, gpus: dict[int, str], engine: str, backend: str) -> None:
    config = load_config(recipe, [])
    rows = dict(plan.placement(config, EIGHT_H200))
    assert {int(name[4:]): who for name, who in rows.items() if name.startswith("GPU ")} == gpus
    assert next(where for name, where in rows.items() if name.startswith("engines")) == engine
    assert sync_backend(config) == backend and shares_gpus(config) is (backend != "nccl")


def test_an_engine_of_two_gpus_has_two_parts() -> None:
    overrides = ["generator.num_inference_engines=2", "generator.inference_engine_tensor_parallel_size=2"]
    assert plan.tenants(load_config("qwen_8gpu_split", overrides)) == {
        **{n: f"engine {n // 2} (part {n % 2 + 1} of 2)" for n in range(4)},
        **{n: f"learner {n - 4}" for n in range(4, 7)},
    }


def test_a_single_learner_apart_has_the_first_gpu() -> None:
    overrides = ["trainer.placement.policy_num_gpus_per_node=1", "generator.num_inference_engines=2"]
    expected = {0: "learner 0", 1: "engine 0", 2: "engine 1"}
    assert plan.tenants(load_config("qwen_8gpu_split", overrides)) == expected


def test_memory_of_a_gpu_to_the_byte() -> None:
    learner, engine = gpu_memory(load_config("qwen_1gpu", []), SHAPE, CARDS["H100"])
    assert [size for _, size in learner] == [
        2 * P,
        16 * P_LORA,
        16384 * (28 * 1536 * 2 + 2 * (8 * 1536 + 2 * 1536 + 2 * 256 + 4 * 8960) * 9 // 12),
        6 * 2**30,
        2 * P,  # of the weight sync
    ]
    assert sum(size for _, size in learner) == 12_800_622_592 + 2 * P
    cache = 60 * 10**9 - 2 * P
    assert [size for _, size in engine] == [2 * P, cache]
    assert engine[1][0].endswith(f"(of {cache // (28 * 1024):,} tokens at most)") and cache // (28 * 1024) == 1_984_963


@pytest.mark.parametrize(
    ("lora", "checkpointing", "measured"),
    [("{}", True, 33.8), ("{}", False, 66.2), ("{rank: 32}", False, 42.4)],
)
def test_the_estimate_is_near_what_was_measured_on_one_gpu(lora: str, checkpointing: bool, measured: float) -> None:
    """GiB at most of an H100, 1.5B, by 16k tokens; docs/figures/learner_gpu.json."""
    overrides = [
        "trainer.policy.model.dtype=bfloat16",
        "trainer.placement.policy_num_gpus_per_node=1",
        "trainer.micro_batch_tokens=16384",
        f"trainer.gradient_checkpointing={checkpointing}",
        f"trainer.policy.model.lora={lora}",
    ]
    rows = learner_memory(load_config(None, overrides), SHAPE)
    assert sum(size for _, size in rows) / 2**30 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("checkpointing", "more"), [("true", 0), ("false", 2 * P)])
def test_compiled_layers_keep_sharded_weights_whole_for_the_backward_pass(checkpointing: str, more: int) -> None:
    overrides = ["trainer.policy.model.lora={}", f"trainer.gradient_checkpointing={checkpointing}"]

    def sizes(learners: int) -> list[int]:
        placed = f"trainer.placement.policy_num_gpus_per_node={learners}"
        return [size for _, size in learner_memory(load_config("qwen_1gpu", [*overrides, placed]), SHAPE)]

    one, two = sizes(1), sizes(2)
    assert two[0] == one[0] / 2 and two[2:] == [one[2] + more, one[3]]


@pytest.mark.parametrize("lora", ["trainer.policy.model.lora={}", "trainer.policy.model.lora={rank: 32}"])
@pytest.mark.parametrize("name", ["ppo", "cispo_ppo"])
def test_a_critic_takes_as_much_again_unless_it_is_a_head_of_the_policys(lora: str, name: str) -> None:
    def sizes(*overrides: str) -> list[int]:
        return [size for _, size in learner_memory(load_config("qwen_1gpu", [lora, *overrides]), SHAPE)]

    named = f"trainer.algorithm.name={name}"
    policy, critic = sizes(), sizes(named)
    assert sizes(named, "trainer.algorithm.options.critic=backbone") == policy
    frozen_or_reference, logits = (0, 3) if "rank" in lora else (1, 3)
    assert all(
        both == (one if place in (frozen_or_reference, logits) else 2 * one)
        for place, (one, both) in enumerate(zip(policy, critic, strict=True))
    )


def test_a_context_longer_than_a_micro_batch_is_passed_whole() -> None:
    def activations(length: int) -> int:
        overrides = ["trainer.micro_batch_tokens=4096", f"generator.max_model_len={length}"]
        return dict(learner_memory(load_config("qwen_1gpu", overrides), SHAPE))["learner: activations of a micro-batch"]

    assert activations(4096) == activations(1024) and activations(32768) == 8 * activations(4096)


def test_a_gpu_that_is_not_in_the_table_has_its_own_memory() -> None:
    a10 = Hardware(8, 2**36, (Gpu("NVIDIA A10G", 23_028 * 2**20),))
    found = card(load_config("qwen_1gpu", []), a10)
    assert found is not None and found[0] == CARDS["H100"]._replace(memory=23_028 * 2**20)
    assert found[1] == "data sheet of 1 x H100, assumed: the machine's own are not known"


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA A100-SXM4-80GB", 2.04e12),
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-PCIE-40GB", 1.555e12),
    ],
)
def test_cards_of_one_name_have_their_own_rates(name: str, bandwidth: float) -> None:
    found = card(load_config("qwen_1gpu", []), Hardware(8, 2**36, (Gpu(name, 40 * 2**30),)))
    assert found is not None and found[0].bandwidth == bandwidth and name in found[1]


def test_limits_of_one_gpu() -> None:
    figures = dict(limits(load_config("qwen_1gpu", []), SHAPE, LAPTOP))
    assert "data sheet of 1 x H100, assumed" in figures["memory bandwidth, arithmetic"]
    decode = 256 / ((2 * P + 256 * 2048 * 28672) / 3.35e12)
    assert figures["decode, at most"].startswith(f"{decode:,.0f} tokens/s") and 47_329 < decode < 47_331
    train = 989e12 / (4 * P + 6 * P_LORA)
    assert figures["train, at most"] == f"{train:,.0f} tokens/s: 989,000 GFLOP/s / (4 P + 6 P_lora), an epoch"
    assert figures["weight sync, at least"].startswith(f"{4 * 2 * P / 3.35e12:.4f} s: 4 P b / bandwidth")
    seconds = f"{256 * 4096 / decode:.1f} s decode + {256 * 6144 / train:.1f} s train + 0.00 s sync"
    assert figures["a step at full length, at least"] == seconds == "22.2 s decode + 10.2 s train + 0.00 s sync"
    config = load_config("qwen_1gpu", ["generator.weight_sync_backend=shared_memory"])
    sync = dict(limits(config, SHAPE, LAPTOP))["weight sync, at least"]
    assert sync.startswith(f"{2 * 2 * P / 64e9:.4f} s: 2 P b / 64 GB/s")
    config = load_config("qwen_1gpu", ["generator.weight_sync_backend=adapter"])
    sync = dict(limits(config, SHAPE, LAPTOP))["weight sync, at least"]
    assert sync.startswith(f"{2 * 2 * P_LORA / 64e9:.4f} s: 2 P_lora b / 64 GB/s")


def test_limits_of_a_split_count_each_sides_gpus() -> None:
    figures = dict(limits(load_config("qwen_8gpu_split", []), SHAPE, LAPTOP))
    decode = 2048 / ((5 * 2 * P + 2048 * 2048 * 28672) / (5 * 3.35e12))
    assert figures["decode, at most"].startswith(f"{decode:,.0f} tokens/s")
    assert figures["train, at most"].startswith(f"{3 * 989e12 / (4 * P + 6 * P_LORA):,.0f} tokens/s")
    assert figures["weight sync, at least"].startswith(f"{2 * P / 450e9:.4f} s: P b / 450 GB/s between GPUs (NCCL)")
    found = card(load_config("qwen_8gpu_split", []), EIGHT_H200)
    assert found == (CARDS["H200"], "data sheet of 8 x NVIDIA H200")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_whole_plan_is_shown_where_there_is_neither_gpu_nor_model(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "hardware", lambda: LAPTOP)
    plan.print_plan(resolve(recipe, []))
    text = capsys.readouterr().out
    for part in ("not on this machine: its shape is from a table", "together, while it learns", "Physical limits"):
        assert part in text
    assert text.count("Memory of each GPU with") == (2 if recipe == "qwen_8gpu_split" else 1)
    (obstacle,) = text[text.index("Would stop") :].splitlines()[1:]
    assert "The placement needs" in obstacle and "this machine has none" in obstacle


def test_of_a_cluster_this_machine_has_to_have_the_learners_gpus() -> None:
    """The engines' may be on any."""
    config = load_config("qwen_8gpu_split", ["ray.address=10.0.0.1:6379", "generator.num_inference_engines=40"])
    assert list(plan.obstacles(config, EIGHT_H200)) == []
    (said,) = plan.obstacles(config, LAPTOP)
    assert said.startswith("The placement needs 3 GPUs (") and said.endswith("; this machine has none.")


def test_beside_a_learner_on_the_processor_the_engine_has_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quick start's, on a machine with a GPU."""
    monkeypatch.setattr("skyrl_trainer.engine.vllm_args.has_gpu", lambda: True)
    one = Hardware(2, 2**36, EIGHT_H200.gpus[:1])
    monkeypatch.setattr(plan, "hardware", lambda: one)
    resolved = resolve("quickstart", [])
    rows = dict(plan.placement(resolved.config, one))
    assert rows["learner"].startswith("processor (2 cores")
    assert rows["engines (1 x vllm)"] == "GPU 0" and rows["GPU 0"] == "engine 0"
    plan.print_plan(resolved)
    text = capsys.readouterr().out
    on_processor, on_gpu = text[text.index("\nMemory, ") : text.index("\nPhysical")].split("\nMemory of each GPU with ")
    assert "learner: weights" in on_processor and "engine" not in on_processor
    assert on_gpu.startswith("engine (as GPU 0)") and "engine: weights" in on_gpu and "learner" not in on_gpu
    shape = model_shape(resolved.config)
    assert shape is not None
    figures = dict(limits(resolved.config, shape, one))
    assert figures["memory bandwidth, arithmetic"].startswith(
        "4,800.0 GB/s, 494,500 GFLOP/s (data sheet of 1 x NVIDIA H200)"
    )
    [trains] = re.findall(r": ([\d,]+) GFLOP/s / \(6 P\), an epoch", figures["train, at most"])
    assert int(trains.replace(",", "")) < 50_000, "two cores' rate"
    assert ": 1 P b / 64 GB/s" in figures["weight sync, at least"]
    four = load_config("quickstart", ["generator.num_inference_engines=4"])
    assert "policy_num_gpus_per_node=0, 4 engines); this machine has 1." in "".join(plan.obstacles(four, one))


def test_too_small_a_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan, "hardware", lambda: Hardware(8, 2**36, (Gpu("NVIDIA L4", 24 * 10**9),)))
    plan.print_plan(resolve("qwen_1gpu", ["trainer.policy.model.lora={}"]))
    assert "A GPU with learner and engine needs about" in capsys.readouterr().out


def test_what_does_not_go_together_is_a_sentence_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan.print_plan(resolve("qwen_1gpu", ["generator.weight_sync_backend=nccl"]))
    text = capsys.readouterr().out
    assert "cuda_ipc: learner and engines share their GPUs" in text and "Physical limits" in text
    plan.print_plan(resolve("qwen_1gpu", ["trainer.policy.model.lora={rank: 0, quantization: nf4}"]))
    text = capsys.readouterr().out
    assert "trainer.policy.model.lora.rank is 0" in text and "GPU 0  " in text


def test_the_plan_shows_every_option_of_the_algorithm_and_who_set_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan.print_plan(resolve("webshop_lite", ["trainer.algorithm.options.beta=0.1"]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "trainer.algorithm.options." in line]
    shown = {name.rpartition(".")[2]: (value, " ".join(source)) for name, value, *source in rows}
    assert shown["beta"] == ("0.1", "command line") and shown["delta"] == ("3.0", "default") and len(shown) == 14


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.algorithm.name=grqo", "trainer.algorithm.name='grqo' is not registered"),
        ("trainer.algorithm.options.epsilom=1", "epsilom is not an option of grpo, did you mean epsilon?"),
        ("trainer.algorithm.options.epsilon=-1", "options.epsilon is -1, but should be greater than or equal to 0."),
        (
            "trainer.algorithm.advantage_estimator=grqo",
            "trainer.algorithm.advantage_estimator='grqo' is not registered",
        ),
    ],
)
def test_an_algorithm_that_cannot_be_made_is_a_sentence_beside_the_plan(
    capsys: pytest.CaptureFixture[str], override: str, sentence: str
) -> None:
    plan.print_plan(resolve("quickstart", [override]))
    text = capsys.readouterr().out
    assert sentence in text[text.index("Would stop") :] and override.rpartition("=")[0] in text


def test_gae_beside_the_default_algorithm_is_ppo(capsys: pytest.CaptureFixture[str]) -> None:
    """As SkyRL has it; a critic's options are then there."""
    plan.print_plan(resolve("quickstart", ["trainer.algorithm.advantage_estimator=gae"]))
    text = capsys.readouterr().out
    assert "trainer.algorithm.options.gae_lambda " in text and text.endswith("nothing found\n")


def test_a_model_on_this_machine_is_not_taken_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN_1_5B, "num_hidden_layers": 1}))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(file))
    shape = model_shape(load_config("qwen_1gpu", []))
    assert shape is not None and shape.layers == 1
