"""Forward and backward pass of the tiny policy on a CPU: linear layers through oneDNN against torch's own BLAS.

    python benchmarks/learner.py [--threads 2]

The same float32 model and batch (64 x 64 tokens), in turn, median of 9 rounds. The last line is one JSON object:
`speedup`, the seconds of both ways, and `gradient_difference`, the largest absolute difference of any gradient.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_trainer.learner.cpu_linear import use_onednn
from skyrl_trainer.tiny.init_policy import TINY_QWEN3


def seconds(model: torch.nn.Module, ids_BT: torch.Tensor) -> float:
    start = time.perf_counter()
    model.zero_grad()
    model(ids_BT, use_cache=False).logits.log_softmax(-1)[..., 3].mean().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**TINY_QWEN3, vocab_size=300, tie_word_embeddings=True)).eval()
    onednn = copy.deepcopy(plain)
    use_onednn(onednn)
    ids_BT = torch.randint(0, 300, (64, 64))
    times: dict[str, list[float]] = {"blas": [], "onednn": []}
    for _ in range(9):
        times["blas"].append(seconds(plain, ids_BT))
        times["onednn"].append(seconds(onednn, ids_BT))
    pairs = zip(plain.parameters(), onednn.parameters(), strict=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    difference = max(
        (a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None
    )
    print(json.dumps({"speedup": medians["blas"] / medians["onednn"], **medians, "gradient_difference": difference}))


if __name__ == "__main__":
    main()
