"""Every relative link of the documents leads to a file that is there, and its anchor to a heading of that file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for part in ("docs", "examples", "packages") for page in (ROOT / part).rglob("*.md")),
]


def without_code(page: Path) -> str:
    text = re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_and_anchor_exists() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", without_code(page))):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 30 and not broken
