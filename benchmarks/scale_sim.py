"""How the loop would do on 8, 64 and 1,024 GPUs, by a simulation with measured constants: nobody here has run it there.

    python benchmarks/scale_sim.py [--gpus 8 64 1024] [--bounds 0 1 2 4] [--steps 8] [--picture docs/scale.png]

Discrete events. Who may be drawn and learned from is decided by rollout/flow.py, which engine gets a group by
rollout/workers.py: the code of real runs. Simulated are engines (each request of one gets the same share; a decode step
reads the weights and every context once), tools, the learner, publications and the driver's own time. At k = 0 engines
and learners take turns on all GPUs; at k > 0 they have GPUs of their own, in the best of four splits.

Two workloads of a 7B model: `agents`, episodes of 4 turns with tools that wait, and `reasoning`, one long answer. The
batch grows with the GPUs (weak scaling: 16 episodes a GPU) or is always 2,048 episodes (strong).

First the simulation is held against what was measured (docs/figures.md: two cores, an H200, an H100); constants fitted
to a row say so. The last line is one JSON object: errors, and seconds of a step by workload, scaling, GPUs and k.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from skyrl_trainer.dry_run.limits import CARDS, ModelShape
from skyrl_trainer.rollout.episode import How
from skyrl_trainer.rollout.flow import Flow
from skyrl_trainer.rollout.workers import Workers
from skyrl_trainer.types import SamplingOptions

CARD = CARDS["H200"]
QWEN_7B = ModelShape.of(
    {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
     "intermediate_size": 18_944, "vocab_size": 152_064, "tie_word_embeddings": False}, "bfloat16"
)  # fmt: skip
QWEN_1_5B = ModelShape.of(
    {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
     "intermediate_size": 8960, "vocab_size": 151_936, "tie_word_embeddings": True}, "bfloat16"
)  # fmt: skip
"""The model whose learner and engine were measured."""
LEARNER = 43_500.0
"""Useful tokens/s of that learner on one H200, full fine-tuning; measured."""
DRIVER = 1.0e-6, 0.4e-3
"""Seconds of the driver's own for a sampled token and for an episode; measured (benchmarks/driver.py)."""
BANDWIDTH_USE, PREFILL_USE, DECODE_STEP = 0.6, 0.5, 2e-3
"""Assumed, and held against an H200: share of the memory's bytes/s while decoding, of FLOP/s in prefill, seconds of an
engine's step besides."""
NETWORK, SYNC = 50e9, 0.5
"""Assumed: bytes/s between machines for each GPU, seconds of a publication besides the bytes."""
SLEEP = 0.73
"""Seconds of an engine's sleep and waking; measured (7B on one H100)."""
MICRO_BATCH = 16_384
"""Tokens for which the learners gather their weights once and give back gradients."""
FLOP_USE = 6 * QWEN_1_5B.active * LEARNER / CARD.flops
ASSUMPTIONS = f"""\
measured: the learner uses {FLOP_USE:.2f} of the FLOP/s (one H200, 1.5B, attention left out); the driver takes
  {DRIVER[0] * 1e6:g} us a token and {DRIVER[1] * 1e3:g} ms an episode; sleep and wake take {SLEEP} s (7B, one H100)
data sheet, H200: {CARD.bandwidth / 1e12:g} TB/s, {CARD.flops / 1e12:g} TFLOP/s, NVLink {CARD.link / 1e9:g} GB/s
assumed, and compared below: an engine reaches {BANDWIDTH_USE} of the bandwidth, {PREFILL_USE} of the FLOP/s in prefill,
  and takes {DECODE_STEP * 1e3:g} ms a step besides
assumed: {NETWORK / 1e9:g} GB/s between machines for each GPU; a publication costs
  its bytes and {SYNC} s; learners have equal loads, and gathering weights hides behind
  computing where it takes less time; lengths are log-normal; no group is refused and nothing fails; a context in
  flight is prefilled again at each publication, and prefixes are cached else"""


class Clock:
    """Simulated time, in seconds, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()

    def at(self, when: float, call: Callable[[], object]) -> None:
        heappush(self._due, (when, next(self._serial), call))

    def next(self) -> None:
        self.now, _, call = heappop(self._due)
        call()

    def run_to(self, when: float) -> None:
        while self._due and self._due[0][0] <= when:
            self.next()
        self.now = when


@dataclass
class Episode:
    trajectory_id: str
    group: int
    turns: deque[tuple[int, float]]
    """Tokens to sample, and seconds that the env takes then."""
    context: int
    tokens: int = 0


@dataclass
class Engine:
    """All live requests get one token a step; `step(live, context)` is the seconds of one."""

    clock: Clock
    slots: int
    step: Callable[[int, float], float]
    prefill: float
    """Seconds of a token."""
    over: Callable[[Episode], object]
    live: list[tuple[float, int, Episode]] = field(default_factory=list)
    waiting: deque[Episode] = field(default_factory=deque)
    held: int = 0
    asleep: bool = False
    done: float = 0.0
    """Tokens that a request has sampled that lives since the beginning."""
    stall: float = 0.0
    """Seconds that stand before the next token: prefill, publications."""
    context: float = 0.0
    seen: float = 0.0
    plan: int = 0

    def begin(self, episode: Episode) -> None:
        if self.held == self.slots:
            self.waiting.append(episode)
            return
        self.held += 1
        self._submit(episode, episode.context)

    def stand(self, seconds: float, again: bool = False) -> None:
        """A publication: nothing is sampled, and then what was in flight is prefilled (`again`)."""
        self._advance()
        self.stall += seconds + (self.context * self.prefill if again else 0.0)
        self._plan()

    def sleep(self, asleep: bool) -> None:
        self._advance()
        self.asleep = asleep
        self._plan()

    def _advance(self) -> None:
        passed, self.seen = self.clock.now - self.seen, self.clock.now
        if not self.asleep:
            stood = min(self.stall, passed)
            self.stall -= stood
            if self.live:
                self.done += (passed - stood) / self.step(len(self.live), self.context)

    def _plan(self) -> None:
        self.plan += 1
        if self.live and not self.asleep:
            left = max(0.0, self.live[0][0] - self.done) * self.step(len(self.live), self.context)
            self.clock.at(self.clock.now + self.stall + left, partial(self._sampled, self.plan))

    def _submit(self, episode: Episode, new: int) -> None:
        """new: tokens to be prefilled."""
        self._advance()
        self.stall += new * self.prefill
        self.context += episode.context + episode.turns[0][0] / 2  # half of an answer is there, in the mean
        heappush(self.live, (self.done + episode.turns[0][0], self.plan, episode))
        self._plan()

    def _sampled(self, plan: int) -> None:
        if plan != self.plan:
            return
        self._advance()
        while self.live and self.live[0][0] <= self.done + 1e-6:
            episode = heappop(self.live)[2]
            tokens, delay = episode.turns.popleft()
            self.context -= episode.context + tokens / 2
            episode.tokens += tokens
            episode.context += tokens
            if not episode.turns:
                self._release()
            self.clock.at(self.clock.now + delay, partial(self._answered, episode))
        self._plan()

    def _answered(self, episode: Episode) -> None:
        if episode.turns:
            self._submit(episode, 0)
        else:
            self.over(episode)

    def _release(self) -> None:
        self.held -= 1
        if self.waiting:
            self.held += 1
            episode = self.waiting.popleft()
            self._submit(episode, episode.context)


class Dispatch(Workers):
    """The real law by which engines get groups, over simulated ones."""

    def __init__(self, engines: list[Engine], places: int, even: bool = False) -> None:
        """even: shares that are made before the start."""
        self.engines, self._workers, self._present = engines, engines, list(range(len(engines)))
        self._in_play: list[dict[str, Any]] = [{} for _ in engines]
        self._waiting: deque[Any] = deque()
        self._places = 10**9 if even else places
        self._ended: dict[str, Any] = {}
        self._at: dict[str, int] = {}

    def start(self, groups: list[Any]) -> None:
        self._start(groups, How(SamplingOptions(1), False, False, False))

    def _send(self, index: int, share: list[Any], how: How) -> None:
        for episode in share:
            self._at[episode.trajectory_id] = index
            self.engines[index].begin(episode)

    def over(self, episode: Episode) -> None:
        del self._in_play[self._at.pop(episode.trajectory_id)][episode.trajectory_id]
        self._hand_out(self._waiting, self._places)


@dataclass
class Place:
    """What the loop runs on."""

    engines: int
    slots: int
    step: Callable[[int, float], float]
    learn: Callable[[int, int], float]
    """Seconds of an update and what the driver does with it, of so many tokens in so many episodes."""
    publish: float
    prefill: float = 0.0
    turns: bool = True
    """Engines and learners take turns on the same devices."""
    slow: dict[int, float] = field(default_factory=dict)
    compute: Callable[[int], float] = lambda tokens: 0.0
    """Of `learn`, the learners' part."""


def simulate(
    place: Place, draw: Callable[[int], list[Episode]], groups: int, k: int, steps: int, even: bool = False
) -> float:
    """Seconds of a step: from the first that has k others before it to the last after which tasks are drawn."""
    clock, flow, ends = Clock(), Flow(groups, k, steps + 2 * k + 1, 1), [0.0]
    playing: dict[int, list[Episode]] = {}
    open_: dict[int, int] = {}

    def over(episode: Episode) -> None:
        dispatch.over(episode)
        open_[episode.group] -= 1
        if not open_[episode.group]:
            flow.finish(episode.group, playing.pop(episode.group), True)  # type: ignore[arg-type]

    def pace(index: int) -> Callable[[int, float], float]:
        return lambda live, context: place.slow.get(index, 1.0) * place.step(live, context)

    engines = [Engine(clock, place.slots, pace(i), place.prefill, over) for i in range(place.engines)]
    dispatch = Dispatch(engines, 2 * place.slots, even)
    for version in range(flow.steps):
        while True:
            new = {number: draw(number) for number in flow.draw(flow.room(version))}
            playing |= new
            open_ |= {number: len(group) for number, group in new.items()}
            dispatch.start(list(new.values()))
            finished = len(playing)
            if (taken := flow.take(version)) is not None:
                break
            while len(playing) == finished:
                clock.next()
        batch: list[Episode] = [episode for group in taken.values() for episode in group]  # type: ignore[misc]
        for engine in engines if place.turns else ():
            engine.sleep(True)
        clock.run_to(clock.now + place.learn(sum(episode.tokens for episode in batch), len(batch)))
        for engine in engines:
            engine.sleep(False)
            engine.stand(place.publish, again=True)
        ends.append(clock.now)
    ends = ends[1 + k : len(ends) - k]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def lognormal(median: float, p99: float, chance: random.Random) -> float:
    return chance.lognormvariate(math.log(median), math.log(p99 / median) / 2.326)


# What was measured on two cores: tool_use, 32 groups of 8 (256 at a time), a call of 24 tokens, an answer of 12.

CALL, ANSWER = 24, 12
TWO_CORES = 2.9, 4.65
"""Seconds of the learner's step with both cores, measured; beside an engine, fitted to `tools, k = 2`."""
ALONE = 3.1
"""Seconds of a step's episodes for the engine alone, four steps' at once; measured, and the engine's speed follows."""


def slow_tools(median: float, p99: float) -> Callable[[int], list[Episode]]:
    """The tries of a task wait alike: its seed is the env's."""

    def draw(number: int) -> list[Episode]:
        wait = lognormal(median, p99, random.Random(number))
        return [Episode(f"{number}/{i}", number, deque([(CALL, wait), (ANSWER, 0.0)]), 100) for i in range(8)]

    return draw


def two_cores(token: float, k: int) -> Place:
    """token: seconds of one; a CPU's step is as long as its batch is large."""
    return Place(1, 256, lambda live, _: live * token, lambda *_: TWO_CORES[bool(k)], 0.0, turns=k == 0)


def engine_speed() -> float:
    """Seconds of a token, so that four steps' episodes take ALONE a step: by bisection."""
    low, high = 1e-5, 1e-2
    for _ in range(30):
        token = math.sqrt(low * high)
        place = two_cores(token, 0)
        place.learn = lambda *_: 0.0
        alone = simulate(place, slow_tools(0.3, 3.0), 128, 0, 3) / 4
        low, high = (low, token) if alone > ALONE else (token, high)
    return token


def balance(even: bool) -> float:
    """A rollout of 192 tasks on two engines with 16 places, the second three times slower."""

    def draw(number: int) -> list[Episode]:
        length = random.Random(number).randint(6, 8)
        return [Episode(f"{number}/{i}", number, deque([(length, 0.0)]), 30) for i in range(8)]

    place = Place(2, 32, lambda live, _: 1e-3 + 1e-4 * live, lambda *_: 0.0, 0.0, slow={1: 3.0})
    return simulate(place, draw, 192, 0, 4, even)


def validation() -> list[tuple[str, float, float, str]]:
    """(what, simulated, measured, how it was used)."""
    token, rows = engine_speed(), []
    seconds: dict[tuple[str, int], float] = {}
    cases = (
        ("tools", 0.3, 0, 6.75),
        ("tools", 0.3, 2, 4.65),
        ("long_tools", 1.0, 0, 11.2),
        ("long_tools", 1.0, 4, 4.4),
    )
    for name, median, k, measured in cases:
        seconds[name, k] = simulate(two_cores(token, k), slow_tools(median, 10 * median), 32, k, 40)
        used = "fitted: the learner beside an engine" if (name, k) == ("tools", 2) else "predicted"
        rows.append((f"2 cores, {name}, k = {k}, seconds of a step", seconds[name, k], measured, used))
    rows.append(("the same, tools: speed-up", seconds["tools", 0] / seconds["tools", 2], 1.47, "predicted"))
    rows.append(
        ("the same, long_tools: speed-up", seconds["long_tools", 0] / seconds["long_tools", 4], 2.56, "predicted")
    )
    rows.append(
        ("two engines, one three times slower: by place over even", balance(True) / balance(False), 1.86, "predicted")
    )
    rows.append(("H200, engine of 1.5B, 256 answers of 512 tokens, seconds", rollout(1, 512, 1.0), 3.72, "predicted"))
    rows.append(("H200, the same in a step of two turns, seconds", rollout(2, 957, 1 / 8), 6.52, "predicted"))
    rows.append(("H100, whose FLOP/s are the H200's: learner of 1.5B, tokens/s", LEARNER, 42_290, "predicted"))
    rows.append(("H200, LoRA of rank 32, tokens/s, at equal FLOP use", LEARNER * 6 / 4, 60_100, "predicted"))
    return rows


def rollout(turns: int, prompt: int, read: float) -> float:
    """Seconds of 256 episodes that sample 512 tokens a turn. read: share of the prompts that is in no cache."""

    def draw(number: int) -> list[Episode]:
        return [Episode(str(number), number, deque([(512, 0.0)] * turns), prompt)]

    place = Place(1, 256, partial(decode_step, shape=QWEN_1_5B), lambda *_: 0.0, 0.0)
    place.prefill = read * 2 * QWEN_1_5B.active / (CARD.flops * PREFILL_USE)
    return simulate(place, draw, 256, 0, 3)


# GPUs.


def agents(number: int) -> list[Episode]:
    """4 turns of 400 tokens in the median, tools of 1 s in the median and over 10 s once in a hundred."""
    chance = random.Random(number)

    def turn() -> tuple[int, float]:
        return math.ceil(lognormal(400, 2400, chance)), lognormal(1, 10, chance)

    return [Episode(f"{number}/{i}", number, deque(turn() for _ in range(4)), 1000) for i in range(8)]


def reasoning(number: int) -> list[Episode]:
    """One answer of 2,000 tokens in the median, over 16,000 once in a hundred; at most 32,000."""
    chance = random.Random(number)
    lengths = (min(32_000, math.ceil(lognormal(2000, 16_000, chance))) for _ in range(8))
    return [Episode(f"{number}/{i}", number, deque([(length, 0.0)]), 300) for i, length in enumerate(lengths)]


WORKLOADS = {"agents": agents, "reasoning": reasoning}
SPLITS = (0.25, 0.375, 0.5, 0.625)
"""Shares of the GPUs that learn, at k > 0."""
SEARCHED = 64
"""GPUs beyond which the share is that of the largest number below: a simulation takes minutes there."""


def decode_step(live: int, context: float, shape: ModelShape = QWEN_7B) -> float:
    """Seconds: bytes of the weights and of every context, or FLOP, whatever takes longer (dry_run/limits.py)."""
    reading = (shape.active * shape.width + context * shape.kv_bytes) / (CARD.bandwidth * BANDWIDTH_USE)
    return max(reading, 2 * shape.active * live / CARD.flops) + DECODE_STEP


def update_seconds(gpus: int, tokens: int) -> float:
    """Of the learners alone."""
    shape, flops = QWEN_7B, 6 * QWEN_1_5B.active * LEARNER
    computing = 6 * shape.active * tokens / gpus / flops
    link = CARD.link if gpus <= 8 else NETWORK
    gathering = math.ceil(tokens / gpus / MICRO_BATCH) * 3 * shape.parameters * shape.width / link
    return max(computing, gathering)


def gpu_place(gpus: int, learners: int) -> Place:
    """learners: 0 for all, in turn with the engines."""
    shape = QWEN_7B
    weights = shape.parameters * shape.width
    publish = SYNC + (weights / (CARD.link if gpus <= 8 else NETWORK) if learners else SLEEP + 2 * weights / CARD.host)
    compute = partial(update_seconds, learners or gpus)

    def learn(tokens: int, episodes: int) -> float:
        return compute(tokens) + DRIVER[0] * tokens + DRIVER[1] * episodes

    prefill = 2 * shape.active / (CARD.flops * PREFILL_USE)
    return Place(gpus - learners, 256, decode_step, learn, publish, prefill, turns=not learners, compute=compute)


def scaled(args: argparse.Namespace) -> Iterator[tuple[str, str, int, int, float, float]]:
    """(workload, scaling, GPUs, k, seconds of a step, share of the GPUs that learn)."""
    for workload, draw in WORKLOADS.items():
        for scaling in ("weak", "strong"):
            best: dict[int, float] = {k: 0.5 for k in args.bounds}
            for gpus in sorted(args.gpus):
                groups = 2 * gpus if scaling == "weak" else 256
                for k in args.bounds:
                    shares = (0.0,) if not k else SPLITS if gpus <= SEARCHED else (best[k],)
                    places = [(gpu_place(gpus, int(gpus * share)), share) for share in shares]
                    seconds, share = min(
                        (simulate(place, draw, groups, k, args.steps), share) for place, share in places
                    )
                    best[k] = share
                    yield workload, scaling, gpus, k, seconds, share


def picture(found: dict[tuple[str, str, int, int], float], args: argparse.Namespace) -> None:
    """Episodes per second and GPU, by GPUs, a line a bound."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    panels = [(workload, scaling) for workload in WORKLOADS for scaling in ("weak", "strong")]
    for axis, (workload, scaling) in zip(axes, panels, strict=True):
        for k in args.bounds:
            per_gpu = [
                (16 if scaling == "weak" else 2048 / gpus) / found[workload, scaling, gpus, k] for gpus in args.gpus
            ]
            axis.plot(range(len(args.gpus)), per_gpu, marker="o", label=f"k = {k}")
        axis.set_xticks(range(len(args.gpus)), [f"{gpus:,}" for gpus in args.gpus])
        axis.set_ylim(bottom=0)
        axis.set_title(f"{workload}, {'16 episodes a GPU' if scaling == 'weak' else '2,048 episodes'}", fontsize=10)
        axis.set_xlabel("GPUs")
    axes[0].set_ylabel("episodes per second and GPU")
    axes[0].legend(frameon=False)
    figure.savefig(args.picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4], metavar="K")
    parser.add_argument("--steps", type=int, default=6, help="that are counted")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(ASSUMPTIONS + "\n\n| what | simulated | measured | error | constant |\n|---|---|---|---|---|")
    errors = {}
    for what, simulated, measured, used in validation():
        errors[what] = simulated / measured - 1
        print(f"| {what} | {simulated:,.3g} | {measured:,.3g} | {errors[what]:+.0%} | {used} |", flush=True)
    print("\n| workload, scaling | GPUs | k | seconds of a step | over k = 0 | GPUs that learn |\n" + "|---" * 6 + "|")
    found: dict[tuple[str, str, int, int], float] = {}
    for workload, scaling, gpus, k, seconds, share in scaled(args):
        found[workload, scaling, gpus, k] = seconds
        gain = found.get((workload, scaling, gpus, 0), math.nan) / seconds
        print(f"| {workload}, {scaling} | {gpus:,} | {k} | {seconds:.1f} | {gain:.2f} | {share or 'all'} |", flush=True)
    if args.picture:
        picture(found, args)
    predicted = mean(abs(error) for what, error in errors.items() if what.startswith(("2 cores", "the same", "two")))
    steps = {"/".join(map(str, key)): round(value, 2) for key, value in found.items()}
    print(
        json.dumps(
            {
                "mean_error_2_cores": round(predicted, 3),
                "errors": {w: round(e, 3) for w, e in errors.items()},
                "step_seconds": steps,
            }
        )
    )


if __name__ == "__main__":
    main()
