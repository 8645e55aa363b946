"""examples/: what a user's first change takes. Each is as short as the project promises, and does what it says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from skyrl_trainer.cli import main
from skyrl_trainer.config import load_config
from skyrl_trainer.data import load_samples
from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.rollout.env_worker import EnvWorker
from skyrl_trainer.tiny.demonstrations import demonstrations
from skyrl_trainer.user_file import load_plugin
from tests.eval.scripted_server import served
from tests.eval.test_command import lines, write
from tests.trainer.learner.tiny_models import make_batch, save_model

pytestmark = pytest.mark.usefixtures("one_ray")

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {"my_loss.py": 12, "my_env.py": 50, "my_benchmark.py": 40, "transformers_engine.py": 250}


@pytest.mark.parametrize("name", LINES)
def test_a_first_change_is_as_short_as_promised(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= LINES[name]


@pytest.mark.parametrize("name", ["undecided", "undecided_ppo"])
def test_a_loss_of_ones_own_learns_over_grpo_and_over_ppo(tmp_path: Path, name: str) -> None:
    settings = [f"trainer.algorithm.plugin_file={EXAMPLES / 'my_loss.py'}", f"trainer.algorithm.name={name}"]
    config = load_config(None, [*settings, "trainer.num_mini_batches=2"])
    load_plugin(config)
    learner = make_learner(config, save_model(tmp_path), 10)
    before = learner.token_logprobs([1, 2, 3])
    metrics = algorithm_class(name)(config).start(learner).update(make_batch())
    assert 0.1 <= metrics["undecided/weight"] <= 1 and metrics["grad_norm"] > 0
    assert (learner.token_logprobs([1, 2, 3]) - before).abs().max() > 0


def test_an_env_of_ones_own_is_played_by_its_expert_in_an_env_worker() -> None:
    spec = "mine/backwards-v0?split=train&difficulty=2"
    samples = load_samples([spec], env_file=str(EXAMPLES / "my_env.py"))
    check_env(gymnasium.make("mine/backwards-v0").unwrapped, skip_render_check=True)
    talk = next(demonstrations(samples, 1, seed=0))
    assert talk[-1]["role"] == "assistant"
    worker = EnvWorker(step_timeout=60.0)
    for index in range(20):
        (reply,) = worker.call_many([("reset", "key", samples[index])])
        word = reply.observation.removeprefix("Backwards: ")
        assert len(word) == 3 and reply.error is None
        ((right),) = worker.call_many([("step", "key", word[::-1])])
        assert (right.reward, right.terminated) == (1.0, True) and right.info["success"]
    worker.shutdown()


def test_a_benchmark_of_ones_own_goes_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows, its env in an EnvWorker, its grader, the report; nothing in the package knows it."""
    rows = [{"country": "Peru", "capital": "Lima"}, {"country": "Chad", "capital": "N'Djamena"}]

    def model(request: dict[str, Any]) -> tuple[int, str]:
        talk = [message["content"] for message in request.get("messages", ())]
        if not talk or "Peru" not in talk[0]:
            return (200, "N'Djamena?") if talk else (404, "no completions here")
        return 200, "Lima" if talk[-1] == "It begins with L." else "Cusco"

    words = ["eval", "agent", f"--plugin={EXAMPLES / 'my_benchmark.py'}", "--bench=capitals", "--model=m"]
    words += [f"--data={write(tmp_path / 'rows.jsonl', rows)}", f"--out={tmp_path / 'run'}"]
    with served(model) as (url, _):
        assert main([*words, f"--base-url={url}"]) == 0
    assert "capitals, 2 of 2 items, no tools: 50.0 %" in capsys.readouterr().out
    attempts = {line["item_id"]: line for line in lines(tmp_path / "run" / "attempts.jsonl")}
    assert [attempts["Peru"][name] for name in ("answer", "steps", "stop")] == ["Lima", 2, "done"]
    assert [attempts["Chad"][name] for name in ("answer", "steps", "stop")] == ["N'Djamena?", 1, "done"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["counts"]["correct"], results["counts"]["wrong"]) == (1, 1)
    assert (tmp_path / "run" / "report.html").is_file()
    assert main(["eval", "code", *words[2:]]) == 2
    assert "--base-url" in capsys.readouterr().err
    assert main(["eval", "code", *words[2:], f"--base-url={url}"]) == 2
    assert "capitals is a benchmark of `eval agent`" in capsys.readouterr().err


def test_a_training_finds_a_benchmark_of_ones_own(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"country": "Peru", "capital": "Lima"}])
    words = ["train", "quickstart", "--dry-run", f'data.val_data=["skyrl_eval:capitals?data={data}"]']
    words += [f"trainer.algorithm.plugin_file={EXAMPLES / 'my_benchmark.py'}"]
    command = [sys.executable, "-m", "skyrl_trainer", *words]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert said.returncode == 0 and "capitals" in said.stdout and "not registered" not in said.stdout + said.stderr


def test_look_ahead_on_copies_plays_better_than_the_random_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    alone, ahead = importlib.import_module("look_ahead").compare(episodes=4, n=8)
    assert ahead > alone + 0.2
