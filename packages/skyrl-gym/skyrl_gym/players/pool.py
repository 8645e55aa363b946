"""Served policies as opponents: `opponent=http://127.0.0.1:8100/v1,http://127.0.0.1:8101/v1#name`."""

from functools import cache

from skyrl_gym.chat_client import fetched, reply

LIMIT = 20.0
"""Seconds for an answer."""


def ask(address: str, messages: list[dict[str, str]], seed: int) -> str:
    """What the policy says. RuntimeError with a sentence where there is no answer."""
    url, _, name = address.partition("#")
    try:
        return reply(url, name or _first_model(url), messages, LIMIT, seed=seed, temperature=1.0)
    except RuntimeError as error:
        raise RuntimeError(f"opponent {address}: {error}; serve a policy there, or name another.") from error


@cache
def _first_model(url: str) -> str:
    return str(fetched(f"{url}/models", None, LIMIT, lambda listed: listed["data"][0]["id"]))
