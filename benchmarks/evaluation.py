"""What evaluation costs: attempts/s of `eval agent` over those of a plain asyncio client with the same requests.

    python benchmarks/evaluation.py [--items 512] [--concurrency 64] [--tokens 128] [--repeats 5]

One vLLM server with the tiny policy of init-policy (0.8 M parameters, random weights, float32), greedy, prompts in its
prefix cache. `solve` plays every item in its env and the agent loop, and has each attempt on the disk; `plain` posts
the very bodies that `solve` sent and reads the JSON. One after the other, median over the repeats. The last line is
one JSON object; `ratio` is solve over plain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from skyrl_eval import benchmarks
from skyrl_eval.endpoint import Endpoint, connect, start_vllm
from skyrl_eval.play import Player
from skyrl_eval.solve import solve
from skyrl_eval.store import Run

Bodies = list[tuple[str, dict[str, Any]]]


def made_up_items(count: int) -> list[Any]:
    gsm8k = benchmarks.find("gsm8k")
    rows = [{"question": f"Ann has {n} pears and eats {n // 2}. How many?", "answer": "#### 1"} for n in range(count)]
    return gsm8k.tasks([gsm8k.Row.model_validate(row) for row in rows], [])


async def run_solve(endpoint: Endpoint, items: list[Any], options: dict[str, Any], folder: Path) -> float:
    player = Player(endpoint, options, {}, [])
    with Run(folder, {}, {}, items) as run:
        start = time.perf_counter()
        errors = await solve(run, 1, player.play, options["concurrency"])
        seconds = time.perf_counter() - start
    assert errors == 0
    return len(items) / seconds


async def run_plain(endpoint: Endpoint, bodies: Bodies, concurrency: int) -> float:
    queue = iter(bodies)

    async def work() -> None:
        for path, body in queue:
            async with endpoint.http.post(endpoint.url + path, json=body) as reply:
                await reply.json()

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return len(bodies) / (time.perf_counter() - start)


async def measure(server: Any, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    endpoint, items, bodies = connect("http://vllm/v1", "", server), made_up_items(options["items"]), Bodies()
    async with endpoint.http:
        await endpoint.probe(messages=False, temperature=0.0)
        post = endpoint.post

        async def noted(path: str, body: dict[str, Any]) -> Any:
            bodies.append((path, body))
            return await post(path, body)

        endpoint.post = noted  # type: ignore[method-assign, assignment]
        await run_solve(endpoint, items, options, folder / "warm-up")
        endpoint.post = post  # type: ignore[method-assign]
        solved, plain = [], []
        for repeat in range(options["repeats"]):
            solved.append(await run_solve(endpoint, items, options, folder / str(repeat)))
            plain.append(await run_plain(endpoint, bodies, options["concurrency"]))
            print(f"{repeat}: solve {solved[-1]:.1f}, plain {plain[-1]:.1f} attempts/s", file=sys.stderr)
    found = {"solve": statistics.median(solved), "plain": statistics.median(plain)}
    return {**{name: options[name] for name in ("items", "concurrency", "max_tokens", "repeats")}, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, dest="max_tokens")
    parser.add_argument("--repeats", type=int, default=5)
    options = vars(parser.parse_args()) | {"temperature": 0.0, "seed": 0}
    with tempfile.TemporaryDirectory() as name:
        command = ["init-policy", f"{name}/tiny", "data.train_data=text_math?split=train&difficulty=1"]
        subprocess.run([sys.executable, "-m", "skyrl_trainer", *command], check=True, capture_output=True)
        server = start_vllm(Path(name) / "tiny", options["max_tokens"], options["concurrency"], 0)
        try:
            found = asyncio.run(measure(server, options, Path(name)))
        finally:
            server.end()
    print(json.dumps(found | {"ratio": round(found["solve"] / found["plain"], 3)}))


if __name__ == "__main__":
    main()
