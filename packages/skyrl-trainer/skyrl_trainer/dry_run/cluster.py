"""`skyrl-trainer doctor --cluster`: what each node of a Ray cluster has, and what of a run would be there."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import ray
import torch

from skyrl_trainer.dry_run.doctor import GIB
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.elastic import spread
from skyrl_trainer.run.cluster import buffer_bytes, examine, living, place_engines
from skyrl_trainer.run.processes import start_ray
from skyrl_trainer.settings import Config


def examine_cluster(config: Config) -> Iterator[tuple[str, str, str]]:
    """As doctor.examine; the subject is a node, the driver's first. Starts nothing that stays."""
    weights, path = buffer_bytes(config), config.run_path.resolve()
    while not path.is_dir():
        path = path.parent
    start_ray(config)
    try:
        nodes, places, on_gpus = living(), list[str](), torch.cuda.is_available()
        try:
            places = place_engines(config, nodes, on_gpus, learns=True)
        except UserError as error:
            yield "FAIL", "engines", str(error)
        envs = spread([""] * config.environment.num_workers, {node.node_id: node.cores for node in nodes})
        with ExitStack() as stack:
            files = [Path(config.trainer.policy.model.path) / "config.json"]
            if "://" not in config.run_address:
                try:
                    marker = stack.enter_context(tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-"))
                    files.append(Path(marker.name))
                except OSError as error:
                    yield "FAIL", "trainer.run_dir", f"{config.run_path} cannot be made: {path}: {error.strerror}"
            for node, found, wrong in examine(config, places, files, learns=True):
                for sentence in wrong:
                    yield "FAIL", node.name, sentence
                if isinstance(found, str):
                    continue
                has = f"{node.cpus:g} of {node.cores:g} cores, {node.gpus:g} GPUs and {found.memory / GIB:.1f} GiB free"
                runs = f"would run {places.count(node.node_id)} engines, {envs.count(node.node_id)} EnvWorkers"
                yield "ok", node.name, f"Python {found.python}, {has}; {runs}"
                room = f"/dev/shm has {found.shared_memory / GIB:.1f} GiB free, the weights are {weights / GIB:.1f} GiB"
                yield "warn" if found.shared_memory < weights else "ok", node.name, room
    finally:
        ray.shutdown()
