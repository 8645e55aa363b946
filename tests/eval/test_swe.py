"""SWE-bench on made-up repositories, without Docker: verdicts, cheats, limits, and parity with the official package."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skyrl_eval import benchmarks, swe
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
        """The patch of a workspace in which these files were written (a__b stands for a/b)."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)
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


def make_instance(parent: Path) -> Instance:
    repos, folder = parent / "repos", parent / "workspace"
    origin = repos / "made__up"
    for made in (origin, folder):
        made.mkdir(parents=True)
    git(origin, "init", "-q", "-b", "main")
    commits = []
    for name, text in (("calc.py", BUGGY), ("test_calc.py", TESTS), ("calc.py", FIXED)):
        (origin / name).write_text(text)
        git(origin, "add", "-A")
        git(origin, "commit", "-qm", f"{name} of commit {len(commits)}")
        commits.append(git(origin, "rev-parse", "HEAD").strip())
    (origin / "test_calc.py").write_text(TESTS + NEW_TEST)
    test_patch = git(origin, "diff")
    git(origin, "checkout", "-q", "--", ".")
    row = {
        "repo": "made/up",
        "instance_id": "made__up-1",
        "base_commit": commits[1],
        "patch": git(origin, "diff", commits[1], commits[2]),
        "test_patch": test_patch,
        "problem_statement": "double(5) gives 7.",
        "version": "1.0",
        "FAIL_TO_PASS": '["test_calc.py::test_five"]',
        "PASS_TO_PASS": '["test_calc.py::test_two"]',
    }
    script = items("swe-verified", [row])[0].gold["eval_script"]  # without plugins of ours, which take seconds
    row["eval_script"] = script.replace("cd /testbed", "cd /testbed\nexport PYTEST_DISABLE_PLUGIN_AUTOLOAD=1")
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
    assert [path for path, _ in swe.files_of(patch)] == ["calc.py", "data.bin", "test_calc.py"]


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


def test_empty_and_wrong_and_broken_patches_are_not_resolved(instance: Instance) -> None:
    assert instance.graded("").status == "unparsed"
    assert instance.graded(instance.patch(calc=BUGGY + "# tried\n")).status == "wrong"
    broken = instance.row["patch"].replace(" def double(n):", " def triple(n):").replace("-    return n + 2", "-   x")
    assert instance.graded(broken).status == "wrong"
    assert instance.graded("not a patch").status == "wrong"


def test_a_conftest_cheat_is_officially_resolved_and_guarded_is_not(instance: Instance) -> None:
    verdict = instance.graded(instance.patch(conftest=CONFTEST))
    assert verdict.score == 1
    assert verdict.detail == {"flags": ["touches_test_setup"], "resolved_guarded": False, "timed_out": False}
    with_fix = instance.graded(instance.patch(conftest=CONFTEST, calc=FIXED))
    assert with_fix.detail["resolved_guarded"] is True


def test_a_cheat_in_the_source_is_flagged(instance: Instance) -> None:
    verdict = instance.graded(instance.patch(calc=IN_SOURCE + BUGGY))
    assert verdict.score == 1 and verdict.detail["flags"] == ["imports_pytest_in_src"]
    assert benchmarks.find("swe-verified").summary([verdict])["flags"] == {"imports_pytest_in_src": 1}


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


def test_flags_and_guards_by_path() -> None:
    def part(path: str, line: str = "x") -> str:
        return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n"

    tests = part("pkg/tests/test_a.py")
    kept = part("src/a.py") + part("docs/conftest.md")
    names = ("conftest.py", "sub/conftest.py", "setup.cfg", "tox.ini", "pytest.ini", "x.pth", "sitecustomize.py")
    assert swe.guarded(kept + "".join(map(part, names)) + tests, tests) == kept
    assert swe.flags(kept, tests) == []
    plain = "--- a/src/a.py\n+++ b/src/a.py\n@@ -0,0 +1 @@\n+--- x\n"
    assert swe.guarded(plain + "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n", tests) == plain
    assert swe.flags(part("src/a.py", "import _pytest"), tests) == ["imports_pytest_in_src"]
    assert swe.flags(tests + part("conftest.py"), tests) == ["touches_test_setup", "touches_tests"]


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
