"""Anthropic's messages as chat completions: what is asked, and the answer to it."""

import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from skyrl_trainer.agent.streaming import NULL_IS_ONE, Answering, Json, Streamed, Told, event_of, rest_of

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why an answer ended: OpenAI's words, and theirs."""


def _blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given or []


class Block(BaseModel):
    """Each type has members of its own; a policy of text can be shown no other types."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Json = {}
    tool_use_id: str = ""
    content: "Blocks" = []


Blocks = Annotated[list[Block], BeforeValidator(_blocks)]


class Message(BaseModel):
    role: Literal["user", "assistant"]
    content: Blocks


class Tool(BaseModel):
    name: str
    description: str = ""
    input_schema: Json = Field(serialization_alias="parameters")


class Messages(Streamed):
    """A request; members that are not here are ignored."""

    model: str
    max_tokens: int = Field(gt=0)
    messages: list[Message] = Field(min_length=1)
    system: Blocks = Field([])
    tools: list[Tool] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: Annotated[float, NULL_IS_ONE] = Field(1.0, gt=0, le=1)
    thread: None = None


def asked(request: Messages) -> Json:
    """The members of a chat_api.Chat that asks the same."""
    told = [{"role": "system", "content": _text(request.system)}] if request.system else []
    for message in request.messages:
        told += _told(message)
    tools = [{"type": "function", "function": tool.model_dump(by_alias=True)} for tool in request.tools or ()]
    same = request.model_dump(include={"model", "max_tokens", "temperature", "top_p", "stream"})
    return same | {"messages": told, "tools": tools or None, "stop": request.stop_sequences}


def _text(blocks: list[Block]) -> str:
    return "\n".join(block.text for block in blocks if block.type == "text")


def _told(message: Message) -> list[Json]:
    said: Json = {"role": message.role, "content": _text(message.content)}
    results, calls = list[Json](), list[Json]()
    for block in message.content:
        if block.type == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            said["reasoning_content"] = block.thinking
    said |= {"tool_calls": calls} if calls else {}
    return [*results, said] if said["content"] or not results else results


def answer_of(reply: Json) -> Json:
    """Of a chat completion with one choice."""
    (choice,), usage = reply["choices"], reply["usage"]
    message, stop = choice["message"], choice.get("stop_reason")
    content = list[Json]()
    if thought := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message["content"]:
        content.append({"type": "text", "text": text})
    for call in message.get("tool_calls", ()):
        made = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **made})
    told = {name: value for name, value in reply.items() if name not in ("choices", "created", "object")}
    told |= {"type": "message", "role": "assistant", "content": content, "stop_sequence": stop}
    told["usage"] = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    return told | {"stop_reason": "stop_sequence" if stop else REASONS[choice["finish_reason"]]}


def error_of(status: int, sentence: str) -> Json:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: Json = {"type": kind, "message": sentence}
    if sentence.startswith("thread:"):  # their client then sends it all
        error["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": error}


async def streamed(given: Messages, told: Told, answering: Answering) -> AsyncIterator[str]:
    """The events of a stream: the first text as it is told, the rest of the answer when it is there."""
    said = ""
    async for text in told:
        if not said:
            begun = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": given.model}
            yield _started(begun | {"usage": {"input_tokens": 0}})
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        said += text
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
    try:
        answer = await answering
        if said:
            answer["content"][0]["text"] = rest_of(answer["content"][0].get("text"), said)
    except Exception as error:  # it has begun: there is no status any more
        yield event_of(error_of(503, str(error)), "error")
        return
    if not said:
        yield _started(answer)
    for index, block in enumerate(answer["content"]):
        name = {"tool_use": "input"}.get(block["type"], block["type"])
        if index or not said:
            yield _event("content_block_start", index=index, content_block=block | {name: type(block[name])()})
        as_json = {"type": "input_json_delta", "partial_json": json.dumps(block[name])}
        delta = as_json if name == "input" else {"type": f"{name}_delta", name: block[name]}
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    weights = {name: answer[name] for name in ("system_fingerprint", "weight_versions") if name in answer}
    yield _event("message_delta", delta=ended, usage=answer["usage"], **weights)
    yield _event("message_stop")


def _started(message: Json) -> str:
    empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    return _event("message_start", message=message | empty | {"usage": message["usage"] | {"output_tokens": 0}})


def _event(kind: str, **members: Any) -> str:
    return event_of({"type": kind, **members}, kind)
