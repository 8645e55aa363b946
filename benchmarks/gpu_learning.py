"""tool_use on one GPU, with a policy of 108 M parameters that is made and cloned there: held-out success before and
after some steps of reinforcement learning, by the command line that everybody uses.

    python benchmarks/gpu_learning.py [--steps 24] [--clone-seconds 90] [--folder DIR]
    python benchmarks/gpu_learning.py --tiny      # the recipe's tiny policy on a CPU, to try this script

A Qwen3 of 8 layers, hidden size 1,024, float32 throughout: its hand-built attention is too sharp for bfloat16. The
clone ends when it repeats a fifth of the expert's episodes, or after `--clone-seconds`, so that there is something to
learn; engine and learner take turns on the GPU. An earlier DIR's policy and clone are taken; its run is made anew. The
last line is one JSON object: seconds of every part, held-out success of each evaluation, and the largest difference
that a sync's canary saw.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = (
    "{vocab_size: 1024, hidden_size: 1024, num_hidden_layers: 8, intermediate_size: 3328, num_attention_heads: 8, "
    "num_key_value_heads: 4, head_dim: 128, initializer_range: 0.0212}"
)
CLONE = "{num_demonstrations: 8000, target_exact_match: 0.2, batch_size: 16, optimizer: {adamw: 3.0e-4}}"
ON_GPU = (
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.placement.colocate_all=true",
    "trainer.learning_rate=2.5e-5",
    "trainer.micro_batch_tokens=16384",
    "generator.num_generations=16",
    "generator.max_concurrency=256",
    "environment.num_workers=6",
    "generator.engine_kwargs={enforce_eager: true, gpu_memory_utilization: 0.3, kv_cache_memory_bytes: 12884901888}",
)
ALWAYS = (
    "trainer.deterministic=false",
    "trainer.lr_scheduler_type=constant_with_warmup",
    "generator.top_p=0.97",
    "trainer.eval_interval=10",
    "trainer.ckpt_interval=0",
    "trainer.logger=none",
)


def run(*words: str) -> float:
    """Seconds of `skyrl-trainer` with these arguments; ends this script where it fails."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "skyrl_trainer", *words], stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"skyrl-trainer {words[0]} failed.")
    return round(time.perf_counter() - start, 1)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    random, cloned, trained = folder / "random", folder / "cloned", folder / "run"
    seconds = {}
    if not random.exists():
        tiny = "{induction: true, config_kwargs: {vocab_size: 1024, num_hidden_layers: 3}}"
        tiny = tiny if args.tiny else f"{{induction: true, config_kwargs: {SHAPE}}}"
        seconds["init"] = run("init-policy", str(random), "tool_use", f"trainer.policy.model.tiny={tiny}")
    if not cloned.exists():
        given = (f"trainer.policy.model.path={random}", f"trainer.policy.model.warmstart={CLONE}")
        seconds["clone"] = run("warmstart", str(cloned), "tool_use", *given, "--seconds", str(args.clone_seconds))
    shutil.rmtree(trained, ignore_errors=True)
    given = (f"trainer.policy.model.path={cloned}", "trainer.policy.model.tiny={}", f"trainer.run_dir={trained}")
    places = () if args.tiny else ON_GPU
    seconds["train"] = run("train", "tool_use", *given, f"trainer.max_steps={args.steps}", *ALWAYS, *places)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    held_out = {int(row["step"]): row["eval/success"] for row in rows if "eval/success" in row}
    return {
        "seconds": seconds,
        "held_out": held_out,
        "gain": round(list(held_out.values())[-1] - held_out[0], 3),
        "canary_max": max(row["sync/max_logprob_diff"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--clone-seconds", type=float, default=90.0)
    parser.add_argument("--tiny", action="store_true", help="the recipe's policy, on a CPU")
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args, args.folder or Path(folder))))


if __name__ == "__main__":
    main()
