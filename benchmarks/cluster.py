"""The cluster drill: episodes of many turns on several Ray nodes of this machine, which die and join meanwhile.

    python benchmarks/cluster.py [--nodes 4] [--minutes 10] [--every 30] [--engine vllm|transformers] [--seed 0]
    python benchmarks/cluster.py --learn [--nodes 4] [--every 30] [--seed 0]

Each node is a `ray start` with a core of its own: an engine each, EnvWorkers and RolloutWorkers among them. Every
`--every` seconds all processes of a node other than the driver's get SIGKILL, and `--join` seconds later a new node
joins. Steps of 64 episodes follow each other, each after a sync of other weights, until the time is over.

The last line printed is one JSON object: every dispatched episode is `returned` once, none `duplicated` or `lost`;
`wrong` are those whose record is not what an undisturbed env answers to the same actions; `failed` ended without an
answer. `equal`: after each sync every engine's checksum was the learner's, but for engines that were away. `sent`:
bytes that a node's object store took in per sync, of the weights' bytes. The exit code is 1 if one is not as it should.

`--learn` trains the quick start with vLLM through the command line, on a cluster that is left alone and on one whose
nodes are killed, from the same clone: `success` of held-out tasks at the end, `disturbed` and `undisturbed`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.faults import draw_samples, is_right

STEP_EPISODES, TRIES, VERSION = 64, 4, 7
STORE_BYTES = 2**27


class Nodes:
    """`with Nodes(cores) as nodes`: a cluster, its first node for the driver; `address` is what ray.address takes."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores

    def __enter__(self) -> Self:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.alive: list[subprocess.Popen[bytes]] = []
        self.joined = 0
        port = self.address.rpartition(":")[2]
        self._start(self._cores[0], "--head", "--include-dashboard=false", f"--port={port}")
        for _ in range(1200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", int(port)), 5).close()
                break
            time.sleep(0.1)
        for cores in self._cores[1:]:
            self.join(cores)
        self._wait(len(self._cores))
        return self

    def __exit__(self, *error: object) -> None:
        for node in reversed(self.alive):
            kill_all(node)
        self._folder.cleanup()

    def join(self, cores: int = 1, before_path: str = "") -> None:
        """One more; it needs some seconds. before_path: a folder where its Python looks first."""
        self._start(cores, f"--address={self.address}", before_path=before_path)

    def kill(self, number: int) -> None:
        """SIGKILL to all processes of one; 0 is the driver's."""
        kill_all(self.alive.pop(number))

    def _wait(self, count: int, seconds: float = 180.0) -> None:
        """Until the head knows so many nodes: a run that starts before has no room for its engines."""
        from ray._raylet import GcsClient

        head, deadline = GcsClient(address=self.address), time.monotonic() + seconds
        while len(head.get_all_node_info(timeout=10)) < count:
            assert time.monotonic() < deadline, f"the cluster has no {count} nodes after {seconds:.0f} s"
            time.sleep(0.2)

    def _start(self, cores: int, *options: str, before_path: str = "") -> None:
        self.joined += 1
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += [f"--num-cpus={cores}", f"--object-store-memory={STORE_BYTES}", f"--node-name=n{self.joined}"]
        command += [f"--temp-dir={self._folder.name}{'' if '--head' in options else f'/{self.joined}'}", *options]
        path = os.pathsep.join(filter(None, [before_path, os.environ.get("PYTHONPATH", "")]))
        quiet, env = subprocess.DEVNULL, {**os.environ, "PYTHONPATH": path}
        self.alive.append(subprocess.Popen(command, stdout=quiet, stderr=quiet, env=env, start_new_session=True))


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """With its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(each.pid, signal.SIGKILL)
    process.wait()


def disturb(args: argparse.Namespace, nodes: Nodes, over: threading.Event, kills: list[float]) -> None:
    """Kills a node now and then, and lets another join."""
    rng = random.Random(f"nodes {args.seed}")
    while not over.wait(args.every):
        nodes.kill(rng.randrange(1, len(nodes.alive)))
        kills.append(time.monotonic())
        over.wait(args.join)
        nodes.join()


def store_bytes() -> Iterator[tuple[str, int]]:
    """What was ever put into each node's object store, by the node's id."""
    import ray
    from ray._private.internal_api import node_stats

    for node in ray.nodes():
        if node["Alive"]:
            found = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            yield node["NodeID"], found.store_stats.cumulative_created_bytes


def config_of(args: argparse.Namespace, nodes: Nodes) -> Any:
    from skyrl_trainer.settings import Config

    generator = {
        "num_inference_engines": args.nodes, "max_turns": 8, "max_completion_length": 16, "max_model_len": 512,
        "max_concurrency": STEP_EPISODES, "episode_timeout": 300.0, "backend": args.engine,
    }  # fmt: skip
    plugin = str(Path(__file__).parents[1] / "examples/transformers_engine.py")
    return Config.model_validate({
        "generator": generator, "environment": {"num_workers": args.nodes, "step_timeout": 2.0},
        "ray": {"address": nodes.address},
        "trainer": {"algorithm": {"plugin_file": plugin if args.engine == "transformers" else None}},
    })  # fmt: skip


def drill(args: argparse.Namespace, folder: Path, nodes: Nodes) -> dict[str, Any]:
    import ray
    import torch
    from transformers import AutoModelForCausalLM

    from skyrl_trainer.run.processes import Processes
    from skyrl_trainer.settings import TinyConfig
    from skyrl_trainer.tiny.init_policy import init_policy
    from skyrl_trainer.types import PromptBatch, Trajectory
    from skyrl_trainer.weight_sync.shared_memory import SharedMemorySync

    init_policy(folder / "policy", ["start 12", "now 345"] * 20, TinyConfig(), args.seed)
    config = config_of(args, nodes)
    done, dispatched, kills, over = list[Trajectory](), set[str](), list[float](), threading.Event()
    equal, sent, away, used = [], [], 0, set[str]()
    with Processes(config, str(folder / "policy")) as processes:
        processes.wait_for_engines()
        learner = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype="float32")
        sync, watch, rollouts = SharedMemorySync(processes.engines, learner.named_parameters), processes.watch, None
        rollouts, sync.away, watch.restore = processes.rollouts, watch.away, sync.restore
        disturber = threading.Thread(target=disturb, args=(args, nodes, over, kills), daemon=True)
        start, step = time.monotonic(), 0
        while time.monotonic() < start + 60 * args.minutes or step < 3:
            with torch.no_grad():
                for parameter in learner.parameters():
                    parameter += 0.01 * torch.randn_like(parameter)
            before = dict(store_bytes()) if not kills else {}
            report = sync.sync(VERSION)
            took = {node: size - before[node] for node, size in store_bytes() if node in before} if not kills else {}
            sent += [size / report.bytes for size in took.values()]
            for seconds in (0.0, *[10.0] * 6):  # until Ray has noticed the deaths that the sync met
                watch.check(seconds)
                loaded = {c for i, c in enumerate(sync.report.engine_checksums) if i not in watch.away}
                if None not in loaded:
                    break
            equal.append(loaded == {report.checksum})  # of engines that came back in the check, too
            samples = draw_samples(STEP_EPISODES // TRIES, args.seed + step)
            for sample in samples:
                sample.options["do"] = ""
            if step == 2 and args.every:
                disturber.start()
            batch = PromptBatch(step, samples, TRIES)
            dispatched |= {f"{step}/{i}/{j}" for i in range(len(samples)) for j in range(TRIES)}
            done += rollouts.run(batch).trajectories
            away, step = max(away, len(watch.away)), step + 1
            used |= {*rollouts._env_nodes}
            print(f"step {step}: {len(done)} episodes, {len(kills)} kills, away {sorted(watch.away)}", flush=True)
        over.set()
        disturber.join() if args.every else None
        living = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}
    names = Counter(trajectory.trajectory_id for trajectory in done)
    return {
        "steps": step, "dispatched": len(dispatched), "returned": len(done), "duplicated": len(done) - len(names),
        "lost": len(dispatched - set(names)), "wrong": sum(not is_right(trajectory) for trajectory in done),
        "failed": sum(trajectory.stop_reason.failed for trajectory in done), "nodes_killed": len(kills),
        "nodes_with_env_workers": len(used), "replays": sum(int(t.metrics.get("env_replays", 0)) for t in done),
        "most_engines_away": away, "back": sorted({*range(args.nodes)} - watch.away), "equal": all(equal),
        "sent": round(max(sent), 3), "longest_episode": round(max(t.metrics["seconds"] for t in done), 1),
        "living": len(living), "seconds": round(time.monotonic() - start),
    }  # fmt: skip


def learn(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """A quick start on nodes of which one is killed now and then, or none."""
    from skyrl_trainer.report.history import read_metrics

    run, over, kills = folder / f"every-{args.every:g}", threading.Event(), list[float]()
    settings = {
        "ray.address": "", "trainer.run_dir": run, "trainer.deterministic": "false", "trainer.seed": args.seed,
        "generator.num_inference_engines": args.nodes, "environment.num_workers": args.nodes, "trainer.logger": "none",
    }  # fmt: skip
    if (clone := folder / "every-0/init/cloned").exists():
        settings["trainer.policy.model.path"] = clone
    with Nodes([1] * args.nodes) as nodes:
        settings["ray.address"] = nodes.address
        command = [sys.executable, "-m", "skyrl_trainer", "train", "quickstart"]
        began = time.monotonic()
        process = subprocess.Popen([*command, *(f"{name}={value}" for name, value in settings.items())])
        while args.every and not (run / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(1)
        disturber = threading.Thread(target=disturb, args=(args, nodes, over, kills), daemon=True)
        disturber.start() if args.every else None
        code = process.wait()
        over.set()
        disturber.join() if args.every else None
    rows = read_metrics(run)
    assert code == 0 and len({row["step"] for row in rows}) == len(rows), f"exit code {code}, {len(rows)} rows"
    found = {"success": rows[-1]["eval/success"], "first": rows[0]["eval/success"], "nodes_killed": len(kills)}
    found |= {"steps": len(rows) - 1, "failed": sum(row.get("failed", 0) for row in rows)}
    return found | {"seconds": round(time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one kill to the next; 0: none")
    parser.add_argument("--join", type=float, default=5.0, help="seconds from a kill to the next node")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learn", action="store_true", help="train a quick start with and without kills")
    args = parser.parse_args()
    if args.learn:
        alone = argparse.Namespace(**{**vars(args), "every": 0.0})
        with tempfile.TemporaryDirectory() as folder:
            runs = {"undisturbed": learn(alone, Path(folder)), "disturbed": learn(args, Path(folder))}
        print(json.dumps(runs))
        sys.exit(abs(runs["disturbed"]["success"] - runs["undisturbed"]["success"]) > 0.03)
    with tempfile.TemporaryDirectory() as folder, Nodes([1] * args.nodes) as nodes:
        found = drill(args, Path(folder), nodes)
    print(json.dumps(found))
    good = found["returned"] == found["dispatched"] and found["equal"] and found["sent"] <= 1.2
    sys.exit(not good or any(found[name] for name in ("duplicated", "lost", "wrong", "failed")))


if __name__ == "__main__":
    main()
