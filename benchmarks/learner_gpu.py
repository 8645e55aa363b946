"""The learner on one NVIDIA GPU: variable-length attention, packing, memory. Needs no engine, only the learner's own.

    python benchmarks/learner_gpu.py [--only adapters] [--adapters lora] [--tiny]

A random Qwen2.5-1.5B (--tiny: two small layers, on the CPU) in bfloat16 with float32 masters. Four parts:
- `correct`: the learner's packed rows against transformers' padded forward with sdpa: largest difference of a
  logprob, cosine of the gradients; the same for groups that share a prompt;
- `speed`: useful tokens/s of whole optimizer steps, rows of log-normal lengths (mean about 600), packed by 8k and 16k
  tokens against random padded batches of 4 with checkpointed layers; model FLOP use counts 6 FLOP a parameter and
  token, attention added, over 989e12 a second (H100 and H200, bfloat16 dense);
- `adapters`: the same for full fine-tuning, LoRA and QLoRA, and how long the merged weights take to make;
- `memory`: peak bytes with and without gradient checkpointing, tokens/s and peak by `LOGITS_AT_ONCE`.
A part that fails reports its error and the others still run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from skyrl_trainer.learner import model as learner_module
from skyrl_trainer.learner.batch import Row, collate, cut
from skyrl_trainer.learner.model import Learner, make_learner
from skyrl_trainer.settings import Config

FLOPS = 989e12
SHAPE = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 8960, "vocab_size": 151_936, "tie_word_embeddings": True}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 64, "vocab_size": 500, "tie_word_embeddings": True}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"rank": 32},
    "nf4": {"rank": 32, "quantization": "nf4"},
}


class Bench:
    def __init__(self, folder: str, tiny: bool, adapters: Sequence[str] = tuple(ADAPTERS)) -> None:
        self.folder, self.tiny, self.shape, self.adapters = folder, tiny, TINY if tiny else SHAPE, adapters
        self.device = "cpu" if tiny else "cuda"
        with torch.device(self.device):
            torch.manual_seed(0)
            Qwen2ForCausalLM(Qwen2Config(**self.shape)).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w").save_pretrained(folder)

    def learner(self, checkpointing: bool = False, lora: dict[str, Any] | None = None) -> Learner:
        place = {"policy_num_gpus_per_node": 0 if self.tiny else 1}
        model = {"path": self.folder, "dtype": "bfloat16", "lora": lora or {}}
        trainer = {"placement": place, "policy": {"model": model}, "gradient_checkpointing": checkpointing}
        return make_learner(Config.model_validate({"trainer": trainer}), self.folder, 100)

    def rows(self, tokens: int, groups: int = 1) -> list[Row]:
        """Log-normal lengths, mean about 600 (tiny: 30); `groups` rows begin with the same prompt of a tenth."""
        draw = np.random.default_rng(0)
        mean, rows, total = 30 if self.tiny else 600, [], 0
        while total < tokens:
            if len(rows) % groups == 0:
                prompt = draw.integers(0, self.shape["vocab_size"], mean // 10)
            size = int(np.clip(mean * np.exp(0.7 * draw.standard_normal() - 0.245), mean // 20 + 2, mean * 4))
            ids = np.append(prompt, draw.integers(0, self.shape["vocab_size"], size))
            ones_T = np.ones(len(ids))
            rows.append(Row(str(len(rows)), ids, np.arange(len(ids)) >= len(prompt), ones_T, 0 * ones_T))
            total += len(ids)
        return rows

    def sync(self) -> float:
        if not self.tiny:
            torch.cuda.synchronize()
        return time.perf_counter()

    def free(self) -> None:
        gc.collect()
        if not self.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def packed(learner: Learner, rows: list[Row], budget: int) -> None:
    for indices in cut(rows, range(len(rows)), budget):
        logprobs_N, _ = learner.logprobs(collate(rows, indices, learner.device, learner.dtype))
        (-logprobs_N.sum() / 1000).backward()
    learner.clip_gradients()
    learner.step()


def padded_logprobs(model: torch.nn.Module, rows: list[Row], device: torch.device) -> torch.Tensor:
    """Of all sampled tokens, by transformers' forward on one padded batch, whole logits."""
    ids = [torch.from_numpy(row.token_ids) for row in rows]
    ids_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
    real_BT = torch.nn.utils.rnn.pad_sequence([torch.ones(len(x)) for x in ids], batch_first=True).to(device)
    masks = [torch.from_numpy(row.mask) for row in rows]
    mask_BT = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        logits_BTV = model(ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1]
    logprobs_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    return logprobs_BT[mask_BT[:, 1:]]


def correct(bench: Bench) -> dict[str, Any]:
    learner = bench.learner()
    plain = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.float32, attn_implementation="sdpa")
    plain = plain.to(learner.device).eval()
    result: dict[str, Any] = {"varlen": not bench.tiny}
    for name, groups in (("rows", 1), ("groups", 8)):
        rows = bench.rows(300 if bench.tiny else 6000, groups)[:8]
        ours_N, _ = learner.logprobs(collate(rows, range(len(rows)), learner.device, learner.dtype))
        ours_N.sum().backward()
        theirs_N = padded_logprobs(plain, rows, learner.device)
        theirs_N.sum().backward()
        both = [torch.cat([p.grad.flatten() for p in ps]) for ps in (learner.parameters, plain.parameters())]
        cosine = torch.nn.functional.cosine_similarity(both[0], both[1], dim=0)
        result[name] = {"logprob": float((ours_N - theirs_N).detach().abs().max()), "cosine": float(cosine)}
        learner.clear_gradients()
        plain.zero_grad()
    return result


def speed(bench: Bench) -> dict[str, Any]:
    learner = bench.learner()
    plain = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.float32, attn_implementation="sdpa")
    plain = plain.to(learner.device)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    plain.train()  # there is no dropout; checkpointing needs it
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, fused=True)
    rows = bench.rows(600 if bench.tiny else 64_000)
    order = np.random.default_rng(1).permutation(len(rows))

    def padded() -> None:
        for start in range(0, len(rows), 4):
            (
                -padded_logprobs(plain, [rows[i] for i in order[start : start + 4]], learner.device).sum() / 1000
            ).backward()
        optimizer.step()
        optimizer.zero_grad()

    sizes = np.array([len(row.token_ids) for row in rows], dtype=float)
    attention = 6 * SHAPE["hidden_size"] * SHAPE["num_hidden_layers"] * float((sizes**2).sum())
    flop = 6 * sum(p.numel() for p in learner.parameters) * sizes.sum() + attention
    ways: dict[str, Callable[[], None]] = {"padded_4": padded}
    ways |= {f"packed_{k}k": lambda k=k: packed(learner, rows, k * 1024) for k in (8, 16)}
    result: dict[str, Any] = {"tokens": int(sizes.sum()), "mean": float(sizes.mean())}
    for name, work in ways.items():
        try:
            work()  # compiles
            start = bench.sync()
            work()
            taken = bench.sync() - start
            result[name] = {"tokens_per_second": float(sizes.sum()) / taken, "flop_use": float(flop) / taken / FLOPS}
        except torch.OutOfMemoryError as error:
            result[name] = str(error)[:120]
        bench.free()
        print(name, result[name], flush=True)
    return result


def memory(bench: Bench) -> dict[str, Any]:
    result: dict[str, Any] = {}
    usual = learner_module.LOGITS_AT_ONCE[bench.device]
    for checkpointing in (False, True):
        learner = bench.learner(checkpointing)
        rows = bench.rows(200 if bench.tiny else 8192)
        for power in (24, 28, 34) if checkpointing else (28,):  # the last: all logits at once
            learner_module.LOGITS_AT_ONCE[bench.device] = 2**power
            bench.free()
            packed(learner, rows, 10**9)
            start = bench.sync()
            packed(learner, rows, 10**9)
            rate = sum(len(row.token_ids) for row in rows) / (bench.sync() - start)
            name = f"{'checkpointing' if checkpointing else 'plain'}_logits_2^{power}"
            result[name] = {
                "peak_bytes": 0 if bench.tiny else torch.cuda.max_memory_allocated(),
                "tokens_per_second": rate,
            }
            print(name, result[name], flush=True)
        learner_module.LOGITS_AT_ONCE[bench.device] = usual
        del learner
        bench.free()
    return result


def adapters(bench: Bench) -> dict[str, Any]:
    """Full fine-tuning, LoRA and QLoRA: tokens/s, FLOP use (4 a frozen parameter and token), peak, time to merge."""
    result: dict[str, Any] = {}
    rows = bench.rows(600 if bench.tiny else 32_000)
    tokens = sum(len(row.token_ids) for row in rows)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen2ForCausalLM(Qwen2Config(**bench.shape)).parameters())
    for name in bench.adapters:
        lora = ADAPTERS[name]
        learner = bench.learner(lora=lora)
        bench.free()
        packed(learner, rows, 16 * 1024)
        start = bench.sync()
        packed(learner, rows, 16 * 1024)
        rate = tokens / (bench.sync() - start)
        peak = 0 if bench.tiny else torch.cuda.max_memory_allocated()
        start = bench.sync()
        for _, tensor in learner.named_tensors():
            tensor.detach()
        flop = (4 if lora else 6) * parameters
        result[name] = {"tokens_per_second": rate, "flop_use_without_attention": rate * flop / FLOPS}
        result[name] |= {"peak_bytes": peak, "full_weights_seconds": bench.sync() - start}
        print(name, result[name], flush=True)
        del learner
        bench.free()
    return result


PARTS = {part.__name__: part for part in (correct, speed, adapters, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=list(ADAPTERS), help="of the third part")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to test this script")
    args = parser.parse_args()
    device = "cpu" if args.tiny else torch.cuda.get_device_name()
    result: dict[str, Any] = {"torch": torch.__version__, "device": device}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(str(Path(folder)), args.tiny, args.adapters)
        for name in args.only:
            start = time.perf_counter()
            try:
                result[name] = PARTS[name](bench)
            except Exception as error:
                traceback.print_exc()
                result[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            bench.free()
            print(name, f"{time.perf_counter() - start:.0f} s", result[name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
