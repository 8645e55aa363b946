"""Which machine of a cluster an engine goes to."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_trainer.errors import UserError
from skyrl_trainer.run.cluster import Node, place_engines
from skyrl_trainer.settings import Config

CPUS = [Node("driver", 2, 0), Node("b", 4, 0)]
GPUS = [Node("driver", 64, 8), Node("b", 64, 8)]


def config(engines: int, tensor_parallel: int = 1, **placement: Any) -> Config:
    generator = {"num_inference_engines": engines, "inference_engine_tensor_parallel_size": tensor_parallel}
    return Config.model_validate({"generator": generator, "trainer": {"placement": placement}})


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
    assert "".join(node[0] for node in place_engines(wanted, nodes, nodes is GPUS)) == placed


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
        place_engines(wanted, nodes, nodes is GPUS)


def test_with_adapters_the_drivers_machine_is_filled_first() -> None:
    wanted = config(3)
    wanted.generator.weight_sync_backend, wanted.trainer.policy.model.lora.rank = "adapter", 8
    assert place_engines(wanted, CPUS, on_gpus=False) == ["driver", "driver", "b"]
