"""What vLLM is started with: on a GPU, where no test has one, and when it is another vLLM than ours."""

from __future__ import annotations

import dataclasses
import gc
import types
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from skyrl_trainer.engine import vllm_args
from skyrl_trainer.engine.vllm_actor import SCHEDULER, VLLMEngine
from skyrl_trainer.engine.vllm_args import PREFILL_TOKENS, vllm_kwargs
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.processes import check_engines
from skyrl_trainer.types import GenerationRequest, SamplingOptions
from tests.trainer.learner.tiny_models import make_config


def test_on_a_gpu_prompts_are_read_in_large_steps_and_the_users_word_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "has_gpu", lambda: True)
    found = vllm_kwargs("there", "bfloat16", 1024, 256, 0, {"gpu_memory_utilization": 0.3})
    assert found["max_num_batched_tokens"] == PREFILL_TOKENS and found["gpu_memory_utilization"] == 0.3
    assert "enforce_eager" not in found and "kv_cache_memory_bytes" not in found
    own = vllm_kwargs("there", "bfloat16", 1024, 256, 0, {"max_num_batched_tokens": 4096})
    assert own["max_num_batched_tokens"] == 4096


def test_an_argument_that_vllm_does_not_know_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {field.name: None for field in dataclasses.fields(vllm.EngineArgs)}
    vllm_args.check_names({**known, "urls": [], "default_chat_template_kwargs": {}})
    config = make_config(generator={"engine_kwargs": {"gpu_memory_utilisation": 0.5}})
    with pytest.raises(UserError, match=r"gpu_memory_utilisation is no .* Did you mean gpu_memory_utilization\?"):
        check_engines(config, "tiny", training=True)
    with pytest.raises(UserError, match=r"engine_kwargs\.foo is no argument of vLLM's EngineArgs: leave it out\.$"):
        vllm_args.check_names({"foo": 1})
    monkeypatch.setattr(vllm_args, "find_spec", lambda name: SimpleNamespace(origin="/nowhere/__init__.py"))
    vllm_args.check_names({"foo": 1})  # of another vLLM, which nobody knows here


def test_attention_in_float32_is_exact_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a Triton kernel there, which rounds to TF32 if nobody says otherwise: then the canary stops every run."""
    assert "TRITON_F32_DEFAULT" not in vllm_args.engine_env()
    monkeypatch.setattr(vllm_args, "has_gpu", lambda: True)
    assert vllm_args.engine_env()["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("0.32.0", {}, SCHEDULER),
        ("0.32.1", {}, SCHEDULER),
        ("0.32.0", {"scheduler_cls": None}, None),
        ("0.33.0", {}, "vLLM's own"),
        ("0.3.32.", {}, "vLLM's own"),
    ],
)
def test_our_scheduler_is_for_the_vllm_that_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch, version: str, given: dict[str, Any], expected: str | None
) -> None:
    class Started(Exception):
        pass

    def started(**arguments: Any) -> None:
        raise Started(arguments.get("scheduler_cls", "vLLM's own"))

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(vllm, "EngineArgs", started)
    monkeypatch.setattr(vllm_args, "has_gpu", lambda: True)  # no model has to be there
    engine: Any = types.SimpleNamespace(settings=("there", "bfloat16", 1024, 256, 0, given))
    with pytest.raises(Started) as found:
        VLLMEngine._load(engine)
    assert found.value.args == (expected,)


def test_an_assertion_without_words_is_told_by_its_line() -> None:
    """As vLLM's kernels for adapters refuse float32."""

    def load() -> None:
        raise AssertionError  # float32

    said: list[str] = []
    engine: Any = types.SimpleNamespace(model_path="m", _load=load, _fail=said.append)
    try:
        VLLMEngine._run(engine)
    finally:
        gc.enable()
    assert said == ["The engine of m stopped. AssertionError: raise AssertionError  # float32"]


@pytest.mark.parametrize(
    ("seed", "tokens", "free", "enters"),
    [(None, 64, 6, True), (7, 64, 6, False), (7, 64, 11, True), (7, 1, 6, True)],
)
def test_what_has_a_seed_waits_for_room_but_the_canary_does_not(
    seed: int | None, tokens: int, free: int, enters: bool
) -> None:
    """Five blocks are reserved for an answer that is being sampled."""
    engine = object.__new__(VLLMEngine)
    engine._in_flight, engine._admitted_tokens, engine._reserved = {"a": None}, 0, {"a": 5}
    engine._block_size, engine._free_blocks, engine.max_model_len = 16, free, 1024
    request = GenerationRequest("b", [1] * 16, SamplingOptions(max_tokens=tokens), seed)
    assert engine._fits(request) is enters
