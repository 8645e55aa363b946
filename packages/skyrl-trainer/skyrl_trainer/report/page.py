"""A page: one HTML file without requests to elsewhere, of page.html, styles, a script and data."""

import json
import math
import os
import re
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from skyrl_trainer.errors import UserError
from skyrl_trainer.files import write_whole, writing

MAX_CHARACTERS = 50_000
"""Of one text of an env or a tool; what is longer is cut, and says so."""


def asset(name: str, package: str = __package__) -> str:
    """The text of a file of a package, such as "charts.js"."""
    return files(package).joinpath(name).read_text("utf-8")


def lean(value: Any, characters: int = MAX_CHARACTERS, parts: int | None = None) -> Any:
    """For JSON and for people: null for what is no number, texts and lists cut, and texts say so."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str) and len(value) > characters:
        return f"{value[:characters]}… ({len(value) - characters:,} characters more)"
    if isinstance(value, dict):
        pairs = islice(value.items(), parts)
        return {str(lean(str(key), characters)): lean(each, characters, parts) for key, each in pairs}
    return [lean(each, characters, parts) for each in value[:parts]] if isinstance(value, list | tuple) else value


def write_page(out: Path, title: str, data: dict[str, Any], style: str, script: str, blocks: str = "") -> int:
    """Writes `out`, whose script finds `data` as `page`; returns its bytes. UserError where it cannot be written."""
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"{out} is not named as a page is, whose name ends in .html: give another -o.")
    # With "<" escaped, no text can close the script element, or open a comment in it.
    inner = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    parts = {"title": escape(title), "data": inner, "style": style, "script": script, "blocks": blocks}
    # In one go: what a part says is not replaced again.
    page = re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], asset("page.html")).encode("utf-8", "replace")
    with writing(out, out.parent):
        write_whole(out, page, os.getpid())  # `report` may run beside a training
    return len(page)
