"""What a stock `anthropic` client gets from the endpoint, over HTTP, of an engine that says what a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from skyrl_trainer.agent.chat_api import application
from skyrl_trainer.agent.parsers import with_parsers
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.serve.server import Policy, PolicyServer
from skyrl_trainer.settings import AgentConfig, GeneratorConfig
from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE
from tests.trainer.fakes import CHATML, tiny_tokenizer
from tests.trainer.serve.test_serve_answers import CALL, Growing, SayingEngine

KEY = "sk-secret"
CALCULATOR = {
    "name": "calculator",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
HELLO: list[Any] = [{"role": "user", "content": "12 + 34 = ?"}]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> SayingEngine:
    """The parameter: one whose answers grow."""
    return (Growing if getattr(request, "param", False) else SayingEngine)(tiny_tokenizer())


@pytest.fixture
def url(engine: SayingEngine) -> Iterator[str]:
    """Without the /v1 that this client adds."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    try:
        policy = Policy("tiny-run", [engine], ChatPrompt(tokenizer), GeneratorConfig(max_model_len=1024))
        server = PolicyServer("127.0.0.1", 0)
        with server.running(application(policy, KEY)):
            yield server.url.removesuffix("/v1")
    finally:
        tokenizer.chat_template = CHATML


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=20)


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny-run", "max_tokens": 300, "messages": HELLO, **more}
    return client.messages.create(**given)


def prompt_of(engine: SayingEngine) -> str:
    return str(tiny_tokenizer().decode(engine.seen[-1].prompt_ids))


def test_a_message_is_a_chat_and_says_its_weights(client: anthropic.Anthropic, engine: SayingEngine) -> None:
    reply = ask(client, system="Be brief.", extra_body={"temperature": 0.5})
    (block,) = reply.content
    assert (reply.role, block.type, block.text, reply.stop_reason) == ("assistant", "text", "46", "end_turn")
    (request,) = engine.seen
    assert prompt_of(engine).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 34 = ?<|im_end|>"
    )
    assert (request.options.temperature, request.options.max_tokens) == (0.5, 300)
    assert reply.usage.input_tokens == len(request.prompt_ids)
    assert reply.model_extra["system_fingerprint"] == "weights-4"
    assert reply.model_extra["weight_versions"][0][-1]["end"] == reply.usage.output_tokens
    assert ask(client, max_tokens=1).stop_reason == "max_tokens"


def test_null_is_as_good_as_a_member_that_is_left_out(client: anthropic.Anthropic) -> None:
    names = ("system", "tools", "stop_sequences", "temperature", "top_p", "stream")
    assert ask(client, extra_body=dict.fromkeys(names)).content[0].text == "46"


def test_an_answer_ends_at_a_stop_sequence_and_names_it(client: anthropic.Anthropic, engine: SayingEngine) -> None:
    engine.text = "12 + 34 = 46"
    reply = ask(client, stop_sequences=["=", "+"])
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("12 ", "stop_sequence", "+")


def test_tools_are_used_and_their_results_are_read(client: anthropic.Anthropic, engine: SayingEngine) -> None:
    engine.text = f"Let me see. {CALL}"
    reply = ask(client, tools=[CALCULATOR])
    text, use = reply.content
    assert reply.stop_reason == "tool_use" and text.text == "Let me see."
    assert (use.type, use.name, use.input) == ("tool_use", "calculator", {"expression": "2+2"})
    assert '"name": "calculator"' in prompt_of(engine) and '"parameters": {' in prompt_of(engine)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "4"}]}
    more = [result, {"type": "text", "text": "So?"}]
    again = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": more}]
    ask(client, messages=again, tools=[CALCULATOR])
    told = prompt_of(engine)
    assert CALL in told and "<tool_response>\n4\n</tool_response>" in told
    assert told.index("Let me see.") < told.index("<tool_response>") < told.index("So?<|im_end|>")


def test_a_stream_is_the_same_message(client: anthropic.Anthropic, engine: SayingEngine) -> None:
    engine.text = f"So: {CALL}"
    whole = ask(client)
    with client.messages.stream(model="tiny-run", max_tokens=300, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    parts, expected = (
        [block.model_dump(exclude_none=True, exclude={"id"}) for block in each.content] for each in (message, whole)
    )
    assert parts == expected and message.content[1].id != whole.content[1].id  # which no two calls share
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert message.usage.input_tokens == whole.usage.input_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_stop") == 2


def test_anthropics_own_tool_runner_shows_the_policy_the_whole_conversation(
    client: anthropic.Anthropic, engine: SayingEngine
) -> None:
    """By itself it sends what is new alone, with the id of the message that it follows."""

    @anthropic.beta_tool
    def calculator(expression: str) -> str:
        """Adds."""
        engine.text = "46"
        return f"{expression} is 4"

    engine.text = f"Let me see. {CALL}"
    given: dict[str, Any] = {"model": "tiny-run", "max_tokens": 300, "messages": HELLO, "tools": [calculator]}
    *_, last = client.beta.messages.tool_runner(**given)
    assert last.content[0].text == "46" and len(engine.seen) == 2
    told = prompt_of(engine)
    assert told.index("12 + 34 = ?") < told.index("Let me see.") < told.index("2+2 is 4")


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_a_message_is_told_while_it_is_sampled(client: anthropic.Anthropic, engine: Growing) -> None:
    engine.text = f"So, let us see: {CALL}"
    with client.messages.stream(model="tiny-run", max_tokens=300, messages=HELLO, tools=[CALCULATOR]) as stream:
        events = list(stream)
        message = stream.get_final_message()
    text, use = message.content
    assert (text.text, use.input, message.stop_reason) == ("So, let us see:", {"expression": "2+2"}, "tool_use")
    assert len([event for event in events if event.type == "text"]) > 2
    assert message.usage.input_tokens == len(engine.seen[0].prompt_ids)


def test_thoughts_are_a_block_of_their_own() -> None:
    from tests.trainer.agent.test_parsers import prompt_of as parsing

    tokenizer = parsing("qwen3").tokenizer
    prompt = with_parsers(ChatPrompt(tokenizer), AgentConfig(tools="+qwen3"))
    engine = SayingEngine(tokenizer)
    engine.text = "<think>\nHmm.\n</think>\n\n46"
    server = PolicyServer("127.0.0.1", 0)
    with server.running(application(Policy("tiny-run", [engine], prompt, GeneratorConfig(max_model_len=1024)))):
        client = anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=20)
        thought, text = ask(client).content
        with client.messages.stream(model="tiny-run", max_tokens=300, messages=HELLO) as stream:
            streamed: Any = stream.get_final_message().content[0]
        assert (thought.type, thought.thinking.strip(), text.text.strip()) == ("thinking", "Hmm.", "46")
        assert streamed.thinking == thought.thinking
        again = [*HELLO, {"role": "assistant", "content": [thought, text]}, HELLO[0]]
        ask(client, messages=again)
    assert "46<|im_end|>" in tokenizer.decode(engine.seen[-1].prompt_ids)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens: Input should be greater than 0."),
        ({"messages": []}, "messages: "),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            "messages.0.role: Input should be 'user' or 'assistant', not 'system'.",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "4"}]}, "The last message is the assistant's"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: Input should be a valid array."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type: Input should be 'text', 'thinking', 'tool_use' or 'tool_result', not 'image'.",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}],
                    }
                ]
            },
            "messages.0.content.0.content.0.type: ",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.input_schema: Field required."),
        ({"system": 3}, "system: "),
        ({"messages": [{"role": "user", "content": "12 " * 2000}]}, "generator.max_model_len=1024"),
    ],
)
def test_a_bad_message_is_400_with_a_sentence(client: anthropic.Anthropic, more: Any, sentence: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        ask(client, **more)
    body: Any = raised.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert sentence in body["error"]["message"]


def test_keys_models_and_garbage_have_errors_in_the_same_form(client: anthropic.Anthropic, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'gpt-4' is not served here; 'tiny-run' is"):
        ask(client, model="gpt-4")
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        ask(anthropic.Anthropic(base_url=url, api_key="sk-other", max_retries=0))
    assert ask(anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0)).content[0].text == "46"
    for garbage in (b"", b"{", b"[" * 100_000, b"\xff"):
        reply = httpx.post(f"{url}/v1/messages", content=garbage, headers={"x-api-key": KEY})
        assert (reply.status_code, reply.json()["type"]) == (400, "error")
