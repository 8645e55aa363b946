"""The model under test: any OpenAI-compatible endpoint, asked in the agent loop's own terms.

An endpoint that takes and gives token ids (vLLM's /v1/completions) reads and writes exactly what it would in training.
Any other one gets chat messages: to the loop MessagePrompt makes every message one "token", so the loop is the same.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from skyrl_trainer.agent.prompt import THOUGHT_END, ChatPrompt, first_messages, load_chat_prompt
from skyrl_trainer.engine.server_process import ServerProcess, reason_of
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

TRIES, LONGEST_PAUSE, REQUEST_SECONDS, PROBE_SECONDS = 6, 60.0, 1800.0, 60.0
BUSY = (408, 409, 425, 429)
MOST_FAILURES = 8
"""Requests in a row that failed after all their tries: then nobody is there any more, and the run ends."""
MESSAGES_LEN = 1 << 24


class Refused(Exception):
    """What an endpoint says instead of an answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class MessagePrompt:
    """Has ChatPrompt's methods, one for each episode: the id of a message is its number, 0 ends a turn.

    Example: first("", "1+1?") == [1], and after the reply [2, 0] observation("Wrong.", [2, 0]) == [3].
    """

    stop_token_ids = (0,)

    def __init__(self, image: str = "") -> None:
        self._messages: list[dict[str, Any]] = [{}]
        self._image = image

    def first(self, instructions: str, observation: str, tools: Any = None) -> list[int]:
        messages: list[dict[str, Any]] = [*first_messages(instructions, observation)]
        if self._image:
            parts = [{"type": "text", "text": observation}, {"type": "image_url", "image_url": {"url": self._image}}]
            messages[-1]["content"] = parts
        return [self.add(message) for message in messages]

    def observation(self, text: str, after_ids: list[int]) -> list[int]:
        return [self.add({"role": "user", "content": text})]

    def decode(self, ids: list[int]) -> str:
        return str(self._messages[ids[0]]["content"])

    def without_thinking(self, ids: list[int]) -> list[int]:
        words = self.decode(ids).rpartition(THOUGHT_END)[2].lstrip()
        return [self.add({"role": "assistant", "content": words}), *ids[1:]]

    def add(self, message: dict[str, Any]) -> int:
        self._messages.append(message)
        return len(self._messages) - 1

    def messages(self, ids: list[int]) -> list[dict[str, Any]]:
        return [self._messages[number] for number in ids if number]


@dataclass
class Endpoint:
    """An open connection. `prompt` is None where the endpoint takes messages only."""

    http: aiohttp.ClientSession
    url: str  # up to and with /v1
    model: str
    max_model_len: int = MESSAGES_LEN
    prompt: ChatPrompt | None = None
    left_out: tuple[str, ...] = ()  # members of a request that it does not know
    failures: int = 0

    async def post(self, path: str, body: dict[str, Any], tries: int = TRIES) -> Any:
        """The answer's JSON. Refused for what trying again does not mend, or did not; UserError once nobody answers."""
        refused, pause = Refused(0, "it was not asked"), 0.0
        for number in range(tries):
            await asyncio.sleep(min(pause, LONGEST_PAUSE))
            pause = 2.0**number
            try:
                async with self.http.post(f"{self.url}{path}", json=body) as reply:
                    text = await reply.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                refused = Refused(0, f"{type(error).__name__}: {error}")
                continue
            if reply.status == 200:
                self.failures = 0
                return json.loads(text)
            refused = Refused(reply.status, f"HTTP {reply.status}: {reason_of(text)}")
            if reply.status < 500 and reply.status not in BUSY:
                raise refused
            if reply.headers.get("Retry-After", "").isdigit():
                pause = float(reply.headers["Retry-After"])
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            raise UserError(f"{self.url} answers no more ({refused}); the same command goes on where this run ended.")
        raise refused

    async def generate(self, request: GenerationRequest, prompt: Any, usage: Counter[str]) -> GenerationOutput:
        """The loop's request, answered; `usage` counts the tokens of prompt and completion, and the cached ones."""
        options = request.options
        body = {"model": self.model, "temperature": options.temperature}
        body |= {} if request.seed is None else {"seed": request.seed}
        try:
            if self.prompt is not None:
                body |= {"prompt": request.prompt_ids, "max_tokens": options.max_tokens, "return_token_ids": True}
                body |= {"stop_token_ids": list(options.stop_token_ids), "ignore_eos": True}
                answer = await self.post("/completions", body)
            else:
                body |= {"messages": prompt.messages(request.prompt_ids), "max_completion_tokens": options.max_tokens}
                answer = await self.post("/chat/completions", self._known(body))
            choice = answer["choices"][0]
            finish = "length" if choice["finish_reason"] == "length" else "stop"
            if self.prompt is not None:
                ids = [int(token) for token in choice["token_ids"]]
            else:
                words = {"role": "assistant", "content": choice["message"].get("content") or ""}
                ids = [prompt.add(words), *([0] if finish == "stop" else [])]
        except Refused as error:
            if error.status != 400 or "context" not in str(error) or self.prompt is not None:
                return GenerationOutput(request.request_id, [], [], [], "error", str(error))
            usage["context"] += 1  # the messages have outgrown it: the episode ends as one that was cut
            ids, finish, answer = [prompt.add({"role": "assistant", "content": ""})], "length", {}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return GenerationOutput(request.request_id, [], [], [], "error", f"no answer of OpenAI's API: {error!r}")
        counts = answer.get("usage") or {}
        usage["prompt_tokens"] += counts.get("prompt_tokens", 0)
        usage["completion_tokens"] += counts.get("completion_tokens", 0)
        usage["cached_tokens"] += (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return GenerationOutput(request.request_id, ids, [0.0] * len(ids), [0] * len(ids), finish)

    def _known(self, body: dict[str, Any]) -> dict[str, Any]:
        if "max_completion_tokens" in self.left_out:
            body = body | {"max_tokens": body["max_completion_tokens"]}
        return {name: value for name, value in body.items() if name not in self.left_out}

    async def probe(self, messages: bool) -> None:
        """Finds out how to ask; spends a handful of tokens. UserError where the endpoint cannot be used."""
        cards = await self._cards()
        card = next((card for card in cards if card.get("id") == self.model), None)
        if cards and card is None and (self.model or len(cards) > 1):
            names = ", ".join(str(card.get("id")) for card in cards[:8])
            raise UserError(f"--base-url {self.url} serves {names}; --model is {self.model or 'not given'}.")
        card = card or (cards[0] if cards else {})
        self.model = self.model or card.get("id", "")
        ask = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": 1, "return_token_ids": True}
        try:
            answer = {} if messages else await self.post("/completions", ask, tries=1)
            if answer and "token_ids" in answer["choices"][0]:
                self.prompt = load_chat_prompt(card.get("root") or self.model)
                self.max_model_len = card.get("max_model_len") or MESSAGES_LEN
                return
        except (Refused, UserError, KeyError, IndexError, TypeError, ValueError):
            pass  # no token ids, or no tokenizer here that makes them
        await self._probe_messages()

    async def _probe_messages(self) -> None:
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Say yes."}],
            "temperature": 0,
            "seed": 1,
        }
        trials = ((), ("seed",), ("seed", "temperature"))
        for self.left_out in (*trials, *((*names, "max_completion_tokens") for names in trials)):
            try:
                await self.post("/chat/completions", self._known(request | {"max_completion_tokens": 16}), tries=2)
                return
            except Refused as error:
                if error.status not in (400, 422):
                    raise UserError(f"--base-url {self.url}, --model {self.model}: {error}.") from error
                reason = str(error)
        raise UserError(f"--base-url {self.url}, --model {self.model}: {reason}.")

    async def _cards(self) -> list[dict[str, Any]]:
        """Of /v1/models; none where the endpoint does not list them."""
        try:
            async with self.http.get(f"{self.url}/models", timeout=aiohttp.ClientTimeout(PROBE_SECONDS)) as reply:
                return list((await reply.json(content_type=None))["data"]) if reply.status == 200 else []
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UserError(
                f"--base-url {self.url} does not answer ({error}): is it up, and does it end in /v1?"
            ) from error
        except (ValueError, KeyError, TypeError):
            return []


def connect(base_url: str, model: str, socket: str | None = None) -> Endpoint:
    """To be called in an event loop; the key is taken from OPENAI_API_KEY."""
    connector = aiohttp.UnixConnector(socket, limit=0) if socket else aiohttp.TCPConnector(limit=0)
    key = os.environ.get("OPENAI_API_KEY")
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=PROBE_SECONDS)
    headers = {"Authorization": f"Bearer {key}"} if key and not socket else {}
    return Endpoint(
        aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers), base_url.rstrip("/"), model
    )


@contextmanager
def served(folder: Path, max_tokens: int, concurrency: int, seed: int) -> Iterator[tuple[str, str]]:
    """A model folder of ours in a vLLM server of its own: the address and the socket at which it answers."""
    import time

    from transformers import AutoConfig

    from skyrl_trainer.engine.stepped import LOAD_SECONDS
    from skyrl_trainer.engine.vllm_actor import kv_token_bytes, vllm_kwargs

    config = AutoConfig.from_pretrained(folder)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    length = min(config.get_text_config().max_position_embeddings, 4 * max_tokens + 8192)
    kwargs = vllm_kwargs(str(folder), dtype, length, concurrency, seed, {"enable_prompt_tokens_details": True})
    if cache := kwargs.get("kv_cache_memory_bytes"):  # so that no request with a seed is preempted: see vllm_actor
        kwargs["max_num_seqs"] = max(1, min(concurrency, cache // kv_token_bytes(str(folder), dtype) // length))
    for name in ("skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls"):
        del kwargs[name]
    server = ServerProcess(kwargs)
    try:
        deadline = time.monotonic() + LOAD_SECONDS
        while not asyncio.run(_healthy(server.socket)):
            if server.ended or time.monotonic() > deadline:
                raise UserError(f"--checkpoint {folder}: vLLM did not start: {server.last_words()}")
            time.sleep(0.2)
        yield "http://engine/v1", server.socket
    finally:
        server.end()


async def _healthy(path: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http,
            http.get("http://engine/health"),
        ):
            return True
    except (aiohttp.ClientError, OSError):
        return False
