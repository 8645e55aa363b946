"""Answers of eight families of models, from their chat templates to text, through vLLM's parsers and back.

The templates are those that `trl` ships, and for Mistral what mistral-common writes. Hermes and Kimi have none here:
their forms are spelled out below as the models' cards have them, which tests the parser but not the model's own file.
The tokenizers are small, with the tokens that the parsers look for; gpt-oss's ids are those of its own vocabulary.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import trl

from skyrl_trainer.agent.chat_api import application
from skyrl_trainer.agent.conversation import Conversation
from skyrl_trainer.agent.parsers import ParsingPrompt, check_names, named, parsed, with_parsers
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.chats import Chat, ChatRow
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.sft import encode_chat
from skyrl_trainer.replay.commands import chat_rows
from skyrl_trainer.serve.server import Policy, PolicyServer
from skyrl_trainer.settings import AgentConfig, GeneratorConfig
from skyrl_trainer.types import Sample, Trajectory, Turn
from tests.trainer.fakes import tiny_tokenizer
from tests.trainer.serve.test_serve_answers import SayingEngine

CHATML = "<|im_start|>assistant\n"
HERMES = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"arguments": {{ call.function.arguments | tojson }}, "name": {{ call.function.name | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
KIMI = """{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% if m.tool_calls %}\
<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}\
<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}\
<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""


class Family(NamedTuple):
    template: str
    """A file of trl's, or the template itself."""
    tools: str
    reasoning: str | None
    opening: str
    """What stands before an answer."""
    end: str
    words: str
    """Tokens that are no special ones."""
    says_and_calls: bool = True
    several: bool = True


THINK, CALL = "<think> </think> ", "<tool_call> </tool_call> "
DEEPSEEK = " ".join(f"<｜tool▁{each}｜>" for each in ["calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"])
KIMIS = " ".join(f"<|tool_{each}|>" for each in ["calls_section_begin", "calls_section_end", "call_begin", "call_end"])
GLM = THINK + CALL + "<arg_key> </arg_key> <arg_value> </arg_value>"
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
FAMILIES = {
    "qwen2.5": Family("qwen2_5", "hermes", None, CHATML, "<|im_end|>", CALL),
    "qwen3": Family("qwen3", "hermes", "qwen3", CHATML, "<|im_end|>", THINK + CALL),
    "qwen3.5": Family("qwen3_5_think", "qwen3_coder", "qwen3", CHATML, "<|im_end|>", THINK + CALL),
    "qwen3.6": Family("qwen3_6", "qwen3_xml", "qwen3", CHATML, "<|im_end|>", THINK + CALL),
    "hermes": Family(HERMES, "hermes", None, CHATML, "<|im_end|>", CALL),
    "llama3.1": Family("llama3_1", "llama3_json", None, LLAMA, "<|eot_id|>", "<|python_tag|>", False, False),
    "llama3.2": Family("llama3_2", "llama3_json", None, LLAMA, "<|eot_id|>", "<|python_tag|>", False, False),
    "deepseek": Family(
        "deepseekv3", "deepseek_v3", "deepseek_r1", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", THINK + DEEPSEEK
    ),
    "glm": Family("glm4moe", "glm45", "glm45", "<|assistant|>", "<|user|>", GLM),
    "kimi": Family(
        KIMI, "kimi_k2", "kimi_k2", "<|im_middle|>", "<|im_end|>", THINK + KIMIS + " <|tool_call_argument_begin|>"
    ),
}
FIND = {
    "query": {"type": "string"},
    "limit": {"type": "integer"},
    "exact": {"type": "boolean"},
    "more": {"type": "object"},
}
CALLED = ["find", "look_up"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": FIND}},
    }
    for name in CALLED
]


def tokenizer_of(template: str, end: str, words: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[end], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the answer is"] * 20, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words.split()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, chat_template=template)


@cache
def prompt_of(name: str) -> ParsingPrompt:
    family = FAMILIES[name]
    file = Path(trl.__file__).parent / f"chat_templates/{family.template}.jinja"
    template = family.template if "{" in family.template else file.read_text()
    agent = AgentConfig(tools=f"{family.tools or ''}+{family.reasoning or ''}")
    prompt = with_parsers(ChatPrompt(tokenizer_of(template, family.end, family.words)), agent)
    assert isinstance(prompt, ParsingPrompt)
    return prompt


def arguments(rng: random.Random) -> dict[str, Any]:
    texts = [
        'say "no"',
        "a {b} [c]",
        "zwölf Äpfel 苹果",
        "two\nlines",
        "C:\\temp\\x",
        "007",
        "true",
        "<b>1 < 2</b>",
        "x, y",
    ]
    given: dict[str, Any] = {"query": " and ".join(rng.sample(texts, rng.randint(1, 3)))}
    given |= {"limit": rng.randint(-5, 10**9)} if rng.random() < 0.7 else {}
    given |= {"exact": rng.random() < 0.5} if rng.random() < 0.5 else {}
    return given | ({"more": {"of": [1, 2.5, None, rng.choice(texts)], "in": {}}} if rng.random() < 0.5 else {})


def messages(name: str, count: int) -> Iterator[dict[str, Any]]:
    """What the family can say: words, one call, several, thoughts before them."""
    family, rng = FAMILIES[name], random.Random(name)
    for _ in range(count):
        calls = [
            {"id": f"functions.{tool}:{place}", "name": tool, "arguments": arguments(rng)}
            for place, tool in enumerate(rng.choices(CALLED, k=rng.choice([0, 1, 1, 3])))
        ][: None if family.several else 1]
        silent = calls and (not family.says_and_calls or rng.random() < 0.5)
        content = "" if silent else rng.choice(["It is 42.", "Let me see: a < b, {c}", "苹果\n\n- one\n- two"])
        thought = rng.choice(["", "Hmm, {so}: 1 < 2?", "First\n\nthen"]) if family.reasoning else ""
        yield {"content": content, "reasoning_content": thought, "calls": calls}


def written(name: str, said: dict[str, Any]) -> str:
    """The answer's text, from what its template makes of the message."""
    family, render = FAMILIES[name], prompt_of(name).tokenizer.apply_chat_template
    as_text = name == "deepseek"  # its template takes arguments as they are written
    functions = [
        {"name": call["name"], "arguments": json.dumps(call["arguments"]) if as_text else call["arguments"]}
        for call in said["calls"]
    ]
    calls = [{"id": c["id"], "type": "function", "function": f} for c, f in zip(said["calls"], functions, strict=True)]
    message = {"role": "assistant", "content": said["content"]} | ({"tool_calls": calls} if calls else {})
    if said["reasoning_content"]:
        message["reasoning_content"] = said["reasoning_content"]
    asked = [{"role": "user", "content": "Go."}]
    before = render(asked, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    whole = render([*asked, message], tools=TOOLS, tokenize=False)
    if name == "deepseek":  # it opens thoughts in the prompt and leaves those of answers out
        text = whole.rpartition(family.opening)[2]
        return f"{said['reasoning_content'] or 'Well.'}\n</think>\n\n{text}"
    text = whole.removeprefix(before)
    assert text != whole
    if name == "kimi":  # it thinks always
        text = f"<think>{said['reasoning_content']}</think>{text}"
    return text.rstrip("\n").removesuffix(family.end) + family.end


def heard(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]
    return {
        "content": (message["content"] or "").strip(),
        "reasoning_content": message.get("reasoning_content", "").strip(),
        "calls": calls,
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_writes_a_parser_reads_back(name: str) -> None:
    prompt, seen = prompt_of(name), set()
    for said in messages(name, 60):
        ids = prompt.encode(written(name, said))
        message = parsed(prompt, prompt.decode(ids), ids, TOOLS)
        calls = [{key: call[key] for key in ("name", "arguments")} for call in said["calls"]]
        thought = said["reasoning_content"] or ("Well." if name == "deepseek" else "")
        assert heard(message) == said | {"calls": calls, "reasoning_content": thought}
        wanted = [call["id"] if name == "kimi" else "" for call in said["calls"]]
        assert [call["id"] for call in message.get("tool_calls", ())] == wanted
        named({"id": f"chatcmpl-{len(seen)}"}, [{"message": message}])
        ids = [call["id"] for call in message.get("tool_calls", ())]
        assert ids == wanted if name == "kimi" else {len(each) for each in ids} <= {9}
        seen.add((len(calls), bool(said["content"]), bool(thought)))
    assert len(seen) >= (2 if name.startswith("llama") else 4), seen


def test_mistrals_own_library_writes_what_the_parser_reads() -> None:
    from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    template = "{% for m in messages %}{{ m.content + ('[/INST]' if m.role == 'user' else '</s>') }}{% endfor %}"
    small = tokenizer_of(template, "</s>", "[TOOL_CALLS]")
    prompt, rng = ParsingPrompt(ChatPrompt(small), AgentConfig(tools="mistral")), random.Random(0)
    tools = [Tool(function=Function(name=each, parameters={"type": "object", "properties": FIND})) for each in CALLED]
    for version in [MistralTokenizer.v3(), MistralTokenizer.v7()]:
        for count in [1, 2, 1, 3]:
            calls = [(rng.choice(CALLED), arguments(rng)) for _ in range(count)]
            made = [
                ToolCall(id=f"abcdefgh{i}", function=FunctionCall(name=tool, arguments=json.dumps(given)))
                for i, (tool, given) in enumerate(calls)
            ]
            answers = [ToolMessage(content="fine", tool_call_id=call.id) for call in made]
            dialogue = [UserMessage(content="Go."), AssistantMessage(content=None, tool_calls=made), *answers]
            encoded = version.encode_chat_completion(ChatCompletionRequest(messages=dialogue, tools=tools))
            whole = version.instruct_tokenizer.tokenizer.decode(encoded.tokens, SpecialTokenPolicy.KEEP)
            text = whole.partition("[/INST]")[2].partition("</s>")[0].replace("▁", " ")
            text = re.sub("(<0x..>)+", lambda each: bytes.fromhex(re.sub("<0x|>", "", each[0])).decode(), text)
            message = parsed(prompt, text, prompt.encode(text), TOOLS)
            wanted = [{"name": tool, "arguments": given} for tool, given in calls]
            assert heard(message) == {"content": "", "reasoning_content": "", "calls": wanted}
            named({"id": "chatcmpl-1"}, [{"message": message}])
            assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in message["tool_calls"])


def test_gpt_oss_is_read_from_its_own_tokens() -> None:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    file = Path(trl.__file__).parent / "chat_templates/gptoss.jinja"
    tokenizer = tokenizer_of(file.read_text(), "<|end|>", "")
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    prompt = ParsingPrompt(ChatPrompt(tokenizer), AgentConfig(tools="openai+openai_gptoss"))
    render, rng, asked = tokenizer.apply_chat_template, random.Random(0), [{"role": "user", "content": "Go."}]
    before = render(asked, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    for number in range(30):
        given, thought = arguments(rng), rng.choice(["", "Hmm, {so}: 1 < 2?", "First\n\nthen"])
        message: dict[str, Any] = {"role": "assistant", "content": rng.choice(["It is 42.", "苹果\n\n- one"])}
        if number % 2:
            call = {"type": "function", "function": {"name": "find", "arguments": given}}
            message |= {"content": "", "tool_calls": [call]}
        message |= {"thinking": thought} if thought else {}
        text = render([*asked, message], tools=TOOLS, tokenize=False).removeprefix(before)
        ids = encoding.encode(text, allowed_special="all")
        wanted = {"content": message["content"], "reasoning_content": thought, "calls": []}
        calls = [{"name": "find", "arguments": given}] if number % 2 else []
        assert heard(parsed(prompt, text, ids, TOOLS)) == wanted | {"calls": calls}


def test_an_unknown_parser_is_refused_with_those_that_vllm_has() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    known = {
        "quen": ("tool_parsers", ToolParserManager.list_registered()),
        "+quen": ("reasoning", ReasoningParserManager.list_registered()),
    }
    for given, (folder, names) in known.items():
        agent = load_config(None, [f"generator.agent.tools={given}"]).generator.agent
        with pytest.raises(UserError) as raised:
            check_names(agent)
        assert str(raised.value) == (
            f"generator.agent.tools={given}: it is neither env nor template, and no parser of vLLM's (its {folder} are "
            f"{', '.join(sorted(names))})."
        )


def test_a_parser_that_needs_other_tokens_is_refused() -> None:
    agent = AgentConfig(tools="+deepseek_r1")
    with pytest.raises(UserError, match=r"generator\.agent\.tools=\+deepseek_r1 does not suit this model"):
        with_parsers(ChatPrompt(tiny_tokenizer()), agent)


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "deepseek", "glm", "kimi"])
def test_whatever_a_policy_writes_is_an_answer(name: str) -> None:
    """Calls are cut, doubled and mixed up: each answer is a message whose calls have JSON objects."""
    prompt, rng = prompt_of(name), random.Random(1)
    texts = [written(name, said) for said in messages(name, 20)]
    pieces = [*FAMILIES[name].words.split(), '{"name": "find", "parameters": 3}', "[", "find\n", *texts]
    for _ in range(200):
        text = "".join(piece[: rng.randint(1, 200)] for piece in rng.choices(pieces, k=rng.randint(1, 6)))
        message = parsed(prompt, text, prompt.encode(text), rng.choice([TOOLS, []]))
        assert message["role"] == "assistant"
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert parsed(prompt, text, prompt.encode(text), None).get("tool_calls") is None
    bad = '<tool_call>{"name": "find", "arguments": "all"}</tool_call>'
    if name == "qwen3":
        assert parsed(prompt, bad, prompt.encode(bad), TOOLS) == {"role": "assistant", "content": bad}


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen3.6", "glm"])
def test_an_agent_gets_thoughts_and_calls_apart_and_its_segment_goes_on(name: str) -> None:
    """It sends back the answer without its thoughts; what stands in the context is what was sampled."""
    prompt = prompt_of(name)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Go."}], "tools": TOOLS}
    conversation = Conversation(prompt, asked, 2**20)
    said = {
        "content": "",
        "reasoning_content": "Hmm.",
        "calls": [{"id": "", "name": "find", "arguments": {"limit": 3}}],
    }
    ids = prompt.encode(written(name, said))
    turn = Turn(conversation.context, ids, [0.0] * len(ids), [0] * len(ids), prompt.decode(ids))
    choice = json.loads(conversation.said(turn))["choice"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"].strip() == "Hmm."
    calls = choice["message"]["tool_calls"]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "three"}
    request = asked | {"messages": [*asked["messages"], answer, result]}
    assert conversation.refusal({"request": request}) is None
    new_ids, new_segment = conversation.advance([turn])
    assert not new_segment and conversation.context == turn.prompt_ids + ids + new_ids
    assert "three" in prompt.decode(new_ids)


ENDS = dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_6", "qwen3_8", "nemotron_3_nano"], "<|im_end|>")
ENDS |= {"qwen3_5_think": "<|im_end|>", "qwen3_5_nothink": "<|im_end|>", "glm4moe": "<|user|>"}
ENDS |= {
    "llama3_1": "<|eot_id|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
}
USER, RESULT = {"role": "user", "content": "And?"}, {"role": "tool", "tool_call_id": "call_0", "content": "three"}
SAID = "Hmm.\n</think>\n\nIt is 42."
SAID_AND_CALLED = f'{SAID}<tool_call>{{"tool": "find", "args": {{"limit": 3}}}}</tool_call>'


class Agent:
    """Asks a policy that says what a test wants."""

    def __init__(self, template: str, **more: Any) -> None:
        """more: of each request."""
        file = Path(trl.__file__).parent / f"chat_templates/{template}.jinja"
        self.prompt, self.more = ChatPrompt(tokenizer_of(file.read_text(), ENDS[template], "")), more
        self.asked = [{"role": "user", "content": "Go."}]
        self.conversation = Conversation(self.prompt, {"messages": self.asked, **more}, 2**20)
        self.new_ids, self.turns = self.conversation.context, list[Turn]()

    def hears(self, text: str, whole: bool = False) -> list[dict[str, Any]]:
        """What it asked, and the answer. whole: as tokens that the tokenizer would take; otherwise its letters."""
        ids = [*chain(*map(self.prompt.encode, [text] if whole else text)), self.prompt.end_of_turn_id]
        turn = Turn(self.new_ids, ids, [0.0] * len(ids), [0] * len(ids), text)
        said = json.loads(self.conversation.said(turn))
        self.turns.append(replace(turn, info=self.conversation.marks))
        return [*self.asked, said["choice"]["message"]]

    def asks(self, *messages: dict[str, Any], **more: Any) -> bool:
        """Whether a segment begins with it."""
        self.asked = list(messages)
        assert self.conversation.refusal({"request": {"messages": self.asked, **self.more, **more}}) is None
        self.new_ids, new_segment = self.conversation.advance(self.turns)
        return new_segment


@pytest.mark.parametrize(
    ("template", "news"),
    [*((template, USER) for template in ENDS), *((each, RESULT) for each in ENDS if not each.startswith("deepseek"))],
    ids=lambda given: given if isinstance(given, str) else given["role"],
)
def test_an_answer_and_what_follows_it_go_on_with_the_segment(template: str, news: dict[str, Any]) -> None:
    """Also where the template opens or closes a thought before an answer, and has none before an earlier one."""
    agent = Agent(template, tools=TOOLS if news is RESULT else None)
    asked = [USER, {"role": "assistant", "content": "ANSWER"}, news]
    render = partial(agent.prompt.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    between = render(asked, tools=agent.more["tools"]).partition("ANSWER")[2].removeprefix(ENDS[template])
    context = list(agent.new_ids)
    for _ in range(3):
        dialogue = agent.hears(SAID_AND_CALLED if news is RESULT else SAID)
        assert not agent.asks(*dialogue, news)
        assert agent.prompt.tokenizer.decode(agent.new_ids) == between
        context += [*agent.turns[-1].output_ids, *agent.new_ids]
    assert agent.conversation.context == context


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_instruct_2507", "llama3_1"])
def test_exported_chats_are_the_conversations_that_the_policy_had_token_by_token(template: str) -> None:
    """Results of tools stay a tool's, examples stay answers that are not learned, and each conversation is a row."""
    agent = Agent(template, tools=TOOLS)
    first = agent.hears('<tool_call>{"tool": "find", "args": {"limit": 3}}</tool_call>', whole=True)
    assert not agent.asks(*first, RESULT)
    thought = {"role": "assistant", "content": "2", "reasoning_content": "One and one."}
    agent.hears("It is 42.", whole=True)
    system = {"role": "developer", "content": "Be brief."}
    assert agent.asks(system, USER, thought, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]})
    agent.hears("5", whole=True)
    agent.turns[-1].new_segment = True
    trajectory = Trajectory("1/0/0", Sample("s", "e", 0, agent="my.py:agent"), 0, 0, agent.turns, tools=TOOLS)
    assert not any("scores" in row for row in chat_rows(trajectory))
    trajectory.scores = {"brief": -0.5, "judge": None}
    rows = json.loads(json.dumps([*chat_rows(trajectory)]))
    assert all(row["scores"] == trajectory.scores for row in rows), "beside the env's reward"
    roles = [[each["role"] for each in row["messages"]] for row in rows]
    dialogue = ["user", "assistant", "tool", "assistant"]
    assert roles == [dialogue, ["system", "user", "assistant", "user", "assistant"]]
    for row, segment in zip(rows, trajectory.segments(), strict=True):
        chat = ChatRow.model_validate(row).model_dump(exclude_none=True)
        ids, learned = encode_chat(agent.prompt, Chat("here", chat["messages"], chat["tools"]))
        assert ids == [token for turn in segment for token in (*turn.prompt_ids, *turn.output_ids)]
        assert sum(learned) == sum(len(turn.output_ids) for turn in segment)


@pytest.mark.parametrize("news", [[USER], [RESULT, RESULT, USER]])
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1"])
def test_a_dialogue_of_texts_is_the_templates_own(template: str, news: list[dict[str, Any]]) -> None:
    """Where it leaves what has been said as it was."""
    agent = Agent(template, tools=TOOLS)
    for _ in range(3):
        assert not agent.asks(*agent.hears("It is 42.", whole=True), *news)
    assert agent.conversation.context == agent.prompt.conversation(agent.asked, TOOLS)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe", "deepseekv3"])
def test_a_retry_from_an_older_answer_is_a_segment_besides(template: str) -> None:
    agent = Agent(template)
    first = agent.hears(SAID)
    assert not agent.asks(*first, USER)
    later = agent.hears("It is 43.")
    other = {"role": "user", "content": "Really?"}
    assert agent.asks(*first, other), "what stands before the older answer is no segment's newest"
    told = agent.prompt.tokenizer.decode(agent.new_ids)
    assert SAID in told and "Really?" in told and "43" not in told
    sampled = agent.turns[0].output_ids
    assert any(agent.new_ids[start : start + len(sampled)] == sampled for start in range(len(agent.new_ids)))
    again = agent.hears("It is 44.")
    assert not agent.asks(*later, USER) and "43" in agent.prompt.tokenizer.decode(agent.conversation.context)
    agent.hears("It is 45.")
    assert not agent.asks(*again, USER) and "44" in agent.prompt.tokenizer.decode(agent.conversation.context)


REWRITTEN: dict[str, tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], dict[str, Any]]] = {
    "other tools": (lambda said: [*said, USER], {"tools": TOOLS[:1]}),
    "no tools": (lambda said: [*said, USER], {"tools": None}),
    "another question": (lambda said: [{"role": "user", "content": "Go on."}, *said[1:], USER], {}),
    "an indented question": (lambda said: [{"role": "user", "content": "  Go."}, *said[1:], USER], {}),
    "another answer": (lambda said: [said[0], {"role": "assistant", "content": "No."}, USER], {}),
    "a system message before": (lambda said: [{"role": "system", "content": "Be brief."}, *said, USER], {}),
    "no answer": (lambda said: [said[0]], {}),
}


@pytest.mark.parametrize("how", REWRITTEN)
@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think"])
def test_a_history_that_was_rewritten_begins_a_segment(template: str, how: str) -> None:
    agent, (rewrite, more) = Agent(template, tools=TOOLS), REWRITTEN[how]
    assert agent.asks(*rewrite(agent.hears(SAID)), **more)
    told = agent.prompt.tokenizer.decode(agent.new_ids)
    assert all(message["content"].strip() in told for message in agent.asked)
    assert told.count('"name": "look_up"') == (0 if more else 1)


def test_a_system_message_that_the_template_moves_to_the_front_is_told() -> None:
    agent = Agent("deepseekv3")
    agent.asks(*agent.hears(SAID), {"role": "system", "content": "Be brief."}, USER)
    assert "Be brief." in agent.prompt.tokenizer.decode(agent.conversation.context)


def test_a_served_policy_has_the_parsers_too() -> None:
    tokenizer = prompt_of("qwen3").tokenizer
    prompt = with_parsers(ChatPrompt(tokenizer), AgentConfig(tools="+qwen3"))  # calls in our own grammar
    engine = SayingEngine(tokenizer)
    server = PolicyServer("127.0.0.1", 0)
    with server.running(application(Policy("tiny-run", [engine], prompt, GeneratorConfig(max_model_len=4096)))):
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=20)
        engine.text = '<think>\nHmm.\n</think>\n\n<tool_call>{"tool": "find", "args": {"limit": 3}}</tool_call>'
        ask: Callable[..., Any] = client.chat.completions.create
        message = (
            ask(model="tiny-run", messages=[{"role": "user", "content": "Go."}], max_tokens=500).choices[0].message
        )
        engine.text = '<tool_call>{"tool": "\\ud800", "args": {}}</tool_call>'  # half a character, which JSON can spell
        odd = ask(model="tiny-run", messages=[{"role": "user", "content": "Go."}], max_tokens=500).choices[0].message
    assert odd.tool_calls[0].function.name == "?"
    assert message.model_extra["reasoning_content"].strip() == "Hmm."
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"limit": 3})


def test_parsers_keep_the_templates_arguments() -> None:
    tokenizer = prompt_of("qwen3").tokenizer
    silent = ChatPrompt(tokenizer, {"enable_thinking": False})
    asked = [{"role": "user", "content": "Go."}]
    parsing = with_parsers(silent, AgentConfig(tools="+qwen3"))
    assert isinstance(parsing, ParsingPrompt) and parsing.text(asked) == silent.text(asked)
    assert parsing.text(asked) != ChatPrompt(tokenizer).text(asked)
