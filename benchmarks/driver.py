"""The driver's own time in a step, with 64 engines and 4,096 episodes in flight; and whether its memory stays flat.

    python -m benchmarks.driver [--engines 64] [--gpus 102] [--steps 4] [--tokens 400] [--profile]
    python -m benchmarks.driver --steps 200 --tokens 8      # memory: many steps with short answers

Real: the loop, the tries, Flow, Rollouts and its balance, rewards, the store on disk, metrics. **Fakes**: engines,
RolloutWorkers and envs are those of benchmarks/scale_sim.py (7B on H200s, 4 turns an episode, tools of 1 s in the
median) in simulated time, and the learner is its seconds; in place of Ray's channels stands pickle, and each call to
Ray is counted with 0.115 ms, as measured. The driver's time is its processor time, and passes on the simulated clock,
too; a share is of the step's seconds on that clock. Making what the fakes answer is not counted.

The last line is one JSON object: {"share": 0.03, "driver_seconds": 1.4, "step_seconds": 42.0, "ray_calls": 900,
"worker_share": 0.001, "microseconds_per_token": 0.5, "rss_growth_mib": 1.2}, means over the steps from the third on;
growth over the last half of them. `worker_share`: of a step, what a RolloutWorker spends on encoding what it played.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pickle
import pstats
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil

import skyrl_trainer.rollout.workers as workers
from benchmarks.scale_sim import Clock, Engine, Episode, gpu_place, lognormal
from skyrl_trainer.algorithms.rewards import Rewards
from skyrl_trainer.algorithms.samplers import UniformSampler
from skyrl_trainer.report.history import MetricsWriter, Spans, write_spans
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.store import JsonlTrajectoryStore, encoded
from skyrl_trainer.run.loop import Loop
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.run.tries import Tries
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, Sample, StepMetrics, Trajectory, Turn

RAY_CALL = 0.115e-3
"""Processor time of the caller: a third of a call, a wait and a get of an actor's answer; measured on two cores."""
TURNS = 4
DRAWS = random.Random(0)
IDS = [DRAWS.randrange(150_000) for _ in range(100_000)]
LOGPROBS = [-DRAWS.random() for _ in range(100_000)]


class World:
    """The simulated clock, on which the driver's processor time passes as well."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.own = self.encoding = 0.0
        """Processor seconds of the driver, and of what all RolloutWorkers encode."""
        self.calls = self.version = 0
        self._seen = time.process_time()

    @contextmanager
    def outside(self, calls: int = 0) -> Iterator[None]:
        """Not the driver: its time up to here is booked, and what happens within is not."""
        spent = time.process_time() - self._seen + calls * RAY_CALL
        self.calls += calls
        self.own += spent
        self.clock.run_to(self.clock.now + spent)
        yield
        self._seen = time.process_time()


class Worker:
    """In place of a RolloutWorker's handle."""

    def __init__(self, world: World, place: Any, tokens: int, slots: int) -> None:
        self.world, self.tokens, self.ended = world, tokens, list[Trajectory]()
        self.engine = Engine(world.clock, slots, place.step, place.prefill, self._over)
        self.playing: dict[str, Trajectory] = {}
        for name in ("start", "finished", "stop_token_ids"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _stop_token_ids(self) -> Any:
        return lambda: pickle.dumps((0,))

    def _start(self, engine: Any, env_workers: Any, share: list[Trajectory], how: Any) -> None:
        sent = pickle.dumps((share, how))
        with self.world.outside(calls=1):
            for trajectory in pickle.loads(sent)[0]:
                chance = random.Random(trajectory.seed)
                lengths = [max(1, round(lognormal(self.tokens, 6 * self.tokens, chance))) for _ in range(TURNS)]
                turns = deque((length, lognormal(1, 10, chance)) for length in lengths)
                episode = Episode(trajectory.trajectory_id, 0, turns, 1000)
                trajectory.turns = [self._turn(length, chance) for length in lengths]
                self.playing[trajectory.trajectory_id] = trajectory
                self.engine.begin(episode)

    def _turn(self, length: int, chance: random.Random) -> Turn:
        where, won = chance.randrange(len(IDS) - 50_000), float(chance.random() < 0.5)
        info = {"success": bool(won)}
        turn = Turn(IDS[:50], IDS[where : where + length], LOGPROBS[where : where + length], [], "x" * 4 * length)
        turn.observation, turn.reward, turn.info, turn.reward_parts = "y" * 200, won, info, {"correct": won}
        turn.tool_calls = [{"tool": "search", "args": {"query": "z" * 40}}]
        return turn

    def _over(self, episode: Episode) -> None:
        trajectory = self.playing.pop(episode.trajectory_id)
        for turn in trajectory.turns:
            turn.weight_versions = [self.world.version] * len(turn.output_ids)
        began = time.process_time()
        trajectory.encoded = encoded(trajectory)
        self.world.encoding += time.process_time() - began
        self.ended.append(trajectory)

    def _finished(self, at_least: int, timeout: float, started: Any) -> Any:
        """A reference: called, it gives the answer as bytes, or None where there is none yet."""
        limit = self.world.clock.now + timeout
        self.world.clock.at(limit, lambda: None)

        def answer() -> bytes | None:
            if len(self.ended) < at_least:
                return pickle.dumps([]) if self.world.clock.now >= limit else None
            ended, self.ended = self.ended, []
            return pickle.dumps(ended)

        self.world.calls += 1
        return answer


class FakeRay:
    """What rollout/workers.py asks of Ray."""

    def __init__(self, world: World, make: Any) -> None:
        self.world, self.make, self.answers = world, make, dict[Any, bytes]()

    def remote(self, cls: type[Any]) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: self.make()))

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        clock = self.world.clock
        with self.world.outside(calls=1):
            limit = clock.now + timeout
            clock.at(limit, lambda: None)
            while True:
                for ref in refs:
                    if (answer := ref()) is not None:
                        self.answers[ref] = answer
                        return [ref], [other for other in refs if other is not ref]
                if clock.now >= limit:
                    return [], refs
                clock.next()

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        self.world.calls += 1
        return pickle.loads(self.answers.pop(ref, None) or ref())


class FakeRun:
    """What a Loop needs of a Run: all that is the driver's is real."""

    enough = False

    def __init__(self, config: Config, args: argparse.Namespace) -> None:
        self.config, self.world, self.stack = config, World(), ExitStack()
        learners = args.gpus - args.engines
        self.place = gpu_place(args.gpus, learners)
        slots = config.generator.max_concurrency
        workers.ray = FakeRay(self.world, lambda: Worker(self.world, self.place, args.tokens, slots))  # type: ignore[attr-defined]
        workers.start_env_workers = lambda *_, **__: []  # type: ignore[assignment]
        self.table = SimpleNamespace(phase=lambda name: None, note=print)
        self.colocation = SimpleNamespace(sleep=lambda: None)
        self.alone = SimpleNamespace(options=SimpleNamespace(max_draws=1, overlong_filter=False))
        self.algorithm, self.rewards = self, Rewards(config, self.alone.options.overlong_filter)
        tasks = [Sample(f"task#{i}", "test/None-v0", i, {"split": "train"}) for i in range(100_000)]
        store = JsonlTrajectoryStore(config.run_path / "trajectories")
        self.tries = Tries(config, 1, UniformSampler(tasks, 0), self.rewards, store)
        self.tries.rollouts = self.rollouts = Rollouts(config, list(range(args.engines)), "")
        self.metrics = MetricsWriter(config.run_path)
        self.rows: list[dict[str, float]] = []
        self.tokens, self.marks = 0, (0.0, 0.0, 0)

    def resume(self) -> tuple[int, StepMetrics | None]:
        return 0, {}

    def publish(self, step: int) -> StepMetrics:
        with self.world.outside():
            self.world.version = step
            for worker in self.rollouts._workers:
                worker.engine.stand(self.place.publish, again=True)
        return {}

    def update(self, rewards: RewardBatch) -> StepMetrics:
        """As LearnerGroup.update: the batch goes to the learners, and the advantages come back."""
        sent = pickle.dumps(rewards)
        self.tokens = sum(each.num_output_tokens for each in rewards.trajectories)
        with self.world.outside(calls=2):
            advantages = [[[0.1] * len(turn.output_ids) for turn in each.turns] for each in rewards.trajectories]
            answer = pickle.dumps(advantages)
            del sent, advantages
            clock = self.world.clock
            clock.run_to(clock.now + self.place.compute(self.tokens))
        for trajectory, of_turns in zip(rewards.trajectories, pickle.loads(answer), strict=True):
            for turn, values in zip(trajectory.turns, of_turns, strict=True):
                turn.advantages = values
        return {"loss": 0.1}

    def evaluate(self, step: int) -> StepMetrics:
        return {}

    def log(self, step: int, metrics: StepMetrics, spans: Spans) -> None:
        self.metrics.write({"step": float(step), **metrics})
        write_spans(self.config.run_path, step, spans)
        with self.world.outside():
            marks, self.marks = self.marks, (self.world.own, self.world.clock.now, self.world.calls)
            own, seconds, calls = (new - old for new, old in zip(self.marks, marks, strict=True))
            rss = psutil.Process().memory_info().rss / 2**20
            row = {"driver_seconds": own, "step_seconds": seconds, "share": own / seconds, "ray_calls": calls}
            row["worker_share"] = self.world.encoding / len(self.rollouts._workers) / seconds
            self.world.encoding = 0.0
            self.rows.append(row | {"tokens": self.tokens, "rss_mib": rss})
            print(f"step {step}:", {key: round(value, 4) for key, value in self.rows[-1].items()}, flush=True)
            path = self.tries._store.path(step - 1)
            path.unlink(missing_ok=True)  # 200 steps need not stay on this disk

    def save(self, step: int, state: dict[str, Any]) -> None:
        json.dumps(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=102, help="the engines', and the learners'")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400, help="of a turn, in the median")
    parser.add_argument("--groups", type=int, default=256, help="of 8 episodes, a batch; twice as many in flight")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer: dict[str, Any] = {"run_dir": folder, "train_batch_size": args.groups, "max_steps": args.steps}
        trainer |= {"max_staleness": 1, "eval_interval": 0, "eval_before_train": False, "deterministic": False}
        config = Config.model_validate({"trainer": trainer, "generator": {"num_generations": 8}})
        run = FakeRun(config, args)
        gc.collect()
        gc.set_threshold(50_000, 20, 50)  # as a run does
        profile = cProfile.Profile()
        train = (
            partial(profile.runcall, Loop(run, StopSignal()).train) if args.profile else Loop(run, StopSignal()).train
        )  # type: ignore[arg-type]
        train()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    rows = run.rows[2:-1]  # the last has nothing in flight behind it
    names = ("share", "driver_seconds", "step_seconds", "ray_calls", "worker_share")  # steps are long and short in turn
    result = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    weighted = sum(row["worker_share"] * row["step_seconds"] for row in rows) / len(rows)
    result["share"] = result["driver_seconds"] / result["step_seconds"]
    result["worker_share"] = weighted / result["step_seconds"]
    result["microseconds_per_token"] = 1e6 * result["driver_seconds"] * len(rows) / sum(row["tokens"] for row in rows)
    result["rss_growth_mib"] = rows[-1]["rss_mib"] - rows[len(rows) // 2]["rss_mib"]
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
