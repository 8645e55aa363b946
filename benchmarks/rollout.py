"""What the agent and env loop costs: tokens/s through it over tokens/s of the same engine without it.

    python benchmarks/rollout.py [--trajectories 512] [--concurrency 64] [--tokens 64] [--repeats 5]
    python benchmarks/rollout.py --env tool_use [--trajectories 64] [--tokens 32] [--repeats 5]
    python benchmarks/rollout.py --env tool_use --agent examples/my_agent.py:agent

Three ways to the same requests (lengths forced, temperature 1, logprobs on), one after the other in one run, median
over the repeats:
  loop     Rollouts.run: RolloutWorker, EnvWorker with the real env, engine actor
  bare     the same engine actor: all first prompts are submitted in one call, and each further one (the context so far,
           its own output and the observation's ids that were recorded) as soon as its previous turn is done
  agent    with --agent: Rollouts.run again, the loop being a user's agent, a process and an endpoint for each episode
  fastest  vLLM in a process of its own without Ray: `LLM.generate` on all requests at once, on 1 or 2 threads

text_math has one turn. tool_use has eight: the tokens of a random policy call no tool, so the env is given, behind what
it decodes to, the calls that the task's expert would make next (search, wiki, calculator), and in the last turn the
answer. So it parses, runs tools and answers as it does for a policy that knows it; `traffic` says how many tokens.

The last line printed is one JSON object: `efficiency` is loop over bare, `of_fastest` loop over the best of the rest,
`agent` agent over loop.
The policy is the tiny one of init-policy (0.8 M parameters, random weights, float32).
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from skyrl_trainer.data import load_samples
from skyrl_trainer.engine.vllm_actor import VLLMEngine
from skyrl_trainer.engine.vllm_args import engine_env
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.settings import Config, TinyConfig
from skyrl_trainer.tiny.demonstrations import conversation_texts
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.types import GenerationRequest, PromptBatch, Sample, SamplingOptions, Trajectory

TURNS = 8
ENV_FILE = f'''
import gymnasium, json
from skyrl_gym.envs.tool_use.env import ToolUseEnv


class Busy(ToolUseEnv):
    """Plays the expert's calls, over and over, behind whatever the policy wrote; answers in the last turn."""

    def begin(self, task):
        self.turn = 0
        return super().begin(task)

    def act(self, action):
        self.turn += 1
        if self.turn == {TURNS}:
            return super().act(f"{{action}}<answer>{{self.task.ground_truth}}</answer>")
        calls = self.task.data["plan"][(self.turn - 1) % len(self.task.data["plan"])]
        texts = [json.dumps(dict(tool=name, args=args)) for name, args in calls]
        return super().act("\\n".join([action, *(f"<tool_call>{{text}}</tool_call>" for text in texts)]))


gymnasium.register("bench/Busy-v0", Busy)
'''
Traffic = list[list[list[int]]]
"""What was added to the context before each turn of each trajectory."""


@dataclass(frozen=True)
class Case:
    """What is played. `difficulties` take turns."""

    env_id: str
    difficulties: tuple[int, ...]
    turns: int
    max_model_len: int
    tokens: int
    trajectories: int


CASES = {
    "text_math": Case("skyrl/text_math-v0", (1, 2, 3, 4), 1, 256, 64, 512),
    "tool_use": Case("bench/Busy-v0", (3, 4), TURNS, 6144, 32, 64),
}


def run_loop(rollouts: Rollouts, step: int, case: Case, folder: Path) -> tuple[float, list[Trajectory]]:
    """Tokens/s through everything, and what was played."""
    samples = [
        Sample(
            f"{step}:{i}", case.env_id, i,
            {"split": "train", "difficulty": case.difficulties[i % len(case.difficulties)]},
            env_file=str(folder / "busy.py"),
        )
        for i in range(case.trajectories)
    ]  # fmt: skip
    sampling = SamplingOptions(max_tokens=case.tokens, min_tokens=case.tokens)
    start = time.perf_counter()
    done = rollouts.run(PromptBatch(step, samples, 1), sampling=sampling)
    seconds = time.perf_counter() - start
    tokens = sum(trajectory.num_output_tokens for trajectory in done.trajectories)
    assert tokens == case.trajectories * case.turns * case.tokens, "turns and output lengths are forced"
    return tokens / seconds, done.trajectories


def run_bare(engine: Any, step: int, traffic: Traffic, tokens: int) -> float:
    client, sampling = f"bare-{step}", SamplingOptions(max_tokens=tokens, min_tokens=tokens)
    contexts: list[list[int]] = [[] for _ in traffic]
    start = time.perf_counter()
    todo = [(i, 0, list[int]()) for i in range(len(traffic))]
    left, calls, count = sum(map(len, traffic)), [], 0
    while left:
        requests = []
        for i, turn, output_ids in todo:
            contexts[i] += output_ids + traffic[i][turn]
            requests.append(GenerationRequest(f"bare/{step}/{i}/{turn}", list(contexts[i]), sampling))
        if requests:
            calls.append(engine.submit.remote(client, requests))
        todo = []
        for output in ray.get(engine.collect.remote(client, 60.0)):
            assert len(output.output_ids) == tokens, output.error
            count, left = count + tokens, left - 1
            i, turn = map(int, output.request_id.split("/")[2:])
            if turn + 1 < len(traffic[i]):
                todo.append((i, turn + 1, output.output_ids))
    ray.get(calls)
    return count / (time.perf_counter() - start)


class Fastest:
    """vLLM's own `LLM` in a child process that waits for a line before every measurement."""

    def __init__(self, model: Path, prompts: Path, threads: int, concurrency: int, tokens: int) -> None:
        env = os.environ | engine_env() | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--child", str(model), str(prompts), str(concurrency), str(tokens)]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def measure(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("tokens/s "):
                return float(line.split()[1])
        raise SystemExit("The process of plain vLLM ended without a figure.")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def child(model: str, prompts: str, concurrency: int, tokens: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=CASES["text_math"].max_model_len,
        max_num_seqs=concurrency,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=128 * 2**20,
        disable_log_stats=True,
    )
    params = SamplingParams(
        max_tokens=tokens, min_tokens=tokens, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True
    )
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"tokens/s {count / (time.perf_counter() - start)}", flush=True)


def measure(args: argparse.Namespace, case: Case, folder: Path) -> dict[str, Any]:
    (folder / "busy.py").write_text(ENV_FILE)
    model = folder / "policy"
    tiny = TinyConfig(config_kwargs={"max_position_embeddings": 8192})  # few random answers make a context of 5,000
    init_policy(model, conversation_texts(load_samples([f"{args.env}?split=train"]), 500, 0), tiny, 0)
    config = Config(
        generator={"max_concurrency": args.concurrency, "max_model_len": case.max_model_len, "max_turns": case.turns},
        trainer={"deterministic": args.deterministic},
    )
    runtime_env = {"env_vars": engine_env()}
    engine_class = ray.remote(VLLMEngine).options(runtime_env=runtime_env, max_concurrency=64, num_cpus=0)
    engine = engine_class.remote(str(model), "float32", case.max_model_len, args.concurrency, 0, {})
    rollouts = Rollouts(config, [engine], str(model))
    loops = {"loop": rollouts}
    if args.agent:
        config = config.model_copy(deep=True)
        config.generator.agent.run = args.agent
        loops["agent"] = Rollouts(config, [engine], str(model))
    ray.get(engine.ready.remote())
    figures: dict[str, list[float]] = {"bare": []}
    warm = [run_loop(each, 0, case, folder)[1] for each in loops.values()]
    played = warm[0]  # gives the traffic
    traffic = [[turn.prompt_ids for turn in trajectory.turns] for trajectory in played]
    run_bare(engine, 0, traffic, case.tokens)
    (folder / "prompts.json").write_text(json.dumps([turns[0] for turns in traffic]))
    others = {} if args.no_fastest or case.turns > 1 else {
        f"fastest_{threads}_threads": Fastest(
            model, folder / "prompts.json", threads, args.concurrency, case.tokens
        ) for threads in (1, 2)
    }  # fmt: skip
    for other in others.values():
        other.measure()
    for step in range(1, args.repeats + 1):
        for name, each in loops.items():
            figures.setdefault(name, []).append(run_loop(each, step, case, folder)[0])
        figures["bare"].append(run_bare(engine, step, traffic, case.tokens))
        for name, other in others.items():
            figures.setdefault(name, []).append(other.measure())
        print({name: round(values[-1]) for name, values in figures.items()}, flush=True)
    for other in others.values():
        other.close()
    for each in loops.values():
        each.close()
    median = {name: statistics.median(values) for name, values in figures.items()}
    best = max(value for name, value in median.items() if name not in loops)
    observations = [len(ids) for turns in traffic for ids in turns[1:]]
    return {
        "efficiency": round(median["loop"] / median["bare"], 3),
        "of_fastest": round(median["loop"] / best, 3),
        **({"agent": round(median["agent"] / median["loop"], 3)} if args.agent else {}),
        "tokens_per_second": {name: round(value) for name, value in median.items()},
        "trajectories": case.trajectories,
        "concurrency": args.concurrency,
        "traffic": {
            "turns": case.turns,
            "new_tokens_a_turn": case.tokens,
            "first_prompt": round(statistics.mean(len(turns[0]) for turns in traffic)),
            "observation": round(statistics.mean(observations)) if observations else 0,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(CASES), default="text_math")
    parser.add_argument("--trajectories", type=int, help="512 of text_math, 64 of tool_use")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, help="new tokens of every turn: 64 of text_math, 32 of tool_use")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--agent", help="generator.agent.run")
    parser.add_argument("--deterministic", action="store_true", help="seeded requests in rounds (bare is not seeded)")
    parser.add_argument("--no-fastest", action="store_true", help="leave out plain vLLM")
    args = parser.parse_args()
    case = CASES[args.env]
    case = replace(case, tokens=args.tokens or case.tokens, trajectories=args.trajectories or case.trajectories)
    os.environ.setdefault("RAY_worker_niceness", "0")  # as a run has it
    ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(args, case, Path(folder))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
