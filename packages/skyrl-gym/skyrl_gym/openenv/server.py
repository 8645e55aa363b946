"""`python -m skyrl_gym serve ENV`: an environment behind the OpenEnv protocol.

A WebSocket at `/ws` is a session of its own; `/reset`, `/step` and `/state` share one by the `episode_id` that reset
gives; `/mcp`, by HTTP or WebSocket, plays by tools. Environments are called in the event loop, as threads would only
make them slower; those with `metadata["waits"]` in threads.
"""

import asyncio
import hmac
import json
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from gymnasium.error import ResetNeeded
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from skyrl_gym.openenv import LOOPBACK, MAX_MESSAGE, in_thread
from skyrl_gym.openenv.episode import SCHEMA, Episode
from skyrl_gym.registry import list_envs

Said = dict[str, Any]
Text = str | bytes | bytearray
CODES = {
    "INVALID_JSON": (400, -32700),
    "SESSION_ERROR": (404, -32000),
    "UNKNOWN_TYPE": (404, -32601),
    "VALIDATION_ERROR": (422, -32602),
    "CAPACITY_REACHED": (503, -32000),
}
OTHER = (500, -32000)
"""HTTP's status and JSON-RPC's code of each of the protocol's codes."""


@dataclass(frozen=True, slots=True)
class Limits:
    sessions: int = 1024
    """At once."""
    idle: float = 600.0
    """Seconds without a message, after which a session ends."""
    call: float = 60.0
    """Seconds of a call of an environment that waits, and of a request's body."""

    def __post_init__(self) -> None:
        if self.sessions < 1 or not (self.idle > 0 and self.call > 0):
            raise ValueError(f"{self}: expected at least one session, and more than 0 seconds.")


class Refused(Exception):
    """What a client is told. args: one of the protocol's codes, and a sentence."""


@dataclass(slots=True)
class Session:
    episode: Episode
    end: asyncio.TimerHandle
    turn: asyncio.Lock


class Server:
    """The sessions by their names, and what is answered to a request."""

    def __init__(self, env_id: str, limits: Limits) -> None:
        """ValueError where the environment cannot be served."""
        self._env_id = env_id
        self._limits = limits
        self._open: dict[str, Session] = {}
        sample = Episode(env_id)
        self._tools, self._waits = sample.tools, sample.waits
        sample.close()

    def _begin(self, name: str) -> None:
        if len(self._open) >= self._limits.sessions:
            raise Refused("CAPACITY_REACHED", f"All {self._limits.sessions} sessions at once are taken: try again.")
        self._open[name] = Session(Episode(self._env_id), self._timer(name), asyncio.Lock())

    def _timer(self, name: str) -> asyncio.TimerHandle:
        longest = self._limits.call * self._waits
        return asyncio.get_running_loop().call_later(self._limits.idle + longest, self._end, name)

    def _end(self, name: str) -> None:
        """Also of a session that has ended already."""
        if session := self._open.pop(name, None):
            session.end.cancel()
            with suppress(Exception):  # nobody is left to be told
                session.episode.close()

    # What the session's Episode answers. Refused with what is wrong.
    async def _call(self, name: Any, what: str, *arguments: Any) -> Any:
        if not isinstance(name, str) or name not in self._open:
            ends = f"one that is idle for {self._limits.idle:g} s ends; reset first."
            raise Refused("SESSION_ERROR", f"There is no session {str(name)[:100]!r}, or no more: {ends}")
        session = self._open[name]
        session.end.cancel()
        session.end = self._timer(name)
        call, limit = partial(getattr(session.episode, what), *arguments), asyncio.timeout(self._limits.call)
        try:
            if not self._waits:
                return call()
            async with limit, session.turn:
                return await asyncio.wrap_future(in_thread(call))
        except (ValueError, ResetNeeded) as error:
            raise Refused("VALIDATION_ERROR", str(error)) from error
        except Exception as error:  # environments raise what they like
            if limit.expired():
                self._end(name)
                late = f"The environment took longer than {self._limits.call:g} s"
                raise Refused("EXECUTION_ERROR", f"{late}; its session has ended.") from error
            raise Refused("EXECUTION_ERROR", f"The environment raised {type(error).__name__}: {error}") from error

    async def converse(self, websocket: WebSocket) -> None:
        """A connection to `/ws` or `/mcp`, until one side closes it."""
        answer = self._rpc if websocket.url.path == "/mcp" else self._message
        await websocket.accept()
        name = secrets.token_hex(16)
        try:
            self._begin(name)
            while (message := await websocket.receive())["type"] == "websocket.receive":
                reply = await answer(message.get("text") or message.get("bytes") or "", name)
                if reply is None:
                    break
                await websocket.send_text(_json(reply))
        except Refused as error:  # there is no room
            await websocket.send_text(_json(_error(error)))
        except WebSocketDisconnect:  # while it was answered
            pass
        finally:
            self._end(name)
        with suppress(RuntimeError, WebSocketDisconnect):  # the client has closed it
            await websocket.close()

    async def http(self, request: Request) -> Response:
        """The answer to `/reset`, `/step`, `/state` or `/mcp`."""
        path, status = request.url.path, 200
        try:
            body = await self._body(request)
            if path == "/mcp":
                said = await self._rpc(body, None)
            else:
                said = await self._played(path, _read(body) | dict(request.query_params))
        except Refused as error:
            code, sentence = error.args
            said, status = {"detail": sentence}, CODES.get(code, OTHER)[0]
        return Response(_json(said), status, media_type="application/json")

    async def _body(self, request: Request) -> bytearray:
        body = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.call):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_MESSAGE:
                        raise Refused("VALIDATION_ERROR", f"A request has at most {MAX_MESSAGE} bytes.")
        return body or bytearray(b"{}")

    async def _played(self, path: str, asked: Said) -> Said:
        if path == "/reset":
            name, done = await self._begun(asked, asked.get("episode_id"))
            done["observation"]["metadata"]["episode_id"] = name
            return done
        about = asked.get("action") if path == "/step" else asked
        return await self._call(asked.get("episode_id"), path[1:], about)

    async def _begun(self, asked: Said, name: Any) -> tuple[str, Said]:
        name = secrets.token_hex(16) if name is None else name
        if not (isinstance(name, str) and 0 < len(name) < 256):
            raise Refused("VALIDATION_ERROR", "episode_id must be a text of 1 to 255 characters.")
        if new := name not in self._open:
            self._begin(name)
        try:
            return name, await self._call(name, "reset", asked | {"episode_id": name})
        except Refused:
            if new:
                self._end(name)
            raise

    # The reply to a message of `/ws`; None to `close`.
    async def _message(self, text: Text, name: str) -> Said | None:
        try:
            message = _read(text)
            kind, data = message.get("type"), _object(message.get("data", {}))
            if kind == "close":
                return None
            if kind not in ("reset", "step", "state"):
                raise Refused("UNKNOWN_TYPE", f"There is no message of type {str(kind)[:40]!r}.")
            if kind == "reset" and name not in self._open:  # idle or too slow
                self._begin(name)
            answer = await self._call(name, kind, data)
            return {"type": "state" if kind == "state" else "observation", "data": answer}
        except Refused as error:
            return _error(error)

    async def _rpc(self, text: Text, name: str | None) -> Said:
        reply: Said = {"jsonrpc": "2.0", "id": None}
        try:
            message = _read(text)
            reply["id"] = message.get("id")
            method, params = message.get("method"), _object(message.get("params", {}))
            return reply | {"result": await self._called(method, params, name)}
        except Refused as error:
            code, sentence = error.args
            return reply | {"error": {"code": CODES.get(code, OTHER)[1], "message": sentence}}

    async def _called(self, method: Any, params: Said, name: str | None) -> Said:
        if not isinstance(method, str):
            form = 'A request is {"jsonrpc": "2.0", "method": "...", "params": {...}, "id"}.'
            raise Refused("VALIDATION_ERROR", form)
        if method == "tools/list":
            return {"tools": self._tools}
        if method == "openenv/session/create":
            name, done = await self._begun(params, name)
            return {"session_id": name} | done
        name = name or params.get("session_id")
        if method == "openenv/session/close":
            self._end(str(name))
            return {"session_id": name, "closed": True}
        if method != "tools/call":
            raise Refused("UNKNOWN_TYPE", f"There is no method {method[:40]!r}.")
        done = await self._call(name, "call_tool", params.get("name"), params.get("arguments", {}))
        text = done["observation"]["text"]
        return {"content": [{"type": "text", "text": text}], "structuredContent": done, "data": text, "isError": False}


def _error(error: Refused) -> Said:
    code, sentence = error.args
    return {"type": "error", "data": {"message": sentence, "code": code}}


def _read(text: Text) -> Said:
    try:
        return _object(json.loads(text))
    except (ValueError, RecursionError) as error:
        why = f"A message is a JSON object, and this is none: {str(error)[:100]}."
        raise Refused("INVALID_JSON", why) from error


def _object(value: Any) -> Said:
    if not isinstance(value, dict):
        form = "A message, its data and its params are JSON objects"
        raise Refused("VALIDATION_ERROR", f"{form}, not {type(value).__name__}.")
    return value


# A figure of numpy's becomes a number, what else JSON has not its repr.
def _json(reply: Said) -> str:
    return json.dumps(reply, default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value)[:1000])


def application(env_id: str, limits: Limits = Limits(), key: str | None = None) -> ASGIApp:
    """key: what `Authorization: Bearer` must have, or None."""
    server, told = Server(env_id, limits), {each.id: each.description for each in list_envs()}
    calls = {"/reset": "POST", "/step": "POST", "/state": "GET", "/mcp": "POST"}
    info = {"title": env_id, "version": "1.0.0"}  # OpenEnv's validator reads it, and the paths
    pages = {
        "/schema": SCHEMA,
        "/health": {"status": "healthy"},
        "/metadata": {"name": env_id, "description": told.get(env_id, "A text environment.")},
        "/openapi.json": {"openapi": "3.1.0", "info": info, "paths": {path: {} for path in calls}},
    }
    routes = [Route(path, JSONResponse(said)) for path, said in pages.items()]
    routes += [Route(path, server.http, methods=[method]) for path, method in calls.items()]
    app = Starlette(routes=[*routes, *(WebSocketRoute(path, server.converse) for path in ("/ws", "/mcp"))])
    if key is None:
        return app
    refusal = JSONResponse({"detail": "This server wants its key, as the header Authorization: Bearer KEY."}, 401)

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization", "")
        known = hmac.compare_digest(given.encode(), f"Bearer {key}".encode())
        await (app if known else refusal)(scope, receive, send)

    return check


def prepared(
    env_id: str, host: str, port: int, key: str | None = None, limits: Limits = Limits()
) -> tuple[uvicorn.Server, socket.socket]:
    """A server, and the socket to run it on. ValueError for an address that is not to be had."""
    if host not in LOOPBACK and not key:
        raise ValueError(f"{host} is open to others: give --key, or set SKYRL_OPENENV_KEY.")
    app = application(env_id, limits, key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(f"Nobody can listen on {host}:{port} ({error}): give another --port or --host.") from None
    most: Said = {"ws_max_size": MAX_MESSAGE, "limit_concurrency": 2 * limits.sessions + 64}
    most |= {"timeout_graceful_shutdown": 2, "ws_per_message_deflate": False}
    return uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", **most)), listening


def write_manifest(folder: Path, env_id: str, port: int) -> None:
    """openenv.yaml, and the server/app.py that it names, for OpenEnv's own tools."""
    name = env_id.rpartition("/")[2].rpartition("-v")[0]
    manifest = {"spec_version": 1, "name": name, "type": "space", "runtime": "fastapi"}
    text = yaml.safe_dump(manifest | {"app": "server.app:app", "port": port}, sort_keys=False)
    module = "from skyrl_gym.openenv.server import application\n\n"
    (folder / "server").mkdir(parents=True, exist_ok=True)
    (folder / "openenv.yaml").write_text(text)
    (folder / "server" / "app.py").write_text(f"{module}app = application({env_id!r})\n")
