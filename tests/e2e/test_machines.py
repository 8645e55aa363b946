"""Engines on another machine of the cluster: two nodes of Ray on this one, weights through the object store."""

from __future__ import annotations

import contextlib
import socket
import subprocess
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.transformers_engine import TransformersEngine
from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.errors import SyncError
from skyrl_trainer.run.processes import ENGINE_START_SECONDS
from skyrl_trainer.weight_sync import machines
from skyrl_trainer.weight_sync.canary import Canary
from skyrl_trainer.weight_sync.nccl import NCCLSync
from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync
from tests.e2e.runs import TRANSFORMERS, Run, assert_nothing_left, metrics

VOCAB = 300
CANARY_IDS = [2 + (i * 37) % (VOCAB - 2) for i in range(80)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with a core each, so that an engine fits on either."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    command += ["--object-store-memory=134217728", "--no-monitor", "--include-log-monitor=false"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = ["--head", "--include-dashboard=false", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}"]
        nodes, quiet = list[subprocess.Popen[bytes]](), subprocess.DEVNULL
        try:
            for arguments in (head, [f"--address={address}", f"--temp-dir={folder}/b"]):
                nodes.append(subprocess.Popen([*command, *arguments], stdout=quiet, stderr=quiet))
                wait_for_nodes(address, len(nodes))
            yield address
        finally:
            for node in reversed(nodes):
                node.terminate()
                node.wait(60)


def wait_for_nodes(address: str, count: int) -> None:
    """Until the cluster has them; at most two minutes."""
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError, ConnectionError):
            socket.create_connection(tuple(address.split(":")), 5).close()  # type: ignore[arg-type]
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            alive = sum(node["Alive"] for node in ray.nodes())
            ray.shutdown()
            if alive == count:
                return
        assert time.monotonic() < deadline, f"the cluster has not come up with {count} nodes"
        time.sleep(0.3)


@pytest.fixture
def joined(cluster: str) -> Iterator[list[str]]:
    """The nodes' ids, this process' first."""
    ray.init(address=cluster, log_to_driver=False, logging_level="ERROR")
    here = ray.get_runtime_context().get_node_id()
    yield [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]
    ray.shutdown()


def path_of(engine: Any) -> str:
    return engine._buffer.path


def is_paused(engine: Any) -> bool:
    return engine._paused


@torch.no_grad()
def perturb(learner: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def test_each_machine_has_its_own_buffer_and_every_engine_the_learners_weights(
    joined: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    learner = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, num_key_value_heads=2, head_dim=32, **sizes)).eval()
    learner.save_pretrained(tmp_path)
    engines = []
    for node, engine in ((0, TransformersEngine), (1, TransformersEngine), (1, VLLMEngine)):
        actor: Any = ray.remote(engine).options(
            max_concurrency=8,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(joined[node], soft=False),
            runtime_env={"env_vars": engine_env()},
        )
        engines.append(actor.remote(str(tmp_path), "float32", 256, 8, 0, {}))
    ray.get([engine.ready.remote() for engine in engines], timeout=ENGINE_START_SECONDS)
    sync = SharedMemorySync(engines, learner.named_parameters)
    canary = Canary(engines, CANARY_IDS, 5e-4)
    paths = ray.get([engine.__ray_call__.remote(path_of) for engine in engines[:2]])
    assert paths[0] == sync._buffer.again != paths[1] and len(sync._receivers) == 1, "one buffer a machine"
    assert all(str(Path(path).readlink()).endswith("(deleted)") for path in paths), "no name is left behind"

    def logprobs(ids: list[int]) -> torch.Tensor:
        return learner(torch.tensor([ids])).logits[0].log_softmax(-1)

    def write_seen(*arguments: Any) -> set[str]:
        paused.extend(ray.get([engine.__ray_call__.remote(is_paused) for engine in engines]))
        return write(*arguments)

    paused, write = list[bool](), machines.write
    monkeypatch.setattr(machines, "write", write_seen)
    for version in (1, 2, 3):
        perturb(learner, version)
        report = sync.sync(version)
        assert report.engine_checksums == (report.checksum,) * 3
        found = canary.check(version, logprobs, report)
        assert found["sync/max_logprob_diff"] < 1e-4 and (version == 1 or found["sync/canary_change"] > 0.01)
    assert paused == [False] * 9, "the engines go on while the weights are on their way"

    for receiver in sync._receivers.values():
        ray.kill(receiver)
    perturb(learner, 4)
    with pytest.raises(SyncError, match="Weight sync failed in write"):
        sync.sync(4)
    sync.close()


@pytest.mark.full  # test_clusters.py has a whole run on four nodes
def test_a_run_spreads_its_engines_over_two_machines_and_leaves_them_as_they_were(
    cluster: str, clone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    settings = {"ray__address": cluster, "generator__num_inference_engines": 2, **TRANSFORMERS}
    code, output = Run(folder, trainer__policy__model__path=clone, trainer__max_steps=2, **settings).finish()
    assert code == 0, output
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/max_logprob_diff"] < 5e-4 for row in rows)
    assert_nothing_left(folder)
    ray.init(address=cluster, log_to_driver=False, logging_level="ERROR")
    assert ray.cluster_resources()["CPU"] == ray.available_resources()["CPU"] == 2
    ray.shutdown()


@pytest.mark.full
def test_a_run_with_more_engines_than_room_says_so(cluster: str, clone: Path, tmp_path: Path) -> None:
    settings = {"ray__address": cluster, "generator__num_inference_engines": 3}
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
