"""Which machine of a cluster an engine goes to."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorUnavailableError

from skyrl_trainer.errors import EngineDied, UserError
from skyrl_trainer.run import processes
from skyrl_trainer.run.cluster import Node, living, place_engines
from skyrl_trainer.run.processes import Processes
from skyrl_trainer.run.signals import Stopped, StopSignal
from skyrl_trainer.settings import Config

CPUS = [Node("driver", 2, 0), Node("b", 4, 0)]
GPUS = [Node("driver", 64, 8), Node("b", 64, 8)]


def config(engines: int, tensor_parallel: int = 1, **placement: Any) -> Config:
    generator = {"num_inference_engines": engines, "inference_engine_tensor_parallel_size": tensor_parallel}
    return Config.model_validate({"generator": generator, "trainer": {"placement": placement}})


RAY_NODES: list[dict[str, Any]] = [
    {"NodeID": name, "NodeName": name, "Alive": True, "Resources": {"CPU": 8.0} | gpus}
    for name, gpus in (("a", {}), ("b", {"GPU": 4.0}), ("c", {}), ("d", {"GPU": 8.0}), ("e", {"GPU": 4.0}))
]
APART: dict[str, Any] = {"colocate_all": False, "policy_num_gpus_per_node": 4}


@pytest.mark.parametrize(
    ("wanted", "nodes", "placed"),
    [
        (config(1), CPUS, "b"),  # of processors the emptiest, and the driver's last
        (config(2), CPUS, "bb"),
        (config(3), CPUS, "dbb"),
        (config(6), CPUS, "ddbbbb"),
        (config(2), [Node("driver", 1.5, 0), Node("b", 0.5, 0), Node("c", 1, 0)], "dc"),
        (config(8, policy_num_gpus_per_node=8), GPUS, "dddddddd"),
        (config(9, policy_num_gpus_per_node=8), GPUS, "ddddddddb"),
        (config(4, **APART), GPUS, "dddd"),
        (config(6, **APART), GPUS, "ddddbb"),
        (config(6, **APART, policy_num_nodes=2), GPUS, "ddddbb"),
        (config(3, 2, **APART), GPUS, "ddb"),
        (config(4, 3, policy_num_gpus_per_node=1), GPUS, "ddbb"),
    ],
)
def test_engines_fill_machines_with_gpus_and_are_spread_over_others(
    wanted: Config, nodes: list[Node], placed: str
) -> None:
    assert "".join(node[0] for node in place_engines(wanted, nodes, nodes is GPUS, learns=True)) == placed


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (config(7), CPUS, "room for 6 of 7 engines: the free cores of 2 machines"),
        (config(9, **APART, policy_num_nodes=2), GPUS, "room for 8 of 9 engines: the free GPUs left by the learners"),
        (config(1, 16), GPUS, "room for 0 of 1 engines"),
    ],
)
def test_too_few_places_are_a_sentence(wanted: Config, nodes: list[Node], said: str) -> None:
    with pytest.raises(UserError, match=said):
        place_engines(wanted, nodes, nodes is GPUS, learns=True)


HEAD, OTHER = Node("driver", 8, 2, 8, "head (aaaa)"), Node("b", 8, 3, 8, "10.0.0.2 (bbbb)")
FOUR: dict[str, Any] = {"policy_num_gpus_per_node": 4}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (FOUR, [HEAD, GPUS[1]], "Node head (aaaa) has 2 free GPUs, and its learners need 4 "),
        (FOUR, [HEAD._replace(gpus=0), GPUS[1]], "Node head (aaaa) has 0 free GPUs, and its learners need 4 "),
        (FOUR | {"policy_num_nodes": 2}, [GPUS[0], OTHER], "Node 10.0.0.2 (bbbb) has 3 free GPUs, and its "),
        (FOUR, [GPUS[0], OTHER], None),
        (FOUR, [GPUS[0]._replace(all_gpus=8), OTHER], None),
    ],
)
def test_a_node_that_lacks_the_gpus_of_its_learners_is_named(
    together: bool, wanted: dict[str, Any], nodes: list[Node], said: str | None
) -> None:
    """They would wait there for hours, or share a GPU with another job."""
    asked, on_gpus = config(1, colocate_all=together, **wanted), nodes[0].gpus > 0
    if said is None:
        assert place_engines(asked, nodes, on_gpus, learns=True) == ["driver"]
        return
    with pytest.raises(UserError, match=re.escape(said) + r".*policy_num_gpus_per_node\): lower that, free some"):
        place_engines(asked, nodes, on_gpus, learns=True)
    assert place_engines(asked, nodes, on_gpus), "an evaluation has no learners"


@pytest.mark.parametrize("nodes", [[HEAD._replace(gpus=6, all_gpus=8)], [GPUS[0], OTHER._replace(gpus=7, all_gpus=8)]])
def test_who_takes_turns_needs_nodes_without_other_jobs(nodes: list[Node]) -> None:
    """Learners that take turns count a node's GPUs from 0, while Ray gives engines any that are free."""
    asked: dict[str, Any] = {"policy_num_gpus_per_node": 1, "policy_num_nodes": len(nodes)}
    said = re.escape(
        f"Node {nodes[-1].name} has {nodes[-1].gpus} free GPUs, and its learners need 8 (trainer.placement."
    )
    with pytest.raises(UserError, match=said + r".*_per_node; with colocate_all it must be theirs alone\): lower"):
        place_engines(config(1, colocate_all=True, **asked), nodes, True, learns=True)
    assert place_engines(config(1, colocate_all=False, **asked), nodes, True, learns=True) == ["driver"]
    assert place_engines(config(1, colocate_all=True, **asked), nodes, True), "an evaluation has no learners"


ONE_GPU: dict[str, Any] = {"policy_num_gpus_per_node": 1}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Called with the GPUs of a machine without a cluster; nothing of Ray starts."""

    def has(gpus: float) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
        monkeypatch.setattr("skyrl_trainer.run.cluster.living", lambda: [HEAD._replace(gpus=gpus)])

    monkeypatch.setattr("skyrl_trainer.run.cluster.PLACE_SECONDS", 0)
    monkeypatch.setattr(processes, "start_ray", lambda _: None)
    monkeypatch.setattr(processes, "ray", Mock())
    monkeypatch.setattr(processes, "EngineWatch", Mock())
    return has


@pytest.mark.parametrize("together", [True, False])
def test_without_a_gpu_for_its_learner_a_run_ends_in_a_sentence_before_an_engine_starts(
    alone: Callable[[float], None], together: bool
) -> None:
    alone(0)
    with pytest.raises(UserError, match=r"Node head \(aaaa\) has 0 free GPUs, and its learners need 1 "):
        Processes(config(1, colocate_all=together, **ONE_GPU), "", plays=False, learns=True).__enter__()
    processes.ray.remote.assert_not_called()


def test_a_single_learner_apart_needs_a_gpu_beside_the_engines(alone: Callable[[float], None]) -> None:
    alone(1)
    with pytest.raises(UserError, match="room for 0 of 1 engines: the free GPUs left by the learners"):
        Processes(config(1, colocate_all=False, **ONE_GPU), "", plays=False, learns=True).__enter__()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_eval_and_serve_of_a_run_need_no_gpu_for_its_learner(
    alone: Callable[[float], None], gpus: int, together: bool, quantization: Any
) -> None:
    """Nor an engine that can sleep, get weights by NCCL, which vLLM refuses on a processor, or load adapters, which it
    refuses in float32 on a GPU."""
    alone(gpus)
    of_run = config(1, colocate_all=together, **ONE_GPU)
    of_run.trainer.policy.model.lora.quantization = quantization
    with Processes(of_run, "", plays=False) as made:
        [[_, options]] = processes.ray.remote().options.call_args_list
        [[_, sent]] = processes.ray.remote().options().remote.call_args_list
    assert len(made.engines) == 1 and options["num_gpus"] == gpus
    assert not {"enable_sleep_mode", "weight_transfer_config", "enable_lora"} & sent["engine_kwargs"].keys()


def test_of_the_other_nodes_those_with_the_most_gpus_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of nodes are drawn."""
    monkeypatch.setattr("ray.nodes", lambda: [*RAY_NODES, {"NodeID": "dead", "Alive": False}])
    monkeypatch.setattr("skyrl_trainer.weight_sync.machines.node_of", lambda _: "c")
    monkeypatch.setattr("skyrl_trainer.run.cluster.available_resources_per_node", lambda: {"d": {"GPU": 5.0}})
    assert [(node.node_id, node.gpus) for node in living()] == [("c", 0), ("d", 5), ("b", 4), ("e", 4), ("a", 0)]


def test_with_adapters_the_drivers_machine_is_filled_first() -> None:
    wanted = config(3)
    wanted.generator.weight_sync_backend, wanted.trainer.policy.model.lora.rank = "adapter", 8
    assert place_engines(wanted, CPUS, on_gpus=False, learns=True) == ["driver", "driver", "b"]


def test_an_engine_that_dies_with_its_node_before_it_is_ready_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's words are that the actor was restarted, and that a task may or may not have been executed."""
    made: Any = Processes.__new__(Processes)
    made._loading, made.model_path = [], "model"
    lost = ActorUnavailableError("The actor was restarted. The task may or may not have been executed.", b"0" * 16)
    monkeypatch.setattr(processes.ray, "get", Mock(side_effect=lost))
    with pytest.raises(EngineDied, match=r"^An engine could not start\. It died, or cannot be reached: start again\.$"):
        made.wait_for_engines()


def test_a_sigterm_while_ray_starts_is_a_stop_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts a handler of its own in the place of ours, which ends the process without a word."""

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(processes.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(processes.ray, "init", init)
    monkeypatch.setattr(processes.ray._private.worker, "listen_error_messages", None)
    with StopSignal():
        ours = signal.getsignal(signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            processes.start_ray(Config())
        assert stopped.value.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == ours
