"""What of a patch can be a fix: all but the tests and what Python, pytest and git load to run them (docs/eval).

The official steps apply the patch, and a git of our own, which nothing in the workspace configures, says what changed.
"""

import hashlib
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_eval import sandbox

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
LOADED = re.compile(
    r"(.*/)?(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.(py|cfg)|pyproject\.toml|\.coveragerc"
    r"|(site|user)customize\.py|\.git(attributes|modules)|[^/]+\.(pth|pyc|egg-link)|[^/]+\.(dist-info|egg-info|egg)/.*)"
)
TEST_FOLDER = re.compile(r"(.*?/)?(tests?|__tests__|spec)(?=/)|testing(?=/)")
LINK, SUBMODULE = "120000", "160000"
UNUSUAL = {
    "imports_pytest_in_src": r"(?i)pytest|\bunittest\.case\b",
    "unusual_in_src": r"PASSED|\bsys\.(modules|_getframe|settrace|setprofile)|\binspect\.(stack|currentframe)"
    r"|\batexit\b|\bos\._exit\b|\bgc\.get_|\b(builtins|__builtins__|__import__)\b|(?<![.\w])(?<!def )(exec|eval)\("
    r"|def __(eq|ne)__.{0,99}(\n.{0,99})?return True",
}


def split(out: Path, graded: set[str], script: str) -> tuple[str, list[str]]:
    """The part that can be a fix, and the flags, of what changes.sh wrote to `out`. graded: the test patch's files."""
    written = {name: sandbox.read_back(out / name) for name in ("modules", "files", "changes", "patch")}
    command = script.partition(START)[2].partition(END)[0]
    named = {str(PurePosixPath(word)) for word in re.findall(r"[^\s'\";|&]+", command)}
    modules = {*written["modules"].split(), *sys.stdlib_module_names, "sitecustomize", "usercustomize"}
    files = map(PurePosixPath, written["files"].split("\0"))
    packages = {path.parent for path in files if path.name == "__init__.py" and path.parent.name}
    folders = {f"{match[0]}/" for path in graded | named if (match := TEST_FOLDER.match(path))}
    fields = written["changes"].split("\0")[:-1]
    parts = re.split(r"(?m)^(?=diff --git )", written["patch"])[1:]
    kept, flags = "", set()
    for meta, name in zip(fields[::2], fields[1::2], strict=True):
        _, mode, _, _, status = meta.split(" ")
        text = parts.pop(0) + (parts.pop(0) if status == "T" else "")  # a file that becomes a link: deleted, and made
        path, is_new = PurePosixPath(name), status == "A"
        in_tests = any(f"{name}/".startswith(folder) for folder in folders)
        around = path.name == "__init__.py" and any(PurePosixPath(test).is_relative_to(path.parent) for test in graded)
        hides = is_new and path.suffix in (".py", ".so") and _top_level(path, packages) in modules
        loaded = LOADED.fullmatch(name) or mode in (LINK, SUBMODULE) or name in named or hides
        if name in graded:
            flags.add("touches_tests")
        elif loaded or (around and (in_tests or is_new)):
            flags.add("touches_test_setup")
        elif not in_tests:
            kept += text
            added = "\n".join(re.findall(r"(?m)^\+(.*)", text)) if path.suffix == ".py" else ""
            flags |= {flag for flag, pattern in UNUSUAL.items() if re.search(pattern, added)}
    return kept, sorted(flags)


def _top_level(path: PurePosixPath, packages: set[PurePosixPath]) -> str:
    while path.parent in packages:
        path = path.parent
    return path.name.split(".")[0]


def canaries(gold: Mapping[str, Any], graded: set[str], patch: str) -> dict[str, str]:
    """Tests that must fail, one for each graded file with tests that must pass: its name, and a line that adds it."""
    wanted, lines = " ".join(gold["FAIL_TO_PASS"]), {}
    for path in sorted(graded):
        file = PurePosixPath(path)
        if file.suffix == ".py" and re.search("^test|tests?$", file.stem) and f"{file.stem}." in wanted:
            seed = f"{path} {gold['test_patch']} {patch}".encode("utf-8", "surrogateescape")
            name = f"test_{hashlib.sha256(seed).hexdigest()[:12]}"
            test = f"def {name}(): assert False\nclass {name}_class(__import__('unittest').TestCase): {name} = {name}\n"
            lines[name] = f"printf '\\n\\n%s' {shlex.quote(test)} >> {shlex.quote(f'/testbed/{path}')}\n"
    return lines


def is_forged(gold: Mapping[str, Any], names: Iterable[str], log: str) -> bool:
    """Of a log by which all is resolved: a canary passed, or did not fail, or a graded test failed as well."""
    failed = {test.rstrip(":") for test in re.findall(r"(?m)^(?:FAILED|FAIL:|ERROR:?) (\S+)", log)}
    passed = "\n".join(re.findall(r"(?m)^(?:PASSED|XFAIL|XPASS) .*|^.* \.\.\. ok$", log))
    contradicted = failed & {*gold["FAIL_TO_PASS"], *gold["PASS_TO_PASS"]}
    spared = [name for name in names if name in passed or not any(test.endswith(name) for test in failed)]
    return bool(contradicted or spared)
