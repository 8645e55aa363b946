"""Our training step against `trl.GRPOTrainer` 1.16 on a CPU: the same policy, tasks, batch and settings, interleaved.

    python benchmarks/versus_trl.py [--rounds 5] [--seeds 3] [--reward-steps 60]      (about 25 minutes)

256 sequences a step (32 prompts x 8), float32, no gradient checkpointing, one optimizer step, no KL. `short`: two-digit
sums, answers of at most 64 tokens. `long_tailed`: chained sums worked out term by term, mean about 60 tokens and some
of 400 and more. TRL runs in two ways: as it comes (`transformers` generation, its fastest mode that works on a CPU)
and with vLLM colocated, whose weight sync we patch for the CPU and which we give the float32 and the environment that
our own engine has. The sides are processes of their own; one works while the others wait.

A ratio is our steps per second over TRL's, from the medians over rounds of one or some whole steps; the learning rate
is then so low that both sides keep sampling answers of the same lengths. For `time_to_reward` and the rewards both
learn the short tasks for `--reward-steps` steps at one rate. The last line is one JSON object: short, long_tailed,
patched_short, patched_long_tailed, time_to_reward, and the rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS, GENERATIONS = 32, 8
WORKLOADS: dict[str, dict[str, Any]] = {
    "short": {
        "data": "text_math?split=train&difficulty=1",
        "max_tokens": 64,
        "demonstrations": 1500,
        "clone": {},
        "steps": 4,
    },
    "long_tailed": {
        "data": "text_math?split=train&difficulty=8&solution=worked",
        "max_tokens": 640,
        "demonstrations": 3000,
        "clone": {"epochs": 1.0},
        "steps": 1,
    },
}
LEARNING_RATE, TIMED_RATE, WARMUP, BETA2 = 3e-4, 1e-7, 5, 0.99
TRL_MICRO_BATCH = 256


# ---------------------------------------------------------------------------- the sides: one process each


def serve(take_steps: Callable[[int], dict[str, Any]]) -> None:
    """Answers "N" on standard input with the seconds and rewards of N steps, until the input ends."""
    reply({"ready": True})
    for line in sys.stdin:
        reply(take_steps(int(line)))


def reply(message: dict[str, Any]) -> None:
    print(f"REPLY {json.dumps(message)}", flush=True)


def ours(workload: dict[str, Any], policy: str, seed: int, learning_rate: float) -> None:
    from skyrl_trainer.config import load_config
    from skyrl_trainer.report.history import read_metrics
    from skyrl_trainer.run.folder import RunFolder
    from skyrl_trainer.run.loop import Loop
    from skyrl_trainer.run.run import Run
    from skyrl_trainer.run.signals import StopSignal

    folder = tempfile.mkdtemp(prefix="versus-trl-")
    overrides = {
        "trainer.run_dir": folder,
        "trainer.policy.model.path": policy,
        "trainer.seed": seed,
        "trainer.max_steps": 100_000,
        "trainer.train_batch_size": PROMPTS,
        "trainer.learning_rate": learning_rate,
        "trainer.warmup_steps": WARMUP,
        "trainer.micro_batch_tokens": 4096,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "generator.num_generations": GENERATIONS,
        "generator.max_completion_length": workload["max_tokens"],
        "data.train_data": f"['{workload['data']}']",
        "data.val_data": f"['{workload['data']}']",
        "data.val_size": 1,
    }
    config = load_config(None, [f"{name}={value}" for name, value in overrides.items()])
    with StopSignal() as stop, RunFolder(config) as run, Run(config, run) as parts:
        trainer = Loop(parts, stop)
        trainer.publish_and_log()

        def take_steps(count: int) -> dict[str, Any]:
            start = time.perf_counter()
            for _ in range(count):
                trainer.learn(*trainer.roll_out())
                trainer.publish_and_log()
            seconds = time.perf_counter() - start
            rows = read_metrics(run.path)[-count:]
            return {
                "seconds": seconds,
                "rewards": [row["reward/mean"] for row in rows],
                "tokens": [row["length/mean"] for row in rows],
                "longest": max(row["length/max"] for row in rows),
                "parts": {k: sum(row[f"time/{k}"] for row in rows) / count for k in ("rollout", "train", "sync")},
            }

        serve(take_steps)


def trl(workload: dict[str, Any], policy: str, seed: int, learning_rate: float, patched: bool) -> None:
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    if patched:
        patch_trl_for_cpu()

    class Turnstile(TrainerCallback):
        """Lets the trainer take as many steps as the other end has asked for."""

        left = 0
        log: list[tuple[float, float, float]]  # seconds since the order, mean reward, mean length

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.left:
                return
            if state.global_step:
                rewards, tokens = [entry[1] for entry in self.log], [entry[2] for entry in self.log]
                reply({"seconds": self.log[-1][0], "rewards": rewards, "tokens": tokens})
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self.left, self.log = int(line), []
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.left -= 1
            metrics = trainer._metrics["train"]
            seconds = time.perf_counter() - self.start
            self.log.append((seconds, metrics["reward"][-1], metrics["completions/mean_length"][-1]))

    dataset, env_reward = trl_tasks(workload, seed)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=env_reward,
        args=trl_config(workload, seed, learning_rate, patched),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
        callbacks=[Turnstile()],
    )
    reply({"ready": True})
    trainer.train()


def trl_tasks(workload: dict[str, Any], seed: int) -> tuple[Any, Callable[..., list[float]]]:
    """The very tasks that our side draws, in its order, and the env's reward for them."""
    import gymnasium
    from datasets import Dataset

    import skyrl_gym
    from skyrl_trainer.algorithms.samplers import UniformSampler
    from skyrl_trainer.data import load_samples

    env = gymnasium.make(skyrl_gym.resolve_env_id("text_math"))
    rows = []
    for sample in UniformSampler(load_samples([workload["data"]], seed=seed), seed).next_tasks(PROMPTS * 600):
        observation, _ = env.reset(seed=sample.seed, options=dict(sample.options))
        messages = [{"role": "user", "content": observation}]
        rows.append({"prompt": messages, "task_seed": sample.seed, "options": json.dumps(sample.options)})

    def env_reward(completions: list[Any], task_seed: list[int], options: list[str], **_: Any) -> list[float]:
        rewards = []
        for completion, number, chosen in zip(completions, task_seed, options, strict=True):
            env.reset(seed=number, options=json.loads(chosen))
            rewards.append(float(env.step(completion[0]["content"])[1]))
        return rewards

    return Dataset.from_list(rows), env_reward


def trl_config(workload: dict[str, Any], seed: int, learning_rate: float, patched: bool) -> Any:
    import torch
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="versus-trl-"),
        per_device_train_batch_size=TRL_MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * GENERATIONS // TRL_MICRO_BATCH,
        num_generations=GENERATIONS,
        max_completion_length=workload["max_tokens"],
        temperature=1.0,
        learning_rate=learning_rate,
        warmup_steps=WARMUP,
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=BETA2,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        max_steps=100_000,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=100_000,
        disable_tqdm=True,
        seed=seed,
        use_vllm=patched,
        vllm_mode="colocate",
        vllm_max_model_length=1024,
        model_init_kwargs={"dtype": torch.float32},
    )


def patch_trl_for_cpu() -> None:
    """vLLM's CPU backend refuses TRL's `load_weights` on a live model; reload layer by layer, as our own sync does."""
    import vllm
    from trl.generation import vllm_generation
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        initialize_layerwise_reload(runner.model)
        runner.model.load_weights(self._iter_named_params())
        finalize_layerwise_reload(runner.model, runner.model_config)
        layers = [layer for layer in runner.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embedding = next(layer for layer in layers if not isinstance(layer, ParallelLMHead))
        for head in layers:
            if isinstance(head, ParallelLMHead):
                head.weight = embedding.weight
                head.quant_method.process_weights_after_loading(head)
        self.llm.reset_prefix_cache()

    class Float32LLM(vllm.LLM):
        """dtype="auto" would turn the float32 policy into bfloat16; and the CPU's cache needs no warm-up."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**29, block_size=32)

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    vllm_generation.LLM = Float32LLM


# ---------------------------------------------------------------------------- the driver


class Side:
    """A process that takes steps on demand."""

    def __init__(self, name: str, workload: str, policy: str, seed: int, learning_rate: float, log: Path) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
        if name == "trl_patched":
            environment |= {
                "TORCH_COMPILE_DISABLE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
        command = [sys.executable, __file__, "--side", name, "--workload", workload, "--policy", policy]
        self.process = subprocess.Popen(
            [*command, "--seed", str(seed), "--learning-rate", str(learning_rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )
        self.log = log
        self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("REPLY "):
                return json.loads(line[len("REPLY ") :])
        raise SystemExit(f"{self.name} ended with {self.process.wait()}:\n{self.log.read_text()[-3000:]}")

    def steps(self, count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def make_policy(folder: Path, workload: dict[str, Any], seed: int) -> str:
    """A half-trained clone of the expert: something to learn is left."""
    random, cloned = folder / "random", folder / "cloned"
    trainer = [sys.executable, "-m", "skyrl_trainer"]
    data = [f"data.train_data={workload['data']}", f"trainer.seed={seed}"]
    cloning = {"num_demonstrations": workload["demonstrations"], **workload["clone"]}
    start = [f"trainer.policy.model.path={random}", f"trainer.policy.model.warmstart={json.dumps(cloning)}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*trainer, "init-policy", str(random), *data], check=True, **quiet)
    subprocess.run([*trainer, "warmstart", str(cloned), *data, *start], check=True, **quiet)
    return str(cloned)


def speed(workload: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Median seconds of a step of each side, measured in turn."""
    policy = make_policy(folder / workload, WORKLOADS[workload], seed=0)
    sides = [Side(name, workload, policy, 0, TIMED_RATE, folder / f"{workload}-{name}.log") for name in SIDES]
    steps = WORKLOADS[workload]["steps"]
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for side in sides:
        side.steps(steps)  # warm-up
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            answer = side.steps(steps)
            seconds[side.name].append(answer["seconds"] / steps)
            print(workload, round_, side.name, {k: v for k, v in answer.items() if k != "rewards"}, flush=True)
    for side in sides:
        side.close()
    return {name: statistics.median(values) for name, values in seconds.items()}


def rewards(seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Reward curves of our side and of TRL as it comes, from one policy on the short tasks, with the seconds."""
    policy = make_policy(folder / f"reward-{seed}", WORKLOADS["short"], seed)
    curves: dict[str, Any] = {}
    for name in ("ours", "trl"):
        side = Side(name, "short", policy, seed, LEARNING_RATE, folder / f"reward-{seed}-{name}.log")
        side.steps(1)
        answer = side.steps(steps)
        side.close()
        curves[name] = {"rewards": answer["rewards"], "seconds": answer["seconds"]}
        print("reward", seed, name, round(statistics.mean(answer["rewards"][-20:]), 3), answer["seconds"], flush=True)
    return curves


def seconds_to(curve: dict[str, Any], target: float) -> float | None:
    """Seconds until the mean reward of five steps reaches the target; None if it does not."""
    values = curve["rewards"]
    for end in range(5, len(values) + 1):
        if statistics.mean(values[end - 5 : end]) >= target:
            return curve["seconds"] * end / len(values)
    return None


SIDES = ("ours", "trl", "trl_patched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="of the reward comparison; 0 leaves it out")
    parser.add_argument("--reward-steps", type=int, default=60)
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="workloads to time")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--learning-rate", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "ours":
        return ours(WORKLOADS[args.workload], args.policy, args.seed, args.learning_rate)
    if args.side:
        return trl(WORKLOADS[args.workload], args.policy, args.seed, args.learning_rate, args.side == "trl_patched")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as name:
        folder = Path(name)
        for workload in args.only or WORKLOADS:
            (folder / workload).mkdir()
            step = speed(workload, args.rounds, folder)
            result[workload] = step["trl"] / step["ours"]
            result[f"patched_{workload}"] = step["trl_patched"] / step["ours"]
            result[f"seconds_{workload}"] = step
        curves = [rewards(seed, args.reward_steps, folder) for seed in range(args.seeds)]
    if curves:
        last = {side: [statistics.mean(c[side]["rewards"][-20:]) for c in curves] for side in ("ours", "trl")}
        target = 0.9 * min(statistics.mean(last["ours"]), statistics.mean(last["trl"]))
        times = {side: [seconds_to(c[side], target) for c in curves] for side in ("ours", "trl")}
        pairs = [t / o for t, o in zip(times["trl"], times["ours"], strict=True) if t and o]
        result["time_to_reward"] = statistics.median(pairs) if pairs else None
        result["last_rewards"] = last
        result["reward_target"] = target
    print(json.dumps(result))


if __name__ == "__main__":
    main()
