"""What evaluation costs: attempts/s of `eval agent` over those of a plain asyncio client with the same requests.

    python benchmarks/evaluation.py [--items 512] [--concurrency 64] [--tokens 128] [--repeats 5]

The tiny policy of init-policy (0.8 M parameters, random weights, float32), greedy, prompts in its prefix cache. `solve`
plays every item in its env and the agent loop on vLLM's own server, and has each attempt on the disk; `plain` posts
the very requests that `solve` makes to the same server, and reads the JSON; `checkpoint` is `solve` on an engine of
training, as `--checkpoint` starts one. One after the other, median over the repeats. The last line is one JSON object;
`ratio` is solve over plain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from skyrl_eval import benchmarks
from skyrl_eval.solve import solve
from skyrl_eval.store import Run
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.engine.endpoint import Endpoint, probe
from skyrl_trainer.engine.server_process import as_flag
from skyrl_trainer.engine.vllm_args import engine_env, vllm_kwargs
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.run.processes import Processes
from skyrl_trainer.settings import Config
from skyrl_trainer.types import SamplingOptions

LENGTH = 2048


def made_up_items(count: int) -> list[Any]:
    gsm8k = benchmarks.find("gsm8k")
    rows = [{"question": f"Ann has {n} pears and eats {n // 2}. How many?", "answer": "#### 1"} for n in range(count)]
    return gsm8k.tasks([gsm8k.Row.model_validate(row) for row in rows], [])


@contextmanager
def server(model: Path, concurrency: int) -> Iterator[str]:
    """The address of vLLM's own server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kwargs = vllm_kwargs(str(model), "float32", LENGTH, concurrency, 0, {"port": port})
    for name in ("skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls"):
        del kwargs[name]
    flags = [as_flag(name, value) for name, value in kwargs.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=os.environ | engine_env(), stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def run_solve(rollouts: Rollouts, items: list[Any], max_tokens: int, folder: Path) -> float:
    sampling = SamplingOptions(max_tokens, 0.0, stop_token_ids=rollouts.stop_token_ids)
    with Run(folder, {}, {}, items) as run:
        start = time.perf_counter()
        errors = solve(run, 1, rollouts, sampling, 0)
        seconds = time.perf_counter() - start
    assert errors == 0
    return len(items) / seconds


async def run_plain(url: str, bodies: list[dict[str, Any]], concurrency: int) -> float:
    queue = iter(bodies)

    async def work() -> None:
        for body in queue:
            async with http.post(f"{url}/completions", json=body) as reply:
                await reply.json()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return len(bodies) / (time.perf_counter() - start)


def requests(model: Path, items: list[Any], max_tokens: int) -> list[dict[str, Any]]:
    """The bodies that `solve` sends."""
    prompt, bodies = load_chat_prompt(str(model)), []
    for item in items:
        task = benchmarks.find(item.bench).env(item).options["task"]
        body = {"model": str(model), "prompt": prompt.first(task["instructions"], task["question"]), "seed": None}
        body |= {"max_tokens": max_tokens, "temperature": 0.0, "return_token_ids": True, "ignore_eos": True}
        bodies.append(body | {"stop_token_ids": list(prompt.stop_token_ids)})
    return bodies


def measure(model: Path, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    items, tokens, concurrency = made_up_items(options["items"]), options["max_tokens"], options["concurrency"]
    generator = {"max_concurrency": concurrency, "max_model_len": LENGTH}
    config = Config.model_validate({"generator": generator, "trainer": {"policy": {"model": {"path": str(model)}}}})
    found: dict[str, list[float]] = {"solve": [], "plain": [], "checkpoint": []}
    with ExitStack() as stack:
        url = stack.enter_context(server(model, concurrency))
        endpoint = asyncio.run(probe(Endpoint(url, ""), False, 0.0))
        rollouts = stack.enter_context(Processes(config, endpoint.tokenizer, endpoint=endpoint)).rollouts
        bodies = requests(model, items, tokens)
        run_solve(rollouts, items, tokens, folder / "warm-up")
        for repeat in range(options["repeats"]):
            found["solve"].append(run_solve(rollouts, items, tokens, folder / str(repeat)))
            found["plain"].append(asyncio.run(run_plain(url, bodies, concurrency)))
            print(f"{repeat}: solve {found['solve'][-1]:.1f}, plain {found['plain'][-1]:.1f}", file=sys.stderr)
    with Processes(config, str(model)) as processes:
        processes.wait_for_engines()
        run_solve(processes.rollouts, items, tokens, folder / "warm-up again")
        for repeat in range(options["repeats"]):
            found["checkpoint"].append(run_solve(processes.rollouts, items, tokens, folder / f"own {repeat}"))
            print(f"{repeat}: checkpoint {found['checkpoint'][-1]:.1f} attempts/s", file=sys.stderr)
    names = ("items", "concurrency", "max_tokens", "repeats")
    return {name: options[name] for name in names} | {name: statistics.median(them) for name, them in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, dest="max_tokens")
    parser.add_argument("--repeats", type=int, default=5)
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as name:
        command = ["init-policy", f"{name}/tiny", "data.train_data=text_math?split=train&difficulty=1"]
        subprocess.run([sys.executable, "-m", "skyrl_trainer", *command], check=True, capture_output=True)
        found = measure(Path(name) / "tiny", options, Path(name))
    print(json.dumps(found | {"ratio": round(found["solve"] / found["plain"], 3)}))


if __name__ == "__main__":
    main()
