"""What MLflow, SwanLab and W&B are told through accelerate's trackers; the libraries are played by recorders.

Trackio is called in the same way, and TensorBoard's files are read in test_report.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState

from skyrl_trainer.config import flatten, load_config
from skyrl_trainer.report.trackers import Tracker
from skyrl_trainer.types import Trajectory
from tests.trainer.report.synthetic import trajectory


class Recorder(SimpleNamespace):
    """A module whose functions note their calls."""

    def __init__(self, *names: str, **more: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        super().__init__(**{name: self._noted(name) for name in names}, **more)

    def _noted(self, name: str) -> Any:
        def note(*words: Any, **named: Any) -> Any:
            self.calls.append((name, words, named))
            return [] if name == "search_experiments" else self

        return note


def learned(
    monkeypatch: pytest.MonkeyPatch, library: str, played: Recorder, tried: Sequence[Trajectory] = ()
) -> tuple[dict[str, Any], Any]:
    """The recorder's calls by name after a run of one step, and all settings."""
    PartialState(cpu=True)  # the learner's to make
    monkeypatch.setitem(sys.modules, library, played)
    config = load_config(None, [f"trainer.logger={library}", "trainer.run_name=mine", "trainer.project_name=sums"])
    tracker = Tracker(config)
    figures = {"step": 3.0, "loss": 0.5, "kl": float("nan"), "reward/right (exact)": 1.0}
    tracker.log(figures | ({"eval/success": 0.5} if tried else {}), tried=tried)
    tracker.close()
    return {name: (words, named) for name, words, named in played.calls}, flatten(config)


def test_mlflow_gets_the_run_its_settings_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    names = ("search_experiments", "create_experiment", "start_run", "log_params", "log_metrics", "end_run")
    played = Recorder(*names, utils=SimpleNamespace(validation=limits))
    calls, settings = learned(monkeypatch, "mlflow", played)
    assert calls["create_experiment"][1]["name"] == "sums" and calls["start_run"][1]["run_name"] == "mine"
    assert calls["log_params"][0] == (settings,)
    # Its store in files has one a name, of which none may be another's folder: `tokens` and `tokens/trained`.
    assert calls["log_metrics"] == (({"loss": 0.5, "reward.right .exact.": 1.0},), {"step": 3}) and "end_run" in calls


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, with a sentence: a server that is gone costs minutes each time that it is asked."""

    def gone(*words: Any, **named: Any) -> None:
        calls.append(words)
        raise ConnectionError("nobody is there")

    calls = list[Any]()
    played = Recorder("init", "finish", config={}, log=gone)
    PartialState(cpu=True)
    monkeypatch.setitem(sys.modules, "swanlab", played)
    tracker = Tracker(load_config(None, ["trainer.logger=swanlab"]))
    for step in range(3):
        tracker.log({"step": float(step), "loss": 0.5})
    tracker.close()
    assert len(calls) == 1 and [name for name, _, _ in played.calls] == ["init"]
    assert caplog.messages == ["trainer.logger=swanlab is given up (nobody is there); metrics.jsonl has all."]


def test_swanlab_gets_the_run_its_settings_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, settings = learned(monkeypatch, "swanlab", Recorder("init", "log", "finish", config={}))
    assert calls["init"][1] == {"project": "sums", "experiment_name": "mine", "config": settings}
    assert calls["log"] == (({"loss": 0.5, "reward/right (exact)": 1.0},), {"step": 3}) and "finish" in calls


def test_wandb_gets_a_table_of_held_out_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[dict[str, Any]] = []
    played = Recorder("init", "log", "finish", config={}, Table=lambda **given: tables.append(given) or "a table")
    learned(monkeypatch, "wandb", played, [trajectory(3, place, 0, 0.5, f"say {place}") for place in range(8)])
    assert tables[0]["columns"] == ["task", "reward", "episode"] and len(tables[0]["data"]) == 8
    task, reward, episode = tables[0]["data"][1]
    assert task == trajectory(3, 1, 0, 0.5, "").sample.sample_id and reward == 0.5 and episode.endswith("say 1")
    assert ({"held_out": "a table"},) in [words for name, words, _ in played.calls if name == "log"]


def test_the_machines_of_prometheus_are_those_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster whose second node joins during the run and whose first one dies."""

    def node(host: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": host, "MetricsExportPort": 8080, "Alive": alive}

    nodes, ports = [node("10.0.0.1")], tmp_path / "prometheus.json"
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", ModuleType("optional_deps"))
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("skyrl_trainer.report.prometheus.Gauge", lambda *_: SimpleNamespace(set=lambda *_: None))
    tracker = Tracker(load_config(None, ["trainer.logger=prometheus", f"trainer.run_dir={tmp_path}"]))
    assert json.loads(ports.read_text()) == [{"targets": ["10.0.0.1:8080"], "labels": {"run": "run"}}]
    written = ports.stat()
    tracker.log({"step": 1.0, "loss": 0.5})
    assert ports.stat() == written  # the same machines
    nodes.append(node("10.0.0.2"))
    tracker.log({"step": 2.0, "loss": 0.5})
    assert json.loads(ports.read_text())[0]["targets"] == ["10.0.0.1:8080", "10.0.0.2:8080"]
    nodes[0] = node("10.0.0.1", alive=False)
    tracker.log({"step": 3.0, "loss": 0.5})
    assert json.loads(ports.read_text())[0]["targets"] == ["10.0.0.2:8080"]
    tracker.close()
    assert not list(tmp_path.glob("*prometheus*"))
