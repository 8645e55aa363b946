"""Tools of MCP servers, one session an episode, over stdio or streamable HTTP; needs the extra `mcp`.

    server = McpServer({"command": ["python", "server.py"]})  # or {"url": "http://127.0.0.1:8000/mcp"}
    tools = {tool.name: tool for tool in server.tools()}  # for run_call
    server.close()  # at the episode's end; the next call begins another session

What goes wrong in a call is a sentence for the model. A server that has died stays dead until `close`.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from skyrl_gym.data import read_list
from skyrl_gym.tools.tool import Tool, ToolError

if TYPE_CHECKING:
    from mcp import Client

    from skyrl_gym.tools.mcp_session import Session

Answer = TypeVar("Answer")
FORM = "command: [PROGRAM, ARGUMENT, ...], maybe with env: {NAME: VALUE}, or url: http://...; tools: FILE, seconds: 20"
KINDS = {"command": list, "env": dict, "url": str, "tools": str, "seconds": float}
SECONDS, LONGEST_REASON = 20.0, 300


class McpServer:
    """settings: `command`, with `env` beside our PATH, HOME and the like, or `url`; and

    tools: a file for the list of tools, written where there is none. From then on the list is read from it, and the
        server not asked before a tool is called: prompts stay as they are, and a replay needs no server.
    seconds: for the server to start and list its tools, and for each call; 20 without it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ImportError("MCP servers need the package mcp: pip install 'skyrl-gym[mcp]'.")
        wrong = [name for name, value in settings.items() if not _fits(value, KINDS.get(name))]
        if wrong or ("command" in settings) == ("url" in settings):
            what = " and ".join(wrong or settings) or "nothing"
            raise ValueError(f"MCP server: {what} cannot be; expected is {FORM}.")
        self._seconds = settings.get("seconds", SECONDS)
        self._settings = settings
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}  # a copy has its own

    def tools(self) -> list[Tool]:
        """RuntimeError, a sentence, where they cannot be had."""
        file = self._settings.get("tools", "")
        known = os.path.exists(file)
        try:
            listed = read_list(file, "an MCP server's tools") if known else self._ask(_list)
            tools = [self._tool(**each) for each in listed]
            if file and not known:
                aside = Path(f"{file}.{uuid4().hex}")
                aside.write_text(json.dumps(listed, indent=1), encoding="utf-8")
                aside.replace(file)
        except Exception as error:
            server = self._settings.get("url") or " ".join(self._settings["command"])  # the rest may hold secrets
            source = file if known else f"the MCP server {server:.200}"
            raise RuntimeError(f"No list of tools from {source}: {_reason(error)}") from error
        return tools

    def close(self) -> None:
        """Ends the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _tool(self, name: str, inputSchema: Any, description: str = "") -> Tool:
        from skyrl_gym import json_schema

        json_schema.validator(inputSchema)
        check = partial(check_arguments, name, inputSchema)
        described = {"name": name, "description": description, "parameters": inputSchema}
        return Tool(name, partial(self._call, name), {"type": "function", "function": described}, True, check)

    def _call(self, name: str, /, **arguments: Any) -> str:
        result = self._ask(lambda client: client.call_tool(name, arguments))
        texts = [part.text if part.type == "text" else f"[{part.type}, not shown]" for part in result.content]
        text = "\n".join(texts) or json.dumps(result.structured_content)
        if result.is_error:
            raise ToolError(text)
        return text

    def _ask(self, question: Callable[["Client"], Awaitable[Answer]]) -> Answer:
        from skyrl_gym.tools import mcp_session

        program = self._settings.get("command", [""])[0]
        if program and not shutil.which(program):
            raise ToolError(f"The MCP server cannot be started: there is no program {program!r}.")
        if self._session is None or self._session.process != os.getpid():
            self._session = mcp_session.Session(self, self._settings)
        try:
            return self._session.ask(question, self._seconds)
        except TimeoutError:
            raise ToolError(f"The MCP server did not answer within {self._seconds:g} s.") from None
        except Exception as error:
            raise ToolError(f"The MCP server failed: {_reason(error)}") from error


def check_arguments(tool: str, schema: Any, arguments: Mapping[str, Any]) -> None:
    """ToolError with what fits least."""
    from skyrl_gym.json_schema import misfit

    if wrong := misfit(schema, arguments):
        raise ToolError(f"{tool}: argument{wrong}")


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:LONGEST_REASON]
    return text if isinstance(error, ToolError) else f"{type(error).__name__}: {text}"


def _fits(value: Any, kind: type | None) -> bool:
    if kind is float:
        return type(value) in (int, float) and 0 < value < 1e6
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return kind is not None and isinstance(value, kind) and all(isinstance(item, str) for item in items) and bool(value)


async def _list(client: "Client") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await client.list_tools(cursor=cursor or None)
        for each in page.tools:
            found.append({"name": each.name, "description": each.description or "", "inputSchema": each.input_schema})
        cursor = page.next_cursor
    return found
