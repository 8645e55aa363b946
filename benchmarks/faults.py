"""The fault drill: episodes of many turns on the real stack while its processes are killed at random.

    python benchmarks/faults.py [--episodes 1000] [--env-kills 20] [--engine-kills 3] [--worker-kills 2] [--seed 0]

A tiny random policy on two vLLM engines plays a scripted env in steps of 100 episodes. Meanwhile SIGKILL goes to
EnvWorkers, engines and RolloutWorkers, and 2 % of the envs raise, hang, or hang where no Python code interrupts them.

The last line printed is one JSON object: every dispatched episode is `returned` once, none `duplicated` or `lost`;
`wrong` are those whose record is not what an undisturbed env answers to the same actions, whose tokens are not all of
the weights that the driver has given, or that failed without a fault of their own or EnvWorkers that died. The exit
code is 1 if one is not as it should be, if a wait went beyond its limit, or if there were fewer `kills` than asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import psutil

from skyrl_trainer.settings import TinyConfig
from skyrl_trainer.types import PromptBatch, Sample, Trajectory

FAULTS = ("raise", "hang", "hang in C", "raise", "hang")
STEP_EPISODES, TRIES, VERSION = 100, 4, 7
EPISODE_TIMEOUT, CLOSE_SECONDS = 180.0, 3.0


class Drill(gymnasium.Env[str, str]):
    """Answers with a number that all past actions decide; in step `at` it does what `do` says. EnvWorkers load this
    file as the run's environment.env_file, so it imports nothing heavy before `drill`."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.options, self.count, self.total = options or {}, 0, int(self.np_random.integers(1000))
        return f"start {self.total}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.total = (31 * self.total + sum(map(ord, action))) % 9973
        time.sleep(self.options["seconds"])
        fault = self.options["do"] if self.count == self.options["at"] else ""
        if fault == "raise":
            raise ValueError("no such move")
        while fault == "hang":
            time.sleep(0.01)
        if fault == "hang in C":
            max(itertools.repeat(0))
        over = self.count == self.options["turns"]
        return f"now {self.total}", float(over), over, False, {"success": over}


gymnasium.register("drill/Drill-v0", Drill)


def planned(args: argparse.Namespace) -> Counter[str]:
    """How many of each kind are to be killed."""
    return Counter(EnvWorker=args.env_kills, VLLMEngine=args.engine_kills, RolloutWorker=args.worker_kills)


def kill(args: argparse.Namespace, dispatched: set[str], over: threading.Event, kills: Counter[str]) -> None:
    """SIGKILL at random times to random processes of this drill, somewhat ahead of the share that was dispatched."""
    rng, todo = random.Random(f"kills {args.seed}"), list(planned(args).elements())
    rng.shuffle(todo)
    number = len(todo)
    while todo and not over.wait(rng.uniform(0.0, 2 * args.every)):
        ahead = kills.total() > 1.2 * len(dispatched) / args.episodes * number
        if not ahead and (victims := _processes(todo[-1])):  # none: all of them are being restarted
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(victims).kill()
                kills[todo.pop()] += 1


def _processes(name: str) -> list[psutil.Process]:
    """Actors of this class below this process, by Ray's title for them, `ray::EnvWorker.call_many`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [process] if "".join(process.cmdline()).startswith(f"ray::{name}") else []
    return found


def draw_samples(number: int, seed: int) -> list[Sample]:
    """Episodes of 3 to 6 turns; 2 % of the samples misbehave somewhere on the way."""
    rng = random.Random(seed)
    faults = dict(zip(rng.sample(range(number), max(1, round(0.02 * number))), itertools.cycle(FAULTS), strict=False))
    samples = []
    for index in range(number):
        turns = rng.randint(3, 6)
        options = {"turns": turns, "seconds": 0.1, "at": rng.randint(1, turns), "do": faults.get(index, "")}
        samples.append(Sample(f"drill:{index}", "drill/Drill-v0", seed + index, options, env_file=__file__))
    return samples


def is_right(trajectory: Trajectory) -> bool:
    """Not `wrong`; a failed episode's last turn may be without an answer."""
    options, failed = trajectory.sample.options, trajectory.stop_reason.failed
    env, turns = Drill(), options["turns"]
    env.reset(seed=trajectory.sample.seed, options=options | {"seconds": 0, "do": ""})
    answered = trajectory.turns[:-1] if failed else trajectory.turns
    same = all(env.step(turn.action)[:2] == (turn.observation, turn.reward) for turn in answered)
    versions = {version for turn in trajectory.turns for version in turn.weight_versions}
    explained = (
        options["do"] or "EnvWorkers died under this episode" in str(trajectory.error)
        if failed
        else len(answered) == turns
    )
    return same and versions <= {VERSION} and bool(explained)


def drill(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from skyrl_trainer.run.processes import Processes
    from skyrl_trainer.settings import Config
    from skyrl_trainer.tiny.init_policy import init_policy
    from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

    init_policy(folder / "policy", ["start 12", "now 345"] * 20, TinyConfig(), args.seed)
    generator = {
        "num_inference_engines": 2, "max_turns": 8, "max_completion_length": 16, "max_model_len": 512,
        "max_concurrency": STEP_EPISODES, "episode_timeout": EPISODE_TIMEOUT,
    }  # fmt: skip
    config = Config(generator=generator, environment={"num_workers": 4, "step_timeout": 1.0})
    samples, size = draw_samples(args.episodes // TRIES, args.seed), STEP_EPISODES // TRIES
    done, dispatched, kills, over = list[Trajectory](), set[str](), Counter[str](), threading.Event()
    killer = threading.Thread(target=kill, args=(args, dispatched, over, kills), daemon=True)
    with Processes(config, str(folder / "policy")) as processes:
        processes.wait_for_engines()
        learner = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype="float32")
        sync = SharedMemorySync(processes.engines, learner.named_parameters)
        sync.sync(VERSION)
        processes.watch.restore = sync.restore
        killer.start()
        for step, start in enumerate(range(0, len(samples), size)):
            batch = PromptBatch(step, samples[start : start + size], TRIES)
            dispatched |= {f"{step}/{i}/{j}" for i in range(len(batch.samples)) for j in range(TRIES)}
            done += processes.rollouts.run(batch).trajectories
            processes.watch.new_step()
            print(f"step {step}: {len(done)} episodes are back, {kills.total()} kills", flush=True)
        over.set()
        killer.join()
    names = Counter(trajectory.trajectory_id for trajectory in done)
    return {
        "dispatched": len(dispatched), "returned": len(done), "duplicated": len(done) - len(names),
        "lost": len(dispatched - set(names)), "wrong": sum(not is_right(trajectory) for trajectory in done),
        "kills": dict(kills), "replays": sum(int(trajectory.metrics.get("env_replays", 0)) for trajectory in done),
        "stop_reasons": dict(Counter(trajectory.stop_reason.value for trajectory in done)),
        "longest_wait": round(max(trajectory.metrics["seconds"] for trajectory in done), 1),
        "limit": EPISODE_TIMEOUT + CLOSE_SECONDS,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--env-kills", type=int, default=20)
    parser.add_argument("--engine-kills", type=int, default=3)
    parser.add_argument("--worker-kills", type=int, default=2)
    parser.add_argument("--every", type=float, default=3.0, help="seconds from one kill to the next, on average")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = drill(args, Path(folder))
    print(json.dumps(found))
    good = found["returned"] == found["dispatched"] and not found["duplicated"] + found["lost"] + found["wrong"]
    enough = Counter(found["kills"]) == planned(args)
    sys.exit(not (good and enough and found["longest_wait"] <= found["limit"]))


if __name__ == "__main__":
    main()
