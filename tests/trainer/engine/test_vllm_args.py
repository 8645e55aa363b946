"""What vLLM is started with on a GPU, where no test has one."""

from __future__ import annotations

import pytest

from skyrl_trainer.engine import vllm_args
from skyrl_trainer.engine.vllm_args import PREFILL_TOKENS, vllm_kwargs


def test_on_a_gpu_prompts_are_read_in_large_steps_and_the_users_word_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "has_gpu", lambda: True)
    found = vllm_kwargs("there", "bfloat16", 1024, 256, 0, {"gpu_memory_utilization": 0.3})
    assert found["max_num_batched_tokens"] == PREFILL_TOKENS and found["gpu_memory_utilization"] == 0.3
    assert "enforce_eager" not in found and "kv_cache_memory_bytes" not in found
    own = vllm_kwargs("there", "bfloat16", 1024, 256, 0, {"max_num_batched_tokens": 4096})
    assert own["max_num_batched_tokens"] == 4096
