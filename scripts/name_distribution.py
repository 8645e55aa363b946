"""Gives a distribution another name on the index: python scripts/name_distribution.py skyrl-gym other-gym

Writes it wherever pip is told it: the pyproject files, what the code says to install and looks up, the packages' long
descriptions. Folders of the checkout and imported modules keep their names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"


def main(old: str, new: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", new, re.ASCII):
        sys.exit(f"{new!r} is not a distribution's name: letters and digits, with '-', '_' and '.' between them.")
    name = re.compile(rf"(?<![\w/.-]){re.escape(old)}(?![\w/-])")
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in sorted(PACKAGES.rglob("*"))
        if path.suffix in (".py", ".toml", ".md")
    }
    found = {path: text for path, text in texts.items() if name.search(text)}
    if not found:
        sys.exit(f"No distribution here is called {old!r}.")
    for path, text in found.items():
        path.write_text(name.sub(new, text), encoding="utf-8")
        print(path.relative_to(PACKAGES.parent))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Two names, please: python scripts/name_distribution.py OLD NEW")
    main(sys.argv[1], sys.argv[2])
