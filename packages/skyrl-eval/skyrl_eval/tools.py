"""search and open_page, for agents: what is found, shortened; what is opened, as text, page by page.

    corpus.jsonl                                      rows of {"url", "title", "text"}: nothing leaves this machine
    https://made.up/search?format=json&q={query}      any search endpoint that answers in JSON; without {query} the
                                                      request is a POST of {"q": ..., "query": ...}

The key of an endpoint is taken from SEARCH_API_KEY, and sent in its usual headers or in place of {key}. The first list
in the answer whose objects have a `url` or `link` holds the results. Sites of blocked.txt, which carry the answers of
benchmarks, are neither shown nor opened, nor is anything that is not on the public internet.
"""

from __future__ import annotations

import hashlib
import html.parser
import ipaddress
import json
import os
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_gym.bm25 import BM25
from skyrl_gym.data import read_jsonl
from skyrl_gym.tools.tool import ToolError
from skyrl_trainer.errors import UserError

SECONDS, MOST_BYTES = 20.0, 4 << 20
RESULTS, SNIPPET, PAGE = 8, 300, 3500
AGENT = {"User-Agent": "Mozilla/5.0 (compatible; skyrl-eval)", "Accept": "text/html, text/plain, application/json"}
Hit = dict[str, str]
"""Example: {"url": "https://made.up/glorp", "title": "Glorp", "text": "A glorp has seven legs."}"""


class Pages:
    """One episode's tools. `is_public` says whether a machine may be asked for a page."""

    def __init__(self, provider: str, is_public: Callable[[str], bool] | None = None) -> None:
        self._provider, self._is_public = provider, is_public or on_the_internet
        self._fetched: list[str] = []

    def search(self, query: str) -> str:
        """Searches the web; returns the title, the address and the beginning of each of the best pages."""
        found = _corpus(self._provider).search(query) if is_corpus(self._provider) else self._ask(query)
        open_ones = [hit for hit in found if not is_blocked(hit["url"])][:RESULTS]
        texts = (f"{hit['title']}\n{hit['url']}\n{' '.join(hit['text'].split())[:SNIPPET]}" for hit in open_ones)
        return "\n\n".join(texts) or "Nothing was found."

    def open_page(self, url: str, page: int = 1) -> str:
        """Opens an address and returns its text; a long text has several pages."""
        if is_blocked(url):
            raise ToolError("This site may not be opened.")
        text = _corpus(self._provider).text(url) if is_corpus(self._provider) else self._fetch(url)
        self._fetched.append(url)
        pages = max(1, -(-len(text) // PAGE))
        if not 1 <= page <= pages:
            raise ToolError(f"There is no page {page}: the text has {pages}.")
        return f"[page {page} of {pages}]\n{text[(page - 1) * PAGE : page * PAGE]}"

    def take_fetched(self) -> list[str]:
        """The addresses that were fetched since the last call."""
        taken, self._fetched = self._fetched, []
        return taken

    def _ask(self, query: str) -> list[Hit]:
        key, url = os.environ.get("SEARCH_API_KEY", ""), self._provider
        keys = {"Authorization": f"Bearer {key}", "X-API-KEY": key, "X-Subscription-Token": key} if key else {}
        body = None if "{query}" in url else json.dumps({"q": query, "query": query}).encode()
        url = url.replace("{query}", urllib.parse.quote(query)).replace("{key}", urllib.parse.quote(key))
        request = urllib.request.Request(url, body, AGENT | keys | {"Content-Type": "application/json"})
        try:
            return list(_hits(json.loads(_read(urllib.request.urlopen(request, timeout=SECONDS)))))
        except (OSError, ValueError) as error:
            raise ToolError(f"The search failed: {error}.".replace(key or "\0", "***")) from error

    def _fetch(self, url: str) -> str:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ToolError("An address begins with http:// or https://.")
        try:
            opener = urllib.request.build_opener(_Checked(self._check))
            request = self._check(urllib.request.Request(url, headers=AGENT))
            with opener.open(request, timeout=SECONDS) as reply:
                kind, text = reply.headers.get_content_type(), _read(reply)
        except (OSError, ValueError) as error:
            raise ToolError(f"The page cannot be opened: {error}.") from error
        if kind not in ("text/html", "application/xhtml+xml", "application/json") and not kind.startswith("text/"):
            raise ToolError(f"The page is {kind}, which cannot be read as text.")
        return to_text(text) if "html" in kind else text

    def _check(self, request: urllib.request.Request) -> urllib.request.Request:
        """Before every request, so that nothing redirects to where it may not go."""
        if is_blocked(request.full_url):
            raise ToolError("This site may not be opened.")
        if not self._is_public(request.host):
            raise ToolError("Only addresses on the public internet can be opened.")
        return request


class _Checked(urllib.request.HTTPRedirectHandler):
    def __init__(self, check: Callable[[urllib.request.Request], urllib.request.Request]) -> None:
        self._check = check

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        request = super().redirect_request(*args)
        return request and self._check(request)


class _Corpus:
    def __init__(self, path: Path) -> None:
        rows = list(read_jsonl(path))
        for where, row in rows:
            for name in ("url", "title", "text"):
                if not isinstance(row, dict) or not isinstance(row.get(name), str):
                    raise ValueError(f"{where}: field {name!r} must be a string.")
        self._pages: list[Hit] = [row for _, row in rows]
        self._index = BM25([f"{page['title']} {page['text']}" for page in self._pages])

    def search(self, query: str) -> list[Hit]:
        return [self._pages[number] for number in self._index.search(query, 3 * RESULTS)]

    def text(self, url: str) -> str:
        found = next((page for page in self._pages if page["url"] == url), None)
        if found is None:
            raise ToolError("There is no page at this address.")
        return f"{found['title']}\n{found['text']}"


_corpus = cache(lambda provider: _Corpus(Path(provider)))


def is_corpus(provider: str) -> bool:
    return not provider.startswith(("http://", "https://"))


def check_provider(provider: str) -> str:
    """What of a provider decides an answer, for the run's identity; UserError where it does not work."""
    try:
        if not is_corpus(provider):
            Pages(provider).search("weather")
            return provider
        _corpus(provider)
        return f"{Path(provider).name} {hashlib.sha256(Path(provider).read_bytes()).hexdigest()[:16]}"
    except (OSError, ValueError, ToolError) as error:
        raise UserError(
            f"--tools {provider} cannot be used ({error}). Give a search endpoint such as "
            "'https://made.up/search?q={query}', its key in SEARCH_API_KEY, or a jsonl file of rows with url, title "
            "and text."
        ) from error


def is_blocked(url: str) -> bool:
    """Example: is_blocked("https://www.Lastexam.ai/x") is True."""
    parts = urllib.parse.urlsplit(url.strip().lower() if "://" in url else f"https://{url.strip().lower()}")
    host, path = (parts.hostname or "").rstrip("."), re.sub("/+", "/", urllib.parse.unquote(parts.path))
    names = [host.split(".", start)[-1] for start in range(host.count(".") + 1)]
    return any(f"{name}{path}/".startswith(f"{entry}/") for name in names for entry in _blocked())


@cache
def _blocked() -> tuple[str, ...]:
    lines = Path(__file__).with_name("blocked.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def on_the_internet(host: str) -> bool:
    """Whether a host (with or without a port) has public addresses only: a model must not reach into a network."""
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    return all(ipaddress.ip_address(entry[4][0]).is_global for entry in socket.getaddrinfo(name, None))


def _hits(answer: Any) -> Iterator[Hit]:
    """Of the first list, wherever it is, whose objects have an address."""
    waiting = [answer]
    while waiting:
        value = waiting.pop(0)
        rows = [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
        found = [row for row in rows if isinstance(row.get("url") or row.get("link"), str)]
        if found:
            for row in found:
                words = next((row[name] for name in ("snippet", "description", "content", "text") if row.get(name)), "")
                yield {"url": row.get("url") or row["link"], "title": str(row.get("title", "")), "text": str(words)}
            return
        waiting += value.values() if isinstance(value, dict) else rows


def _read(reply: Any) -> str:
    return reply.read(MOST_BYTES).decode(reply.headers.get_content_charset() or "utf-8", "replace")


class _Text(html.parser.HTMLParser):
    HIDDEN = ("script", "style", "noscript", "template", "svg")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in self.HIDDEN
        self.parts += ["\n"] if tag in ("p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "table") else []

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self.HIDDEN))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def to_text(page: str) -> str:
    """The words of an HTML page, a line a paragraph."""
    reader = _Text()
    reader.feed(page)
    lines = (" ".join(line.split()) for line in "".join(reader.parts).splitlines())
    return "\n".join(line for line in lines if line)
