"""OpenAI's API over HTTP, as a served policy and an agent's episode (agent_env.py) speak it."""

import asyncio
import json
import secrets
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, StrictInt, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from skyrl_gym.parsing import ToolCall, parse_tool_calls
from skyrl_trainer.agent import anthropic_api
from skyrl_trainer.agent.prompt import well_formed
from skyrl_trainer.agent.streaming import NULL_IS_ONE, Answering, Json, Streamed, Told, after, event_of, rest_of

MAX_CHOICES, MAX_BODY = 16, 4 << 20
THEIRS = "/v1/messages"  # Anthropic's
CALL = "<tool_call>"
"""How a call of a tool begins in our grammar."""
ROLES = ("system", "developer", "user", "assistant", "tool")
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
Stop = Annotated[str, Field(max_length=1000)]
JsonFunction = Callable[[Any], Coroutine[Any, Any, Json]]
Choice = Json
"""Example: {"index": 0, "message": {"role": "assistant", "content": "46"}, "finish_reason": "stop", ...}"""


class Common(Streamed):
    """What both kinds of requests have; members that are not here are ignored, as OpenAI's servers do."""

    model: str
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Annotated[float, NULL_IS_ONE] = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: Annotated[int, NULL_IS_ONE] = Field(1, gt=0, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None

    @property
    def stops(self) -> list[str]:
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def most(self) -> int | None:
        """Tokens of the answer, where the request says it."""
        return self.max_completion_tokens or self.max_tokens


class Completion(Common):
    prompt: str | list[StrictInt] = Field(min_length=1)
    logprobs: None = None  # chats have them


class Chat(Common):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None


class Refusal(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Backend(Protocol):
    name: str
    limits: Json
    """More for its card at /v1/models: {"max_model_len": 4096}."""

    async def chat(self, request: Chat) -> Json:
        """Begins with `check`."""

    async def complete(self, request: Completion) -> Json: ...


def message_of(text: str) -> Json:
    """The assistant's message: calls of tools in our grammar become `tool_calls`, and what stands before them stays."""
    calls = [call for call in parse_tool_calls(text) if isinstance(call, ToolCall)]
    if not calls:
        return {"role": "assistant", "content": text}
    before = text.partition(CALL)[0].rstrip()  # its beginning may have been told
    functions = [{"name": well_formed(call.tool), "arguments": json.dumps(call.args)} for call in calls]
    made = [{"id": "", "type": "function", "function": each} for each in functions]
    return {"role": "assistant", "content": before or None, "tool_calls": made}


def tokens_of(decode: Callable[[list[int]], str], text: str, ids: list[int], logprobs: list[float]) -> Json:
    """A choice's `logprobs`: the text's tokens, each with its log-probability."""
    count, tokens = bisect_left(range(len(ids)), True, key=lambda n: decode(ids[:n]).startswith(text)), []
    for number, logprob in zip(ids[:count], logprobs, strict=False):
        token = decode([number])
        known = None if "\ufffd" in token else list(token.encode())  # no text tells a part's
        tokens.append({"token": token, "logprob": logprob, "bytes": known, "top_logprobs": []})
    return {"content": tokens}


def answer_of(name: str, model: str, usage: dict[str, int]) -> Json:
    """What answers of all kinds have. usage: {"prompt_tokens", "completion_tokens"}."""
    usage = usage | {"total_tokens": sum(usage.values())}
    return {"id": name, "created": int(time.time()), "model": model, "usage": usage}


def for_template(message: Json) -> Json:
    """Templates want text, no parts and no `null`; and a call's arguments as an object."""
    content, role = message.get("content") or "", message.get("role")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    told, calls = message | {"content": content, "role": "system" if role == "developer" else role}, []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": json.loads(function["arguments"])}})
    return told | {"tool_calls": calls} if calls else told


def too_long(tokens: int, limit: int) -> str:
    """In words by which clients of OpenAI and of Anthropic know that they must shorten it."""
    told = f"prompt is too long: {tokens} tokens > {limit - 1} maximum, so that there is room for an answer"
    return f"{told}. This model's maximum context length is {limit} tokens (generator.max_model_len={limit})."


def check(request: Chat) -> None:
    """Refuses what no policy of text can be asked, before its chat template sees it."""
    for number, message in enumerate(request.messages):
        where = f"messages.{number}"
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts if isinstance(parts, list) else [parts]:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise Refusal(400, f"{where}: a part of type {kind!r} cannot be shown to this policy, only text.")
        if (role := message.get("role")) not in ROLES:
            raise Refusal(400, f"{where} has the role {role!r:.40}, expected one of {', '.join(ROLES)}.")
        try:
            for_template(message)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = "its tool_calls are not OpenAI's, which have arguments as a JSON text"
            raise Refusal(400, f"{where}: {what} ({error!r}).") from error
    if request.messages[-1]["role"] == "assistant":
        raise Refusal(400, "The last message is the assistant's: end with a user's or a tool's, which it answers.")
    for number, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(400, f"tools.{number} is no {{type: function, function: {{name, description, parameters}}}}.")


def application(backend: Backend, key: str = "", more: Mapping[str, JsonFunction] | None = None) -> Starlette:
    """key: what `Authorization: Bearer` or `x-api-key` must hold, if any. more: what answers JSON at other paths."""

    async def models(request: Request) -> Response:
        card = {"id": backend.name, "object": "model", "created": 0, "owned_by": "skyrl-trainer"} | backend.limits
        name = request.path_params.get("name", "").strip("/")
        if name not in ("", backend.name):
            return JSONResponse(_error_of(404, f"The model {name!r} is not served here; {backend.name!r} is."), 404)
        return JSONResponse(card if name else {"object": "list", "data": [card]})

    async def messages(request: anthropic_api.Messages) -> Json:
        same = Chat(**anthropic_api.asked(request))
        same.tells_for(request)
        return anthropic_api.answer_of(await backend.chat(same))

    async def unknown(request: Request, error: Any) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}. Ask POST /v1/chat/completions or {THEIRS}."
        error_of = anthropic_api.error_of if request.url.path.startswith(THEIRS) else _error_of
        return JSONResponse(error_of(error.status_code, told), error.status_code, error.headers)

    routes: dict[str, tuple[Any, JsonFunction]] = {
        "/v1/completions": (Completion.model_validate_json, backend.complete),
        "/v1/chat/completions": (Chat.model_validate_json, backend.chat),
        THEIRS: (anthropic_api.Messages.model_validate_json, messages),
        **{path: (json.loads, function) for path, function in (more or {}).items()},
    }
    asked = [Route(path, partial(_answer, key, *both), methods=["POST"]) for path, both in routes.items()]
    asked += [Route("/v1/models", models), Route("/v1/models/{name:path}", models)]
    return Starlette(routes=asked, exception_handlers={HTTPException: unknown})


async def _answer(key: str, read: Callable[[bytes], Any], answer: JsonFunction, request: Request) -> Response:
    theirs = request.url.path == THEIRS
    error_of, streamed = (anthropic_api.error_of, anthropic_api.streamed) if theirs else (_error_of, _streamed)
    try:
        keys = request.headers.get("authorization"), request.headers.get("x-api-key")
        if key and keys[0] != f"Bearer {key}" and keys[1] != key:
            raise Refusal(401, "The key is wrong: send `Authorization: Bearer` or `x-api-key` with the one given.")
        if len(body := await request.body()) > MAX_BODY:
            raise Refusal(413, f"A request has at most {MAX_BODY} bytes.")
        given = read(body)
        answering = asyncio.create_task(answer(given))
        listening = asyncio.create_task(_cancel_at_hang_up(request, answering))
        answering.add_done_callback(lambda _: listening.cancel())
        if not getattr(given, "stream", False):
            return JSONResponse(await answering)
        told = given.told(answering)
        if first := await anext(told, ""):
            told = after(first, told)
        else:  # complete, or a refusal, which has a status of its own
            await answering
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        wrong = f", not {first['input']!r:.80}" if first["type"] == "literal_error" else ""
        return JSONResponse(error_of(400, f"{where}: {first['msg']}{wrong}."), 400)
    except (ValueError, RecursionError) as error:
        return JSONResponse(error_of(400, f"The body is no JSON that can be read: {error}."), 400)
    except Refusal as error:
        return JSONResponse(error_of(error.status, str(error)), error.status)
    except asyncio.CancelledError:  # nobody hears it
        return Response()
    return StreamingResponse(streamed(given, told, answering), media_type="text/event-stream")


async def _cancel_at_hang_up(request: Request, answering: Answering) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


def _error_of(status: int, sentence: str) -> Json:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sentence, "type": kind, "code": status}}


async def _streamed(given: Common, told: Told, answering: Answering) -> AsyncIterator[str]:
    chat = isinstance(given, Chat)
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": given.model}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    said = ""
    async for text in told:
        role = {} if said else {"role": "assistant"}
        said += text
        new = {"delta": role | {"content": text}} if chat else {"text": text}
        yield event_of(head | {"choices": [{"index": 0, **new, "finish_reason": None}]})
    try:
        reply = await answering
        choices = [_untold(choice, said) for choice in reply["choices"]]
    except Exception as error:  # it has begun: there is no status any more
        yield event_of(_error_of(getattr(error, "status", 503), str(error)))
        return
    yield event_of(reply | head | {"choices": choices})
    yield "data: [DONE]\n\n"


def _untold(choice: Choice, said: str) -> Choice:
    if "message" not in choice:
        return choice | {"text": rest_of(choice["text"], said)}
    delta = choice["message"] | {"content": rest_of(choice["message"]["content"], said)}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    if said:
        del delta["role"]  # clients join the chunks' texts
    return {name: value for name, value in choice.items() if name != "message"} | {"delta": delta}
