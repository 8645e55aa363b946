"""Policies that somebody serves as opponents: `opponent=http://127.0.0.1:8100/v1,http://127.0.0.1:8101/v1#name`.

Any OpenAI-compatible endpoint, as `skyrl-trainer serve` makes of a checkpoint; without #name it is the first model that
it lists. What is drawn there has a seed from the episode's, so that an endpoint that heeds it answers alike again.
"""

import json
from functools import cache
from typing import Any
from urllib.request import Request, urlopen

LIMIT = 20.0
"""Seconds for an answer."""


def ask(address: str, messages: list[dict[str, str]], seed: int) -> str:
    """What the policy says. RuntimeError with a sentence where there is no answer."""
    url, _, name = address.partition("#")
    try:
        body = {"model": name or _first_model(url), "messages": messages, "seed": seed, "temperature": 1.0}
        return str(_fetched(f"{url}/chat/completions", body)["choices"][0]["message"]["content"] or "")
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = "gave no answer of OpenAI's API"
        raise RuntimeError(f"opponent {address} {what} ({error}): serve a policy there, or name another.") from error


@cache
def _first_model(url: str) -> str:
    return str(_fetched(f"{url}/models")["data"][0]["id"])


def _fetched(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=LIMIT) as reply:
        return json.load(reply)
