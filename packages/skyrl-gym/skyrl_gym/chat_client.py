"""Questions to OpenAI-compatible endpoints, with the standard library alone; the key is $OPENAI_API_KEY."""

import json
import os
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from skyrl_gym.parsing import said


class Unanswered(RuntimeError):
    """An endpoint has not given what it was asked for."""


def past_proxies() -> None:
    """From now on this process and its children ask this machine's own servers past any proxy."""
    known = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if (here := "127.0.0.1,localhost") not in known:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (known, here)))


def fetched(url: str, body: dict[str, Any] | None, seconds: float, part: Callable[[Any], Any]) -> Any:
    """A part of the JSON at the address, asked by POST where there is a body. Unanswered where it is not there."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '-')}"}
    data = None if body is None else json.dumps(body).encode()
    past_proxies()
    try:
        with urlopen(Request(url, data, headers), timeout=seconds) as answer:
            return part(json.load(answer))
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        told = f": {error.read(500).decode(errors='replace')}" if isinstance(error, HTTPError) else ""
        raise Unanswered(f"{url} gave no answer of OpenAI's API ({type(error).__name__}: {error}{told})") from error


def reply(url: str, model: str, messages: list[dict[str, str]], seconds: float, **sampling: Any) -> str:
    """What the model says next in a chat. url: up to /v1."""
    body = {"model": model, "messages": messages, **sampling}
    path = f"{url.rstrip('/')}/chat/completions"
    return str(fetched(path, body, seconds, lambda answer: said(answer["choices"][0]["message"])))
