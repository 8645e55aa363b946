"""The code blocks of a document, and its commands as a shell reads them."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^( *)(```+)(\w*)\n(.*?)^ *\2$", re.DOTALL | re.MULTILINE)
BETWEEN = "\x1e"
"""Stands between two commands of a block."""


class Block(NamedTuple):
    line: int
    """Of its first line in the document, from 1."""
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """All blocks, or those of the languages; one without a language that begins with the prompt `$` is console."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(text):
        body = textwrap.dedent(match[4])
        language = match[3] or ("console" if body.startswith("$ ") else "")
        if not languages or language in languages:
            found.append(Block(text[: match.start()].count("\n") + 2, language, body))
    return found


def commands(block: str) -> list[list[str]]:
    """The words of each command; lines that a backslash ends go together, also over comments between them.

    Where lines begin with the prompt `$`, the others are output, but for those that go on.
    """
    prompted = block.startswith("$ ")
    lines, goes_on = [""], False
    for line in block.splitlines():
        said = line.strip()
        if not said or said.startswith(("#", "...")) or (prompted and not (goes_on or said.startswith("$ "))):
            continue
        if not goes_on:
            lines.append("")
        goes_on = said.endswith("\\")
        lines[-1] += " " + said.removeprefix("$ ").removesuffix("\\")
    script = "\n".join(f"printf '%s\\0' {line}\nprintf '{BETWEEN}'" for line in lines[1:])
    out = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    out.check_returncode()
    return [each[:-1].split("\0") for each in out.stdout.split(BETWEEN)[:-1]]
