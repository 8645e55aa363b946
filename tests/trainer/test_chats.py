"""Chats to learn from: tokens as a rollout makes them, the assistant's alone are taught, wrong rows get a sentence."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.chats import Chat, read_chats
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.sft import encode_chat, make_rows
from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "\n3"},
    {"role": "user", "content": "No."},
    {"role": "assistant", "content": "2"},
]
TEMPLATES = ("ours", "qwen2_5", "qwen3")


@cache
def prompt_of(template: str) -> ChatPrompt:
    """Our tokenizer with our template, or with Qwen's as TRL ships them."""
    tokenizer = make_tokenizer(["the answer is in turn 12", "user assistant"] * 9, 320)
    path = files("trl").joinpath("chat_templates", f"{template}.jinja")
    tokenizer.chat_template = CHAT_TEMPLATE if template == "ours" else path.read_text()
    return ChatPrompt(tokenizer)


def taught_text(prompt: ChatPrompt, ids: list[int], taught: list[bool]) -> str:
    return prompt.tokenizer.decode([token for token, said in zip(ids, taught, strict=True) if said])


def test_chats_are_tokenized_as_at_rollout() -> None:
    prompt = prompt_of("ours")
    ids, taught = encode_chat(prompt, Chat("", CHAT))
    assert prompt.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n\n3<|im_end|>\n"
        "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    first = prompt.first("Be brief.", "1+1?")
    action = [*prompt.encode("\n3"), prompt.end_of_turn_id]
    after = prompt.observation("No.", action)
    assert ids == [*first, *action, *after, *prompt.encode("2"), prompt.end_of_turn_id]
    assert taught[: len(first) + len(action)] == [False] * len(first) + [True] * len(action)
    assert taught_text(prompt, ids, taught) == "\n3<|im_end|>2<|im_end|>"


def test_an_answer_of_weight_0_stands_there_and_is_not_learned(tmp_path: Path) -> None:
    prompt = prompt_of("ours")
    weighed = [*CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
    ids, taught = encode_chat(prompt, read_chats(write(tmp_path / "chats.jsonl", {"messages": weighed}))[0])
    assert ids == encode_chat(prompt, Chat("", CHAT))[0]
    assert taught_text(prompt, ids, taught) == "2<|im_end|>"


@pytest.mark.parametrize("template", TEMPLATES)
def test_tools_and_their_calls_and_results_are_the_templates(template: str) -> None:
    """An answer after the results of two calls: what the template makes of the whole."""
    prompt = prompt_of(template)
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3."},
    ]
    ids, taught = encode_chat(prompt, Chat("", messages, TOOLS))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert taught_text(prompt, ids, taught) == f"I add.\n{call}\n{call}<|im_end|>3.<|im_end|>"
    whole = prompt.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    plain = whole.replace("<think>\n\n</think>\n\n", "")  # Qwen3 puts one before the last answer
    assert prompt.tokenizer.decode(ids) == plain.removesuffix("\n")


@pytest.mark.parametrize("template", [*TEMPLATES, "qwen3_5_think", "qwen3_instruct_2507"])
@pytest.mark.parametrize("said", ["", "I add."])
@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n", "Hm.\n</think>\n\n"])
def test_what_was_thought_before_a_call_is_learned_as_it_stands(template: str, said: str, thought: str) -> None:
    """The third thought is one that the prompt has opened, as Qwen3.5's does."""
    prompt = prompt_of(template)
    spoken = {"role": "assistant", "content": thought + said, "tool_calls": [CALL]}
    ids, taught = encode_chat(prompt, Chat("", [CHAT[1], spoken], TOOLS))
    learned, start = taught_text(prompt, ids, taught), thought + said
    assert learned.startswith(start) and learned.endswith("</tool_call><|im_end|>")
    assert learned.removeprefix(start).strip().startswith("<tool_call>\n")
    assert learned.count("Hm.") == ("Hm." in thought)


def test_a_template_without_tool_calls_is_refused_with_the_row() -> None:
    tokenizer = make_tokenizer(["user assistant"] * 9, 320)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = Chat("c.jsonl:7", [CHAT[1], {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}])
    with pytest.raises(UserError, match=r"c\.jsonl:7: .*does not write an assistant's tool_calls"):
        make_rows(ChatPrompt(tokenizer), [chat])


def test_rows_of_one_system_message_share_what_their_prompts_begin_with() -> None:
    prompt, chats = prompt_of("ours"), list[Chat]()
    for n, system in enumerate(["Be brief.", "", "Be brief.", "Answer at length.", "", "Be brief."]):
        told = [{"role": "system", "content": system}] if system else []
        asked = {"role": "user", "content": f"{n}{n} + {n}?"}
        chats.append(Chat(str(n), [*told, asked, {"role": "assistant", "content": "No." * n}]))
    rows = make_rows(prompt, chats)
    brief = prompt.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert [row.shared for row in rows] == [
        len(brief),
        None,
        len(brief),
        len(prompt.first("Answer at length.", "33 + 3?")),
        None,
        len(brief),
    ]
    assert rows[0].prompt.tolist() == rows[2].prompt.tolist() == brief
    assert rows[1].prompt.tolist() == prompt.first("", "11 + 1?")


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_rows_of_jsonl_and_parquet(tmp_path: Path) -> None:
    """Other columns and empty fields are left out, JSON within JSON is read."""
    pandas = pytest.importorskip("pandas")
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    rows = [
        {"messages": CHAT, "reward": 1.0},
        {"messages": [CHAT[1], called, {"role": "tool", "content": "3", "name": "add"}], "tools": json.dumps(TOOLS)},
    ]
    path = write(tmp_path / "chats.jsonl", *rows)
    first, second = read_chats(path)
    assert first == Chat(f"{path}:1", CHAT)
    assert second.messages[1:] == [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "add"},
    ]
    assert second.tools == TOOLS
    pandas.DataFrame(rows).to_parquet(tmp_path / "chats.parquet")
    assert [chat[1:] for chat in read_chats(str(tmp_path / "chats.parquet"))] == [first[1:], second[1:]]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([1], "the row is '[1]', but should be a valid dictionary."),
        ({"prompt": "?"}, "messages is missing."),
        (
            {"messages": CHAT[:2]},
            "the row should have a system's or user's message first, and an assistant's to learn after it",
        ),
        ({"messages": []}, "the row should have a system's or user's message first"),
        ({"messages": CHAT[2:]}, "the row should have a system's or user's message first"),
        ({"messages": [CHAT[1], {**CHAT[2], "weight": 0}]}, "the row should have a system's or user's message first"),
        ({"messages": [CHAT[1], {**CHAT[2], "weight": 2}]}, "messages.1.weight is '2', but should be 0 or 1."),
        (
            {"messages": [{"role": "agent", "content": "?"}]},
            "messages.0.role is 'agent', but should be 'system', 'user'",
        ),
        ({"messages": [CHAT[1], {"role": "assistant"}]}, "messages.1 has no content"),
        ({"messages": [CHAT[1], {**CHAT[2], "reasoning_content": "hm"}]}, "messages.1 has reasoning_content: put it"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content is \"[{'type': 'text'}]\", but",
        ),
        (
            {"messages": [CHAT[1], {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
            "messages.1.tool_calls.0.function is missing",
        ),
    ],
)
def test_a_wrong_row_is_a_sentence_with_file_and_line(tmp_path: Path, row: Any, sentence: str) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": CHAT}, row)
    with pytest.raises(UserError) as caught:
        read_chats(path)
    assert str(caught.value).startswith(f"{path}:2: {sentence}")


def test_a_wrong_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"messages": [')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "not.parquet").write_text("text")
    for name, words in (
        ("none.jsonl", "none.jsonl cannot be read (No such file"),
        ("cut.jsonl", "cut.jsonl:1: not one JSON object"),
        ("empty.jsonl", "empty.jsonl has no rows"),
        ("not.parquet", "not.parquet"),
    ):
        with pytest.raises(UserError) as caught:
            read_chats(str(tmp_path / name))
        assert words in str(caught.value)
