"""A judge for tests: an OpenAI-compatible server of the standard library that says what a function tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def served(reply: Callable[[dict[str, Any]], tuple[int, str]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The server's base address, and the requests that it has got; `reply` gives the HTTP status and the message."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(request)
            status, content = reply(request)
            message = {"role": "assistant", "content": content}
            usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
            body: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": request["model"]}
            body |= {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
            data = json.dumps(body if status == 200 else {"error": {"message": content}}).encode()
            self.send_response(status)
            if status in (429, 500, 503):
                self.send_header("Retry-After", "0")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()


def match(correct: str, confidence: int = 80, answer: str = "7") -> str:
    parts = {"extracted_final_answer": answer, "reasoning": "-", "correct": correct, "confidence": confidence}
    return json.dumps(parts | {"strict": True})
