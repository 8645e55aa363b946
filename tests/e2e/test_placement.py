"""Where the processes run: a Ray cluster that somebody else started, several engines, several learners."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_trainer.cli import main
from tests.e2e.runs import QUICK, Run, assert_nothing_left, metrics, train

LOOK = """
import json, sys, ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps([ray.cluster_resources()["CPU"], ray.available_resources()["CPU"]]))
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of one node, as `ray start --head` makes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=4"]
    command += ["--no-monitor", "--include-log-monitor=false"]
    quiet = ["--disable-usage-stats", "--include-dashboard=false", f"--port={address.rpartition(':')[2]}"]
    # A folder of its own, with a short name for its sockets: in the default one, it would stay the machine's cluster.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [*command, *quiet, f"--temp-dir={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            look(address)
            yield address
        finally:
            head.terminate()
            head.wait(60)


def look(address: str) -> list[float]:
    """The cluster's CPUs, all of them and the free ones; waits until it is up."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", LOOK, address], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
    raise AssertionError(done.stderr)


@pytest.mark.full  # test_machines.py joins a cluster with two engines that are not vLLM
def test_a_joined_cluster_trains_with_two_engines_and_is_left_as_it_was(
    cluster: str, clone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    settings = {"ray__address": cluster, "generator__num_inference_engines": 2, "trainer__max_steps": 2}
    code, output = Run(folder, trainer__policy__model__path=clone, **settings).finish()
    assert code == 0, output
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/max_logprob_diff"] < 5e-4 for row in rows)
    assert_nothing_left(folder)
    assert look(cluster) == [4.0, 4.0], "nothing of the run holds a CPU of the cluster"


@pytest.mark.full
def test_two_servers_train(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = {"generator__backend": "openai_server", "generator__num_inference_engines": 2, "trainer__max_steps": 2}
    code, output = Run(folder, trainer__policy__model__path=clone, **settings).finish()
    assert code == 0, output
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/max_logprob_diff"] < 5e-4 for row in rows)
    assert_nothing_left(folder)


def test_a_cluster_that_is_not_there_is_a_sentence(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"trainer__policy__model__path": clone, "ray__address": "127.0.0.1:1"}
    assert main(train(tmp_path / "run", **settings)) == 2
    said = capsys.readouterr().err
    assert "ray.address" in said and "Traceback" not in said, said


@pytest.mark.full  # test_learner_group.py has their gradients and checkpoints, test_sft.py a run of them
def test_two_learners_train_over_gloo(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = {"trainer__placement__policy_num_nodes": 2, "trainer__max_steps": 2, **QUICK}
    code, output = Run(folder, trainer__policy__model__path=clone, **settings).finish()
    assert code == 0, output
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/max_logprob_diff"] < 5e-4 for row in rows)
    assert all(row["grad_norm"] > 0 and row["kl/engine_learner"] < 1e-3 for row in rows[1:])
    assert_nothing_left(folder)
