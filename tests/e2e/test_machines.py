"""Engines on another machine of the cluster: two nodes of Ray on this one, weights through the object store."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_trainer.engine.transformers import TransformersEngine
from skyrl_trainer.errors import SyncError
from skyrl_trainer.weight_sync.canary import Canary
from skyrl_trainer.weight_sync.nccl import NCCLSync
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync
from tests.e2e.runs import Run, assert_nothing_left, metrics

VOCAB = 100
CANARY_IDS = [2 + (i * 37) % (VOCAB - 2) for i in range(80)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a core each, so that an engine fits on either."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        node = {"num_cpus": 1, "object_store_memory": 128 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder})
        cluster.add_node(num_cpus=1, object_store_memory=128 * 2**20)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[list[str]]:
    """The nodes' ids, this process' first."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    here = ray.get_runtime_context().get_node_id()
    yield [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]
    ray.shutdown()


def path_of(engine: Any) -> str:
    return engine._buffer.path


@torch.no_grad()
def perturb(learner: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def test_each_machine_has_its_own_buffer_and_every_engine_the_learners_weights(
    joined: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    learner = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, num_key_value_heads=1, head_dim=16, **sizes)).eval()
    learner.save_pretrained(tmp_path)
    actor: Any = ray.remote(TransformersEngine)
    where = [NodeAffinitySchedulingStrategy(node, soft=False) for node in (joined[0], joined[1], joined[1])]
    engines = [
        actor.options(max_concurrency=8, num_cpus=0, scheduling_strategy=strategy).remote(
            str(tmp_path), "float32", 128, 8, 0, {}
        )
        for strategy in where
    ]
    ray.get([engine.ready.remote() for engine in engines], timeout=120)
    sync = SharedMemorySync(engines, learner.named_parameters)
    canary = Canary(engines, CANARY_IDS, 5e-4)
    paths = ray.get([engine.__ray_call__.remote(path_of) for engine in engines])
    assert paths[0] != paths[1] == paths[2], "one buffer a machine"
    assert not any(Path(path).exists() for path in paths), "no name is left behind"

    def logprobs(ids: list[int]) -> torch.Tensor:
        return learner(torch.tensor([ids])).logits[0].log_softmax(-1)

    for version in (1, 2, 3):
        perturb(learner, version)
        report = sync.sync(version)
        assert report.engine_checksums == (report.checksum,) * 3
        found = canary.check(version, logprobs, report)
        assert found["sync/max_logprob_diff"] < 1e-4 and (version == 1 or found["sync/canary_change"] > 0.01)

    for receiver in sync._receivers.values():
        ray.kill(receiver)
    perturb(learner, 4)
    with pytest.raises(SyncError, match="Weight sync failed in write"):
        sync.sync(4)
    sync.close()


def test_a_run_spreads_its_engines_over_two_machines(cluster: Cluster, clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = {"ray__address": cluster.address, "generator__num_inference_engines": 2, "trainer__max_steps": 2}
    code, output = Run(folder, trainer__policy__model__path=clone, **settings).finish()
    assert code == 0, output
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/max_logprob_diff"] < 5e-4 for row in rows)
    assert_nothing_left(folder)


def test_a_run_with_more_engines_than_room_says_so(cluster: Cluster, clone: Path, tmp_path: Path) -> None:
    settings = {"ray__address": cluster.address, "generator__num_inference_engines": 3}
    code, output = Run(tmp_path / "run", trainer__policy__model__path=clone, **settings).finish()
    assert code == 2 and "There is room for 2 of 3 engines" in output and "Traceback" not in output, output


class Broken:
    """An engine in whose workers a load fails, or does not end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def update_weights(self) -> None:
        time.sleep(self.seconds)
        raise ValueError("the worker's own fault")


class Alone(NCCLSync):
    def __init__(self, learners: Any) -> None:
        self._engines, self._learners = [], learners


@pytest.mark.parametrize("first", ["engine", "learner"])
def test_nobody_waits_for_the_other_side_of_a_broadcast_that_failed(joined: list[str], first: str) -> None:
    engine: Any = ray.remote(Broken).options(num_cpus=0).remote(0.0 if first == "engine" else 600.0)

    def learner(method: str) -> None:
        time.sleep(600 if first == "engine" else 0)
        raise RuntimeError("out of memory")

    start = time.monotonic()
    with pytest.raises(SyncError, match="the worker's own fault" if first == "engine" else "out of memory"):
        Alone(learner)._both("update_weights", [engine.update_weights.remote()], "send")
    assert time.monotonic() - start < 20
    ray.kill(engine)
