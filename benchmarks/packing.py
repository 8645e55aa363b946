"""Micro-batches without padding: useful tokens per CPU-second, forward and backward, on one thread.

    python benchmarks/packing.py [--rounds 7]

A Qwen3 of hidden size 256 and 6 layers (vocabulary 512, float32) on 64 rows of log-normal lengths, mean 219, largest
866: a prompt of 4 tokens, each row its own, and sampled tokens. Three ways, in turn, medians:
- packed: the learner's, cut by 8192 tokens;
- padded: rows at random in batches of 8, padded to the longest, through transformers' own sdpa attention and mask;
- full: the learner's on as many rows that all have the mean length.
All take their linear layers through oneDNN and give the log-probability of every sampled token. The last line is one
JSON object: `useful_ratio` (packed over padded), `of_full_rows` (packed over full), tokens/s each way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from skyrl_trainer.learner.batch import Row, collate, cut
from skyrl_trainer.learner.cpu_linear import use_onednn
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.settings import Config

MEAN, LARGEST, ROWS, PROMPT, VOCABULARY = 219, 866, 64, 4, 512
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}


def lengths() -> list[int]:
    """The quantiles of the log-normal distribution that has this mean and whose largest quantile is that."""
    z = np.array([NormalDist().inv_cdf((i + 0.5) / ROWS) for i in range(ROWS)])
    low, high = 0.0, 2.0
    for _ in range(50):
        spread = (low + high) / 2
        shape = np.exp(spread * z)
        low, high = (spread, high) if shape.max() / shape.mean() < LARGEST / MEAN else (low, spread)
    return [int(n) for n in (shape * MEAN / shape.mean()).round()]


def make_rows(sizes: list[int], draw: np.random.Generator) -> list[Row]:
    return [
        Row(str(i), draw.integers(0, VOCABULARY, n), np.arange(n) >= PROMPT, np.ones(n), np.zeros(n))
        for i, n in enumerate(sizes)
    ]


def packed(learner: Learner, rows: list[Row]) -> None:
    for indices in cut(rows, range(len(rows)), 8192):
        logprobs_N, _ = learner.logprobs(collate(rows, indices, learner.device, learner.dtype))
        (-logprobs_N.sum()).backward()
    learner.clear_gradients()


def padded(model: torch.nn.Module, rows: list[Row], order: np.ndarray) -> None:
    for start in range(0, len(rows), 8):
        chosen = [torch.from_numpy(rows[i].token_ids) for i in order[start : start + 8]]
        ids_BT = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        real_BT = torch.arange(ids_BT.shape[1]) < torch.tensor([len(ids) for ids in chosen])[:, None]
        logits_BTV = model(ids_BT, attention_mask=real_BT.long(), use_cache=False).logits[:, :-1]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        (-logprobs_BT[real_BT[:, 1:]].sum()).backward()
    model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    ragged, full = make_rows(lengths(), draw), make_rows([MEAN] * ROWS, draw)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(Path(folder))
        learner = Learner(Config(), folder, 1)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    use_onednn(plain)
    order = draw.permutation(ROWS)
    ways = {
        "packed": (ragged, lambda: packed(learner, ragged)),
        "padded": (ragged, lambda: padded(plain, ragged, order)),
        "full": (full, lambda: packed(learner, full)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (_rows, work) in ways.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    rate = {n: sum(len(r.token_ids) for r in rows) / statistics.median(times[n]) for n, (rows, _) in ways.items()}
    ratios = {"useful_ratio": rate["packed"] / rate["padded"], "of_full_rows": rate["packed"] / rate["full"]}
    shape = {
        "mean": statistics.fmean(len(r.token_ids) for r in ragged),
        "largest": max(len(r.token_ids) for r in ragged),
    }
    print(json.dumps(ratios | {f"{name}_tokens_per_cpu_second": value for name, value in rate.items()} | shape))


if __name__ == "__main__":
    main()
