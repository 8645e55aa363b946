"""The model under test: any OpenAI-compatible endpoint, asked in the agent loop's own terms.

An endpoint that takes and gives token ids (vLLM's /v1/completions) reads and writes exactly what it would in training.
Any other gets chat messages: MessagePrompt makes every message one "token" to the loop, which so stays the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from skyrl_trainer.agent.prompt import ChatPrompt, first_messages, load_chat_prompt
from skyrl_trainer.engine.server_process import ServerProcess, reason_of
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

TRIES, LONGEST_PAUSE, REQUEST_SECONDS, PROBE_SECONDS, LOAD_SECONDS = 6, 60.0, 1800.0, 60.0, 900.0
BUSY = (408, 409, 425, 429)
MOST_FAILURES = 8  # requests in a row that failed after all their tries: then nobody is there, and the run ends
UNBOUNDED = 1 << 24


class Refused(Exception):
    """What an endpoint says instead of an answer; status 0 when it said nothing."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class MessagePrompt:
    """ChatPrompt's methods as the loop uses them, for one episode: the id of a message is its number, 0 ends a turn.

    Example: first("", "1+1?") == [1], and after the reply [2, 0] observation("Wrong.", [2, 0]) == [3].
    """

    stop_token_ids = (0,)

    def __init__(self, image: str = "") -> None:
        self._messages: list[dict[str, Any]] = [{}]
        self._image = image

    def first(self, instructions: str, observation: str, tools: Any = None) -> list[int]:
        *system, _ = first_messages(instructions, observation)
        image = {"type": "image_url", "image_url": {"url": self._image}}
        content = [{"type": "text", "text": observation}, image] if self._image else observation
        return [self.add(message["role"], message["content"]) for message in system] + [self.add("user", content)]

    def observation(self, text: str, after_ids: list[int]) -> list[int]:
        return [self.add("user", text)]

    def decode(self, ids: list[int]) -> str:
        return str(self._messages[ids[0]]["content"])

    def add(self, role: str, content: Any) -> int:
        self._messages.append({"role": role, "content": content})
        return len(self._messages) - 1

    def messages(self, ids: list[int]) -> list[dict[str, Any]]:
        return [self._messages[number] for number in ids if number]


@dataclass
class Endpoint:
    """An open connection; `prompt` is None where it takes messages."""

    http: aiohttp.ClientSession
    url: str  # up to and with /v1
    model: str
    server: ServerProcess | None = None  # ours
    prompt: ChatPrompt | None = None
    max_model_len: int = UNBOUNDED
    limit: str = "max_completion_tokens"  # what it calls the tokens of an answer
    failures: int = 0

    async def post(self, path: str, body: dict[str, Any], tries: int = TRIES) -> Any:
        """The answer's JSON. Refused for what trying again does not mend, or did not; UserError once nobody answers."""
        refused, pause = Refused(0, ""), 0.0
        for number in range(tries):
            await asyncio.sleep(min(pause, LONGEST_PAUSE))
            pause = 2.0**number
            try:
                async with self.http.post(self.url + path, json=body) as reply:
                    text = await reply.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                refused = Refused(0, f"{type(error).__name__}: {error}")
                continue
            with suppress(ValueError):  # a page that is not JSON is refused below
                if reply.status == 200:
                    answer, self.failures = json.loads(text), 0
                    return answer
            refused = Refused(reply.status, f"HTTP {reply.status}: {reason_of(text)}")
            if reply.status < 500 and reply.status not in BUSY:
                raise refused
            after = reply.headers.get("Retry-After", "")
            pause = float(after) if after.isdigit() else pause
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            raise UserError(f"{self.url} answers no more ({refused}); the same command goes on where this run ended.")
        raise refused

    async def generate(self, request: GenerationRequest, prompt: Any, usage: Counter[str]) -> GenerationOutput:
        """The loop's request, answered; `usage` counts prompt, completion and cached tokens, as the endpoint says."""
        try:
            ask = self._tokens if self.prompt else self._message
            answer, ids, finish = await ask(request, prompt)
        except Refused as error:
            if error.status != 400 or "context" not in str(error) or self.prompt:
                return GenerationOutput(request.request_id, [], [], [], "error", str(error))
            answer, ids, finish = {}, [prompt.add("assistant", "")], "length"  # the messages have outgrown it
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return GenerationOutput(
                request.request_id, [], [], [], "error", f"not an answer of OpenAI's API: {error!r}"
            )
        counts = answer.get("usage") or {}
        usage["prompt_tokens"] += counts.get("prompt_tokens", 0)
        usage["completion_tokens"] += counts.get("completion_tokens", 0)
        usage["cached_tokens"] += (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return GenerationOutput(request.request_id, ids, [0.0] * len(ids), [0] * len(ids), finish)

    async def _tokens(self, request: GenerationRequest, prompt: Any) -> tuple[dict[str, Any], list[int], str]:
        options = request.options
        body: dict[str, Any] = {"model": self.model, "prompt": request.prompt_ids, "return_token_ids": True}
        body |= {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": request.seed}
        body |= {"stop_token_ids": list(options.stop_token_ids), "ignore_eos": True}
        choice = (answer := await self.post("/completions", body))["choices"][0]
        return answer, choice["token_ids"], "length" if choice["finish_reason"] == "length" else "stop"

    async def _message(self, request: GenerationRequest, prompt: Any) -> tuple[dict[str, Any], list[int], str]:
        body = {"model": self.model, "messages": prompt.messages(request.prompt_ids)}
        body |= {self.limit: request.options.max_tokens, "temperature": request.options.temperature}
        choice = (answer := await self.post("/chat/completions", body))["choices"][0]
        ids = [prompt.add("assistant", choice["message"].get("content") or "")]
        return answer, *((ids, "length") if choice["finish_reason"] == "length" else ([*ids, 0], "stop"))

    async def probe(self, messages: bool, temperature: float) -> None:
        """Finds out how to ask, for a handful of tokens. UserError where the endpoint cannot be used."""
        cards = {str(card.get("id")): card for card in await self._models()}
        self.model = self.model or ("".join(cards) if len(cards) == 1 else "")
        if not self.model or (cards and self.model not in cards):
            raise UserError(f"--model {self.model or 'is missing'}: {self.url} serves {', '.join(cards) or 'no list'}.")
        card = cards.get(self.model, {})
        tokens = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": 1, "return_token_ids": True}
        try:
            if not messages and (await self.post("/completions", tokens, tries=1))["choices"][0]["token_ids"]:
                self.prompt = load_chat_prompt(card.get("root") or self.model)
                self.max_model_len = card.get("max_model_len") or UNBOUNDED
                return
        except (Refused, UserError, LookupError, TypeError, ValueError):
            pass  # no token ids, or no tokenizer here that makes them
        hello = {"model": self.model, "messages": [{"role": "user", "content": "Hello."}], "temperature": temperature}
        for self.limit in ("max_completion_tokens", "max_tokens"):
            try:
                await self.post("/chat/completions", hello | {self.limit: 16}, tries=2)
                return
            except Refused as error:
                reason = str(error)
        raise UserError(f"--base-url {self.url}, --model {self.model}: {reason}.")

    async def _models(self) -> list[dict[str, Any]]:
        """What /v1/models lists, nothing where there is no such list; waits for a server of ours to load."""
        deadline = time.monotonic() + LOAD_SECONDS
        while True:
            try:
                async with self.http.get(f"{self.url}/models", timeout=aiohttp.ClientTimeout(PROBE_SECONDS)) as reply:
                    return list((await reply.json(content_type=None))["data"])
            except (ValueError, LookupError, TypeError):
                return []
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if self.server is None:
                    raise UserError(f"--base-url {self.url} does not answer ({error}): is it up?") from error
                if self.server.ended or time.monotonic() > deadline:
                    raise UserError(f"vLLM did not start: {self.server.last_words()}") from error
            await asyncio.sleep(0.2)


def connect(url: str, model: str, server: ServerProcess | None = None) -> Endpoint:
    """To be called in an event loop. The key is taken from OPENAI_API_KEY."""
    key = "" if server else os.environ.get("OPENAI_API_KEY", "")
    http = aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(server.socket, limit=0) if server else aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=PROBE_SECONDS),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    return Endpoint(http, url.rstrip("/"), model, server)


def start_vllm(folder: Path, max_tokens: int, concurrency: int, seed: int) -> ServerProcess:
    """A server of a model's folder, as the engines of training are; it ends with this process, however that ends."""
    from transformers import AutoConfig

    from skyrl_trainer.engine.vllm_actor import kv_token_bytes, vllm_kwargs

    config = AutoConfig.from_pretrained(folder)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    length = min(config.get_text_config().max_position_embeddings, 4 * max_tokens + 8192)
    kwargs = vllm_kwargs(str(folder), dtype, length, concurrency, seed, {"enable_prompt_tokens_details": True})
    if cache := kwargs.get("kv_cache_memory_bytes"):  # so that no request with a seed is preempted: see vllm_actor
        kwargs["max_num_seqs"] = max(1, min(concurrency, cache // kv_token_bytes(str(folder), dtype) // length))
    for name in ("skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls"):
        del kwargs[name]
    return ServerProcess(kwargs)
