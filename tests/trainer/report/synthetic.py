"""A run folder as a real run leaves it, with made-up figures."""

from __future__ import annotations

import math
import random
from pathlib import Path

from skyrl_trainer.config import load_config, to_yaml
from skyrl_trainer.report.history import MetricsWriter
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn

NASTY = "</script><script>document.title='pwned'</script><!-- <b>bold</b> & \u2028 \\boxed{7}"


def metrics_row(step: int, max_steps: int, rng: random.Random, gain: float) -> dict[str, float]:
    progress = 1 - math.exp(-4 * step / max_steps)
    success = 0.38 + gain * progress + rng.gauss(0, 0.012)
    row = {"step": step, "time/eval": 0.0, "time/step": 2.9, "memory/pss_gib": 3.1 + 0.01 * rng.random()}
    if step % 10 == 0:
        row |= {"eval/success": success, "time/eval": 1.2}
    if step == 0:
        return row
    reward = success + 0.09 + rng.gauss(0, 0.02)
    return row | {
        "loss": rng.gauss(0, 0.01),
        "lr": 3e-4 * min(1, step / 5),
        "grad_norm": 0.4 + 0.2 * rng.random(),
        "entropy": 0.9 - 0.6 * progress + rng.gauss(0, 0.02),
        "clip_fraction": 0.02 + 0.01 * rng.random(),
        "success": success - 0.05,
        "reward/mean": reward,
        "reward/total": reward,
        "reward/correct": reward - 0.09,
        "reward/format": 0.09,
        "length/mean": 22 - 6 * progress + rng.gauss(0, 0.4),
        "length/max": 64,
        "stop/terminated": 500 + rng.randrange(12),
        "stop/length": rng.randrange(12),
        "kl/engine_learner": math.nan if step == 7 else 3e-6 * (1 + rng.random()),
        "sync/max_logprob_diff": 2e-5 * (1 + rng.random()),
        "tokens/per_second": 9500 + rng.gauss(0, 400),
        "time/rollout": 1.2 + 0.2 * rng.random(),
        "time/train": 1.4 + 0.2 * rng.random(),
        "time/sync": 0.03,
    }


def trajectory(step: int, sample: int, generation: int, reward: float, action: str) -> Trajectory:
    correct = reward > 1
    parts = {"correct": float(correct), "format": 0.1 if reward > 0 else 0.0}
    turn = Turn([1, 70, 71, 72], [75, 76], [-0.5, -0.25], [step, step], action, "", reward, parts, terminated=True)
    turn.info = {"success": correct}
    task = Sample(f"text_math:train:{sample}", "skyrl/text_math-v0", sample, {"split": "train"}, ground_truth=42)
    return Trajectory(f"{step}/{sample}/{generation}", task, generation, 7, [turn], StopReason.TERMINATED)


def rollouts(step: int, rng: random.Random) -> RolloutBatch:
    batch = RolloutBatch(step, [])
    for sample in range(4):
        group = []
        for generation in range(4):
            reward = rng.choice((0.0, 0.1, 1.1))
            action = {0.0: "I think it is 41", 0.1: "17 + 24 = 41\n\\boxed{41}", 1.1: "17 + 25 = 42\n\\boxed{42}"}[
                reward
            ]
            group.append(trajectory(step, sample, generation, reward, action))
        batch.groups.append(group)
    failed = trajectory(step, 3, 4, 0.0, "")
    failed.stop_reason, failed.error, failed.turns = StopReason.ENV_ERROR, "The env raised: division by zero", []
    batch.groups[-1].append(failed)
    batch.groups[0][0] = trajectory(step, 0, 0, 1.1, NASTY)
    return batch


def make_run(
    folder: Path, max_steps: int = 50, gain: float = 0.55, seed: int = 0, overrides: tuple[str, ...] = ()
) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load_config(None, [f"trainer.run_name={folder.name}", *overrides])))
    writer, store = MetricsWriter(folder), JsonlTrajectoryStore(folder / "trajectories")
    for step in range(max_steps + 1):
        writer.write(metrics_row(step, max_steps, rng, gain))
        if step:
            store.write(rollouts(step, rng))
    writer.close()
    return folder
