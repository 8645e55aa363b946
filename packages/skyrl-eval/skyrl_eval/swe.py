"""SWE-bench without a Docker engine: workspaces, patches, and grading by the official rules.

A workspace is a clone of depth 1 at the base commit: no remote, no tag, no later commit. A patch is graded in a fresh
one, without network, by the official steps: apply it, run the item's eval script, read the log between its markers.
The parsers and the rules of the package `swebench` decide; swe_guard says what the guarded figure leaves out.
"""

import importlib.util
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_eval import sandbox, swe_guard
from skyrl_eval.sandbox import SandboxFailed
from skyrl_eval.swe_guard import END, START
from skyrl_trainer.errors import UserError

EXIT_CODE = ">>>>> Test Exit Code"
SECONDS = 1800.0
STEPS = Path(__file__).with_name("swe_steps")
"""Scripts: of the official steps, and of a workspace's beginning. The sandbox has them as /steps."""


def workspace(repo: str, commit: str, folder: Path, repos: Path | None = None) -> None:
    """Checks `repo` out at `commit`, from repos/owner__name or else GitHub, into an empty folder. Or SandboxFailed."""
    origin = str((repos / repo.replace("/", "__")).resolve()) if repos else f"https://github.com/{repo}.git"
    upload = "git -c uploadpack.allowAnySHA1InWant=true -c safe.directory=* upload-pack"
    served = ["--upload-pack", upload] if repos else []
    fetch = ["fetch", "-q", "--depth=1", "--no-tags", *served, origin, commit]
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
    """All changes of a workspace as a patch that `git apply` takes: new, binary and deleted files too."""
    # In the sandbox (`where`), for git runs what the workspace's configuration tells it to. "" where git does not work.
    # With an index of its own, which leaves the agent's `git diff` as it was; -p, as git reads changes off its time.
    index = "export GIT_INDEX_FILE=/out/index; cp -p .git/index /out/index 2> /dev/null; "
    script = index + 'git add -A && git diff --cached --binary --no-color --no-ext-diff "$0" > /out/patch'
    with sandbox.folder("skyrl-swe-") as out:
        binds = [(folder, "/testbed", True), (out, "/out", True)]
        done = sandbox.run(["bash", "-c", script, commit], binds, seconds=120, cwd="/testbed", **where)
        return sandbox.read_back(out / "patch") if done.code == 0 else ""


class Tested(NamedTuple):
    """What the official steps said; forged: by output that contradicts itself, or of tests that cannot pass."""

    resolved: bool
    timed_out: bool
    log: str
    forged: bool


def run_tests(
    gold: Mapping[str, Any], meta: Mapping[str, Any], patch: str, context: Any, guarded: bool = False
) -> Tested:
    """The official steps in a fresh workspace; `guarded` adds tests that fail."""
    canaries = swe_guard.canaries(gold, paths_of(gold["test_patch"]), patch) if guarded else {}
    added = "".join(canaries.values())
    script = re.sub(rf"(?m)^.*{START}", lambda found: added + found[0], gold["eval_script"], count=1)
    # After the tests it also says how their command ended, as upstream has it.
    lines = rf"SWEBENCH_TEST_EXIT_CODE=$?\n\g<0>\necho '{EXIT_CODE}': $SWEBENCH_TEST_EXIT_CODE"
    script = re.sub(rf"(?m)^.*{END}.*", lines, script.strip(), count=1) + "\n"
    done = _run("grade.sh", {"patch.diff": patch, "eval.sh": script}, gold.get("seconds"), meta, context)
    resolved = not done.timed_out and is_resolved(gold, done.output)
    forged = guarded and resolved and swe_guard.is_forged(gold, canaries, done.output)
    return Tested(resolved and not forged, done.timed_out, done.output, forged)


def guarded(gold: Mapping[str, Any], meta: Mapping[str, Any], patch: str, context: Any) -> tuple[str, list[str]]:
    """What of a patch can be a fix, "" where nothing can or is applied; and what is to be looked at by hand."""
    with sandbox.folder("skyrl-swe-") as out:
        done = _run("changes.sh", {"patch.diff": patch}, None, meta, context, [(out, "/out", True)])
        if done.code == 3:  # a file such as .GIT/config
            return "", ["refused_by_git"]
        if done.code:
            raise SandboxFailed(f"What the patch changes cannot be told: {done.output.strip()[-300:]}")
        return swe_guard.split(out, paths_of(gold["test_patch"]), gold["eval_script"])


def _run(script: str, files: dict[str, str], seconds: Any, meta: Any, context: Any, binds: Any = ()) -> sandbox.Done:
    with sandbox.folder("skyrl-swe-") as folder:
        (folder / "eval").mkdir()
        for file, text in files.items():
            (folder / "eval" / file).write_bytes(text.encode("utf-8", "surrogateescape"))
        binds = [*binds, (folder / "eval", "/eval", False), (STEPS, "/steps", False)]
        if context.executor == "namespace":
            (folder / "testbed").mkdir()
            workspace(meta["repo"], meta["base_commit"], folder / "testbed", context.repos)
            activate = (STEPS / "activate", "/opt/miniconda3/bin/activate", False)
            binds += [(folder / "testbed", "/testbed", True), activate]
        where = {"executor": context.executor, "image": meta["container"]}
        return sandbox.run(("bash", f"/steps/{script}"), binds, seconds=seconds or SECONDS, **where)


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


def paths_of(patch: str) -> set[str]:
    """The files that git finds in a patch of the data, which may be empty."""
    if not patch.strip():
        return set()
    command = ["git", "apply", "--numstat", "-z", "-"]
    done = subprocess.run(command, cwd="/", input=patch.encode("utf-8", "surrogateescape"), capture_output=True)
    if done.returncode:
        raise UserError(f"The item's test_patch is none that git reads: {done.stderr.decode(errors='replace').strip()}")
    rows = done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return {row.split("\t", 2)[2] for row in rows}


def pytest_script(commit: str, test_patch: str, tests: Sequence[str]) -> str:
    """An eval script of the official shape, for pytest; it resets files that are there before the test patch."""
    form = STEPS.with_name("swe_pytest.sh").read_text(encoding="utf-8")
    graded = " ".join(sorted({shlex.quote(path) for path in re.findall(r"(?m)^--- a/([^\t\n]+)", test_patch)}))
    files = " ".join(sorted({shlex.quote(test.split("::")[0]) for test in tests}))
    patch = test_patch.rstrip("\n")
    return form.format(commit=commit, graded=graded, patch=patch, files=files, START=START, END=END)
