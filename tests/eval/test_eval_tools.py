"""search and open_page: found and opened pages, what is blocked, what is recorded, and what is wrong as a sentence."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import gymnasium
import pytest

from skyrl_eval import tools
from skyrl_eval.tools import PAGE, Pages, check_provider, is_blocked, on_the_internet, plain_text
from skyrl_gym.tools.tool import ToolError
from skyrl_trainer.errors import UserError

ROWS = [
    {"url": "https://made.up/glorp", "title": "Glorp", "text": "A glorp has seven legs. " * 300},
    {"url": "https://huggingface.co/datasets/x", "title": "Answers about the glorp", "text": "glorp glorp"},
    {"url": "https://made.up/ix", "title": "Ix", "text": "Ix is a moon."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture
def web() -> Iterator[tuple[str, list[str]]]:
    """A site with a search endpoint; and the requests that it got."""
    seen: list[str] = []

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            seen.append(f"{self.path} {self.headers.get('X-API-KEY')}")
            if url.path == "/away":
                self.send_response(302)
                self.send_header("Location", "https://huggingface.co/datasets/x")
                self.end_headers()
                return
            hits = [{"link": "https://made.up/1", "title": "One", "snippet": parse_qs(url.query).get("q", [""])[0]}]
            hits.append({"link": "https://[made.up/2", "title": "No address"})
            films = {"results": [{"url": "https://made.up/film", "title": "Film"}]}
            found = json.dumps({"meta": {"n": [1, 2]}, "videos": films, "web": {"results": hits}})
            pages = {"/search": ("application/json", found), "/pdf": ("application/pdf", "%PDF")}
            page = "<title>T</title><script>no()</script><p>A &amp; B<p>C"
            kind, text = pages.get(url.path, ("text/html; charset=utf-8", page))
            self.send_response(200 if url.path != "/none" else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            with suppress(OSError):  # whoever asked has gone
                for letter in text if url.path == "/drips" else [text]:
                    self.wfile.write(letter.encode())
                    time.sleep(0.1 * (url.path == "/drips"))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def test_a_corpus_is_searched_and_opened_page_by_page_without_what_is_blocked(corpus: str) -> None:
    pages = Pages(corpus)
    found = pages.search("glorp legs")
    assert found.startswith("Glorp\nhttps://made.up/glorp\nA glorp has seven legs.") and "huggingface" not in found
    assert pages.search("xyzzy") == "Nothing was found."
    first, last = pages.open_page("https://made.up/glorp"), pages.open_page("https://made.up/glorp", 3)
    assert first.startswith("[page 1 of 3]\nGlorp\n") and len(first) < PAGE + 20 and last.endswith("legs. ")
    for url, sentence in [("https://made.up/no", "no page"), (ROWS[1]["url"], "may not be opened")]:
        with pytest.raises(ToolError, match=sentence):
            pages.open_page(url)
    with pytest.raises(ToolError, match="the text has 1"):
        pages.open_page("https://made.up/ix", 2)
    assert pages.fetched == ["https://made.up/glorp", "https://made.up/glorp", "https://made.up/ix"]


def test_an_endpoint_is_asked_and_pages_are_fetched(
    web: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, seen = web
    monkeypatch.setenv("SEARCH_API_KEY", "made-up-key")
    monkeypatch.setattr(tools, "SECONDS", 1.0)
    pages = Pages(f"{site}/search?q={{query}}", is_public=lambda host: True)
    assert pages.search("a & b") == "One\nhttps://made.up/1\na & b"
    assert seen == ["/search?q=a%20%26%20b made-up-key"]
    assert pages.open_page(f"{site}/page") == "[page 1 of 1]\nT\nA & B\nC"
    assert seen[-1] == "/page None", "the key goes to the search endpoint only"
    cases = {"/away": "not all of them", "/pdf": "application/pdf", "/none": "404", "/drips": "not come within 1 sec"}
    for path, sentence in cases.items():
        with pytest.raises(ToolError, match=sentence):
            pages.open_page(site + path)
    with pytest.raises(ToolError, match="public internet"):
        pages.open_page("file:///etc/passwd")
    assert pages.fetched == [f"{site}/page"]
    with pytest.raises(ToolError, match="public internet"):
        Pages(f"{site}/search?q={{query}}").open_page(f"{site}/page")


def test_a_server_that_speaks_no_http_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"SSH-2.0-made_up\r\n")

        threading.Thread(target=talk, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(ToolError, match="search failed: SSH"):
            Pages(url).search("x")
        with pytest.raises(ToolError, match="cannot be opened: SSH"):
            Pages(url, is_public=lambda host: True).open_page(url)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80", "10.0.0.1", "169.254.169.254", "[::1]:8000", "localhost", "192.168.1.1"]
)
def test_no_model_reaches_into_a_network(host: str) -> None:
    assert not on_the_internet(host)


@pytest.mark.parametrize(
    ("url", "blocked"),
    [
        ("https://www.Lastexam.ai/x", True),
        ("lastexam.ai", True),
        ("https://huggingface.co/datasets/cais/hle", True),
        ("https://huggingface.co./datasets", True),
        ("http://user@github.com:443//CentersForAI", False),
        ("https://github.com//centerforaisafety/%68le/blob/main/x", True),
        ("https://github.com/centerforaisafety/hle2", False),
        ("https://nothuggingface.co/", False),
        ("https://made.up/?u=huggingface.co", False),
        ("https://arxiv.org/abs/2501.14249v5", True),
        ("https://export.arxiv.org/pdf/2501.14249v2.pdf", True),
        ("https://arxiv.org/pdf/2504.12516", True),
        ("https://arxiv.org/html/2601.20975v1/", True),
        ("https://alphaxiv.org/abs/2501.14249", True),
        ("https://arxiv.org/abs/2501.142490", False),
        ("https://arxiv.org/abs/2501.1424", False),
        ("https://github.com/centerforaisafety/hle.git", True),
        ("https://github.com/centerforaisafety/hle.git/info/refs", True),
        ("https://api.github.com/repos/centerforaisafety/hle/contents", True),
        ("https://cdn.jsdelivr.net/gh/openai/simple-evals@main/browsecomp_eval.py", True),
        ("https://github.com/openai/simple-evals-extra", False),
        ("https://web.archive.org/web/2025/https://huggingface.co/datasets/cais/hle", True),
        ("https://web.archive.org/web/2025id_/http://lastexam.ai:80/", True),
        ("https://web.archive.org/web/2025/https://made.up/page", False),
        ("https://r.jina.ai/https%3A%2F%2Fmade.up", True),
        ("https://huggingface-co.translate.goog/datasets/cais/hle", True),
        ("http://https://huggingface.co", True),
        ("https://huggingface%2Eco/datasets", True),
        ("https://huggingface.co.made.up/", False),
        ("https://[made.up/", True),
    ],
)
def test_what_is_blocked(url: str, blocked: bool) -> None:
    assert is_blocked(url) is blocked


def test_a_providers_identity_is_its_content(corpus: str, tmp_path: Path) -> None:
    first = check_provider(corpus)
    with Path(corpus).open("a") as file:
        file.write(json.dumps(ROWS[2]) + "\n")
    assert first.startswith("corpus.jsonl ") and check_provider(corpus) != first
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"url": "x", "title": 1, "text": "y"}\n')
    for provider, reason in [
        (str(bad), "bad.jsonl:1"),
        ("no.jsonl", "No such file"),
        ("http://127.0.0.1:9/?q=", "refused"),
    ]:
        with pytest.raises(UserError, match=f"--tools .*{reason}.* SEARCH_API_KEY"):
            check_provider(provider)


def test_the_text_of_a_page() -> None:
    page = "<html><style>p {}</style><body><h1>Glorps</h1><p>Seven\n <b>legs</b>.<br>And&nbsp;wings<!-- no --></body>"
    assert plain_text(page) == "Glorps\nSeven legs.\nAnd wings"


def test_the_env_answers_calls_and_ends_with_the_first_message_without_one(corpus: str) -> None:
    env = gymnasium.make("skyrl_eval:skyrl/question-v0")
    task = {"instructions": "Be short.", "question": "Legs?", "tools": corpus}
    observation, info = env.reset(seed=0, options={"task": task})
    assert observation == "Legs?" and info["instructions"].startswith("Be short.\n\nYou can use tools.")
    assert '"open_page"' in info["instructions"]
    call = '<tool_call>{"tool": "open_page", "args": {"url": "https://made.up/ix"}}</tool_call>'
    observation, _, terminated, _, info = env.step(f"<think>{call}{call}</think>{call}")
    assert observation == "<tool_response>\n[page 1 of 1]\nIx\nIx is a moon.\n</tool_response>" and not terminated
    assert len(info["tool_calls"]) == 1 and info["urls"] == ["https://made.up/ix"]
    observation, _, terminated, _, info = env.step('<tool_call>{"tool": "open_pag"}</tool_call>')
    assert "did you mean open_page" in observation and info["urls"] == [] and not info["valid_action"]
    env.unwrapped.feed_external([{"tool": "search", "args": {"query": "ix"}, "result": "as recorded"}])  # type: ignore[attr-defined]
    observation, *_ = env.step('<tool_call>{"tool": "search", "args": {"query": "ix"}}</tool_call>')
    assert observation == "<tool_response>\nas recorded\n</tool_response>"
    other = gymnasium.make("skyrl_eval:skyrl/question-v0").unwrapped
    other.set_state(json.loads(json.dumps(env.unwrapped.get_state())))  # type: ignore[attr-defined]
    assert "Ix is a moon" in other.step(call)[0] and other.step("Seven.")[2]
    assert env.step("Seven.")[2]
