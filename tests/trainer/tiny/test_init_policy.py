"""The policy without a download: the tokenizer loses nothing, the template only grows, same seed same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from skyrl_trainer.config import load_config
from skyrl_trainer.data import load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.settings import TinyConfig
from skyrl_trainer.tiny.init_policy import SPECIAL_TOKENS, TOOL_TAGS, init_policy, make_tokenizer
from skyrl_trainer.tiny.start import StartPolicy

TEXTS = [f"{a} + {b} = ? Answer in \\boxed{{}}." for a in range(10, 40) for b in range(10, 40)] + [
    "把答案写进 \\boxed{}。"
]
SMALL = TinyConfig(
    config_kwargs={"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(TEXTS, 512)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(out, TEXTS, SMALL, seed=3)
    return out


@pytest.fixture(scope="module")
def spaces_after() -> PreTrainedTokenizerFast:
    return make_tokenizer(["color: navy, and [SEP] navy [SEP] dark navy"] * 9, 300, "after")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text() | st.lists(st.sampled_from(["[SEP]", " ", "  ", "\n", "word", "[", "]", "'s", "12"])).map("".join)
)
def test_any_unicode_text_survives_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, spaces_after: PreTrainedTokenizerFast, text: str
) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert spaces_after.decode(spaces_after.encode(text)) == text


def test_with_spaces_after_words_what_is_clicked_is_the_token_that_was_read(
    spaces_after: PreTrainedTokenizerFast,
) -> None:
    (navy,) = spaces_after.encode("navy")
    for text in ("color: navy, and", "[SEP] navy [SEP]", "click[navy]", "dark navy"):
        assert navy in spaces_after.encode(text)


@given(number=st.integers(0, 10**12), lead=st.sampled_from(["", " ", "x = ", "第"]))
def test_numbers_are_split_digit_by_digit(tokenizer: PreTrainedTokenizerFast, number: int, lead: str) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(lead + str(number)))
    assert tokens[-len(str(number)) :] == list(str(number))


def test_tool_tags_are_single_ordinary_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for tag in TOOL_TAGS:
        ids = tokenizer.encode(f"a{tag}b")
        assert len(ids) == 3
        assert ids[1] not in tokenizer.all_special_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"a{tag}b"
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>"), skip_special_tokens=True) == "a"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI add.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "", "reasoning_content": "done", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "\\boxed{3}"},
    {"role": "user", "content": "Thanks."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("start", [0, 1])
def test_a_longer_conversation_begins_with_its_beginning(
    tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]] | None, start: int
) -> None:
    messages = CONVERSATION[start:]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    for end in range(1, len(messages)):
        ask = messages[end]["role"] == "assistant"
        part = tokenizer.apply_chat_template(messages[:end], tools=tools, tokenize=False, add_generation_prompt=ask)
        assert whole.startswith(part)


def test_template_text_is_chatml_with_tools_as_in_qwen3(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION[1:4], tokenize=False, add_generation_prompt=True)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text == (
        "<|im_start|>user\n1 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nI add.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    with_tools = tokenizer.apply_chat_template(CONVERSATION[:2], tools=TOOLS, tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in with_tools


def test_same_seed_same_bytes_and_the_callers_generator_is_left_alone(policy: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    init_policy(tmp_path / "same", TEXTS, SMALL, seed=3)
    assert torch.equal(torch.rand(4), expected)
    init_policy(tmp_path / "other", TEXTS, SMALL, seed=4)
    files = {path.name: path.read_bytes() for path in policy.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "same").iterdir()} == files
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != files["model.safetensors"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_loads_in_transformers_tied_and_float32(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer) <= 512
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 = ?"}], add_generation_prompt=True)
    output = model.generate(torch.tensor([ids["input_ids"]]), max_new_tokens=3, min_new_tokens=3)
    assert output.shape[1] == len(ids["input_ids"]) + 3


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"hidden_sise": 64}, "hidden_size"),
        ({"head_dim": 48}, "head_dim is 48"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
        ({"vocab_size": 100}, "vocab_size is 100"),
    ],
)
def test_bad_settings_are_refused_and_leave_nothing(tmp_path: Path, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        init_policy(tmp_path / "out", ["a"], TinyConfig(config_kwargs=kwargs), 0)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_begins_with_a_policy_of_its_settings(tmp_path: Path) -> None:
    """What an earlier start left is of other settings, perhaps; what was given to the run stays."""
    no_expert = "trainer.policy.model.warmstart.num_demonstrations=0"

    def layers(number: int) -> int:
        sizes = f"trainer.policy.model.tiny.config_kwargs={{num_hidden_layers: {number}}}"
        config = load_config(None, [no_expert, sizes])
        with StartPolicy(config, tmp_path, load_samples(["text_math"])) as policy:
            return int(json.loads((Path(policy.weights()) / "config.json").read_text())["num_hidden_layers"])

    for other in ("cloned", "given"):
        (tmp_path / "init" / other).mkdir(parents=True)
    assert layers(1) == 1 and layers(2) == 2
    assert not (tmp_path / "init/cloned").exists() and (tmp_path / "init/given").exists()
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    assert layers(3) == 2


def test_a_folder_in_use_is_refused(policy: Path) -> None:
    with pytest.raises(UserError, match="not empty"):
        init_policy(policy, TEXTS, SMALL, 0)
