"""A model that somebody serves: any OpenAI-compatible endpoint, asked in the terms of the agent loop.

One that takes and gives token ids (vLLM's /v1/completions) reads and writes exactly what an engine of training would.
Any other gets chat messages: agent.message_prompt makes every message one "token" to the loop, which so stays the same.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from skyrl_trainer.engine.http import HTTPClient, Refused
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

TRIES, REQUEST_SECONDS, FIRST_SECONDS = 6, 1800.0, 60.0
MOST_FAILURES = 8
"""Requests in a row that failed after all their tries: then nobody is there, and the run ends."""
UNBOUNDED = 1 << 24


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a RolloutWorker needs to ask a served model, in place of an engine's handle.

    Example: Endpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", tokenizer="Qwen/Qwen3-8B", max_model_len=40960)
    """

    url: str  # up to and with /v1
    model: str
    tokenizer: str = ""  # a folder or a name; "": the endpoint takes messages
    max_model_len: int = UNBOUNDED
    limit: str = "max_completion_tokens"  # what it calls the tokens of an answer
    key: str = "OPENAI_API_KEY"  # the environment variable with the key

    def connect(self) -> HTTPClient:
        return HTTPClient(self.url, os.environ.get(self.key, ""))


class EndpointClient:
    """What EngineClient offers, on an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._http = endpoint, endpoint.connect()
        self._failures = 0
        self.conversations: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Of episodes that are played by messages, their MessagePrompt by the trajectory's id."""

    async def generate_round(self, requests: list[GenerationRequest]) -> list[GenerationOutput]:
        return list(await asyncio.gather(*map(self.generate, requests)))

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """UserError once nobody answers any more."""
        said = self.conversations.get(request.request_id.rpartition("#")[0])
        try:
            ids, cut, usage = await (self._tokens(request) if said is None else self._message(request, said))
        except Refused as error:
            if said is None or error.status != 400 or "context" not in error.reason:
                return _failed(request, str(error))
            ids, cut, usage = [said.add("assistant", "")], True, None  # the messages have outgrown it
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return _failed(request, f"not an answer of OpenAI's API: {error!r}")
        finish = "length" if cut else "stop"
        counts = usage or {}
        cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tokens = {name: counts.get(name, 0) for name in ("prompt_tokens", "completion_tokens")}
        usage = tokens | {"cached_tokens": cached}
        return GenerationOutput(request.request_id, ids, [0.0] * len(ids), [0] * len(ids), finish, usage=usage)

    async def _tokens(self, request: GenerationRequest) -> tuple[list[int], bool, Any]:
        options = request.options
        body = {"prompt": request.prompt_ids, "return_token_ids": True, "max_tokens": options.max_tokens}
        body |= {"temperature": options.temperature, "seed": request.seed}
        body |= {"stop_token_ids": list(options.stop_token_ids), "ignore_eos": True}
        answer = await self._post("/completions", body)
        choice = answer["choices"][0]
        return choice["token_ids"], choice["finish_reason"] == "length", answer.get("usage")

    async def _message(self, request: GenerationRequest, said: Any) -> tuple[list[int], bool, Any]:
        body = {"messages": said.messages(request.prompt_ids), "temperature": request.options.temperature}
        answer = await self._post("/chat/completions", body | {self._endpoint.limit: request.options.max_tokens})
        choice = answer["choices"][0]
        number, cut = said.add("assistant", choice["message"].get("content") or ""), choice["finish_reason"] == "length"
        return [number] if cut else [number, *said.stop_token_ids], cut, answer.get("usage")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        body = {"model": self._endpoint.model} | body
        try:
            answer = await self._http.ask("POST", path, body, REQUEST_SECONDS, TRIES)
        except Refused as error:
            self._failures += error.passes
            if self._failures >= MOST_FAILURES:
                raise UserError(
                    f"{self._endpoint.url} answers no more ({error}); the same command goes on where this run ended."
                ) from error
            raise
        self._failures = 0
        return answer


def _failed(request: GenerationRequest, reason: str) -> GenerationOutput:
    return GenerationOutput(request.request_id, [], [], [], "error", reason)


async def probe(endpoint: Endpoint, messages: bool, temperature: float) -> Endpoint:
    """How the endpoint can be asked, for a handful of tokens. UserError where it cannot.

    messages: do not ask for token ids.
    """
    async with endpoint.connect() as http:
        cards = await _cards(http)
        model = endpoint.model or ("".join(cards) if len(cards) == 1 else "")
        if not model or (cards and model not in cards):
            raise UserError(f"--model {model or 'is missing'}: {http.url} serves {', '.join(cards) or 'no list'}.")
        card, found = cards.get(model, {}), replace(endpoint, model=model)
        tokens = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "return_token_ids": True}
        try:
            answer = None if messages else await http.ask("POST", "/completions", tokens, FIRST_SECONDS)
            if answer and answer["choices"][0]["token_ids"]:
                length = card.get("max_model_len") or UNBOUNDED
                return replace(found, tokenizer=card.get("root") or model, max_model_len=length)
        except (Refused, LookupError, TypeError):
            pass  # no token ids
        hello = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "temperature": temperature}
        reason = "its answers are not those of OpenAI's API"
        for limit in ("max_completion_tokens", "max_tokens"):
            try:
                answer = await http.ask("POST", "/chat/completions", hello | {limit: 16}, FIRST_SECONDS, tries=2)
                if isinstance(answer, dict) and answer.get("choices"):
                    return replace(found, limit=limit)
            except Refused as error:
                reason = str(error)
    raise UserError(f"--base-url {endpoint.url}, --model {model}: {reason}.")


async def _cards(http: HTTPClient) -> dict[str, Any]:
    """What /v1/models lists, by name; nothing where there is no such list."""
    try:
        return {str(card.get("id")): card for card in (await http.ask("GET", "/models", limit=FIRST_SECONDS))["data"]}
    except (LookupError, TypeError, AttributeError):
        return {}
    except Refused as error:
        if error.status:
            return {}
        raise UserError(f"--base-url {http.url} does not answer ({error}): is it up?") from error
