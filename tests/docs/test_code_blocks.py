"""Every block of bash, Python, YAML and JSON in the documents is executed, page by page, in a folder of its own.

Python runs as it stands, after the page's blocks before it, and plays with the servers that it names (prepared.py).
Recipes, registries and rows go through their loaders; Prometheus' own configuration finds the file that a run writes.
Commands run in this process: what trains is a `--dry-run`, and what would start an engine or ask a model is checked up
to there (UP_TO). A GRPOTrainer is made and does not train: tests/e2e/test_train.py and test_trl_scripts.py let those
blocks train. Scripts of the repository read their arguments and do no more. LEFT_OUT has the blocks that need
packages that only a full run installs, and why. Pages in Chinese have the blocks of the English ones but for their
comments: a full run executes them, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
import uvicorn
import yaml

import skyrl_gym
from skyrl_gym.__main__ import main as gym_main
from skyrl_gym.data import load_rows
from skyrl_trainer import GRPOTrainer, cli
from skyrl_trainer.algorithms import advantages, rewards, samplers
from skyrl_trainer.chats import read_chats
from skyrl_trainer.config import load_config
from skyrl_trainer.learner.compose import ALGORITHMS, algorithm_class
from skyrl_trainer.report.prometheus import PrometheusTracker
from skyrl_trainer.user_file import PREFIX, load_plugin
from tests.docs.blocks import Block, blocks, commands
from tests.docs.prepared import PREPARED
from tests.eval.test_swe import instance
from tests.gym.test_mcp_tools import folder, url
from tests.gym.test_openenv import served as served_env
from tests.packaging.test_packaging import checked, empty_environment
from tests.trainer.learner.tiny_models import save_model
from tests.trainer.report.synthetic import make_run

__all__ = ["folder", "instance", "url"]
ROOT = Path(__file__).parents[2]
LANGUAGES = ("bash", "console", "python", "yaml", "json")
EVERY = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [str(page.relative_to(ROOT)) for page in EVERY if blocks(page, *LANGUAGES)]
LEFT_OUT = {
    "docs/agents/your-environment.md": {
        "from openenv.core": "openenv-core does not fit beside our versions: the full run's test below",
    },
    "docs/environments/task_sets.md": {
        "textarena_games": "only a full run installs TextArena: tests/examples/test_textarena.py trains with it",
        "from verifiers_tasksets": "only a full run installs verifiers: tests/examples/test_verifiers.py",
        "-m venv /tmp/verifiers": "as above",
        "-m venv /tmp/inspect": "only a full run installs inspect: tests/examples/test_inspect_tasks.py",
        "inspect_tasks.py:agent": "as above",
    },
}
"""Of a page, what stands in a block, and why it is not executed with the page's others."""
SAYS_CODE = {"docs/environments/gallery.md"}
"""Whose blocks are what agents wrote in their episodes."""
UP_TO = {
    "sft": ("skyrl_trainer.run.sft.fine_tune", "learned"),
    "eval": ("skyrl_trainer.run.commands.evaluate", {"eval/success": 0.5}),
    "serve": ("skyrl_trainer.serve.server.serve", None),
    "replay": ("skyrl_trainer.replay.commands.run", 0),
    "warmstart": ("skyrl_trainer.tiny.clone.warmstart", "cloned"),
}
"""Of a command, what it calls once its arguments are read and checked, to start processes or to work for minutes; and
what that returns."""


class Understood(Exception):
    """A script has read its arguments."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders by the names that the documents use."""
    folder = tmp_path_factory.mktemp("documents") / "runs"
    first = make_run(folder / "quickstart", max_steps=60)
    shutil.copytree(first / "trajectories", first / "held_out")
    save_model(first / "model" / "last")
    config = json.loads((first / "model" / "last" / "config.json").read_text())
    (first / "model" / "last" / "config.json").write_text(json.dumps({**config, "skyrl_step": 60}))
    template = "{% for message in messages %}{{ message.content }}w1{% endfor %}"  # every policy's tokenizer has one
    (first / "model" / "last" / "chat_template.jinja").write_text(template)
    (first / "ray-logs").mkdir()
    shutil.copytree(first / "model" / "last", first / "model" / "best")
    for name in ("mine", "tool_use", "first", "sort", "kuhn_poker"):
        shutil.copytree(first, folder / name)
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's blocks run. What they register is gone after it, and what would take long is not begun."""
    shutil.copytree(runs, tmp_path / "runs")
    for name in ("benchmarks", "docs", "examples", "packages", "requirements", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (skyrl_gym.registry, ALGORITHMS, rewards._REWARDS, samplers._SAMPLERS, advantages._ESTIMATORS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for where, answer in UP_TO.values():
        monkeypatch.setattr(where, lambda *arguments, answer=answer: answer)
    for name in ("train", "save_model"):
        monkeypatch.setattr(GRPOTrainer, name, lambda *arguments: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    before, loaded = set(gymnasium.registry), {name for name in sys.modules if name.startswith(PREFIX)}
    yield tmp_path
    for env_id in set(gymnasium.registry) - before:
        del gymnasium.registry[env_id]
    for name, module in list(sys.modules.items()):
        users = name.startswith(PREFIX) and name not in loaded  # what it registered is gone
        if users or str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.full if ".zh" in page else ()) for page in PAGES if page not in SAYS_CODE],
)
def test_every_block_is_executed(
    page: str, place: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    names: dict[str, Any] = {"__name__": "a_block", "fixture": request.getfixturevalue}
    prepare = PREPARED.get(page, lambda names: None)
    with prepare(names) or contextlib.nullcontext():
        for block in blocks(ROOT / page, *LANGUAGES):
            if any(text in block.text for text in LEFT_OUT.get(page, ())):
                continue
            try:
                execute(page, block, names, monkeypatch)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{page}:{block.line}: {type(error).__name__}: {error}") from error


def test_what_is_left_out_is_there() -> None:
    for page, texts in LEFT_OUT.items():
        for text in texts:
            assert len([block for block in blocks(ROOT / page, *LANGUAGES) if text in block.text]) == 1, (page, text)
    assert len(PAGES) > 40


@pytest.mark.full
def test_openenvs_own_client_plays_our_server(tmp_path: Path) -> None:
    page = ROOT / "docs/agents/your-environment.md"
    (text,) = [block.text for block in blocks(page, "python") if "from openenv.core" in block.text]
    python = empty_environment(tmp_path / "venv")
    script = f'python="{sys.executable}"; source scripts/pip_settings.sh; "$@"'
    install = (sys.executable, "-m", "uv", "pip", "install", "--python", python, "openenv-core==0.3.0")
    checked("bash", "-euo", "pipefail", "-c", script, "bash", *install)
    with served_env("skyrl/webshop_lite-v0") as address:
        said = checked(python, "-c", text.replace("http://127.0.0.1:8900", address.replace("ws", "http", 1)))
    assert "search[" in said and said.splitlines()[-1].endswith(" False")


def test_a_block_that_is_wrong_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "bash": [
            "skyrl-trainer train quickstart trainer.max_step=3",
            "skyrl-trainer report runs/none",
            "python -m skyrl_gym play text_maths",
            "python benchmarks/envs.py --peer-less",
            "make trane",
            "pip install ./packages/skyrl-gym[none]",
            "ls runs/none",
            "rm -rf runs",
        ],
        "yaml": ["trainer: {algorithm: {name: none}}", "schema: 1\nenvs: [{id: x}]"],
        "json": ['{"prompt": 3}', "{", '{"messages": []}'],
        "python": ["import none", "1 +"],
    }
    for language, texts in wrong.items():
        for text in texts:
            with pytest.raises((Exception, SystemExit)):
                execute("page", Block(1, language, text + "\n"), {}, monkeypatch)


def execute(page: str, block: Block, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if block.language == "python":
        text = names.get("replaced", lambda text: text)(block.text)
        exec(compile(text, f"{page}:{block.line}", "exec"), names)
    elif block.language == "yaml":
        read_yaml(block.text)
    elif block.language == "json":
        read_json(block.text)
    else:
        for words in commands(block.text):
            command(words, monkeypatch)


def read_yaml(text: str) -> None:
    path = Path("block.yaml")
    path.write_text(text)
    found = yaml.safe_load(text)
    if "envs" in found:
        assert skyrl_gym.load_registry(path)
    elif "scrape_configs" in found:
        scrape(found["scrape_configs"])
    else:
        config = load_config(str(path), [])
        load_plugin(config)
        algorithm_class(config.trainer.algorithm.name)(config)  # which checks its options


def scrape(jobs: list[dict[str, Any]]) -> None:
    """As Prometheus reads them: the files that a job names are there and name targets, once a run has begun."""
    config = load_config("quickstart", ["trainer.logger=prometheus"])
    with pytest.MonkeyPatch.context() as patch:  # as where Ray runs and serves metrics
        patch.setitem(sys.modules, "ray.dashboard.optional_deps", ModuleType("optional_deps"))
        patch.setattr("ray.nodes", lambda: [{"NodeManagerAddress": "::1", "MetricsExportPort": 80, "Alive": True}])
        patch.setattr("skyrl_trainer.report.prometheus.Gauge", lambda *arguments: None)
        PrometheusTracker(config).start()
    for job in jobs:
        assert job.keys() <= {"job_name", "scrape_interval", "file_sd_configs"} and job["job_name"]
        assert re.fullmatch(r"\d+s", job["scrape_interval"])
        patterns = [pattern for each in job["file_sd_configs"] for pattern in each["files"]]
        paths = [path for pattern in patterns for path in Path().glob(pattern.removeprefix("/path/to/"))]
        assert paths and all(group["targets"] for path in paths for group in json.loads(path.read_text()))


def read_json(text: str) -> None:
    rows, decoder = [], json.JSONDecoder()
    while text := text.strip():
        row, end = decoder.raw_decode(text)
        rows.append(row)
        text = text[end:]
    path = Path("block.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_chats(str(path)) if "messages" in rows[0] else load_rows(path)) == len(rows)


def command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    while re.match(r"[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program = words[0].removeprefix(".venv/bin/")
    if words[0] == "export":
        for name, value in (word.split("=") for word in words[1:]):
            monkeypatch.setenv(name, value)
            if name == "PYTHONPATH":
                monkeypatch.syspath_prepend(value)
            elif name == "SKYRL_ENVS_REGISTRY":  # a new process would read it when it imports skyrl_gym
                skyrl_gym.load_registry(value)
    elif program == "skyrl-trainer":
        trainer(words[1:])
    elif words[:3] == ["python", "-m", "skyrl_gym"]:
        with pytest.MonkeyPatch.context() as patch:
            port = ["--port", "0"] if words[3:4] == ["serve"] else []  # listens, and ends there
            patch.setattr(uvicorn.Server, "run", lambda *arguments, sockets: [each.close() for each in sockets])
            assert gym_main([*words[3:], *port]) == 0
    elif program == "python" and words[1] == "-c":
        exec(words[2], {})
    elif program == "python":
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Understood):
            parse = argparse.ArgumentParser.parse_args
            patch.setattr(argparse.ArgumentParser, "parse_args", lambda *parser: understood(parse(*parser)))
            module = words[1] == "-m"
            patch.setattr(sys, "argv", words[1 + module :])
            run = runpy.run_module if module else runpy.run_path
            run(words[1 + module], run_name="__main__")
    elif program == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        installs(words[2:])
    elif program == "ls":
        assert all(map(os.path.exists, words[1:])), words
    else:
        raise AssertionError(f"nothing says how {words} is executed")


def understood(_: Any) -> None:
    raise Understood


def trainer(words: list[str]) -> None:
    if words[0] == "eval" and words[1] in ("agent", "code"):  # they ask a model or a judge at once
        cli._parse(words)
    elif words[0] == "view" and "eval-" in words[1]:
        cli._parse(words)  # the page of an evaluation is tests/eval/test_eval_report.py's
    elif words[0] == "train":
        assert cli.main([*words, *(["--dry-run"] if "--dry-run" not in words else [])]) == 0
    else:
        assert cli.main(words) == 0


def installs(words: list[str]) -> None:
    """Folders, their extras and the files of constraints are there."""
    while words:
        word = words.pop(0)
        if word in ("-c", "-r", "-e"):
            word = words.pop(0)
        elif word.startswith("--"):
            words.pop(0)
            continue
        path, extra = re.fullmatch(r"([^\[]+)(?:\[(.+)\])?", word).groups()
        if not path.endswith(".txt"):
            folder = ROOT / ("packages" if path.startswith("skyrl-") else "") / path
            project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
            assert not extra or extra in project["optional-dependencies"]
        else:
            assert Path(path).is_file()
