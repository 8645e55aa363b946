"""What a stock `openai` client gets from the endpoint, over HTTP; the engine is a fake that says what a test wants."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from skyrl_trainer.agent.chat_api import MAX_BODY, application
from skyrl_trainer.agent.http_server import HTTPServer
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.agent.streaming import settled
from skyrl_trainer.errors import EngineDied, UserError
from skyrl_trainer.serve.server import Policy, PolicyServer
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE
from skyrl_trainer.types import GenerationOutput, GenerationRequest
from tests.trainer.fakes import CHATML, tiny_tokenizer

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
LAST = len(tiny_tokenizer()) - 1
"""The last token's id."""
HELLO: list[Any] = [{"role": "user", "content": "12 + 34 = ?"}]


class SayingEngine:
    """A handle whose engine answers `text`; the second half of the tokens is of version 4, the rest of 3."""

    def __init__(self, tokenizer: Any) -> None:
        self.text, self.logprob, self.seen = "46", 0.0, list[GenerationRequest]()
        self._tokenizer, self._done = tokenizer, list[GenerationOutput]()
        self.submit = SimpleNamespace(remote=self._submit)
        self.collect = SimpleNamespace(remote=self._collect)

    async def _submit(self, client: str, requests: list[GenerationRequest]) -> None:
        self.seen += requests
        for request in requests:
            ids = self._tokenizer.encode(self.text, add_special_tokens=False)[: request.options.max_tokens]
            stopped = len(ids) < request.options.max_tokens
            ids += [request.options.stop_token_ids[0]] if stopped else []
            versions = [3] * (len(ids) // 2) + [4] * (len(ids) - len(ids) // 2)
            reason = "stop" if stopped else "length"
            self._done.append(GenerationOutput(request.request_id, ids, [self.logprob] * len(ids), versions, reason))

    async def _collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        await asyncio.sleep(0.001)
        done, self._done = self._done, []
        return done


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> SayingEngine:
    """The parameter: one whose answers grow."""
    return (Growing if getattr(request, "param", False) else SayingEngine)(tiny_tokenizer())


@pytest.fixture
def url(engine: SayingEngine, request: pytest.FixtureRequest) -> Iterator[str]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = getattr(request, "param", CHAT_TEMPLATE)
    try:
        policy = Policy("tiny-run", [engine], ChatPrompt(tokenizer), GeneratorConfig(max_model_len=1024))
        server = PolicyServer("127.0.0.1", 0)
        with server.running(application(policy)):
            yield server.url
    finally:
        tokenizer.chat_template = CHATML


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20)


def test_models_and_a_chat_with_its_weight_versions(client: openai.OpenAI, engine: SayingEngine) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-run"]
    assert client.models.retrieve("tiny-run") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'a/b' is not served here; 'tiny-run' is"):
        client.models.retrieve("a/b")
    reply = client.chat.completions.create(model="tiny-run", messages=HELLO, temperature=0.5, seed=7)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "46", "stop")
    (request,) = engine.seen
    assert tiny_tokenizer().decode(request.prompt_ids).endswith("12 + 34 = ?<|im_end|>\n<|im_start|>assistant\n")
    assert (request.seed, request.options.temperature) == (7, 0.5)
    count = reply.usage.completion_tokens
    assert reply.usage.prompt_tokens == len(request.prompt_ids)
    assert reply.system_fingerprint == "weights-4"
    half = count // 2
    spans = [{"version": 3, "start": 0, "end": half}, {"version": 4, "start": half, "end": count}]
    assert reply.model_extra["weight_versions"] == [spans]


def test_other_paths_and_methods_are_refused_in_the_dialects_json(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/responses: Not Found\. Ask POST /v1/chat/completions or"):
        client.responses.create(model="tiny-run", input="12 + 34 = ?")
    refused = httpx.get(f"{url}/chat/completions")
    assert refused.status_code == 405 and "GET /v1/chat/completions" in refused.json()["error"]["message"]
    assert refused.headers["allow"] == "POST"
    theirs = httpx.post(f"{url}/messages/count_tokens", json={})
    assert (
        theirs.status_code == 404
        and theirs.json()["type"] == "error"
        and "messages" in theirs.json()["error"]["message"]
    )


def test_a_stream_that_the_end_cuts_off_is_no_error_in_the_console(capfd: pytest.CaptureFixture[str]) -> None:
    async def forever(request: Request) -> StreamingResponse:
        async def told() -> AsyncIterator[str]:
            while True:
                yield "data: 1\n\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(told())

    server = HTTPServer("127.0.0.1", 0)
    came = threading.Event()

    def read() -> None:
        with suppress(httpx.RemoteProtocolError), httpx.stream("GET", f"{server.url}/stream") as reply:
            for _ in reply.iter_text():
                came.set()

    reader = threading.Thread(target=read)
    with server.running(Starlette(routes=[Route("/v1/stream", forever)])):
        reader.start()
        assert came.wait(20)
    reader.join(20)
    assert capfd.readouterr().err == ""
    with (again := HTTPServer("127.0.0.1", 0)).running(Starlette(routes=[Route("/v1/raises", raises)])):
        assert httpx.get(f"{again.url}/raises").status_code == 500
    assert "a bug" in capfd.readouterr().err, "what is an error in a later server is told"


async def raises(request: Request) -> Response:
    raise ValueError("a bug")


def test_an_engine_that_is_away_is_not_asked() -> None:
    tokenizer, away = tiny_tokenizer(), {0}
    engines = [SayingEngine(tokenizer), SayingEngine(tokenizer)]
    policy = Policy("tiny-run", engines, ChatPrompt(tokenizer), GeneratorConfig(max_model_len=1024), away)
    with (server := PolicyServer("127.0.0.1", 0)).running(application(policy)):
        client, asked = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=20), list[list[int]]()
        for gone in ({0}, {1}, set[int](), {0, 1}):  # where all are, it waits for one
            away.clear()
            away |= gone
            for engine in engines:
                engine.seen.clear()
            for _ in range(4):
                client.completions.create(model="tiny-run", prompt="1", max_tokens=1)
            asked.append([len(engine.seen) for engine in engines])
    assert asked == [[0, 4], [4, 0], [2, 2], [2, 2]]


def test_null_is_as_good_as_a_member_that_is_left_out(url: str) -> None:
    """Clients that write all of their fields send it."""
    names = ("n", "top_p", "stream", "temperature", "stop", "seed", "max_tokens", "logprobs", "tools")
    for more in ({}, dict.fromkeys(names)):
        body = {"model": "tiny-run", "messages": HELLO, **more}
        reply = httpx.post(f"{url}/chat/completions", json=body, timeout=20).json()
        assert reply["choices"][0]["message"]["content"] == "46", more


def test_completions_take_text_or_tokens_and_end_at_a_stop_string(client: openai.OpenAI, engine: SayingEngine) -> None:
    engine.text = "12 + 34"
    reply = client.completions.create(model="tiny-run", prompt="the answer is", n=2, stop="+")
    assert [(choice.text, choice.finish_reason) for choice in reply.choices] == [("12 ", "stop")] * 2
    cut = client.completions.create(model="tiny-run", prompt=[5, 6, 7], max_tokens=1)
    assert engine.seen[-1].prompt_ids == [5, 6, 7] and cut.choices[0].finish_reason == "length"
    assert len({request.seed for request in engine.seen}) == 3


def test_the_largest_seed_gives_every_choice_one_that_engines_can_take(
    client: openai.OpenAI, engine: SayingEngine
) -> None:
    client.completions.create(model="tiny-run", prompt=[0, LAST], seed=2**63 - 1, n=3)
    assert [request.seed for request in engine.seen] == [2**63 - 1, 0, 1]
    assert engine.seen[0].prompt_ids == [0, LAST]


def test_what_a_request_says_of_the_sampling_goes_before_the_settings(
    client: openai.OpenAI, engine: SayingEngine
) -> None:
    """Temperature 0, too, which is greedy; and an answer never has more tokens than are left of the context."""
    client.chat.completions.create(model="tiny-run", messages=HELLO, temperature=0, top_p=0.5, max_tokens=5000)
    (request,) = engine.seen
    options = request.options
    assert (options.temperature, options.top_p, options.max_tokens) == (0, 0.5, 1024 - len(request.prompt_ids))


def test_tools_go_through_the_template_and_calls_come_back(client: openai.OpenAI, engine: SayingEngine) -> None:
    engine.text = f"Let me see. {CALL}"
    messages: list[Any] = [*HELLO]
    reply = client.chat.completions.create(model="tiny-run", messages=messages, tools=TOOLS, max_tokens=300)
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": "2+2"})
    assert '"name": "calculator"' in tiny_tokenizer().decode(engine.seen[0].prompt_ids)
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "4"},
    ]
    engine.text = "4"
    client.chat.completions.create(model="tiny-run", messages=messages)
    again = tiny_tokenizer().decode(engine.seen[1].prompt_ids)
    assert CALL in again and "<tool_response>\n4\n</tool_response>" in again


def test_no_two_calls_have_one_id_and_each_has_nine_characters(client: openai.OpenAI, engine: SayingEngine) -> None:
    """OpenAI's Agents SDK ends at an id that an earlier call had; Mistral's templates take no other length."""
    engine.text, ids = CALL + CALL, list[str]()
    for _ in range(3):
        reply = client.chat.completions.create(model="tiny-run", messages=HELLO, tools=TOOLS, max_tokens=300, n=2)
        ids += [call.id for choice in reply.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == len(ids) == 12 and {len(each) for each in ids} == {9}


def test_parts_of_text_are_read_and_log_probabilities_are_those_of_the_sampling(
    client: openai.OpenAI, engine: SayingEngine
) -> None:
    parts: Any = [{"type": "text", "text": "12 + 34"}, {"type": "text", "text": "= ?"}]
    engine.text, engine.logprob = "46+1", -0.25
    messages: list[Any] = [{"role": "user", "content": parts}]
    reply = client.chat.completions.create(model="tiny-run", messages=messages, logprobs=True, stop="+")
    assert "12 + 34\n= ?<|im_end|>" in tiny_tokenizer().decode(engine.seen[0].prompt_ids)
    told = reply.choices[0].logprobs.content
    assert "".join(token.token for token in told) == "46" == reply.choices[0].message.content
    assert {token.logprob for token in told} == {-0.25} and bytes(told[0].bytes).decode() == told[0].token
    assert client.models.list().data[0].model_extra["max_model_len"] == 1024


def test_log_probabilities_are_told_of_each_part_of_a_character(client: openai.OpenAI, engine: SayingEngine) -> None:
    """What bytes such a token stands for, no text can tell."""
    parts = len(tiny_tokenizer().encode("\U0001f600\u597d"))
    engine.text, engine.logprob = "\U0001f600\u597d ok+1", -0.25
    reply = client.chat.completions.create(model="tiny-run", messages=HELLO, logprobs=True, stop="+")
    told = reply.choices[0].logprobs.content
    assert parts == 7 and [token.bytes for token in told[:parts]] == [None] * parts
    assert b"".join(bytes(token.bytes) for token in told[parts:]).decode() == " ok"
    assert {token.logprob for token in told} == {-0.25}


def test_the_developers_words_are_the_systems(client: openai.OpenAI, engine: SayingEngine) -> None:
    for role in ("system", "developer"):
        messages: list[Any] = [{"role": role, "content": "Be brief."}, *HELLO]
        client.chat.completions.create(model="tiny-run", messages=messages)
    asked = [request.prompt_ids for request in engine.seen]
    assert asked[0] == asked[1] and "system\nBe brief." in tiny_tokenizer().decode(asked[0])


def test_a_stream_has_the_same_text_and_calls(client: openai.OpenAI, engine: SayingEngine) -> None:
    engine.text = f"So: {CALL}"
    chunks = list(client.chat.completions.create(model="tiny-run", messages=HELLO, stream=True, max_tokens=300))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "So:"
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "calculator"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    text = client.completions.create(model="tiny-run", prompt="x", stream=True, max_tokens=300)
    assert "".join(chunk.choices[0].text for chunk in text) == engine.text


class Growing(SayingEngine):
    """Whose tokens are there one by one, each at a call of `written`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.calls, self.dies, self.final = 0, False, ""
        self.written = SimpleNamespace(remote=self._written)

    async def _written(self, request_id: str, known: int) -> list[int]:
        await asyncio.sleep(0.001)
        self.calls += 1
        return self._tokenizer.encode(self.text, add_special_tokens=False)[: self.calls]

    async def _collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        while self.calls <= len(self._tokenizer.encode(self.text, add_special_tokens=False)):
            await asyncio.sleep(0.001)
        if self.dies:
            raise EngineDied("The engine is gone.")
        done = await super()._collect(client, timeout)
        for each in done if self.final else []:  # as after a new start
            each.output_ids[:-1] = self._tokenizer.encode(self.final, add_special_tokens=False)
        return done


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_a_reply_is_told_while_it_is_sampled(client: openai.OpenAI, engine: Growing) -> None:
    engine.text = "twelve and = more 46 x"
    given: Any = {"model": "tiny-run", "stream": True, "max_tokens": 300}
    chunks = list(client.chat.completions.create(messages=HELLO, **given))
    told = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(told) == engine.text and len([text for text in told if text]) > 2
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    engine.calls = 0
    ended = list(client.completions.create(prompt="x", stop="= more", **given))
    assert "".join(chunk.choices[0].text for chunk in ended) == "twelve and " and len(ended) > 2, "no part of the stop"
    engine.calls, engine.text = 0, f"So, let us see: {CALL}"
    chunks = list(client.chat.completions.create(messages=HELLO, tools=TOOLS, **given))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "So, let us see:"
    assert chunks[-1].choices[0].delta.tool_calls[0].function.name == "calculator" and len(chunks) > 2


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_the_clients_own_stream_joins_the_chunks_to_the_reply(client: openai.OpenAI, engine: Growing) -> None:
    engine.text = f"\n\nLet me look it up. {CALL}"
    with client.chat.completions.stream(model="tiny-run", messages=HELLO, tools=TOOLS, max_tokens=300) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "\n\nLet me look it up.")
    assert message.tool_calls and message.tool_calls[0].function.name == "calculator"


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_an_answer_that_is_another_than_was_told_is_an_error_in_the_stream(
    client: openai.OpenAI, engine: Growing
) -> None:
    engine.text, engine.final = "Hello there, you two and you", "Goodbye"
    stream = client.chat.completions.create(model="tiny-run", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="its new answer is another one: ask again"):
        list(stream)


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_an_engine_that_dies_while_it_streams_is_an_error_in_the_stream(client: openai.OpenAI, engine: Growing) -> None:
    engine.text, engine.dies = "twelve and more", True
    stream = client.chat.completions.create(model="tiny-run", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="The engine is gone"):
        list(stream)


def test_what_is_settled_of_a_text() -> None:
    assert settled("a b ", []) == "a b" and settled("ab\ufffd", []) == "ab"
    assert settled("ab <tool", ["<tool_call>"]) == "ab" and settled("a <b", ["<tool_call>"]) == "a <b"
    assert settled("ab <tool_call> c", ["<tool_call>"]) == "ab" and settled("12 +", ["+3"]) == "12"


def test_another_models_name_is_404_and_names_the_one_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; 'tiny-run' is"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("chat/completions", {"messages": HELLO}, "model: Field required"),
        ("chat/completions", {"model": "tiny-run", "messages": []}, "messages: "),
        ("chat/completions", {"model": "tiny-run", "messages": HELLO, "temperature": -1}, "temperature: "),
        ("chat/completions", {"model": "tiny-run", "messages": [{"role": "tool", "tool_calls": [1]}]}, "messages"),
        (
            "chat/completions",
            {
                "model": "tiny-run",
                "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            },
            "messages.0: its tool_calls are not OpenAI's",
        ),
        (
            "chat/completions",
            {"model": "tiny-run", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "a part of type 'image_url' cannot be shown to this policy",
        ),
        *(
            (
                "chat/completions",
                {"model": "tiny-run", "messages": [{**HELLO[0], "role": role}]},
                f"messages.0 has the role {role!r}, expected one of system, developer, user, assistant, tool.",
            )
            for role in ("narrator", None, ["user"])
        ),
        ("chat/completions", {"model": "tiny-run", "messages": [{**HELLO[0], "content": 5}]}, "a part of type 'int' "),
        ("chat/completions", {"model": "tiny-run", "messages": HELLO, "top_logprobs": 3}, "top_logprobs: "),
        ("completions", {"model": "tiny-run", "prompt": "x", "logprobs": 1}, "logprobs: Input should be null"),
        ("completions", {"model": "tiny-run", "prompt": "12 " * 2000}, "generator.max_model_len=1024"),
        ("completions", "no JSON", "the body: Invalid JSON"),
        ("completions", {"model": "tiny-run", "prompt": "x", "stop": ["x" * 1001]}, "stop"),
        ("completions", {"model": "tiny-run", "prompt": "x", "stop": ["x"] * 65}, "stop"),
        # Of each of these an engine would die.
        *(
            (
                "completions",
                {"model": "tiny-run", "prompt": [5, each]},
                f"prompt: {each} is no token here: give 0 to {LAST}.",
            )
            for each in (-1, LAST + 1)
        ),
        ("completions", {"model": "tiny-run", "prompt": "x", "seed": 2**63}, "seed: "),
        ("chat/completions", {"model": "tiny-run", "messages": HELLO, "seed": 2**64}, "seed: "),
    ],
)
def test_a_bad_request_is_400_with_a_sentence(url: str, path: str, body: Any, sentence: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    reply = httpx.post(f"{url}/{path}", content=content, timeout=20)
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"]


def test_a_body_that_would_hold_up_all_others_is_refused(url: str) -> None:
    body = {"model": "tiny-run", "messages": [{"role": "user", "content": "1 " * (MAX_BODY // 2)}]}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    assert reply.status_code == 413 and "A request has at most" in reply.json()["error"]["message"]


@pytest.mark.parametrize("url", [CHATML], indirect=True)
def test_tools_need_a_template_that_shows_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="shows no tools"):
        client.chat.completions.create(model="tiny-run", messages=HELLO, tools=TOOLS)


def test_a_port_in_use_is_a_sentence(url: str) -> None:
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
        PolicyServer("127.0.0.1", port)


def test_a_connection_outlives_the_pause_between_two_requests(url: str) -> None:
    """uvicorn would close it after five seconds, and a client that does not try again would fail."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    for pause in (5.5, 0.0):
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read()
        time.sleep(pause)
