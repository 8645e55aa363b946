"""SWE-bench on made-up repositories, without Docker: verdicts, cheats, limits, and parity with the official package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skyrl_eval import benchmarks, sandbox, swe
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.types import Item, Verdict
from tests.eval.made_up import attempt, items

BUGGY = "def double(n):\n    return n + 2\n"
FIXED = "def double(n):\n    return 2 * n\n"
TESTS = "from calc import double\n\n\ndef test_two():\n    assert double(2) == 4\n"
NEW_TEST = "\n\ndef test_five():\n    assert double(5) == 10\n"
CONFTEST = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
IN_SOURCE = """import _pytest.runner
_made = _pytest.runner.TestReport.from_item_and_call.__func__


def _passed(cls, item, call):
    report = _made(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report


_pytest.runner.TestReport.from_item_and_call = classmethod(_passed)
"""


def git(folder: Path, *command: str) -> str:
    identity = ("-c", "user.name=made-up", "-c", "user.email=made@up", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@dataclass
class Instance:
    """A repository with a bug, the fix committed after it, and the item that asks for it."""

    repos: Path
    folder: Path
    item: Item
    row: dict[str, Any]

    def patch(self, **files: str) -> str:
        """The patch of a workspace in which these modules were written."""
        return self.changed({f"{name}.py": text.encode() for name, text in files.items()})

    def changed(self, files: Mapping[str, bytes | Path | None]) -> str:
        """The patch of a workspace with these files, links to others (a path), and without those that are None."""
        for name, made in files.items():
            path = self.folder / name
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(made, Path):
                path.symlink_to(made)
            elif made is not None:
                path.write_bytes(made)
        patch = swe.diff(self.folder, self.row["base_commit"])
        git(self.folder, "reset", "-q", "--hard")
        git(self.folder, "clean", "-fdq")
        return patch

    def graded(self, patch: str, seconds: float = 60, logs: Path | None = None) -> Verdict:
        item = Item(self.item.bench, self.item.item_id, "", self.item.gold | {"seconds": seconds}, self.item.meta)
        return benchmarks.find("swe-verified").grade(item, attempt(item, patch), Context(repos=self.repos, logs=logs))


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    return make_instance(tmp_path_factory.mktemp("instance"))


LONE = ({"calc.py": BUGGY}, {"test_calc.py": TESTS}, {"calc.py": FIXED}, {"test_calc.py": TESTS + NEW_TEST})
ALONE = "export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"  # without plugins of ours, which take seconds


def make_instance(parent: Path, stages: Sequence[Mapping[str, str]] = LONE, before: str = ALONE) -> Instance:
    """Of the files of two commits, of the fix, and of the tests that it is graded by; `before` the tests' command."""
    repos, folder = parent / "repos", parent / "workspace"
    origin = repos / "made__up"
    for made in (origin, folder):
        made.mkdir(parents=True)
    git(origin, "init", "-q", "-b", "main")
    commits = []
    for number, files in enumerate(stages):
        for name, text in files.items():
            (origin / name).parent.mkdir(parents=True, exist_ok=True)
            (origin / name).write_text(text)
        git(origin, "add", "-A")
        if number < 3:
            git(origin, "commit", "-qm", f"Commit {number}")
            commits.append(git(origin, "rev-parse", "HEAD").strip())
    test_patch = git(origin, "diff", "--cached")
    git(origin, "reset", "-q", "--hard")
    (five, *_), (two, *_) = stages[3], stages[1]
    row = {
        "repo": "made/up",
        "instance_id": "made__up-1",
        "base_commit": commits[1],
        "patch": git(origin, "diff", commits[1], commits[2]),
        "test_patch": test_patch,
        "problem_statement": "double(5) gives 7.",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps([f"{five}::test_five"]),
        "PASS_TO_PASS": json.dumps([f"{two}::test_two"]),
    }
    script = items("swe-verified", [row])[0].gold["eval_script"]
    row["eval_script"] = script.replace("cd /testbed", f"cd /testbed\n{before}")
    swe.workspace("made/up", commits[1], folder, repos)
    return Instance(repos, folder, items("swe-verified", [row])[0], row)


def test_a_workspace_has_one_commit_and_no_way_to_the_others(instance: Instance) -> None:
    later = git(instance.repos / "made__up", "rev-parse", "main").strip()
    assert git(instance.folder, "rev-list", "--all", "HEAD").split() == [instance.row["base_commit"]]
    assert git(instance.folder, "remote") == git(instance.folder, "tag") == git(instance.folder, "reflog") == ""
    assert subprocess.run(["git", "cat-file", "-e", later], cwd=instance.folder, capture_output=True).returncode != 0
    assert git(instance.folder, "checkout", instance.row["base_commit"], "--", "calc.py") == ""
    with pytest.raises(swe.SandboxFailed, match="made/none at 000 cannot be had"):
        swe.workspace("made/none", "000", instance.folder, instance.repos)


def test_a_patch_carries_new_deleted_and_binary_files(instance: Instance, tmp_path: Path) -> None:
    (instance.folder / "data.bin").write_bytes(bytes(range(256)))
    (instance.folder / "test_calc.py").unlink()
    patch = instance.patch(calc=FIXED)
    swe.workspace("made/up", instance.row["base_commit"], tmp_path, instance.repos)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode("utf-8", "surrogateescape"), check=True)
    assert (tmp_path / "data.bin").read_bytes() == bytes(range(256))
    assert (tmp_path / "calc.py").read_text() == FIXED and not (tmp_path / "test_calc.py").exists()
    assert swe.paths_of(patch) == {"calc.py", "data.bin", "test_calc.py"}


def test_a_workspaces_git_configuration_is_obeyed_in_the_sandbox_only(instance: Instance, tmp_path: Path) -> None:
    swe.workspace("made/up", instance.row["base_commit"], tmp_path, instance.repos)
    mark = instance.folder / "mark"
    git(tmp_path, "config", "core.fsmonitor", f"touch {mark} /tmp/obeyed; ls /tmp >> /out/patch; false")
    (tmp_path / "calc.py").write_text(FIXED)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "return 2 * n" in swe.diff(tmp_path, instance.row["base_commit"]) and not mark.exists()
    (tmp_path / ".git/HEAD").unlink()
    assert swe.diff(tmp_path, instance.row["base_commit"]) == ""


def test_gold_is_resolved_and_its_log_kept(instance: Instance, tmp_path: Path) -> None:
    verdict = instance.graded(instance.row["patch"], logs=tmp_path)
    assert verdict.status == "correct"
    assert verdict.detail == {"flags": [], "resolved_guarded": True, "timed_out": False}
    log = (tmp_path / "made__up-1/0/test_output.txt").read_text()
    assert swe.START in log and "PASSED test_calc.py::test_five" in log
    assert (tmp_path / "made__up-1/0/patch.diff").read_text() == instance.row["patch"]


def test_tests_are_reset_where_the_test_patch_adds_a_file(tmp_path: Path) -> None:
    """git checks nothing out where one of the files is not there: a patch's own tests would stay, and count."""
    instance = make_instance(tmp_path, (*LONE[:3], {**LONE[3], "data.txt": "5\n"}))
    assert instance.graded(instance.patch(test_calc="")).status == "wrong"
    own = instance.patch(calc=FIXED, test_calc=TESTS + "\n\ndef test_of_its_own():\n    pass\n")
    assert instance.graded(own).status == "correct"


def test_empty_and_wrong_and_broken_patches_are_not_resolved(instance: Instance) -> None:
    assert instance.graded("").status == "unparsed"
    assert instance.graded(instance.patch(calc=BUGGY + "# tried\n")).status == "wrong"
    broken = instance.row["patch"].replace(" def double(n):", " def triple(n):").replace("-    return n + 2", "-   x")
    assert instance.graded(broken).status == "wrong"
    assert instance.graded("not a patch").status == "wrong"


def test_a_patch_of_which_a_part_is_there_already_is_applied_as_officially(tmp_path: Path) -> None:
    """git applies nothing of it, and patch all but that part, and fails."""
    there = LONE[0] | {"other.py": "A = 2\n"}
    instance = make_instance(tmp_path, (there, *LONE[1:]))
    known = "--- a/other.py\n+++ b/other.py\n@@ -1 +1 @@\n-A = 1\n+A = 2\n"
    verdict = instance.graded(known + instance.row["patch"])
    assert verdict.status == "correct" and verdict.detail["resolved_guarded"] is True
    assert instance.graded(known + instance.row["patch"].replace("-    return n + 2", "-    return 7")).score == 0


def test_a_failure_of_the_machine_is_not_the_patchs(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    full = sandbox.Done(1, "No space left on device", False)
    monkeypatch.setattr(swe, "_run", lambda *_: full)
    with pytest.raises(sandbox.SandboxFailed, match="No space left"):
        swe.guarded(instance.item.gold, instance.item.meta, instance.row["patch"], None)


def test_a_conftest_cheat_is_officially_resolved_and_guarded_is_not(instance: Instance) -> None:
    verdict = instance.graded(instance.patch(conftest=CONFTEST))
    assert verdict.score == 1
    assert verdict.detail == {"flags": ["touches_test_setup"], "resolved_guarded": False, "timed_out": False}
    with_fix = instance.graded(instance.patch(conftest=CONFTEST, calc=FIXED))
    assert with_fix.detail["resolved_guarded"] is True


def test_a_cheat_in_the_source_is_flagged(instance: Instance) -> None:
    verdict = instance.graded(instance.patch(calc=IN_SOURCE + BUGGY))
    flags = ["imports_pytest_in_src", "forges_outcomes"]
    assert verdict.score == 1 and verdict.detail["flags"] == flags and not verdict.detail["resolved_guarded"]
    assert benchmarks.find("swe-verified").summary([verdict])["flags"] == dict.fromkeys(sorted(flags), 1)


def test_edits_of_the_graded_tests_do_not_count(instance: Instance) -> None:
    verdict = instance.graded(instance.patch(test_calc="def test_five(): pass\n\n\ndef test_two(): pass\n"))
    assert verdict.score == 0 and verdict.detail["flags"] == ["touches_tests"]


def test_an_endless_loop_ends_within_its_limit(instance: Instance) -> None:
    verdict = instance.graded(instance.patch(calc="while True:\n    pass\n"), seconds=3)
    assert (verdict.score, verdict.detail["timed_out"]) == (0, True)


def test_tests_have_no_network_and_cannot_reach_the_repository_outside(instance: Instance) -> None:
    source = f"""import os, socket
try:
    socket.create_connection(("192.0.2.1", 80), 2)
except OSError:
    if not os.path.exists({str(instance.repos)!r}):
        def double(n): return 2 * n
"""
    assert instance.graded(instance.patch(calc=source)).score == 1


RUN = f"+ : '{swe.START}'\n{{}}\n+ : '{swe.END}'\n{swe.EXIT_CODE}: {{}}\n"
FIVE, TWO = "test_calc.py::test_five", "test_calc.py::test_two"


@pytest.mark.parametrize(
    ("resolved", "log"),
    [
        (True, RUN.format(f"PASSED {TWO}\nPASSED {FIVE}", 0)),
        (True, RUN.format(f"XFAIL {TWO}\nXFAIL {FIVE}", 0)),
        (True, RUN.format(f"SKIPPED {TWO}\nPASSED {FIVE}", 0)),
        (False, RUN.format(f"PASSED {TWO}\nSKIPPED {FIVE}", 0)),
        (False, RUN.format(f"PASSED {TWO}\nFAILED {FIVE} - assert 7 == 10", 1)),
        (False, RUN.format(f"FAILED {TWO} - x\nPASSED {FIVE}", 1)),
        (False, RUN.format(f"PASSED {TWO}", 0)),
        (False, RUN.format(f"PASSED {TWO}\nPASSED {FIVE}", 1)),  # the run failed, and its output does not say where
        (False, f"PASSED {TWO}\nPASSED {FIVE}"),
        (False, ">>>>> Patch Apply Failed\n" + RUN.format(f"PASSED {TWO}\nPASSED {FIVE}", 0)),
    ],
)
def test_a_log_is_read_by_the_official_package(resolved: bool, log: str) -> None:
    gold = {"instance_id": "made__up-1", "repo": "made/up", "eval_script": "", "eval_type": "pass_and_fail"}
    gold |= {"log_parser": "parse_log_pytest", "FAIL_TO_PASS": [FIVE], "PASS_TO_PASS": [TWO]}
    assert swe.is_resolved(gold, log) == resolved
