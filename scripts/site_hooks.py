"""What MkDocs is told for the documentation site (mkdocs.yml): pages from outside docs/, formulas, diagrams, languages.

README.md is the home page, README.zh-CN.md the Chinese one. Any other file of the repository that a page links to is a
page under repository/, a source file as a block of code: no link leaves the site for a place that may not be there.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
HOME = {"README.md": "index.md", "README.zh-CN.md": "index.zh.md"}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)")
BOOSTS = {"docs/configuration.md": 8, "docs/api": 0.5}
"""In the search: who types a setting looks for what it does, and docstrings say every word."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}
OUTSIDE: dict[str, str] = {}
"""Where a file outside docs/ is in the site, for example examples/my_env.py at repository/examples/my_env.py.md."""


def target_of(source: str, link: str) -> str:
    """The path in the repository, for a link in the file `source`; "" where there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else ""


def place_of(path: str) -> str:
    """MkDocs leaves out what begins with a dot."""
    return "repository/" + path.lstrip(".") + ("" if path.endswith(".md") else ".md")


def text_of(path: str) -> str:
    """A file as a page; a folder as the list of its files."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.is_file() and not each.name.startswith("."))
        return f"# {path}\n\n" + "".join(f"- [{name}]({posixpath.basename(path)}/{name})\n" for name in names)
    return f"# {path}\n\n`````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n`````\n"


def source_of(page: File) -> str:
    """The path in the repository of what the page is made from."""
    return next((path for path, place in OUTSIDE.items() if place == page.src_uri), f"docs/{page.src_uri}")


def drawing_of(source: str, *_: Any, **__: Any) -> str:
    """A ```mermaid block as scripts/draw_diagrams.mjs drew it; the theme's own way fetches a script in the browser."""
    path = ROOT / f"docs/diagrams/{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"
    if not path.exists():
        raise PluginError(f"A diagram has no drawing ({source[:40]!r}...): run scripts/draw_diagrams.mjs.")
    return f'<div class="diagram">{path.read_text(encoding="utf-8")}</div>'


def on_config(config: MkDocsConfig) -> None:
    """Anchors as GitHub makes them, and ```math blocks as MathML, which browsers show without a script."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [
        {"name": "math", "class": "math", "format": lambda source, *_, **__: convert(source, display="block")},
        {"name": "mermaid", "class": "mermaid", "format": drawing_of},
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside docs/ that a page links to, those that are added included."""
    OUTSIDE.clear()
    OUTSIDE.update(HOME)
    queue = [f"docs/{page.src_uri}" for page in files.documentation_pages()] + list(HOME)
    while queue:
        source = queue.pop()
        if not source.endswith(".ipynb"):
            text = text_of(source)
            found = {target_of(source, link) for _, link in LINK.findall(text)}
            if source in OUTSIDE:
                head = "hide: [navigation]" if source == "README.md" else f"search: {{exclude: {source not in HOME}}}"
                files.append(File.generated(config, OUTSIDE[source], content=f"---\n{head}\n---\n{text}"))
            new = sorted(path for path in found - OUTSIDE.keys() if path and not path.startswith("docs/"))
            OUTSIDE.update({path: place_of(path) for path in new})
            queue += new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links by where things are in the repository become links by where they are in the site."""
    source = source_of(page.file)
    if boost := BOOSTS.get(posixpath.dirname(source)) or BOOSTS.get(source):
        page.meta.setdefault("search", {})["boost"] = boost

    def moved(link: re.Match[str]) -> str:
        path = target_of(source, link[2])
        place = OUTSIDE.get(path) or path.removeprefix("docs/")
        return link[1] + (posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") if path else link[2])

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of notebooks, which mkdocs-jupyter leaves as they are."""

    def moved(link: re.Match[str]) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join("notebooks", link[1])))
        return f'href="{target.url_relative_to(page.file)}' if target else link[0]

    return re.sub(r'href="([^"#:]+\.(?:md|ipynb))', moved, html) if page.file.src_uri.endswith(".ipynb") else html


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> None:
    """A Chinese page tells browsers and screen readers that it is Chinese, and the theme's own words there are, too."""
    config.theme["language"] = "zh" if page.file.src_uri.endswith(".zh.md") else "en"


class Docstrings(griffe.Extension):
    """Docstrings are read as plain text first: a list follows its sentence, and <name> is no HTML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            lists = re.sub(r"(\S\n)(?=- )", r"\1\n", obj.docstring.value)
            obj.docstring.value = re.sub(r"(`[^`]*`)|<(?=[\w/])", lambda found: found[1] or "&lt;", lists)
