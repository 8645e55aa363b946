"""An engine that sleeps generates nothing until its cache is back, whatever else it is told, and loses no request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.transformers_engine import TransformersEngine
from skyrl_trainer.errors import EngineLost
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions
from skyrl_trainer.weight_sync.buffer import FlatBuffer
from tests.trainer.learner.tiny_models import save_model


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(save_model(tmp_path), "float32", 4096, 8, 0, {})
    engine.ready()
    yield engine
    gc.unfreeze()  # an engine has a process of its own as a rule


def collect(engine: TransformersEngine, seconds: float) -> list[GenerationOutput]:
    return asyncio.run(engine.collect("test", seconds))


def test_requests_wait_out_the_sleep_and_a_sync_in_it(engine: TransformersEngine) -> None:
    tensors = {name: parameter.detach() + 0.01 for name, parameter in engine._model.named_parameters()}
    buffer = FlatBuffer.create(tensors.items())
    for name, tensor in tensors.items():
        buffer.tensors[name].copy_(tensor)
    engine.init_weight_transfer({"path": buffer.path, "layout": buffer.layout})
    buffer.unlink()
    request = GenerationRequest("r", [5, 6, 7], SamplingOptions(max_tokens=200), seed=1)
    engine.submit("test", [request])
    engine.sleep(2)
    engine.submit("test", [GenerationRequest("later", [5, 6], SamplingOptions(max_tokens=4), seed=2)])
    assert collect(engine, 0.3) == []
    engine.wake_up(["weights"])
    engine.pause()
    engine.start_weight_update()
    engine.update_weights({})
    assert engine.finish_weight_update(7) == buffer.checksum()
    engine.resume()
    assert collect(engine, 0.3) == [], "the cache is not back"
    engine.wake_up(["kv_cache"])
    outputs: dict[str, GenerationOutput] = {}
    while len(outputs) < 2:
        outputs |= {output.request_id: output for output in collect(engine, 30.0)}
    assert len(outputs["r"].output_ids) == 200 and outputs["r"].weight_versions[-1] == 7
    assert outputs["later"].weight_versions == [7] * 4
    assert torch.equal(engine._model.model.norm.weight, tensors["model.norm.weight"])


def test_one_that_has_not_loaded_takes_no_command(tmp_path: Path) -> None:
    """A process that took a dead one's place: nobody would ever carry it out."""
    with pytest.raises(EngineLost, match="has not loaded yet"):
        TransformersEngine(save_model(tmp_path), "float32", 4096, 8, 0, {}).pause()
