"""`skyrl/openenv-v0`: an environment behind an OpenEnv server, text in and text out.

An observation of one text is that text, any other is JSON. Where the server's schema asks for one text, the action is
that; else it is a JSON object of the agent's, and one that does not fit the schema is answered here. A server that is
gone, slow or talks nonsense raises a ConnectionError of one sentence in time, and the next reset connects anew.
"""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import gymnasium

from skyrl_gym.chat_client import past_proxies
from skyrl_gym.data import plain
from skyrl_gym.openenv import MAX_MESSAGE, TERMINATED, TRUNCATED, in_thread
from skyrl_gym.spaces import UnicodeText

try:
    from websockets.sync.client import connect

    from skyrl_gym.json_schema import misfit, validator
except ImportError as error:
    raise ImportError(f"OpenEnv servers need more ({error}): pip install 'skyrl-gym[server]'.") from error

Info = dict[str, Any]
Answer = tuple[str, float, bool, Info]
"""An observation's text, the reward, whether the episode is over, and info."""
KEY = "SKYRL_OPENENV_KEY"
"""The environment variable with a server's key."""
_REFUSED = {"reward_parts": {"reward": 0.0}, "valid_action": False, "success": False}


class OpenEnv(gymnasium.Env[str, str]):
    """url: ws://host:port. timeout: seconds of an answer. Both are options of reset, too; others are the server's."""

    metadata: Info = {"render_modes": [], "waits": True}  # noqa: RUF012 (Gymnasium's declaration)

    def __init__(self, url: str = "", timeout: float = 20.0, render_mode: None = None) -> None:
        self.observation_space = UnicodeText(MAX_MESSAGE)
        self.action_space = UnicodeText(1 << 20)
        self._default, self._url, self._limit = {"url": url, "timeout": timeout}, "", timeout
        self._socket: Any = None
        past_proxies()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        asked: Info = self._default | (options or {})
        url, limit = str(asked.pop("url")).rstrip("/").removesuffix("/ws"), asked.pop("timeout")
        if type(limit) not in (int, float) or not 0 < limit < 1e6:
            raise ValueError(f"timeout is {limit!r}; expected seconds, more than 0.")
        if url != self._url:
            self.close()
        self._url = url
        self._limit = limit
        if self._socket is None:
            connecting = in_thread(self._connected)
            try:
                self._schema, self._field, self._socket = self._in_time(connecting.result)
            except BaseException:  # an EnvTimeout, too
                connecting.add_done_callback(lambda late: late.exception() or late.result()[2].close())
                raise
        asked |= {} if seed is None else {"seed": seed}
        text, _, _, info = self._in_time(partial(self._exchange, "reset", asked))
        form = "Each action is one JSON object of this schema: " + json.dumps(self._schema)
        return text, {"instructions": "" if self._field else form, **info}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        text, reward, done, info = self._in_time(partial(self._acted, action))
        truncated = info.pop(TRUNCATED, False) is True
        terminated = info.pop(TERMINATED, False) is True if truncated else done
        info = {"valid_action": True, "success": done and reward >= 1, **info}
        info.setdefault("reward_parts", {"reward": reward})
        return text, reward, terminated, truncated, info

    def close(self) -> None:
        """Ends the session; a server that does not mind is left."""
        if self._socket is not None:
            with suppress(ConnectionError):
                self._in_time(self._left)
        self._socket = None

    def _in_time(self, call: Callable[[], Any]) -> Any:
        try:
            return in_thread(call).result(self._limit)
        except TimeoutError:
            why = f"gave no answer within {self._limit:g} s"
        except ValueError as error:
            why = str(error)
        except Exception as error:
            why = f"is out of reach ({type(error).__name__}: {str(error)[:200]})"
        gone, self._socket = self._socket, None
        if gone is not None:
            in_thread(gone.close)
        raise ConnectionError(f"The OpenEnv server {self._url!r} {why}.")

    def _connected(self) -> tuple[Info, str | None, Any]:
        key = os.environ.get(KEY)
        address = re.fullmatch("(?:ws|http)(s?://[^/].*)", self._url)
        if address is None:
            raise ValueError("has no address: give ws://HOST:PORT")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        schema, field = _schema(Request(f"http{address[1]}/schema", headers=headers), self._limit)
        options: Info = {"additional_headers": headers, "max_size": MAX_MESSAGE}
        options |= {"compression": None, "open_timeout": self._limit, "close_timeout": 1}
        return schema, field, connect(f"ws{address[1]}/ws", **options).__enter__()

    def _left(self) -> None:
        self._socket.send('{"type": "close"}')
        with suppress(Exception):  # whatever it says: it has ended the session when it closes
            self._socket.recv(timeout=1)
        self._socket.close()

    def _acted(self, action: str) -> Answer:
        if self._field is not None:
            return self._exchange("step", {self._field: action})
        try:
            value = json.loads(action[action.find("{") : action.rfind("}") + 1])
        except (ValueError, RecursionError):
            none = "This action holds no JSON object, and one that fits the schema is expected."
            return none, 0.0, False, _REFUSED
        if wrong := misfit(self._schema, value):
            return f"This action does not fit the schema: action{wrong}.", 0.0, False, _REFUSED
        return self._exchange("step", value)

    def _exchange(self, kind: str, data: Info) -> Answer:
        if self._socket is None:
            raise ValueError("has no session with this client: reset begins one")
        sent = json.dumps({"type": kind, "data": data}, default=plain)
        with suppress(Exception):  # a server that has closed the connection may have said why
            self._socket.send(sent)
        received = self._socket.recv()
        try:
            reply = json.loads(received)
            said = reply["data"]
            if reply["type"] == "observation":
                return _observed(said)
            errors = said.get("errors")
            why = f"{said['message']}{f' {json.dumps(errors)[:500]}' if errors else ''}"
            mended = kind == "step" and said.get("code") == "VALIDATION_ERROR"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError("talks nonsense: what it sent is no observation") from None
        if mended:  # by the agent, who reads it
            return why, 0.0, False, _REFUSED
        raise ValueError(f"refuses the {kind}: {why[:500]}")


def _schema(asked: Request, seconds: float) -> tuple[Info, str | None]:
    try:
        with urlopen(asked, timeout=seconds) as reply:
            schema = json.loads(reply.read(MAX_MESSAGE))["action"]
        validator(schema)
        fields = schema["properties"]
        needed = [name for name in schema.get("required", fields) if name != "metadata"]
        one = len(needed) == 1 and fields.get(needed[0], {}).get("type") == "string" and "arguments" not in fields
        return schema, needed[0] if one else None
    except HTTPError as error:
        said = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
        hint = f" (its key goes into {KEY})" * (error.code in (401, 403))
        raise ValueError(f"answers /schema with {said}{hint}") from None
    except OSError:
        raise
    except Exception as error:  # whatever it may be, it is no schema
        raise ValueError(f"has no schema of actions at /schema ({type(error).__name__})") from None


def _observed(said: Any) -> Answer:
    seen, reward, done = said["observation"], said.get("reward") or 0.0, said.get("done", False)
    if not (isinstance(reward, int | float) and math.isfinite(reward) and isinstance(done, bool)):
        raise ValueError
    info = seen.pop("metadata", {}) if isinstance(seen, dict) else {}
    (text,) = seen.values() if isinstance(seen, dict) and len(seen) == 1 else (seen,)
    shown = text if isinstance(text, str) else json.dumps(seen, ensure_ascii=False)
    return shown, float(reward), done, info if isinstance(info, dict) else {}
