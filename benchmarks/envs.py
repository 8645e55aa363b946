"""How fast the environments are, in one process, through gym.make with its default wrappers.

    python benchmarks/envs.py            # ours
    python benchmarks/envs.py --peers    # also GEM, reasoning-gym and TextArena, from the index into a throw-away venv

Steps per second of whole episodes, resets included, over all difficulties; the expert's actions are worked out before
the clock starts, and episodes that call python_exec are left out. python_exec is measured by itself, interleaved with
an unprotected `python -I -c` of the same code. `waiting` is the training side's: 256 envs of one EnvWorker of which
every step waits a second, in seconds a turn (the median of 5). The last line is one JSON object: {"<env>": steps/s,
..., "python_exec": calls/s, "python_exec_over_bare": ratio, "waiting": seconds, "peers": {...}}; null is what is not
there or was not asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, SECONDS, EPISODES = 5, 0.3, 200
CODE = "print(sum(i * i for i in range(10)))"
ROW = {"prompt": [{"role": "user", "content": "How many are 4 dozen?"}], "reward_spec": {"ground_truth": "48"}}
PROMPT = "skyrl/prompt-v0"  # has no expert: any answer ends its episode
PROGRAM = {"text": "Double x.", "code": "def f(x):\n    return 2 * x", "test_list": ["assert f(2) == 4"]}
WAITING = """
import time

import gymnasium


class Waiting(gymnasium.Env):
    metadata = {"render_modes": [], "waits": True}

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        time.sleep(1.0)
        return action, 0.0, False, False, {}


gymnasium.register("bench/Waiting-v0", Waiting)
"""
PEERS = {"gem": ["gem-llm", "datasets", "pylatexenc"], "reasoning_gym": ["reasoning-gym"], "textarena": ["textarena"]}


def rate(work: Callable[[], int | None]) -> float:
    """How much `work` does per second (None is once): the median of rounds, after one to warm up."""
    rates = []
    for _ in range(ROUNDS + 1):
        count, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < SECONDS:
            count += work() or 1
        rates.append(count / seconds)
    return statistics.median(rates[1:])


def steps_per_second(env_id: str) -> float:
    import gymnasium as gym

    env = gym.make(env_id)
    levels = env.unwrapped.choices.get("difficulty", (None,))
    plans: list[tuple[dict[str, Any], list[str]]] = []
    for seed in range(EPISODES):
        options: dict[str, Any] = {} if levels[0] is None else {"difficulty": levels[seed % len(levels)]}
        try:
            options["task_id"] = env.reset(seed=seed, options=options)[1]["task_id"]
        except ValueError:  # played from dataset rows
            options["task"] = PROGRAM if "code" in env_id else ROW
            env.reset(options=options)
        actions, ended = [], False
        while not ended:
            actions.append("Four." if env_id == PROMPT else env.unwrapped.expert_action())
            ended = any(env.step(actions[-1])[2:4])
        if not any("python_exec" in action for action in actions):
            plans.append((options, actions))

    def one_pass() -> int:
        for options, actions in plans:
            env.reset(options=options)
            for action in actions:
                env.step(action)
        return sum(len(actions) for _, actions in plans)

    return rate(one_pass)


def python_exec() -> tuple[float | None, float | None]:
    """Calls per second in the sandbox, and how many times that is the rate of a bare interpreter."""
    try:
        from skyrl_gym.tools.python_exec import Sandbox
    except ImportError:
        return None, None
    sandbox = Sandbox()
    sandbox.run(CODE)
    ours, bare = [], []
    for _ in range(100):
        start = time.perf_counter()
        sandbox.run(CODE)
        middle = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, check=True)
        ours.append(middle - start)
        bare.append(time.perf_counter() - middle)
    return 1 / statistics.median(ours), statistics.median(bare) / statistics.median(ours)


def waiting() -> float | None:
    """Seconds a turn of 256 envs, of which every step waits one."""
    try:
        import ray

        from skyrl_trainer.rollout.env_client import EnvClient, RemoteEnv
        from skyrl_trainer.rollout.pool import close_env_workers, start_env_workers
        from skyrl_trainer.types import Sample
    except ImportError:
        return None

    async def turns(workers: list[Any], sample: Sample) -> list[float]:
        client, seconds = EnvClient(workers), []
        envs = [RemoteEnv(client, f"{i}", sample) for i in range(256)]
        await asyncio.gather(*(env.reset() for env in envs))
        for _ in range(ROUNDS):
            began = time.perf_counter()
            replies = await asyncio.gather(*(env.step("x") for env in envs))
            seconds.append(time.perf_counter() - began)
            assert [reply.observation for reply in replies] == ["x"] * len(envs)
        return seconds

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(WAITING)
        file.flush()
        workers = start_env_workers(1, step_timeout=30.0)
        seconds = asyncio.run(turns(workers, Sample("bench", "bench/Waiting-v0", 0, env_file=file.name)))
        close_env_workers(workers)
    ray.shutdown()
    return statistics.median(seconds)


# The next three run in the peers' own interpreter.


def gem() -> dict[str, float]:
    import gem.envs  # registers
    from datasets import Dataset
    from gem.envs.math_env import MathEnv
    from gem.tools.python_code_tool import PythonCodeTool

    questions = [{"problem": f"{n} + 2 = ?", "answer": str(n + 2)} for n in range(10, 90)]
    math, game = MathEnv(dataset=Dataset.from_list(questions)), gem.make("game:GuessTheNumber-v0-hard")
    tool = PythonCodeTool()

    def one_question() -> None:
        math.reset()
        math.step(f"\\boxed{{{math.answer}}}")

    def one_game() -> int:
        game.reset()
        return next(n for n in itertools.count(1) if any(game.step(game.sample_random_action())[2:4]))

    def one_call() -> None:
        tool.execute_action(f"<python>{CODE}</python>")

    return {"math": rate(one_question), "guess_the_number": rate(one_game), "python_tool": rate(one_call)}


def reasoning_gym() -> dict[str, float]:
    import reasoning_gym

    def items(name: str) -> int:
        dataset = reasoning_gym.create_dataset(name, seed=time.time_ns() % 2**31, size=100)
        return len([dataset.score_answer(str(item["answer"]), item) for item in dataset])

    return {name: rate(lambda: items(name)) for name in ("chain_sum", "gsm_symbolic", "knights_knaves")}  # noqa: B023


def textarena() -> dict[str, float]:
    import textarena

    def one_game() -> int:
        env = textarena.make("GuessTheNumber-v0")
        env.reset(num_players=1, seed=1)
        return next(n for n in itertools.count(1) if env.get_observation() and env.step(f"[{n}]")[0])

    return {"guess_the_number": rate(one_game)}


def measure_peer(name: str) -> Any:
    """The peer's rates in steps, items or calls per second; or why there are none, in a line."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "bin/python")
        for command in (
            [sys.executable, "-m", "venv", folder],
            [python, "-m", "pip", "install", "-q", *PEERS[name]],
            [python, "-W", "ignore", __file__, "--peer", name],
        ):
            run = subprocess.run(command, capture_output=True, text=True, timeout=900)
            if run.returncode != 0:
                return run.stderr.strip().splitlines()[-1]
        return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second of the environments, in one process.")
    parser.add_argument("--peers", action="store_true", help="also measure other projects' environments")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peer:
        print(json.dumps({"gem": gem, "reasoning_gym": reasoning_gym, "textarena": textarena}[chosen.peer]()))
        return
    import skyrl_gym

    result: dict[str, Any] = {}
    for entry in skyrl_gym.list_envs():
        name = entry.id.removeprefix("skyrl/").removesuffix("-v0")
        result[name] = round(steps_per_second(entry.id))
        print(f"{name:<24}{result[name]:>12,} steps/s")
    result["python_exec"], result["python_exec_over_bare"] = python_exec()
    print(f"python_exec: {result['python_exec']} calls/s, {result['python_exec_over_bare']} times a bare interpreter")
    result["waiting"] = waiting()
    print(f"256 envs that wait one second each step: {result['waiting']} seconds a turn")
    result["peers"] = {name: measure_peer(name) for name in PEERS} if chosen.peers else None
    for name, rates in (result["peers"] or {}).items():
        print(f"{name:<24}{rates}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
