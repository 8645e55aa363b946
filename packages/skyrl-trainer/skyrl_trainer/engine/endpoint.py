"""A model that somebody serves, asked by token ids or by chat messages (agent/message_prompt.py)."""

import os
import re
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakValueDictionary

from skyrl_trainer.engine.http import BUSY, HTTPClient, Refused, Replies
from skyrl_trainer.engine.stops import first_stop
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import GenerationOutput, GenerationRequest

TRIES, REQUEST_SECONDS, FIRST_SECONDS = 6, 1800.0, 120.0
BUSY_SECONDS = 1800.0
"""How long a request waits for a rate limit to let it through."""
MOST_FAILURES = 8
"""Failed requests in a row, no fewer than are in flight, after which it is asked whether it is there."""
UNBOUNDED, FAILED = 1 << 24, ("abort", "error")
TOO_LONG = "(?i)context|token|length|too long"
OUTGROWN = r"(?i)context|too (long|large|many tok)|inputs?\W+(length|tok)|the length of|longer than|max\S* (\S+ )*tok"
"""In a refusal's reason: prompt and answer may be more than its context; the prompt alone is."""
# OpenAI's refusal, where thoughts have used up the limit of an answer.
CUT_OFF = "Could not finish the message"
FILTERED = re.compile(r"content (management )?policy|content.filter|usage polic", re.IGNORECASE)
Usage = dict[str, int]
HELLO = [{"role": "user", "content": "Hello."}]


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
    seeded: bool = False  # whether it takes the seed of a chat
    request: dict[str, Any] = field(default_factory=dict)  # further members of every request
    cache: str = ""  # a folder of replies: what is in there is not asked for again
    key: str = "OPENAI_API_KEY"  # the environment variable with the key

    def connect(self) -> HTTPClient:
        return HTTPClient(self.url, os.environ.get(self.key, ""))


class EndpointClient:
    """EngineClient's `generate`, on an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._http = endpoint, endpoint.connect()
        self._replies = Replies(endpoint.cache)
        self._in_flight = self._failures = 0
        self._answered = False
        self.conversations: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Of episodes that are played by messages, their MessagePrompt by the trajectory's id."""

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """UserError once nobody answers any more. Usage has "uncounted" where the endpoint tells no tokens, and
        "ended/0/refusal" and the like for what is no plain answer in turn 0."""
        said = self.conversations.get(request.request_id.rpartition("#")[0])
        told: Usage = {}
        try:
            asked = self._tokens(request, told) if said is None else self._message(request, said, told)
            ids, finish, usage = await asked
            reason = f"the endpoint ended the answer: {finish}"
        except Refused as error:
            finish, reason, usage = "error", str(error), {}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            finish, reason, usage = "error", f"not an answer of OpenAI's API: {error!r}", told or {"uncounted": 1}
        if finish in FAILED:
            return GenerationOutput(request.request_id, [], [], [], "error", reason, usage=usage)
        finish = "length" if finish == "length" else "stop"
        return GenerationOutput(request.request_id, ids, [0.0] * len(ids), [0] * len(ids), finish, usage=usage)

    async def _tokens(self, request: GenerationRequest, told: Usage) -> tuple[list[int], str, Usage]:
        options = request.options
        body = {"prompt": request.prompt_ids, "return_token_ids": True, "max_tokens": options.max_tokens}
        body |= {"temperature": options.temperature, "seed": request.seed}
        body |= {"stop_token_ids": list(options.stop_token_ids), "ignore_eos": True}
        body |= {"stop": list(options.stops)} if options.stops else {}
        answer, keep = await self._reply("/completions", body, request, told)
        choice = answer["choices"][0]
        ids, finish = choice["token_ids"], choice["finish_reason"]
        known = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(ids)}
        keep()
        return ids, finish, usage_of(answer, known)

    async def _message(self, request: GenerationRequest, said: Any, told: Usage) -> tuple[list[int], str, Usage]:
        endpoint, most = self._endpoint, request.options.max_tokens
        turn = request.request_id.rpartition("#")[2]
        body = {"messages": said.messages(request.prompt_ids), "temperature": request.options.temperature}
        if endpoint.seeded and request.seed is not None:
            body["seed"] = request.seed
        if said.tools:
            body["tools"] = said.tools
        # Without a limit an answer has what is left of the context: here, less than the limit.
        limits = [{endpoint.limit: most}, {}] if most < endpoint.max_model_len else [{}]
        for limit in limits:
            try:
                answer, keep = await self._reply("/chat/completions", body | limit, request, told)
                break
            except Refused as error:
                if CUT_OFF in error.reason:
                    return [said.add("assistant", "")], "length", {"uncounted": 1}
                if error.status == 400 and FILTERED.search(error.reason):
                    blocked = {"uncounted": 1, f"ended/{turn}/content_filter": 1}
                    return [said.add("assistant", ""), *said.stop_token_ids], "stop", blocked
                too_long = error.status in (400, 413, 422) and re.search(TOO_LONG if limit else OUTGROWN, error.reason)
                if not too_long or (turn == "0" and not limit):
                    raise
        else:
            return [said.add("assistant", "")], "length", {}  # it has outgrown the context
        choice = answer["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason") or "stop"
        text, usage = text_of(message.get("content")), usage_of(answer, {})
        if found := first_stop(text, request.options.stops):
            text, finish = text[: found[0]] + found[1], "stop"
        # DeepSeek takes calls back with the thoughts before them only.
        kept = ("tool_calls", "reasoning_content", "reasoning") if said.tools and message.get("tool_calls") else ()
        calls = {name: message[name] for name in kept if message.get(name) is not None}
        if not calls and (odd := _oddity(message, finish, text)):
            usage[f"ended/{turn}/{odd}"] = 1
        number = said.add("assistant", text or message.get("refusal") or "", **calls)
        said.decode([number])  # raises now what calls of another form raise
        keep()
        return [number] if finish == "length" else [number, *said.stop_token_ids], finish, usage

    async def _reply(self, path: str, body: dict[str, Any], request: GenerationRequest, told: Usage) -> Any:
        keep: Any = dict  # called once the answer could be read
        body = {"model": self._endpoint.model} | self._endpoint.request | body
        asked = self._endpoint.url, path, body, request.request_id, request.seed
        if (answer := self._replies.get(*asked)) is None:
            answer = await self._post(path, body)
            choice = answer["choices"][0]
            if choice.get("finish_reason") not in FAILED and (choice.get("message") or choice.get("token_ids")):
                keep = partial(self._replies.put, answer, *asked)
        told |= usage_of(answer, {})
        return answer, keep

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        self._in_flight += 1
        try:
            answer = await self._http.ask("POST", path, body, REQUEST_SECONDS, TRIES, BUSY_SECONDS)
        except Refused as error:
            self._failures = self._failures + 1 if error.passes else 0
            if self._failures >= max(MOST_FAILURES, self._in_flight) and not await self._is_there():
                raise UserError(f"{self._endpoint.url} answers no more: {error}; the same command goes on.") from error
            raise
        finally:
            self._in_flight -= 1
        if not (isinstance(answer, dict) and answer.get("choices")):
            raise ValueError("its answer is no JSON" if answer is None else repr(answer)[:200])
        self._failures, self._answered = 0, True
        return answer

    async def _is_there(self) -> bool:
        endpoint = self._endpoint
        hello = endpoint.request | {"model": endpoint.model, "messages": HELLO, endpoint.limit: 16}
        try:
            await self._http.ask("POST", "/chat/completions", hello, FIRST_SECONDS)
        except Refused as error:
            return self._answered and not error.passes
        return self._answered


def usage_of(answer: dict[str, Any], known: Usage) -> Usage:
    counts = known | (answer.get("usage") or {})
    found: dict[str, Any] = {name: counts.get(name) for name in ("prompt_tokens", "completion_tokens")}
    if not all(type(count) is int and count >= 0 for count in found.values()):
        return {"uncounted": 1}
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens")
    return found | {"cached_tokens": cached if type(cached) is int else 0}


def text_of(content: Any) -> str:
    """A message's content: text, or a list of parts. TypeError or AttributeError for what is neither."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return "" + (content or "")


# What an answer is where it is no plain one; "" for one that is.
def _oddity(message: dict[str, Any], finish: str, text: str) -> str:
    if finish not in ("stop", "length"):
        return re.sub(r"\W+", "_", finish)[:30]
    for name in ("refusal", "tool_calls"):
        if message.get(name):
            return name
    thought = message.get("reasoning_content") or message.get("reasoning")
    return "" if text.strip() or finish == "length" else "reasoning_only" if thought else "empty"


async def probe(endpoint: Endpoint, messages: bool, temperature: float) -> Endpoint:
    """How the endpoint can be asked; UserError where it cannot. messages: do not ask for token ids."""
    async with endpoint.connect() as http:
        cards = await _cards(http)
        model = endpoint.model or ("".join(cards) if len(cards) == 1 else "")
        if not model or (cards and model not in cards):
            raise UserError(f"--model {model or 'is missing'}: {http.url} serves {', '.join(cards) or 'no list'}.")
        card = cards.get(model, {})
        found = replace(endpoint, model=model, max_model_len=card.get("max_model_len") or UNBOUNDED)
        first = FIRST_SECONDS, 2, FIRST_SECONDS  # two tries, and a rate limit is waited for
        tokens = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "return_token_ids": True}
        try:
            answer = None if messages else await http.ask("POST", "/completions", tokens, *first)
            if answer and answer["choices"][0]["token_ids"]:
                return replace(found, tokenizer=card.get("root") or model)
        except (Refused, LookupError, TypeError):
            pass  # no token ids
        hello = endpoint.request | {"model": model, "messages": HELLO, "temperature": temperature}
        reason = ""
        seeds = [{"seed": 0}, {}] if temperature else [{}]
        for seed, limit in product(seeds, ("max_completion_tokens", "max_tokens")):
            asked = replace(found, limit=limit, seeded=bool(seed))
            try:
                answer = await http.ask("POST", "/chat/completions", hello | seed | {limit: 16}, *first)
                if isinstance(answer, dict) and answer.get("choices"):
                    return asked
            except Refused as error:
                if CUT_OFF in error.reason:
                    return asked
                if not reason or limit not in error.reason:  # not of its name
                    unlike = error.status == 404 and not endpoint.url.endswith("/v1")
                    reason = f"{error}{' (does the address end in /v1?)' * unlike}"
                if error.status in (0, *BUSY):  # says nothing of the request's form
                    break
    reason = reason or "its answers are not those of OpenAI's API"
    raise UserError(f"--base-url {endpoint.url}, --model {model}: {reason}.")


async def _cards(http: HTTPClient) -> dict[str, Any]:
    try:
        listed = await http.ask("GET", "/models", limit=FIRST_SECONDS, busy=FIRST_SECONDS)
        return {str(card.get("id")): card for card in listed["data"]}
    except (LookupError, TypeError, AttributeError):
        return {}
    except Refused as error:
        if error.status:
            return {}
        raise UserError(f"--base-url {http.url} does not answer ({error}): is it up?") from error
