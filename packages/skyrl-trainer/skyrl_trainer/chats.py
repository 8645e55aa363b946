"""Chats to learn from: rows {"messages": [...]}, as `export --trajectories` writes and TRL's SFTTrainer reads them.

    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"},
                  {"role": "assistant", "content": "2"}]}

`tool_calls` of a message and `tools` (schemas) of a row are as in OpenAI's API. An answer of `weight` 0 is not learned.
"""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Json, ValidationError, model_validator

from skyrl_gym.data import read_jsonl, read_parquet
from skyrl_trainer.errors import UserError


class Function(BaseModel):
    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]]


class Call(BaseModel):
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel, extra="allow"):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[Call] | None = None
    weight: Literal[0, 1] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("has no content")
        if self.model_extra and self.model_extra.get("reasoning_content"):
            raise ValueError("has reasoning_content: put it into the content, as the model itself writes its thoughts")
        return self


class ChatRow(BaseModel):
    messages: list[Message]
    tools: list[dict[str, Any]] | Json[list[dict[str, Any]]] | None = None

    @model_validator(mode="after")
    def _is_answered(self) -> Self:
        learned = [each for each in self.messages[1:] if each.role == "assistant" and each.weight != 0]
        if not learned or self.messages[0].role == "assistant":
            raise ValueError("should have a system's or user's message first, and an assistant's to learn after it")
        return self


class Chat(NamedTuple):
    where: str
    """Its file and line, for people."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def read_chats(path: str) -> list[Chat]:
    """The rows of a .jsonl or .parquet file. UserError with the file, the line and what was expected."""
    file = Path(path).expanduser()
    try:
        rows = read_parquet(file) if file.suffix == ".parquet" else read_jsonl(file)
        chats = [_chat(where, row) for where, row in rows]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); expected a file of chats.") from error
    except ValueError as error:
        raise UserError(str(error)) from None
    if not chats:
        raise UserError(f"{path} has no rows.")
    return chats


def _chat(where: str, row: Any) -> Chat:
    try:
        found = ChatRow.model_validate(row).model_dump(exclude_none=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"])) or "the row"
        problem = wrong["msg"].removeprefix("Value error, ")
        if wrong["type"] == "missing":
            problem = "is missing"
        elif wrong["type"] != "value_error":
            wanted = re.sub(" or instance of .*", "", problem.removeprefix("Input should be "))
            problem = f"is {str(wrong['input'])[:80]!r}, but should be {wanted}"
        raise UserError(f"{where}: {name} {problem}.") from None
    return Chat(where, found["messages"], found.get("tools"))
