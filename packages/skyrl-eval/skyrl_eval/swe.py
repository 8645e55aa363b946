"""SWE-bench without a Docker engine: workspaces, patches, and grading by the official rules.

A workspace is a clone of depth 1 at the base commit: no remote, no tag, no later commit. A patch is graded in a fresh
one, without network, by the official steps: apply it, run the item's eval script, read the log between its markers.
The parsers and the rules of the package `swebench` decide.

Two verdicts: `resolved` is the official one. `resolved_guarded` grades the patch without what no fix needs (edits of
the graded tests, conftest.py, pytest's configuration, what Python runs when it starts).
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_eval import sandbox
from skyrl_eval.sandbox import SandboxFailed
from skyrl_trainer.errors import UserError

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
GUARDED = ("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "sitecustomize.py", "usercustomize.py")
SECONDS = 1800.0
APPLY = """cd /testbed || exit 0
for apply in "git apply --verbose" "git apply --verbose --3way" "git apply --verbose --reject" \\
    "patch --batch --forward --fuzz=5 -p1 -i"; do
  if $apply /eval/patch.diff; then applied=yes; break; fi
  git checkout -- . ; git clean -fd
done
[ -n "$applied" ] || git apply --check --reverse /eval/patch.diff || { echo ">>>>> Patch Apply Failed"; exit 0; }
bash /eval/eval.sh
exit 0
"""
ACTIVATE = "conda() { :; }\n"
"""Stands in for conda's script where there is no image: the interpreter on PATH is the environment."""


def workspace(repo: str, commit: str, folder: Path, repos: Path | None = None) -> None:
    """Checks `repo` out at `commit`, from repos/owner__name or else from GitHub, into an empty folder.

    Raises:
        SandboxFailed: the commit is not to be had.
    """
    origin = str((repos / repo.replace("/", "__")).resolve()) if repos else f"https://github.com/{repo}.git"
    upload = "git -c uploadpack.allowAnySHA1InWant=true -c safe.directory=* upload-pack"
    fetch = ["fetch", "-q", "--depth=1", "--no-tags", *(["--upload-pack", upload] if repos else []), origin, commit]
    for step in (["init", "-q"], fetch, ["checkout", "-q", "--detach", "FETCH_HEAD"]):
        command = ["git", "-c", "core.logAllRefUpdates=false", *step]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired as error:
            raise SandboxFailed(f"{repo} at {commit} did not arrive from {origin} in 600 s.") from error
        if done.returncode:
            raise SandboxFailed(f"{repo} at {commit} cannot be had from {origin}: {done.stderr.strip()[-300:]}")
    (folder / ".git/FETCH_HEAD").unlink(missing_ok=True)


def diff(folder: Path, commit: str, **where: Any) -> str:
    """All that was changed in a workspace, as a patch that `git apply` takes: new, binary and deleted files too.

    In the sandbox (`where`: executor, image), for git runs what the workspace's configuration tells it to. "" where git
    does not work any more.
    """
    # With an index of its own, which leaves the agent's `git diff` as it was; -p, as git reads changes off its time.
    index = "export GIT_INDEX_FILE=/out/index; cp -p .git/index /out/index 2> /dev/null; "
    script = index + 'git add -A && git diff --cached --binary --no-color --no-ext-diff "$0" > /out/patch'
    with tempfile.TemporaryDirectory(prefix="skyrl-swe-") as out:
        binds: list[sandbox.Bind] = [(folder, "/testbed", True), (Path(out), "/out", True)]
        done = sandbox.run(["bash", "-c", script, commit], binds, seconds=120, cwd="/testbed", **where)
        return sandbox.read_back(Path(out) / "patch") if done.code == 0 else ""


def run_tests(gold: Mapping[str, Any], meta: Mapping[str, Any], patch: str, context: Any) -> sandbox.Done:
    """The log of the official steps in a fresh workspace (or in a container of the item's image)."""
    with tempfile.TemporaryDirectory(prefix="skyrl-swe-") as name:
        folder = Path(name)
        files = {"patch.diff": patch, "run.sh": APPLY, "eval.sh": _recording(gold["eval_script"]), "activate": ACTIVATE}
        (folder / "eval").mkdir()
        for file, text in files.items():
            (folder / "eval" / file).write_bytes(text.encode("utf-8", "surrogateescape"))
        binds: list[sandbox.Bind] = [(folder / "eval", "/eval", False)]
        if context.executor == "namespace":
            (folder / "testbed").mkdir()
            workspace(meta["repo"], meta["base_commit"], folder / "testbed", context.repos)
            activate = (folder / "eval/activate", "/opt/miniconda3/bin/activate", False)
            binds += [(folder / "testbed", "/testbed", True), activate]
        command = ("bash", "/eval/run.sh")
        limits: dict[str, Any] = {"seconds": gold.get("seconds") or SECONDS, "image": meta["container"]}
        return sandbox.run(command, binds, executor=context.executor, **limits)


def _recording(script: str) -> str:
    """The eval script, which after the tests also says how their command ended, as upstream has it."""
    lines = script.strip().split("\n")
    end = next((place for place, line in enumerate(lines) if END in line), None)
    if end is not None:
        lines[end:end] = ["SWEBENCH_TEST_EXIT_CODE=$?"]
        lines[end + 2 : end + 2] = [f'echo "{EXIT_CODE}: $SWEBENCH_TEST_EXIT_CODE"']
    return "\n".join(lines) + "\n"


def is_resolved(instance: Mapping[str, Any], log: str) -> bool:
    """The official verdict on a log, by the package swebench."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    spec = {"image": "", "version": "", **instance}
    prediction = {"instance_id": instance["instance_id"], "model_name_or_path": "model", "model_patch": "-"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(log)
        file.flush()
        report = get_eval_report(make_test_spec(spec), prediction, file.name, include_tests_status=False)
    return bool(report[instance["instance_id"]]["resolved"])


def check() -> None:
    """UserError where the package that decides is not installed."""
    if not importlib.util.find_spec("swebench"):
        raise UserError("SWE-bench is graded by the package swebench: pip install 'skyrl-trainer[swebench]'.")


def guarded(patch: str, test_patch: str) -> str:
    """The patch without the files that a fix must not touch."""
    tests = {path for path, _ in files_of(test_patch)}
    return "".join(text for path, text in files_of(patch) if path not in tests and not _is_guarded(path))


def flags(patch: str, test_patch: str) -> list[str]:
    """What to look at by hand: "touches_tests", "touches_test_setup", "imports_pytest_in_src"."""
    tests = {path for path, _ in files_of(test_patch)}
    found = set()
    for path, text in files_of(patch):
        is_test = path in tests or re.search(r"(^|/)(tests?/|test_[^/]*$|[^/]*_test\.)", path)
        if is_test:
            found.add("touches_tests")
        elif _is_guarded(path):
            found.add("touches_test_setup")
        elif path.endswith(".py") and re.search(r"(?m)^\+.*(\b_?pytest\b|\bunittest\.case\b)", text):
            found.add("imports_pytest_in_src")
    return sorted(found)


def files_of(patch: str) -> list[tuple[str, str]]:
    """A patch file by file: the path after the change (before it, for a deleted file), and its part of the patch."""
    plain = not re.search(r"(?m)^diff --git ", patch)
    parts = re.split(r"(?m)^(?=--- .*\n\+\+\+ )" if plain else r"(?m)^(?=diff --git )", patch)
    path = re.compile(r"--- .*\n\+\+\+ b/([^\t\n]*)" if plain else r"diff --git .* \"?b/(.*?)\"?\n")
    return [(match[1], part) for part in parts if (match := path.match(part))]


def _is_guarded(path: str) -> bool:
    name = PurePosixPath(path).name
    return name in GUARDED or name.endswith(".pth")


def pytest_script(commit: str, test_patch: str, tests: Sequence[str]) -> str:
    """An eval script of the official shape for a repository whose tests pytest runs."""
    paths = sorted({path for path, _ in files_of(test_patch)})
    marker = "EOF_114329324912"
    return "\n".join(
        (
            "#!/bin/bash",
            "set -uxo pipefail",
            "source /opt/miniconda3/bin/activate",
            "conda activate testbed",
            "cd /testbed",
            f"git checkout {commit} {' '.join(paths)}",
            f"git apply -v - <<'{marker}'",
            test_patch.rstrip("\n"),
            marker,
            f": '{START}'",
            f"pytest -rA {' '.join(sorted({test.split('::')[0] for test in tests}))}",
            f": '{END}'",
            f"git checkout {commit} {' '.join(paths)}",
            "",
        )
    )
