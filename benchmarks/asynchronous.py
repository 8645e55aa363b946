"""What it brings that rollouts go on while the learner learns: `trainer.max_staleness=k` against 0.

    python benchmarks/asynchronous.py [--only tools long_tools cpu_bound balance] [--steps 10] [--out runs/asynchronous]
    python benchmarks/asynchronous.py --learning [--recipes quickstart tool_use] [--seeds 0 1 2] [--bounds 0 1 2 4 8]

Each pair trains through the real command line, one run after the other from the same clone, in the order 0, k, k, 0:
  tools        tool_use, each call of a tool waits (log-normal, median 0.3 s, 99 % below 3 s, no processor): k = 2
  long_tools   the same with a median of 1 s and 99 % below 10 s: k = 4
  cpu_bound    the quick start, where the engine and the learner share the processor: k = 1, nothing to gain
  balance      a rollout on two engines, one of which takes three times as long per step: groups that go to the engine
               which has a place, over groups that are divided evenly before the start
A figure is steps per hour over those at k = 0: from the end of the first step that has k others before it to the last
one after which tasks are still drawn. `of_limit`: the share that `tools` reaches of what the slower of the two would
do alone: the learner (its seconds of a step at k = 0), or the engine (a rollout of all these tasks at once).

`--learning`: held-out success at the end of each recipe by bound and seed, `OUT/learning.md`; a finished run is not run
again. The last line is one JSON object: {"tools": 1.7, "long_tools": 2.5, "of_limit": 0.9, "cpu_bound": 1.0, ...}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from skyrl_trainer.config import load_config
from skyrl_trainer.report.history import read_metrics, read_spans

ENV_FILE = '''
import math, random, time

import gymnasium
from skyrl_gym.envs.tool_use.env import ToolUseEnv


class Slow(ToolUseEnv):
    """Its tools wait for something else, as a search or a browser does."""

    metadata = {**ToolUseEnv.metadata, "waits": True}

    def reset(self, *, seed=None, options=None):
        self.delays = random.Random(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        answer = super().step(action)
        if answer[4].get("tool_calls"):
            time.sleep(self.delays.lognormvariate(math.log(MEDIAN), math.log(P99 / MEDIAN) / 2.326))
        return answer


gymnasium.register("slow/tool_use-v0", entry_point=Slow)
'''
UNEVEN = '''
import time

import skyrl_trainer.rollout.workers as workers
from skyrl_trainer.engine.actor import register_engine
from skyrl_trainer.engine.vllm_actor import VLLMEngine


@register_engine("uneven")
class Uneven(VLLMEngine):
    """The second engine, which has the odd seed, takes three times as long."""

    def _step(self):
        began = time.perf_counter()
        done = super()._step()
        if self.seed % 2:
            time.sleep(2 * (time.perf_counter() - began) + 0.002)
        return done


if STATIC:
    workers.places = lambda generator: (10**9, 10**9)
'''
QUIET = ("trainer.logger=none", "trainer.eval_interval=0", "trainer.eval_before_train=false", "trainer.ckpt_interval=0")
BOUNDS = [0, 1, 2, 4, 8]


def train(recipe: str, folder: Path, *settings: str) -> Path:
    """Through the command line; a run that is complete is left alone."""
    command = [sys.executable, "-m", "skyrl_trainer", "train", recipe, f"trainer.run_dir={folder.resolve()}"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.log", "ab") as log:
        subprocess.run([*command, "trainer.deterministic=false", *settings], check=True, stdout=log, stderr=log)
    return folder


def clone(recipe: str, out: Path, seed: int = 0) -> str:
    """The setting that starts a run from the recipe's clone, which is made if it is not there."""
    folder = out / f"{recipe}-clone{seed}"
    if not (folder / "init/cloned").exists():
        train(recipe, folder, *QUIET, "trainer.max_steps=0", f"trainer.seed={seed}")
    return f"trainer.policy.model.path={(folder / 'init/cloned').resolve()}"


def step_seconds(run: Path, bound: int) -> float:
    """Mean seconds of a step, where neither the beginning nor the end of the run is near."""
    ends = [max(span[1] for spans in step.values() if isinstance(spans, list) for span in spans)
            for step in read_spans(run)]  # fmt: skip
    ends = ends[1 + bound : len(ends) - bound]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def pair(recipe: str, name: str, bound: int, args: argparse.Namespace, *settings: str) -> tuple[float, Path]:
    """Steps per hour at this bound over those at 0, and a run at 0."""
    common = (*QUIET, clone(recipe, args.out), f"trainer.max_steps={args.steps + 2 * bound}", *settings)
    seconds: dict[int, list[float]] = {0: [], bound: []}
    for number, k in enumerate((0, bound, bound, 0)):
        run = train(recipe, args.out / f"{name}-{number}-k{k}", *common, f"trainer.max_staleness={k}")
        seconds[k].append(step_seconds(run, bound))
        print(f"{name}, max_staleness={k}: {seconds[k][-1]:.2f} s per step", flush=True)
    return mean(seconds[0]) / mean(seconds[bound]), args.out / f"{name}-3-k0"


def slow_tools(median: float, p99: float, args: argparse.Namespace) -> list[str]:
    path = (args.out / f"slow_{median:g}.py").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ENV_FILE.replace("MEDIAN", str(median)).replace("P99", str(p99)))
    still = "trainer.learning_rate=1e-7"  # the same policy throughout: a better or worse one calls its tools otherwise
    data = [f"data.{split}_data=['slow/tool_use-v0?split={split}&difficulty=1']" for split in ("train", "val")]
    return [f"environment.env_file={path}", "environment.step_timeout=60", still, *data]


def rollout_seconds(recipe: str, tasks: int, *settings: str) -> float:
    """Of a rollout of so many tasks at once, without a learner."""
    from skyrl_trainer.run.guardian import guarded
    from skyrl_trainer.run.held_out import tasks as all_tasks
    from skyrl_trainer.run.processes import Processes
    from skyrl_trainer.types import PromptBatch

    config = load_config(recipe, ["trainer.deterministic=false", *settings])
    samples = all_tasks(config, config.data.train_data)
    with guarded(), Processes(config, config.trainer.policy.model.path) as processes:
        processes.wait_for_engines()
        size = config.generator.num_generations
        processes.rollouts.run(PromptBatch(0, [samples[i] for i in range(4)], size))  # everything is warm
        began = time.perf_counter()
        processes.rollouts.run(PromptBatch(1, [samples[i] for i in range(tasks)], size))
        return time.perf_counter() - began


def tools(args: argparse.Namespace) -> dict[str, float]:
    settings = slow_tools(0.3, 3.0, args)
    ratio, run = pair("tool_use", "tools", 2, args, *settings)
    rows = read_metrics(run)[1:]
    learner = mean(row["time/train"] + row["time/sync"] for row in rows)
    batch = load_config("tool_use", []).trainer.train_batch_size
    engine = rollout_seconds("tool_use", 4 * batch, clone("tool_use", args.out), *settings) / 4
    alone = max(learner, engine)
    reached = mean(step_seconds(args.out / f"tools-{number}-k2", 2) for number in (1, 2))
    print(f"alone: learner {learner:.2f} s per step, engine {engine:.2f} s; together {reached:.2f} s", flush=True)
    return {"tools": ratio, "of_limit": alone / reached}


def long_tools(args: argparse.Namespace) -> dict[str, float]:
    return {"long_tools": pair("tool_use", "long_tools", 4, args, *slow_tools(1.0, 10.0, args))[0]}


def cpu_bound(args: argparse.Namespace) -> dict[str, float]:
    return {"cpu_bound": pair("quickstart", "cpu_bound", 1, args)[0]}


def balance(args: argparse.Namespace) -> dict[str, float]:
    """In a process per rollout: the plug-in file of one would be seen by the other."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    model = clone("quickstart", args.out)
    for static in (True, False, False, True):
        path = (args.out / f"uneven_{static}.py").resolve()
        path.write_text(UNEVEN.replace("STATIC", str(static)))
        settings = [model, "generator.num_inference_engines=2", "generator.backend=uneven"]
        settings += [f"trainer.algorithm.plugin_file={path}", "generator.max_concurrency=16"]
        code = f"from benchmarks.asynchronous import rollout_seconds as r; print(r('quickstart', 192, *{settings!r}))"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        seconds[static].append(float(done.stdout.splitlines()[-1]))
        print(f"{'even shares' if static else 'by place'}: {seconds[static][-1]:.2f} s", flush=True)
    return {"balance": mean(seconds[True]) / mean(seconds[False])}


def learning(args: argparse.Namespace) -> dict[str, Any]:
    """Final held-out success by recipe and bound, a number per seed."""
    found: dict[str, dict[int, list[float]]] = {}
    lines = ["| recipe | " + " | ".join(f"k = {k}" for k in args.bounds) + " |", "|---" * (len(args.bounds) + 1) + "|"]
    for recipe in args.recipes:
        for seed in args.seeds:
            start = clone(recipe, args.out, seed)
            for k in args.bounds:
                folder = args.out / "learning" / f"{recipe}-k{k}-seed{seed}"
                settings = ("trainer.logger=none", f"trainer.seed={seed}", f"trainer.max_staleness={k}", start)
                final = read_metrics(train(recipe, folder, *settings))[-1]["eval/success"]
                found.setdefault(recipe, {}).setdefault(k, []).append(final)
                print(f"{recipe}, seed {seed}, max_staleness={k}: {final:.3f}", flush=True)
        cells = (", ".join(f"{x:.3f}" for x in values) + f" ({mean(values):.3f})" for values in found[recipe].values())
        lines.append(f"| {recipe} | " + " | ".join(cells) + " |")
    (args.out / "learning.md").write_text("\n".join(lines) + "\n")
    return found


FIGURES = {"tools": tools, "long_tools": long_tools, "cpu_bound": cpu_bound, "balance": balance}
ORDER = ("tools", "long_tools", "of_limit", "cpu_bound", "balance")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--out", type=Path, default=Path("runs/asynchronous"))
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "tool_use"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.learning:
        print(json.dumps(learning(args)))
        return
    found: dict[str, float] = {}
    for name in args.only:
        found |= FIGURES[name](args)
    print(json.dumps({name: round(found[name], 3) for name in ORDER if name in found}))


if __name__ == "__main__":
    main()
