"""The prompts of benchmarks and judges, word for word, with their sources in SOURCES.md."""

import hashlib
import re
from functools import cache
from pathlib import Path


@cache
def text(name: str) -> str:
    """The prompt `name`.txt, without the file's last newline."""
    return (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def fill(name: str, **values: str) -> str:
    """The prompt with each {name} that is given replaced; braces in the values and elsewhere stay."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match[1]], text(name))


def digest(name: str) -> str:
    """The prompt's SHA-256, for a run's manifest."""
    return hashlib.sha256(text(name).encode()).hexdigest()
