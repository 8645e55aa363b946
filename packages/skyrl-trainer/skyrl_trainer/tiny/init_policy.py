"""The policy without a download: a tiny Qwen3 model and a byte-level BPE tokenizer, made from the envs' own texts.

The same arguments give the same bytes. The chat template is Qwen3's ChatML, but a longer conversation begins with the
very text of its beginning (Qwen3's drops earlier thoughts and joins neighbouring tool messages).
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_gym.data import beside
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import written_aside
from skyrl_trainer.registry import load
from skyrl_trainer.settings import TinyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Ordinary tokens: `decode(skip_special_tokens=True)` keeps them, so that a parser finds the calls."""
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text().strip()
TINY_QWEN3 = beside(__file__, "qwen3.yaml")
INDUCTION_ROPE = {"rope_type": "default", "rope_theta": 1e6}
"""Qwen's base: the copying circuit needs slow frequencies as well as fast ones."""
# What vLLM's CPU attention (0.32) has kernels for.
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def make_tokenizer(texts: Iterable[str], vocab_size: int, spaces: str = "before") -> "PreTrainedTokenizerFast":
    """A byte-level BPE of at most `vocab_size` tokens, added ones included. spaces: as in settings.TinyConfig."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(beside(__file__, "pieces.yaml")[spaces]), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(TOOL_TAGS),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ("system", "user", "assistant")
    core.train_from_iterator((piece for text in texts for piece in (text[:10_000], *roles)), trainer)  # else minutes
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TOOL_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        model_max_length=TINY_QWEN3["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: "PreTrainedTokenizerFast", tiny: TinyConfig, seed: int) -> "Qwen3ForCausalLM":
    """A float32 Qwen3 with tied embeddings; the caller's random state and number of threads are left as they were."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from skyrl_trainer.tiny.induction import add_induction

    rope = {"rope_parameters": INDUCTION_ROPE} if tiny.induction else {}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    settings = {**tiny_settings(rope | tiny.config_kwargs), "vocab_size": len(tokenizer), "bos_token_id": None, **ends}
    config = Qwen3Config(**settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a matrix product's last bits depend on it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        if tiny.induction:
            add_induction(model)
    torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    return model


def tiny_settings(config_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of the whole Qwen3 configuration; UserError where they make no model that vLLM runs on the processor."""
    setting, known = "trainer.policy.model.tiny.config_kwargs", load("transformers:Qwen3Config")().to_dict()
    for key in sorted(config_kwargs.keys() - known.keys()):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UserError(f"{setting}: Qwen3 has no setting {key!r}{hint}")
    settings = {**TINY_QWEN3, **config_kwargs}
    for key in (key for key, usual in TINY_QWEN3.items() if type(usual) is int):
        least = 256 + len(SPECIAL_TOKENS + TOOL_TAGS) if key == "vocab_size" else 1  # each byte is a token
        if type(settings[key]) is not int or settings[key] < least:
            raise UserError(f"{setting}: {key} is {settings[key]!r}; it must be a whole number from {least} on.")
    if settings["head_dim"] not in _HEAD_SIZES:
        sizes = ", ".join(map(str, _HEAD_SIZES))
        raise UserError(f"{setting}: head_dim is {settings['head_dim']}; vLLM's CPU attention has {sizes}.")
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    if heads % kv_heads:
        wanted = "num_attention_heads must be a multiple of num_key_value_heads"
        raise UserError(f"{setting}: {wanted}, not {heads} and {kv_heads}.")
    return settings


def refuse_used(out: Path) -> None:
    """UserError unless there is no `out`, or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists and is not empty; name another folder or remove it.")


def init_policy(out: Path, texts: Iterable[str], tiny: TinyConfig, seed: int) -> None:
    """Into `out`, a new or empty folder; `texts` train the tokenizer, `seed` makes the weights."""
    refuse_used(out)
    with written_aside(out) as folder:
        tokenizer = make_tokenizer(texts, tiny_settings(tiny.config_kwargs)["vocab_size"], tiny.spaces)
        make_model(tokenizer, tiny, seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
