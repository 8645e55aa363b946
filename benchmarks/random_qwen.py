"""Qwen2.5's shapes with random weights: a model's folder, and a learner of it.

`engine_gpu.py SIZE --only make` makes one where there is nothing but torch, transformers and tokenizers: what else is
needed is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

if TYPE_CHECKING:
    from skyrl_trainer.types import GenerationOutput

#        hidden layers heads kv intermediate tied vocabulary
SHAPES = {
    "tiny": (128, 2, 4, 2, 256, True, 600),
    "0.5B": (896, 24, 14, 2, 4864, True, 151_936),
    "1.5B": (1536, 28, 12, 2, 8960, True, 151_936),
    "3B": (2048, 36, 16, 2, 11_008, True, 151_936),
    "7B": (3584, 28, 28, 4, 18_944, False, 152_064),
}
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = "bfloat16" if GPU else "float32"
ROOT = Path(__file__).resolve().parent.parent


def config_of(size: str) -> Qwen2Config:
    hidden, layers, heads, kv, intermediate, tied, vocabulary = SHAPES[size]
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=intermediate, tie_word_embeddings=tied, vocab_size=vocabulary, max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Of the project's own texts, with the tiny policy's chat template. skyrl_trainer.tiny would need gymnasium."""
    special, tags = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("tool_call", "tool_response", "think")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(8192, vocabulary) - len(special) - len(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/skyrl-gym/**/*.py")])
    core.train_from_iterator((path.read_text() for path in texts), trainer)
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    core.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    template = ROOT / "packages/skyrl-trainer/skyrl_trainer/tiny/chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        eos_token=special[2],
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text().strip(),
    )


def make_model(size: str, folder: Path) -> None:
    config = config_of(size)
    tokenizer = make_tokenizer(config.vocab_size)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would look right in memory that nobody has written to
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: a folder that has it is whole


class BareModel:
    """The learner's place for a model whose masters would not fit beside the engine."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE))
        self.model = model.to(DEVICE).eval()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()  # tied ones once

    def share_weights(self) -> None:
        return None

    def sampled_logprobs(self, prompt: list[int], output_ids: list[int]) -> Tensor:
        ids = torch.tensor(prompt + output_ids, device=DEVICE)
        logits = self.model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0]


def make_learner(size: str, folder: Path) -> Any:
    if size == "7B":
        return BareModel(folder)
    from skyrl_trainer.learner.model import Learner
    from skyrl_trainer.settings import Config

    place = {"colocate_all": GPU, "policy_num_gpus_per_node": int(GPU)}
    policy = {"model": {"path": str(folder), "dtype": DTYPE}}
    return Learner(Config.model_validate({"trainer": {"placement": place, "policy": policy}}), str(folder), 100)


def learner_logprobs(learner: Any, played: list[tuple[list[int], GenerationOutput]]) -> Tensor:
    from skyrl_trainer.learner.batch import Row, collate

    rows = []
    for i, (prompt, output) in enumerate(played):
        ids = np.array(prompt + list(output.output_ids))
        ones_T = np.ones(len(ids))
        rows.append(Row(str(i), ids, np.arange(len(ids)) >= len(prompt), ones_T, 0 * ones_T))
    batch = collate(rows, range(len(rows)), learner.device, learner.dtype)
    return learner.logprobs(batch)[0].float().cpu()
