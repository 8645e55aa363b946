"""What `skyrl-trainer serve` answers: OpenAI's completions and chat completions, out of our engines.

Every reply names the weights that it was sampled with: `system_fingerprint` "weights-12" is the newest of them, and
`weight_versions` says which tokens came from which, [{"version": 12, "start": 0, "end": 31}], a list per choice.
"""

import asyncio
import itertools
import json
import secrets
import time
from typing import Any

from pydantic import BaseModel, Field

from skyrl_gym.parsing import ToolCall, parse_tool_calls
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.engine.client import EngineClient
from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions

ANSWER_SECONDS = 600.0
"""Longest wait for a reply; an engine that is being restarted answers within it."""
MAX_CHOICES = 16


class Common(BaseModel):
    """What both kinds of requests have; members that are not here are ignored, as OpenAI's servers do."""

    model: str
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0)
    n: int = Field(1, gt=0, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stream: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Common):
    prompt: str | list[int] = Field(min_length=1)
    logprobs: None = None  # chats have them


class Chat(Common):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0)


class Refusal(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Policy:
    """A policy by its name, on several engines in turn. Used from one event loop."""

    def __init__(self, name: str, engines: list[Any], prompt: ChatPrompt, generator: GeneratorConfig) -> None:
        self.name, self.max_model_len = name, generator.max_model_len
        self._prompt, self._generator = prompt, generator
        self._clients = itertools.cycle([EngineClient(engine, f"serve-{secrets.token_hex(4)}") for engine in engines])

    async def complete(self, request: Completion) -> dict[str, Any]:
        given = request.prompt
        ids = self._prompt.encode(given) if isinstance(given, str) else given
        outputs, answer = await self._generate(request, ids)
        choices = []
        for index, output in enumerate(outputs):
            text, finish = self._text(request, output)
            choices.append({"index": index, "text": text, "logprobs": None, "finish_reason": finish})
        return answer | {"object": "text_completion", "choices": choices}

    async def chat(self, request: Chat) -> dict[str, Any]:
        try:
            ids = self._prompt.conversation([_for_template(message) for message in request.messages], request.tools)
        except UserError as error:
            raise Refusal(400, str(error)) from error
        except Exception as error:  # templates are programs, and raise what they like
            raise Refusal(400, f"The chat template cannot render these messages: {error}") from error
        outputs, answer = await self._generate(request, ids)
        choices = [self._choice(request, index, output) for index, output in enumerate(outputs)]
        return answer | {"object": "chat.completion", "choices": choices}

    def _choice(self, request: Chat, index: int, output: GenerationOutput) -> dict[str, Any]:
        text, finish = self._text(request, output)
        calls = [call for call in parse_tool_calls(text) if isinstance(call, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            before, finish = text.partition("<tool_call>")[0].strip(), "tool_calls"
            functions = [{"name": call.tool, "arguments": json.dumps(call.args)} for call in calls]
            made = [{"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
            message |= {"content": before or None, "tool_calls": made}
        logprobs = {"content": self._tokens_of(text, output)} if request.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _tokens_of(self, text: str, output: GenerationOutput) -> list[dict[str, Any]]:
        """The text's tokens, each with the log-probability that it was sampled with."""
        tokens, length = list[dict[str, Any]](), 0
        for number, logprob in zip(output.output_ids, output.logprobs, strict=True):
            if length >= len(text):
                break
            token = self._prompt.decode([number])
            tokens.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
            length += len(token)
        return tokens

    def _text(self, request: Common, output: GenerationOutput) -> tuple[str, str]:
        """The output's text up to the request's first stop string, and why it ends."""
        text = self._prompt.decode(output.output_ids)
        ends = [at for stop in request.stops if stop and (at := text.find(stop)) >= 0]
        return (text[: min(ends)], "stop") if ends else (text, output.finish_reason)

    async def _generate(self, request: Common, ids: list[int]) -> tuple[list[GenerationOutput], dict[str, Any]]:
        """The outputs, and what every kind of answer has."""
        if request.model != self.name:
            raise Refusal(404, f"The model {request.model!r} is not served here; {self.name!r} is.")
        room = self._generator.max_model_len - len(ids)
        if room <= 0:
            limit = f"generator.max_model_len={self._generator.max_model_len}"
            raise Refusal(400, f"The prompt has {len(ids)} tokens and leaves no room for an answer in {limit}.")
        most = request.max_completion_tokens or request.max_tokens or self._generator.max_completion_length
        temperature = self._generator.temperature if request.temperature is None else request.temperature
        options = SamplingOptions(min(most, room), temperature, request.top_p, self._prompt.stop_token_ids)
        seed = secrets.randbits(48) if request.seed is None else request.seed
        name = f"cmpl-{secrets.token_hex(12)}"
        # Seeded always: engines on a CPU only keep seeded requests from pushing each other out of the cache.
        asked = [GenerationRequest(f"{name}-{i}", ids, options, seed + i) for i in range(request.n)]
        try:
            outputs = await asyncio.wait_for(next(self._clients).generate_round(asked), ANSWER_SECONDS)
        except (UserError, TimeoutError) as error:
            raise Refusal(503, str(error) or f"No answer within {ANSWER_SECONDS:.0f} s.") from error
        if failed := [output.error for output in outputs if output.error is not None]:
            raise Refusal(400, failed[0])
        count = sum(len(output.output_ids) for output in outputs)
        spans = [versions_of(output) for output in outputs]
        newest = max((span["version"] for each in spans for span in each), default=0)
        return outputs, {
            "id": name,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": f"weights-{newest}",
            "weight_versions": spans,
            "usage": {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count},
        }


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Templates want text, no parts and no `null`; and a call's arguments as an object."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if odd := [part["type"] for part in content if part["type"] != "text"]:
            raise UserError(f"messages: a part of type {odd[0]!r} cannot be shown to this policy, only text.")
        content = "\n".join(part["text"] for part in content)
    told, calls = message | {"content": content}, []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": json.loads(function["arguments"])}})
    return told | {"tool_calls": calls} if calls else told


def versions_of(output: GenerationOutput) -> list[dict[str, int]]:
    """Example: versions [3, 3, 4] are [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]."""
    spans, start = [], 0
    for version, tokens in itertools.groupby(output.weight_versions):
        end = start + len(list(tokens))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans
