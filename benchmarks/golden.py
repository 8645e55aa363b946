"""Do two checkouts train to the same bytes? Eight steps of the quick start, seed 0, in this one and in another.

    git worktree add ../before HEAD~20
    python benchmarks/golden.py --against ../before

A change that only moves code must not change a bit of what is sampled and learned. Bytes depend on the processor and on
the versions of torch and vLLM, so both are run here, with the same interpreter. The last line is one JSON object: the
checksums of this checkout and whether the other has the same.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SETTINGS = ("trainer.max_steps=8", "data.val_size=50", "trainer.ckpt_interval=4", "trainer.logger=none")
CLOCKS = ("time/", "idle/", "memory", "tokens/per", "sync/seconds")
"""How metrics begin that are measured by a clock."""


def run(checkout: Path, folder: Path, settings: list[str]) -> dict[str, str]:
    """Trains there and returns the checksums. Raises CalledProcessError when training fails."""
    packages = (str(checkout / "packages" / name) for name in ("skyrl-gym", "skyrl-trainer", "skyrl-eval"))
    command = [sys.executable, "-m", "skyrl_trainer", "train", "quickstart", f"trainer.run_dir={folder}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(packages)}
    subprocess.run([*command, *SETTINGS, *settings], cwd=checkout, env=environment, check=True)
    return checksums(folder)


def checksums(folder: Path) -> dict[str, str]:
    """Of a finished run: clone, trained weights, sampled tokens with all that hangs on them, metrics."""
    tokens, metrics = hashlib.sha256(), hashlib.sha256()
    for path in sorted((folder / "trajectories").glob("*.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            for turn in json.loads(line).get("turns", ()):
                parts = [turn[name] for name in ("output_ids", "logprobs", "reward", "advantages")]
                tokens.update(json.dumps(parts).encode())
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = {name: value for name, value in sorted(json.loads(line).items()) if not name.startswith(CLOCKS)}
        metrics.update(json.dumps(row).encode())
    files = {"clone": folder / "init/cloned/model.safetensors", "weights": folder / "model/last/model.safetensors"}
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return found | {"tokens": tokens.hexdigest(), "metrics": metrics.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout; default: none")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="for both, behind the script's own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(HERE, Path(folder) / "here", args.settings)
        result: dict[str, object] = {name: value[:16] for name, value in found.items()}
        if args.against:
            other = run(args.against.resolve(), Path(folder) / "there", args.settings)
            result["same"] = {name: value == other[name] for name, value in found.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
