"""docs/plug-ins.md: every example is what it says; a file that cannot be loaded is a sentence with file and line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyrl_trainer import plugins
from skyrl_trainer.algorithms.advantages import estimator
from skyrl_trainer.algorithms.rewards import reward_function
from skyrl_trainer.algorithms.samplers import sampler_class
from skyrl_trainer.cli import main
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.learner.ppo import PPO
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch, Sample, Trajectory, Turn
from skyrl_trainer.user_file import blaming, cause, load_plugin, load_user_file
from tests.trainer.learner.tiny_models import make_batch, save_model

PAGE = (Path(__file__).parents[2] / "docs" / "plug-ins.md").read_text()
EXAMPLES = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def with_plugin(path: Path, text: str, **algorithm: Any) -> Config:
    path.write_text(text)
    return Config.model_validate({"trainer": {"algorithm": {"plugin_file": str(path), **algorithm}}})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("plugin")
    made = with_plugin(folder / "mine.py", EXAMPLES, name="damped", options={"damping": 0.25, "sampler": "mixed"})
    load_plugin(made)
    return made


def test_the_examples_register_what_the_page_says(config: Config, tmp_path: Path) -> None:
    assert reward_function("brevity")(prompts=[], completion_ids=[], completions=[[{"content": "x" * 25}]]) == [0.75]
    done, lost = (
        Trajectory("1/0/0", Sample("s", "e", 0), 0, 0, [Turn([1], [2], [0.0], [0], "x", info={"success": success})])
        for success in (True, False)
    )
    sampler = sampler_class("mixed")([done.sample], 0)
    assert sampler.accept([done, lost], [1.0, 1.0]) and not sampler.accept([done, done], []) | sampler.accept([], [])
    rewards = RewardBatch(RolloutBatch(1, [[done] * 3]), [done] * 3, [0] * 3, [[0.0], [1.0], [5.0]])
    assert [row[0] for row in estimator("median")(rewards, None, None).advantages] == [-1.0, 0.0, 4.0]
    algorithm = algorithm_class("damped")(config)
    assert isinstance(algorithm, GRPO) and algorithm.options.damping == 0.25
    algorithm.start(Learner(config, save_model(tmp_path), 1))
    metrics = algorithm.update(make_batch())
    assert metrics["grad_norm"] > 0 and metrics["damped/entropy"] == pytest.approx(metrics["entropy"])
    assert (
        issubclass(algorithm_class("damped_ppo"), PPO) and algorithm_class("damped_ppo")(config).estimator_name == "gae"
    )


def test_the_judge_asks_its_endpoint_and_gives_none_where_it_hears_no_mark(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            mark = "7" if "Reference: 42" in asked else "well"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": mark}}]}).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    given: dict[str, Any] = {name: [[{"content": "text"}]] * 2 for name in ("prompts", "completions", "completion_ids")}
    assert reward_function("judge")(**given, ground_truth=[42, 1]) == [0.7, None]
    server.shutdown()
    server.server_close()
    assert reward_function("judge")(**given, ground_truth=[42, 1]) == [None, None]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("import math\n\n1 / 0\n", r"ZeroDivisionError: division by zero \(.*broken\.py, line 3\)\.$"),
        ("x = (\n", r"SyntaxError: .*broken\.py, line 1\)\.$"),
        ("from skyrl_trainer.plugins import register_reword\n", r"ImportError: .*broken\.py, line 1\)\.$"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_sentence_with_file_and_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    broken = with_plugin(tmp_path / "broken.py", text)
    for _ in range(2):  # it is not taken for loaded afterwards
        with pytest.raises(UserError, match=r"^trainer\.algorithm\.plugin_file: .* failed with " + sentence):
            load_plugin(broken)
    broken.trainer.algorithm.plugin_file = str(tmp_path / "none.py")
    with pytest.raises(UserError, match=r"none\.py is not a Python file; give one that registers trainers"):
        load_plugin(broken)


def test_the_package_is_light_until_the_python_api_is_asked_for() -> None:
    code = "import sys, skyrl_trainer; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules; "
    code += "from skyrl_trainer import load_config; assert 'torch' not in sys.modules and load_config(None, []); "
    code += "assert not hasattr(skyrl_trainer, 'nothing'); from skyrl_trainer import GRPOTrainer; GRPOTrainer()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plugin_that_exits_is_a_sentence_and_no_end_of_the_run(tmp_path: Path) -> None:
    """An exit code of 0 would tell scripts that it had trained."""
    (tmp_path / "leaves.py").write_text("import sys\n\n\ndef leave():\n    sys.exit(0)\n")
    leave = load_user_file("trainer.algorithm.plugin_file", str(tmp_path / "leaves.py"), "leaves").leave
    with pytest.raises(UserError, match=r"A plug-in failed with SystemExit: 0 \(.*leaves\.py, line 5\)"), blaming():
        leave()


def test_an_error_over_several_lines_is_one_sentence() -> None:
    assert cause(RuntimeError("my judge's server\nis  gone.")) == "RuntimeError: my judge's server is gone"


def test_a_plugin_that_raises_is_a_sentence_with_its_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it is called, and through a library of its own choosing; an error of ours still is an unexpected one."""
    text = """
from skyrl_trainer.plugins import UniformSampler, register_sampler

@register_sampler("impatient")
class Impatient(UniformSampler):
    def __init__(self, source, seed):
        super().__init__(source, seed)
        self.rates = sorted([1, "a"])
"""
    (tmp_path / "impatient.py").write_text(text)
    words = [
        "train",
        "quickstart",
        f"trainer.run_dir={tmp_path / 'run'}",
        "trainer.algorithm.options.sampler=impatient",
    ]
    assert main([*words, f"trainer.algorithm.plugin_file={tmp_path / 'impatient.py'}"]) == 2
    said = capsys.readouterr().err
    assert "unexpected" not in said
    assert re.search(r"A plug-in failed with TypeError: '<' not supported .*impatient\.py, line 8\)\.$", said.strip())


def test_all_that_a_plugin_needs_is_exported_for_type_checkers() -> None:
    """An import alone is private to them."""
    public = {name for name in vars(plugins) if name[0] != "_"}
    assert public == {*plugins.__all__} and len(plugins.__all__) == len(public)
