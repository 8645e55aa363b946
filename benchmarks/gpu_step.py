"""Whole steps of GRPO on one GPU, engine and learner in turns: `qwen_1gpu` with Qwen2.5-1.5B's shape and random
weights, by the command line that everybody uses, as a fraction of the physical limit that its `--dry-run` states.

    python benchmarks/gpu_step.py [--staleness 0 1] [--quantization none nf4] [--steps 3] [--folder DIR]
    python benchmarks/gpu_step.py --tiny      # a tiny model on a CPU, to try this script

256 episodes of two turns of 512 tokens, LoRA of rank 32: merged into the weights, or with nf4 (QLoRA) hot-loaded. A
random policy hardly ever ends an answer, so that every episode has full length, as the limit assumes; its reward is the
parity of its tokens, so that there is something to learn from. The first step compiles and is not counted, nor is the
last evaluation. An earlier DIR's policy is taken; its runs are made anew. The last line is one JSON object: for each
bound of `trainer.max_staleness` and way the seconds of the median step and its parts, the `limit` and its `fraction`,
and the largest difference that a sync's canary saw.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.random_qwen import make_model

PARTS = ("rollout", "train", "sync")
COIN = """from skyrl_trainer.algorithms.rewards import register_reward


@register_reward("coin")
def coin(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""
ALWAYS = (
    "trainer.eval_before_train=false",
    "trainer.eval_interval=0",
    "trainer.ckpt_interval=0",
    "trainer.gradient_checkpointing=false",
    "trainer.logger=none",
    "trainer.algorithm.reward_funcs={coin: 1.0, env: 0.0}",
    "data.val_size=8",
    "generator.max_turns=2",
    "generator.max_model_len=2080",
)
ON_GPU = ("generator.engine_kwargs={gpu_memory_utilization: 0.6, kv_cache_memory_bytes: 21474836480}",)
ON_CPU = (
    "trainer.placement={colocate_all: false, policy_num_gpus_per_node: 0}",
    "trainer.policy.model.dtype=float32",
    "trainer.train_batch_size=4",
    "generator.num_generations=4",
    "generator.max_completion_length=64",
    "generator.engine_kwargs={}",
)


def trainer(*words: str) -> str:
    """What `skyrl-trainer train qwen_1gpu` prints with these settings; ends this script where it fails."""
    command = [sys.executable, "-m", "skyrl_trainer", "train", "qwen_1gpu", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"skyrl-trainer ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def seconds(row: dict[str, float]) -> float:
    return sum(row[f"time/{part}"] for part in PARTS)


def measure(args: argparse.Namespace, folder: Path, staleness: int, quantization: str) -> dict[str, Any]:
    run = folder / f"k{staleness}-{quantization}"
    shutil.rmtree(run, ignore_errors=True)
    given = (f"trainer.policy.model.path={folder / args.size}", f"trainer.run_dir={run}", *ALWAYS)
    given += (f"trainer.algorithm.plugin_file={folder / 'coin.py'}", f"trainer.max_staleness={staleness}")
    given += (f"trainer.policy.model.lora={{rank: 32, quantization: {quantization}}}",)
    given += (*(ON_CPU if args.tiny else ON_GPU), f"trainer.max_steps={args.steps}")
    (said,) = re.findall(r"at least +(\S+) s decode \+ (\S+) s train \+ (\S+) s sync", trainer(*given, "--dry-run"))
    limit = sum(map(float, said))
    trainer(*given)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = sorted((row for row in rows if row["step"] > 1), key=seconds)
    middle = counted[len(counted) // 2]
    parts = {part: round(middle[f"time/{part}"], 2) for part in PARTS} | {"step": round(seconds(middle), 2)}
    fraction = {"limit": round(limit, 2), "fraction": round(limit / seconds(middle), 3)}
    canary = max(row["sync/max_logprob_diff"] for row in rows)
    return {**parts, **fraction, "tokens": middle["tokens"], "steps": len(counted), "canary_max": canary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--quantization", nargs="+", choices=("none", "nf4"), default=["none"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    args = parser.parse_args()
    args.size = "tiny" if args.tiny else "1.5B"
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "coin.py").write_text(COIN)
        if not (folder / args.size / "tokenizer.json").exists():
            make_model(args.size, folder / args.size)
        cases = [(k, quantization) for quantization in args.quantization for k in args.staleness]
        print(json.dumps({f"k={k}, {how}": measure(args, folder, k, how) for k, how in cases}))


if __name__ == "__main__":
    main()
