"""No item of a benchmark and no canary is in this repository: canaries and ids of the real sets have forms."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Every pattern is written so that this file does not match it.
UUID = r"\b[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\b"
PROJECTS = "astropy|django|matplotlib|mwaskom|pallets|psf|pydata|pylint-dev|pytest-dev|scikit-learn|sphinx-doc|sympy"
FORMS = {
    "a canary's words": r"should\s+never\s+appear[\s#*/-]+in\s+training\s+corpora|canary[\s_:-]*gu" + r"id",
    "a canary's UUID": UUID,
    "an item of SWE-bench": rf"\b({PROJECTS})_[_]\w[\w.-]*-\d+",
    "an item of GPQA": r"\brec(?=\w*\d)(?=\w*[a-z])(?=\w*[A-Z])\w{14}\b",
    "an item of HLE": r"\b6[67][0-9a-f]{22}\b",
    "an item of LiveCodeBench": r"\b(abc|arc|agc)[1-4]\d\d_[a-h]\b",
}


def found(text: str) -> list[str]:
    """What of a benchmark is in a text."""
    return [what for what, form in FORMS.items() if re.search(form, text, re.I if "canary" in what else 0)]


def test_the_repository_has_none() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    assert len(names) > 200
    hits = {name: what for name in names if (what := found((ROOT / name).read_bytes().decode("utf-8", "replace")))}
    assert hits == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("BENCHMARK DATA SHOULD NEVER APPEAR" + "\n# IN TRAINING CORPORA", "a canary's words"),
        ("made-up canary " + "GUID", "a canary's words"),
        ("-".join(("01234567", "89ab", "4cde", "8f01", "23456789abcd")), "a canary's UUID"),
        ("django_" + "_django-99999", "an item of SWE-bench"),
        ("rec" + "A1b2C3d4E5f6G7", "an item of GPQA"),
        ("66e8" + "0" * 20, "an item of HLE"),
        ("abc" + "499_h", "an item of LiveCodeBench"),
    ],
)
def test_one_would_be_seen(text: str, what: str) -> None:
    assert what in found(f"x = '{text}'")
