"""`trainer.logger=prometheus`: a step's metrics on the port on which Ray serves those of its own processes.

`ray_skyrl_metric{key="reward/mean", run="quickstart"}` has the value in metrics.jsonl; `key="step"` is the step.
"""

import json
import math
from collections.abc import Mapping
from importlib import import_module

import ray
from ray.util.metrics import Gauge

from skyrl_trainer.config import Config
from skyrl_trainer.files import write_whole, writing


class PrometheusTracker:
    """Of the driver, and of what it knows of each engine: what accelerate's trackers offer."""

    def __init__(self, config: Config) -> None:
        self._path = config.run_path / "prometheus.json"
        self._run = config.trainer.run_name
        self._shown, self._ports = set[str](), b""

    def start(self) -> None:
        """ImportError where Ray cannot serve metrics."""
        import_module("ray.dashboard.optional_deps")
        self._gauge = Gauge("skyrl_metric", "A key of metrics.jsonl, of the newest step.", ("key", "run"))
        self._name_ports()

    def _name_ports(self) -> None:
        ports = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes() if node["Alive"]]
        targets = [f"{host}:{port}" for host, port in ports if port > 0]
        content = json.dumps([{"targets": targets, "labels": {"run": self._run}}]).encode()
        if content != self._ports:
            with writing(self._path):
                write_whole(self._path, content)
            self._ports = content

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A key that this step lacks has no number: the last one would look like this step's."""
        self._name_ports()
        shown = {**dict.fromkeys(self._shown, math.nan), **values, "step": float(step)}
        for key, value in shown.items():
            self._gauge.set(value, {"key": key, "run": self._run})
        self._shown = set(shown)

    def finish(self) -> None:
        self._path.unlink(missing_ok=True)
