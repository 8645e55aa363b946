"""A policy's tokenizer, and the prompts that it builds."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.errors import UserError

BY_NAME = ("TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Of Qwen3, AutoTokenizer takes those by the name that stands in their folder; of Qwen2 all are a Qwen2Tokenizer."""


def load_tokenizer(path: str) -> Any:
    """What AutoTokenizer gives, which imports torch: 3 s and 340 MB of a RolloutWorker. `model_ends` are
    ids at which the model's files end an answer. UserError where there is none."""
    import transformers

    folder, settings = Path(path), dict[str, Any]()
    for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
        with suppress(OSError, TypeError, ValueError):
            settings |= json.loads(Path(transformers.utils.cached_file(path, file)).read_bytes())
        if not (settings or folder.is_dir()):
            break  # no such model, or no network: each file would wait for it
    name = settings.get("tokenizer_class", "")
    known = name in BY_NAME and "auto_map" not in settings and (folder / "tokenizer.json").is_file()
    by_kind = {"qwen2": "Qwen2Tokenizer", "qwen3": name} if known else {}
    chosen = by_kind.get(settings.get("model_type", "qwen3"), "AutoTokenizer")
    try:
        tokenizer = getattr(transformers, chosen).from_pretrained(path)
    except Exception as error:  # also tokenizers' own
        hint = "the folder holds no usable one" if folder.is_dir() else "it is neither a folder nor a known name"
        setting = f"trainer.policy.model.path={path}"
        raise UserError(f"The tokenizer of {setting} cannot be loaded: {hint} ({error}).") from error
    ends = settings.get("eos_token_id")
    tokenizer.model_ends = ends if isinstance(ends, list) else [ends]
    return tokenizer


def load_chat_prompt(path: str, template_kwargs: Mapping[str, Any] = {}) -> ChatPrompt:
    return ChatPrompt(load_tokenizer(path), template_kwargs)
