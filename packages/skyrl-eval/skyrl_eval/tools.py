"""search and open_page, for agents (docs/eval/README.md), on the public internet alone."""

import hashlib
import html
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Callable
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener, urlopen

from skyrl_gym.bm25 import BM25
from skyrl_gym.data import read_jsonl
from skyrl_gym.tools.tool import ToolError
from skyrl_trainer.errors import UserError

SECONDS, MOST_BYTES, RESULTS, SNIPPET, PAGE = 20.0, 4 << 20, 8, 300, 3500
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; skyrl-eval)", "Content-Type": "application/json"}
SITES = re.findall(r"(?m)^[^#\s].*", Path(__file__).with_name("blocked.txt").read_text(encoding="utf-8"))
BLOCKED = re.compile(rf"(^|[./:])({'|'.join(map(re.escape, SITES))})(\.|v\d+)?(\.pdf|\.git)?[/:@]")
Hit = dict[str, str]
"""Example: {"url": "https://made.up/glorp", "title": "Glorp", "text": "A glorp has seven legs."}"""


class Pages:
    """One episode's tools; `fetched` has every address that was opened. `is_public`: which hosts may be asked."""

    def __init__(self, provider: str, is_public: Callable[[str], bool] | None = None) -> None:
        self._provider = provider
        self._is_public = is_public or on_the_internet
        self.fetched: list[str] = []

    def search(self, query: str) -> str:
        """Searches; returns the title, the address and the beginning of each of the best pages."""
        found = self._ask(query) if "://" in self._provider else corpus(self._provider).search(query)
        hits = [hit for hit in found if not is_blocked(hit["url"])][:RESULTS]
        texts = [f"{hit['title']}\n{hit['url']}\n{' '.join(hit['text'].split())[:SNIPPET]}" for hit in hits]
        return "\n\n".join(texts) or "Nothing was found."

    def open_page(self, url: str, page: int = 1) -> str:
        """Opens an address and returns its text; a long text has several pages."""
        if is_blocked(url):
            raise ToolError("This site may not be opened.")
        text = self._fetch(url) if "://" in self._provider else corpus(self._provider).text(url)
        self.fetched.append(url)
        if not 1 <= page <= (pages := max(1, -(-len(text) // PAGE))):
            raise ToolError(f"There is no page {page}: the text has {pages}.")
        return f"[page {page} of {pages}]\n{text[(page - 1) * PAGE : page * PAGE]}"

    def _ask(self, query: str) -> list[Hit]:
        key, url = os.environ.get("SEARCH_API_KEY", ""), self._provider
        keys = {"Authorization": f"Bearer {key}", "X-API-KEY": key, "X-Subscription-Token": key} if key else {}
        body = None if "{query}" in url else json.dumps({"q": query, "query": query}).encode()
        url = url.replace("{query}", quote(query)).replace("{key}", quote(key))
        try:
            with urlopen(Request(url, body, HEADERS | keys), timeout=SECONDS) as reply:
                return _hits(json.loads(_read(reply)))
        except (OSError, ValueError, HTTPException) as error:
            raise ToolError(f"The search failed: {error}.") from error

    def _fetch(self, url: str) -> str:
        check = self._check

        class Checked(HTTPRedirectHandler):
            def redirect_request(self, *args: Any) -> Request | None:
                request = super().redirect_request(*args)
                return request and check(request)

        try:
            with build_opener(Checked).open(check(Request(url, headers=HEADERS)), timeout=SECONDS) as reply:
                kind = reply.headers.get_content_type()
                text = _read(reply).decode(reply.headers.get_content_charset("utf-8"), "replace")
        except (OSError, ValueError, LookupError, HTTPException) as error:
            raise ToolError(f"The page cannot be opened: {error}.") from error
        if not kind.startswith(("text/", "application/json", "application/xhtml")):
            raise ToolError(f"The page is {kind}, which cannot be read as text.")
        return plain_text(text) if "html" in kind else text

    # Before every request, so that nothing redirects to where it may not go.
    def _check(self, request: Request) -> Request:
        if request.type not in ("http", "https") or is_blocked(request.full_url) or not self._is_public(request.host):
            raise ToolError("Only pages on the public internet can be opened, and not all of them.")
        return request


class Corpus:
    """Pages on disk. ValueError names the first row that is wrong."""

    def __init__(self, path: str) -> None:
        rows = list(read_jsonl(Path(path)))
        for where, row in rows:
            fields = [row.get(name) for name in ("url", "title", "text")] if isinstance(row, dict) else [None]
            if not all(isinstance(value, str) for value in fields):
                raise ValueError(f"{where}: fields 'url', 'title' and 'text' must be strings.")
        self._pages = [row for _, row in rows]
        self._index = BM25([f"{page['title']} {page['text']}" for page in self._pages])

    def search(self, query: str) -> list[Hit]:
        return [self._pages[number] for number in self._index.search(query, 3 * RESULTS)]

    def text(self, url: str) -> str:
        if not (found := [page for page in self._pages if page["url"] == url]):
            raise ToolError("There is no page at this address.")
        return f"{found[0]['title']}\n{found[0]['text']}"


corpus = cache(Corpus)


def check_provider(provider: str) -> str:
    """What of a provider decides a run, for its identity; UserError where it does not work."""
    try:
        Pages(provider).search("weather")
        content = b"" if "://" in provider else Path(provider).read_bytes()
    except (OSError, ValueError, ToolError) as error:
        wanted = "'https://made.up/search?q={query}', its key in SEARCH_API_KEY, or jsonl rows of url, title and text"
        raise UserError(f"--tools {provider} cannot be used ({error}): give an endpoint as {wanted}.") from error
    return f"{Path(provider).name} {hashlib.sha256(content).hexdigest()[:16]}" if content else provider


def is_blocked(url: str) -> bool:
    """Example: is_blocked("https://www.Lastexam.ai/x") is True, and so is what is no address."""
    try:
        parts = urlsplit(re.sub(r"^(?!https?://)", "https://", url.strip().lower()))
    except ValueError:
        return True
    place = unquote(f"{parts.hostname}{parts.path}/")
    return bool(BLOCKED.search(re.sub("/+", "/", place)))


def on_the_internet(host: str) -> bool:
    """Whether all addresses of a host (with or without a port) are public."""
    found = socket.getaddrinfo(urlsplit(f"//{host}").hostname, None)
    return all(ipaddress.ip_address(entry[4][0]).is_global for entry in found)


# A socket's own limit, the only one of headers, begins anew with every byte.
def _read(reply: Any) -> bytes:
    data, until = b"", time.monotonic() + SECONDS
    while len(data) < MOST_BYTES and (part := reply.read1(1 << 16)):
        data += part
        if time.monotonic() > until:
            raise TimeoutError(f"it did not come within {SECONDS:g} seconds")
    return data[:MOST_BYTES]


def _hits(answer: Any) -> list[Hit]:
    waiting = [answer]
    for value in waiting:
        rows = [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
        if found := [row for row in rows if isinstance(row.get("url") or row.get("link"), str)]:
            return [_hit(row) for row in found]
        waiting += ({"web": None} | value).values() if isinstance(value, dict) else rows
    return []


def _hit(row: dict[str, Any]) -> Hit:
    text = next((row[name] for name in ("snippet", "description", "content", "text") if row.get(name)), "")
    return {"url": row.get("url") or row["link"], "title": str(row.get("title")), "text": str(text)}


def plain_text(page: str) -> str:
    """The words of an HTML page, a line a paragraph."""
    page = re.sub(r"(?is)<!--.*?-->|<(script|style|noscript|template|svg)\b.*?</\1\s*>", "", page)
    page = re.sub(r"(?i)<(/?(p|div|li|tr|table|h\d|title)|br)\b[^>]*>", "\n", " ".join(page.split()))
    lines = (" ".join(html.unescape(line).split()) for line in re.sub(r"<[^>]*>", "", page).splitlines())
    return "\n".join(filter(None, lines))
