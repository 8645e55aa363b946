"""Endpoints and judges for tests: an OpenAI-compatible server that says what a function tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """An answer as it goes over the wire; `cut`: the connection ends after so many bytes of the body."""

    body: str
    status: int = 200
    after: str | None = None
    cut: int | None = None


Reply = Callable[[dict[str, Any]], Raw | tuple[int, str]]
"""Of a request; a pair is the HTTP status, and the message or the reason of the refusal."""


def said(content: Any, finish: str | None = "stop", usage: Any = ..., **message: Any) -> Raw:
    """A chat completion. usage: ... is a plain one, None leaves the member out."""
    told = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16} if usage is ... else usage
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return Raw(json.dumps(body | ({} if told is None else {"usage": told})))


def no(status: int, reason: str, after: str | None = None, **more: str | int) -> Raw:
    return Raw(json.dumps({"error": {"message": reason, **more}}), status, after)


@contextmanager
def served(reply: Reply, card: dict[str, Any] | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address, and the requests that came. It takes chats only.

    card: of the model m in /v1/models, which is missing without it.
    """
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(Raw(json.dumps({"data": [{"id": "m", **card}]})) if card else no(404, "no such page"))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request)
            raw = reply(request) if "messages" in request else no(404, "no completions here")
            if not isinstance(raw, Raw):
                status, text = raw
                raw = said(text) if status == 200 else no(status, text, "0")
            self._send(raw)

        def _send(self, raw: Raw) -> None:
            data = raw.body.encode("utf-8", "surrogateescape")
            self.send_response(raw.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if raw.after is not None:
                self.send_header("Retry-After", raw.after)
            self.end_headers()
            self.wfile.write(data[: raw.cut])
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def match(correct: str, confidence: int = 80, answer: str = "7") -> str:
    parts = {"extracted_final_answer": answer, "reasoning": "-", "correct": correct, "confidence": confidence}
    return json.dumps(parts | {"strict": True})
