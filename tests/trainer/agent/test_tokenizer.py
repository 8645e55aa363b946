"""A worker's tokenizer is the one that AutoTokenizer gives, without torch; the model says what ends an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from skyrl_trainer.agent.tokenizer import BY_NAME, load_chat_prompt, load_tokenizer
from skyrl_trainer.errors import UserError
from tests.trainer.fakes import tiny_tokenizer

TEXT = "don't  add 12+345\n\n你好 <|im_start|>user\n"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", None])
@pytest.mark.parametrize("name", [*BY_NAME, "NoSuchTokenizer"])
def test_it_is_the_one_that_auto_tokenizer_gives(tmp_path: Path, name: str, model_type: str | None) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_bytes()) | {"tokenizer_class": name}))
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    wanted, found = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    assert type(found) is type(wanted)
    assert (
        found.encode(TEXT) == wanted.encode(TEXT)
        and found.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    )
    talk = [{"role": "user", "content": TEXT}]
    assert found.apply_chat_template(talk, tokenize=False) == wanted.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("kind", ["tiny", "qwen"])
def test_it_needs_no_torch(tmp_path: Path, kind: str) -> None:
    tokenizer = tiny_tokenizer()
    if kind == "qwen":
        pieces = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        template = tokenizer.chat_template
        tokenizer = Qwen2Tokenizer(vocab=pieces["vocab"], merges=[tuple(pair) for pair in pieces["merges"]])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    code = "import sys; from skyrl_trainer.rollout.rollout_worker import RolloutWorker, load_chat_prompt as load; "
    code += f"assert load({str(tmp_path)!r}).first('a', 'b') and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("model", "generation", "more"),
    [
        ({}, '{"eos_token_id": [7, 9]}', [7, 9]),
        ({"eos_token_id": 8}, '{"eos_token_id": 7}', [7]),
        ({"eos_token_id": 8}, '{"temperature": 0.7}', [8]),
        ({"eos_token_id": 8}, '{"eos_tok', [8]),
        ({"eos_token_id": 8}, None, [8]),
        ({"eos_token_id": None}, None, []),
    ],
)
def test_an_answer_ends_at_every_token_that_the_model_ends_at(
    tmp_path: Path, model: dict[str, object], generation: str | None, more: list[int]
) -> None:
    """As with vLLM and TRL: Qwen's base models, for one, end what they say with <|endoftext|>."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    prompt = load_chat_prompt(str(tmp_path))
    assert [*prompt.stop_token_ids] == [*dict.fromkeys([prompt.end_of_turn_id, tokenizer.eos_token_id, *more])]
    for end in prompt.stop_token_ids:
        assert prompt.decode([*prompt.encode("12"), end]) == "12"
        after = prompt.observation("b", [end])
        assert after[0] == prompt.end_of_turn_id or end == prompt.end_of_turn_id


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each file is asked for again and again where there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_a_name_that_is_not_cached_and_a_file_that_is_no_object_are_sentences(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    for path, said in ((str(tmp_path), "the folder holds no usable one"), ("no/model", "neither a folder nor a known")):
        with pytest.raises(UserError, match=said):
            load_tokenizer(path)


@pytest.mark.usefixtures("offline")
def test_a_hub_that_does_not_answer_is_asked_for_one_file_before_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(path: str, file: str) -> str:
        asked.append(file)
        raise OSError("no network")

    monkeypatch.setattr("transformers.utils.cached_file", unreachable)
    with pytest.raises(UserError, match="neither a folder nor a known name"):
        load_tokenizer("no/such-model")
    assert asked == ["config.json"]
