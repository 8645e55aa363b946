"""The documentation site and the figures of the documents: what scripts write is up to date, what is built holds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import skyrl_gym
from scripts import write_environments, write_figures, write_gallery
from skyrl_trainer.learner.compose import ALGORITHMS
from skyrl_trainer.settings import OPTIONS, leaf_fields

ROOT = Path(__file__).parents[2]


# Figures


def test_every_marked_figure_is_that_of_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    marks = 0
    for path in write_figures.pages():
        text = path.read_text(encoding="utf-8")
        marks += len(write_figures.MARK.findall(text))
        assert write_figures.written(text) == text, f"{path}: run scripts/write_figures.py"
    assert marks > 80
    old = [line.partition(":")[0] for line in write_figures.older()]
    with capsys.disabled():  # a report, no failure: a figure may be old, and its file has the date
        print(
            f"\n{len(old)} of {len(write_figures.names())} files of figures are older than the code: {', '.join(old)}"
        )


def test_figures_are_older_where_what_they_measure_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_figures, "ROOT", tmp_path)
    monkeypatch.setattr(write_figures, "FIGURES", tmp_path / "docs/figures")
    write_figures.FIGURES.mkdir(parents=True)

    def commit(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        write_figures.git("add", ".")
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        write_figures.git(*author, "commit", "-qm", "Changes " + " ".join(files))
        return write_figures.git("rev-parse", "--short", "HEAD")

    def figures(name: str, commit: str, measures: list[str]) -> None:
        kept = {"date": "2026-11-24", "commit": commit, "measures": measures}
        (write_figures.FIGURES / f"{name}.json").write_text(json.dumps(kept), encoding="utf-8")

    write_figures.git("init", "-q")
    first = commit(a="1", b="1", c="1")
    for name in ("a", "b"):
        figures(f"known_{name}", first, [name])
        figures(f"gone_{name}", "0123abc", [name])
    brought = commit(b="2")
    changed = commit(a="2")
    figures("gone_b", "0123abc", ["b", "c"])  # the figures are not newer for it
    commit(c="2")
    lines = dict(line.split(": ", 1) for line in write_figures.older())
    assert lines.keys() == {"known_a", "known_b", "gone_a", "gone_b"}
    assert lines["known_a"].startswith(f"2026-11-24 at {first}; changes since: 1, the last {changed} ")
    assert lines["gone_a"].startswith(
        f"2026-11-24 at 0123abc (not in this clone, which has the figures since {brought})"
    )
    assert brought in lines["gone_b"]
    figures("gone_b", "0123abc", ["b"])
    assert not [line for line in write_figures.older() if line.startswith("gone_b")]


@pytest.mark.parametrize("name", write_figures.names())
def test_a_file_of_figures_says_how_they_were_made(name: str) -> None:
    found = write_figures.load(name)
    assert found.keys() == write_figures.FIELDS and found["figures"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"]) and re.fullmatch(r"[0-9a-f]{7,}", found["commit"])
    assert found["measures"] and all((ROOT / path).exists() for path in found["measures"])
    scripts = re.findall(r"(?<!/)(?:benchmarks|examples)/\w+\.py", found["command"])
    assert scripts or re.search(r"\bmake t|skyrl-trainer train ", found["command"])
    assert all((ROOT / script).exists() for script in scripts)
    assert any(f"figures/{name}.json" in page.read_text(encoding="utf-8") for page in write_figures.pages())


def test_another_figure_than_that_of_the_file_is_written_again() -> None:
    told = write_figures.load("rollout")["figures"]["efficiency"]
    assert write_figures.written("| 0.5<!--rollout.efficiency--> |") == f"| {told}<!--rollout.efficiency--> |"
    tests = int(write_figures.load("make_test")["figures"]["tests"])
    assert write_figures.written("(1<!--make_test.tests:,-->") == f"({tests:,}<!--make_test.tests:,-->"
    with pytest.raises(ValueError, match=r"rollout\.json has no figure efficient\."):
        write_figures.written("0.5<!--rollout.efficient-->")
    with pytest.raises(ValueError, match=r"There is no docs/figures/roll\.json; valid names: agents, "):
        write_figures.written("0.5<!--roll.efficiency-->")


def test_a_table_is_written_from_its_file_with_its_date() -> None:
    mark = "<!-- table ../figures/scale.json errors -->\n{}<!-- end -->"
    text = write_figures.written(mark.format("| a | b |\n"))
    assert text == write_figures.written(mark.format("")) and text.startswith(mark.format("")[:44])
    head, *rows = write_figures.load("scale")["figures"]["errors"]
    assert text.count("\n| ") == len(rows) + 2 and f"| {' | '.join(head)} |" in text
    assert re.search(r"Measured on 20\d\d-\d\d-\d\d at \w+ \(\[how\]\(\.\./figures/scale\.json\)\)\.", text)
    with pytest.raises(ValueError, match=r"scale\.json has no figure error\."):
        write_figures.written(mark.format("").replace("errors", "error"))


def test_a_benchmark_that_is_run_again_gives_its_file_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write_figures.load("viewer") | {"command": """echo words; echo '{"seconds": 0.5, "parts": {"a": 1.25}}'"""}
    (tmp_path / "viewer.json").write_text(json.dumps(kept), encoding="utf-8")
    monkeypatch.setattr(write_figures, "FIGURES", tmp_path)
    write_figures.run("viewer", "another machine")
    found = write_figures.load("viewer")
    assert found["figures"] == {"seconds": "0.5", "parts": {"a": "1.25"}} and found["machine"] == "another machine"
    assert found["commit"] == write_figures.git("rev-parse", "--short", "HEAD") and found["date"] >= kept["date"]
    assert write_figures.figure("viewer", "parts.a", ".1f") == "1.2"


# Pages


def test_the_table_of_each_environment_is_what_its_code_says() -> None:
    texts = write_environments.page_texts()
    assert len(texts) >= 6
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run scripts/write_environments.py"


def test_the_gallery_shows_every_environment_as_it_plays_now() -> None:
    shown = (ROOT / "docs/environments/gallery.md").read_text(encoding="utf-8")
    assert shown == write_gallery.page(), "run scripts/write_gallery.py"


def test_each_diagram_is_drawn_and_asks_no_other_site_for_anything() -> None:
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    sources = [source for page in pages for source in re.findall(r"^```mermaid\n(.*?)\n```$", page, re.DOTALL | re.M)]
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/diagrams").glob("*.svg")}
    assert sources and drawn.keys() == {hashlib.sha256(source.encode()).hexdigest()[:12] for source in sources}
    assert not [name for name, svg in drawn.items() if re.search(r"@import|<script|href|url\((?!#)", svg)]


def named_pages(part: Any) -> list[str]:
    """Of a part of the navigation; patterns are left out, for what they stand for may not be there yet."""
    if isinstance(part, str):
        return [part] if "*" not in part else []
    parts = part if isinstance(part, list) else part.values() if "glob" not in part else []
    return [name for each in parts for name in named_pages(each)]


def test_pages_of_the_navigation_exist_and_each_algorithm_has_one() -> None:
    navigation = yaml.safe_load((ROOT / "docs/.nav.yml").read_text(encoding="utf-8"))["nav"]
    named = [name for name in named_pages(navigation) if name not in ("index.md", "index.zh.md")]  # made of READMEs
    assert len(named) > 35
    assert not [name for name in named if not (ROOT / "docs" / name).exists()]
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/algorithms").glob("*.md"))
    assert not [name for name in ALGORITHMS.built_in if f"`{name}`" not in pages]


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if value and (name == "src" or (name == "href" and tag in ("a", "link"))):
                self.links.append(value)


def dead_links(site: Path) -> list[str]:
    """Links of every page of a built site that lead to no file of it, or to no place in a page; other sites' not."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}  # whose links are absolute
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(parts.fragment)
            if not target.exists() or (fragment and target in pages and fragment not in pages[target].ids):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


@pytest.mark.full
def test_the_site_is_built_without_a_warning_and_finds_all_by_its_search(tmp_path: Path) -> None:
    site = tmp_path.resolve() / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert not dead_links(site)
    for path in site.rglob("index.html"):
        html = path.read_text(encoding="utf-8")
        language = "zh" if path.parent.name.endswith(".zh") else "en"
        assert f'<html lang="{language}"' in html and 'class="mermaid"' not in html, path
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    texts = {each["location"]: f"{each['title']}\n{each['text']}" for each in index}
    all_of_it = "\n".join(texts.values())
    assert not [entry.id for entry in skyrl_gym.list_envs() if entry.id not in all_of_it]
    assert not [name for name in ALGORITHMS.built_in if name not in all_of_it]
    sections = {each["title"]: each["text"] for each in index if each["location"].startswith("configuration/#")}
    for name in leaf_fields():
        section, _, last = name.rpartition(".")
        assert name == OPTIONS or last in sections[section], name
    assert OPTIONS in sections


def test_a_dead_link_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/index.html").write_text('<h2 id="there"></h2><a href="../b/">', encoding="utf-8")
    (tmp_path / "index.html").write_text('<a href="a/#there"><a href="a/#gone"><img src="a/x.png">', encoding="utf-8")
    assert sorted(dead_links(tmp_path)) == ["a/index.html: ../b/", "index.html: a/#gone", "index.html: a/x.png"]
