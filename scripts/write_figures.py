"""The figures of the documents, from docs/figures/*.json: no number is typed twice.

    python scripts/write_figures.py                # writes each marked figure of README and docs again
    python scripts/write_figures.py --older        # which figures are older than the code that they measure
    python scripts/write_figures.py --run NAME     # measures docs/figures/NAME.json again, on this machine

A mark in a page names the figure before it: `0.94<!--rollout.efficiency-->` is figures.efficiency of
docs/figures/rollout.json. A format may follow, as in `<!--make_test.tests:,-->`. A whole table stands between
`<!-- table figures/scale.json steps -->` and `<!-- end -->`: figures.steps of that file, a list of rows.
Fields of a file:

    command    makes the figures; its last line of output is one JSON object
    date       and commit: when, and of which code
    machine    in words
    measures   the paths whose change makes the figures old: the files that do what is measured, not their rooms
    figures    the command's last line; those of 2026-11-23 and before are as the page had them, rounded
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/figures"
MARK = re.compile(r"[\d.,e+-]+<!--(\w+)\.([\w.]+)(?::([^>\s]+))?-->")
TABLE = re.compile(r"<!-- table (\S*figures/(\w+)\.json) (\S+) -->\n.*?<!-- end -->", re.DOTALL)
FIELDS = {"command", "date", "commit", "machine", "measures", "figures"}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def load(name: str) -> dict[str, Any]:
    """Numbers are texts, as they are written in the file: 0.920 stays 0.920."""
    path = FIGURES / f"{name}.json"
    if not path.exists():
        raise ValueError(f"There is no docs/figures/{name}.json; valid names: {', '.join(names())}.")
    return json.loads(path.read_text(encoding="utf-8"), parse_float=str, parse_int=str)


def names() -> list[str]:
    return sorted(path.stem for path in FIGURES.glob("*.json"))


def found_in(name: str, place: str) -> Any:
    """place: keys joined by dots."""
    found = load(name)["figures"]
    for key in place.split("."):
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"docs/figures/{name}.json has no figure {place}.")
        found = found[key]
    return found


def figure(name: str, place: str, spec: str | None) -> str:
    found = found_in(name, place)
    return format(float(found), ",.0f" if spec == "," else spec) if spec else found


def table(path: str, name: str, place: str) -> str:
    """Between its marks, and behind it when it was measured. path: of the file, as the page names it."""
    head, *rows = found_in(name, place)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    made = "Measured on {date} at {commit}".format_map(load(name))
    return "\n".join([f"<!-- table {path} {place} -->", "", *lines, "", f"{made} ([how]({path})).", "<!-- end -->"])


def written(text: str) -> str:
    """The text of a page with its marked figures as the files have them."""

    def again(mark: re.Match[str]) -> str:
        return figure(mark[1], mark[2], mark[3]) + mark[0][mark[0].index("<!--") :]

    return TABLE.sub(lambda mark: table(*mark.groups()), MARK.sub(again, text))


def pages() -> list[Path]:
    found = [*ROOT.glob("README*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text(encoding="utf-8") for path in found}
    return [path for path, text in texts.items() if MARK.search(text) or TABLE.search(text)]


def older() -> list[str]:
    """A line for each file of figures whose code has changed since; a commit that is gone is told by the file's own."""
    lines = []
    for name in names():
        found = load(name)
        since = when = found["commit"]
        try:
            git("cat-file", "-e", f"{since}^{{commit}}")
        except subprocess.CalledProcessError:
            since = git("log", "-1", "--format=%h", f"-S{since}", "--", str(FIGURES / f"{name}.json"))
            when += f" (not in this clone, which has the figures since {since})"
        changes = git("log", "--format=%h %cs", f"{since}..HEAD", "--", *found["measures"]).splitlines()
        if changes:
            lines.append(f"{name}: {found['date']} at {when}; changes since: {len(changes)}, the last {changes[0]}")
    return lines


def run(name: str, machine: str | None) -> None:
    kept = load(name)
    print(f"{kept['command']} ...", flush=True)
    done = subprocess.run(kept["command"], shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    kept |= {"date": datetime.date.today().isoformat(), "commit": git("rev-parse", "--short", "HEAD")}
    kept |= {"machine": machine or kept["machine"], "figures": json.loads(done.stdout.splitlines()[-1])}
    (FIGURES / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the figures of the documents from docs/figures/*.json.")
    parser.add_argument("--older", action="store_true", help="say which are older than the code that they measure")
    parser.add_argument("--run", metavar="NAME", help="measure docs/figures/NAME.json again")
    parser.add_argument("--machine", help="the machine in words, if it is another than the file says")
    args = parser.parse_args()
    try:
        if args.run:
            run(args.run, args.machine)
        texts = {path: written(path.read_text(encoding="utf-8")) for path in pages()}
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    if args.older:
        print("\n".join(older()) or "No figure is older than its code.")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
