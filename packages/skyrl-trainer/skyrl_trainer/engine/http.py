"""The client of JSON servers: tries, pauses between them, limits, what an error says; and replies on disk."""

import asyncio
import hashlib
import json
import os
import threading
import time
from contextlib import AbstractAsyncContextManager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp

from skyrl_trainer.files import write_whole, writing
from skyrl_trainer.types import PLAYED

PROBE_SECONDS = 10.0
"""Limit of one short question to a server, and of connecting to it."""
LONGEST_PAUSE = 60.0
"""Between two tries, whatever Retry-After says, unless the caller gives a rate limit more time."""
BUSY = (408, 409, 425, 429)


class Refused(Exception):
    """What a server says instead of an answer; status 0: it did not answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}" if status else reason)
        self.status, self.reason = status, reason

    @property
    def passes(self) -> bool:
        """Whether another try may get an answer."""
        return self.status in (0, *BUSY) or self.status >= 500


class HTTPClient(AbstractAsyncContextManager["HTTPClient"]):
    """To be made, used and closed in one event loop."""

    def __init__(self, url: str, key: str = "", socket: str = "", keep_alive: float = 15.0) -> None:
        """key: sent as a bearer token. socket: the path of a Unix socket to connect to instead of the URL's host.
        keep_alive: seconds after which an idle connection is not used again."""
        self.url = url.rstrip("/")
        how: Any = {"limit": 0, "keepalive_timeout": keep_alive}
        connector = aiohttp.UnixConnector(socket, **how) if socket else aiohttp.TCPConnector(**how)
        headers = {"Authorization": f"Bearer {key.strip()}"} if key else {}
        self._http = aiohttp.ClientSession(connector=connector, headers=headers)

    async def ask(
        self, method: str, path: str, body: Any = None, limit: float = PROBE_SECONDS, tries: int = 1, busy: float = 0.0
    ) -> Any:
        """The answer's JSON, or None. Raises Refused for what no other try mends, or after the last one.
        limit: seconds of one try; where they pass, there is no other. busy: seconds in which a 429 costs no try.
        """
        failures, number, busy_until = 0, 0, time.monotonic() + busy
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=PROBE_SECONDS)
        while True:
            pause = 2.0**number
            try:
                async with self._http.request(method, self.url + path, json=body, timeout=timeout) as reply:
                    text = await reply.text(errors="replace")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if type(error) is TimeoutError:  # once more would take as long once more
                    raise Refused(0, f"no answer within {limit:g} seconds") from error
                usable = self.url.startswith(("http://", "https://"))
                refused = Refused(0, f"{type(error).__name__}: {error}" if usable else "it begins with no http://")
            else:
                answer, status = None, reply.status
                with suppress(ValueError, RecursionError, LookupError, TypeError, OverflowError):
                    answer = json.loads(text)
                    if status == 200 and 400 <= (code := int(answer["error"]["code"])) < 600:
                        status = code  # OpenRouter's way, once a model has begun
                if status == 200:
                    return answer
                refused = Refused(status, reason_of(text))
                if not refused.passes or '"insufficient_quota"' in text:  # no waiting mends OpenAI's
                    raise refused
                pause = max(0.1 * pause, seconds_of(reply.headers.get("Retry-After", ""), pause))
            failures += refused.status != 429 or time.monotonic() > busy_until
            if failures >= tries:
                raise refused
            episode = PLAYED.get() if refused.status == 429 else None
            sleep = episode.pause if episode else asyncio.sleep
            await sleep(min(pause, max(LONGEST_PAUSE, busy_until - time.monotonic())))
            number = min(number + 1, 6)

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()


def seconds_of(after: str, default: float) -> float:
    """Of a Retry-After header, which has seconds or a date."""
    with suppress(ValueError):
        return max(0.0, float(after))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    return default


def reason_of(text: str) -> str:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:300] or "nothing"


class Replies:
    """A folder with a JSON file per reply, named by the hash of what was asked; processes may share it.
    Example: Replies(Path("cache")).put({"text": "2"}, "a-model", "1+1?"), then get("a-model", "1+1?")["text"] == "2"
    """

    def __init__(self, folder: str | Path) -> None:
        """folder: made with the first reply; "" keeps none."""
        self._folder = folder and Path(folder)

    def get(self, *asked: Any) -> Any:
        """None where there is none, or where its file is damaged."""
        with suppress(OSError, ValueError):
            return json.loads(self._path(asked).read_bytes()) if self._folder else None

    def put(self, reply: Any, *asked: Any) -> None:
        if not self._folder:
            return
        path = self._path(asked)
        with writing(path, path.parent):
            write_whole(path, json.dumps(reply).encode(), f"{os.getpid()}-{threading.get_ident()}")

    def _path(self, asked: tuple[Any, ...]) -> Path:
        return Path(self._folder, hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest())
