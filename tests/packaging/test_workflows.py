""".github/workflows: the schema that GitHub publishes holds, and what a step runs is run here where that can be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
NOT_HERE = {
    "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0": "changes the machine",
    "make test": "would run this test again",
    "make docs": "tests/packaging/test_site.py builds the site",
    "python -m pip install build": "needs an index; the module is in requirements/dev.txt",
    "python -m pip install build twine": "needs an index",
    "python -m twine check --strict dist/*/*": "twine is not installed; test_packaging.py checks the metadata",
    "python -m pip install packages/skyrl-gym/dist/*.whl": "test_packaging.py installs that wheel into an empty .venv",
    "python -m pip install dist/gym/*.whl": "the same",
    "python -m pip install dist/trainer/*.whl": "needs 4 GB from an index",
    "python -m skyrl_trainer doctor": "tests/trainer/cli/test_cli.py runs it",
}
"""What a workflow runs and this file does not, and why."""


def lines(path: Path) -> list[str]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [line for job in jobs.values() for step in job.get("steps", ()) for line in step.get("run", "").splitlines()]


def follows_the_schema(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *paths)
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def test_workflows_follow_githubs_schema(tmp_path: Path) -> None:
    done = follows_the_schema(*WORKFLOWS)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "runs_on:"), encoding="utf-8")
    assert "runs_on" in follows_the_schema(wrong).stdout


def test_there_are_tests_a_release_and_the_site() -> None:
    assert [path.stem for path in WORKFLOWS] == ["release", "site", "tests"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would give of the packages."""
    folder = tmp_path_factory.mktemp("checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "packages", "envs-registry.yaml"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def run(line: str, folder: Path, tag: str = "v0.1.0") -> subprocess.CompletedProcess[str]:
    """With this interpreter as `python`; a build takes its tools from here and not from an index."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    address = {"PROJECT_URL": "https://example.org/owner/name", "GITHUB_REF_NAME": tag}
    line = line.replace("python -m build ", "python -m build --no-isolation ")
    environment = {**os.environ, **address, "PATH": path}
    return subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_works(path: Path, checkout: Path) -> None:
    executed = 0
    for line in lines(path):
        if line not in NOT_HERE:
            done = run(line, checkout)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            executed += 1
    assert executed or path.stem == "site"


def test_every_line_that_is_left_out_is_one_of_a_workflow() -> None:
    assert NOT_HERE.keys() <= {line for path in WORKFLOWS for line in lines(path)}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line.removeprefix("make ") for line in NOT_HERE if line.startswith("make ")} <= targets


def test_a_tag_that_is_not_the_version_publishes_nothing(checkout: Path) -> None:
    checks = [line for line in lines(ROOT / ".github/workflows/release.yml") if "GITHUB_REF_NAME" in line]
    assert len(checks) == 2 and all(run(line, checkout, tag="v9.9.9").returncode for line in checks)


def test_only_the_job_that_publishes_may_ask_the_index_for_a_token() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert jobs["publish"]["needs"] == ["tests", "install"] and jobs["install"]["needs"] == "build"
    assert not any("run" in step for step in jobs["publish"]["steps"])
