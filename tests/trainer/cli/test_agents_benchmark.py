"""benchmarks/agents.py: what it reads off a run folder; the runs themselves are its work."""

import importlib.util
import json
from pathlib import Path

import pytest

from skyrl_trainer.config import load_config, to_yaml
from skyrl_trainer.errors import UserError

path = Path(__file__).parents[3] / "benchmarks/agents.py"
spec = importlib.util.spec_from_file_location("agents_benchmark", path)
assert spec and spec.loader
agents = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agents)


def write(run: Path, rows: list[dict]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def step(number: int, seconds: float, success: float | None = None) -> dict:
    return {"step": number, "time/step": seconds} | ({} if success is None else {"eval/success": success})


def test_the_warm_start_and_its_seconds_are_not_learning(tmp_path):
    write(tmp_path, [step(0, 500.0, 0.25), step(1, 30.0), step(2, 60.0, 0.5)])
    assert agents.figures(tmp_path) == {"warmstart": 0.25, "final": 0.5, "minutes": 1.5}


def test_what_came_after_the_limit_does_not_count(tmp_path):
    write(tmp_path, [step(0, 0.0, 0.25), step(1, agents.LIMIT - 60, 0.5), step(2, 61.0, 0.75)])
    assert agents.figures(tmp_path) == {"warmstart": 0.25, "final": 0.5, "minutes": 19.0}
    assert agents.finished("tool_use", tmp_path)


def test_a_run_is_finished_with_its_last_evaluation(tmp_path):
    last = load_config("tool_use", []).trainer.max_steps
    write(tmp_path, [step(0, 0.0, 0.25), step(last - 1, 60.0, 0.5)])
    assert not agents.finished("tool_use", tmp_path)
    write(tmp_path, [step(0, 0.0, 0.25), step(last, 60.0)])
    assert not agents.finished("tool_use", tmp_path)
    write(tmp_path, [step(0, 0.0, 0.25), step(last, 60.0, 0.5)])
    assert agents.finished("tool_use", tmp_path)


def test_a_folder_of_other_settings_is_refused_by_name(tmp_path):
    agents.check("tool_use", 0, tmp_path)
    for seed in (0, 1):
        config = load_config("tool_use", agents.settings("tool_use", 0, tmp_path))
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        if seed == 0:
            agents.check("tool_use", seed, tmp_path)
        else:
            with pytest.raises(UserError, match=r"trainer\.seed was 0, is 1"):
                agents.check("tool_use", seed, tmp_path)
