"""What traces and Prometheus cost: processor time of an episode with spans over one without, and of a step's metrics.

    python -m benchmarks.observability [--episodes 400] [--turns 2]

Episodes on a fake engine and fake envs, in turn with and without spans, which go to a collector in another process.
Both are given as shares of what a real run takes for the same: an episode of tool_use 18 ms (4.6 s for a step of 256,
two cores), and its step 4.6 s. The last line is one JSON object: {"traces": 0.01, "prometheus": 0.001, ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from statistics import median
from typing import Any

import ray

from skyrl_trainer.config import load_config
from skyrl_trainer.report.trackers import Tracker
from tests.trainer.fakes import FakeEngineClient, FakeEnvWorker
from tests.trainer.rollout.test_episodes import play, shells

STEP, EPISODES = 4.6, 256
KEYS = 90
"""Metrics of a step of tool_use, rounded up."""


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve(channel: Any) -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    channel.send(server.server_port)
    server.serve_forever()


def episode_seconds(args: argparse.Namespace) -> float:
    """Processor time of one, spans sent included."""
    began = time.process_time()
    asyncio.run(play(shells([{"turns": args.turns}] * args.episodes), FakeEngineClient(), [FakeEnvWorker()]))
    if "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ:
        from skyrl_trainer.rollout.tracing import tracer

        tracer().span_processor.force_flush()  # type: ignore[attr-defined]
    return (time.process_time() - began) / args.episodes


def traces(args: argparse.Namespace) -> dict[str, float]:
    ours, theirs = multiprocessing.Pipe()
    collector = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    collector.start()
    address, seconds = f"http://127.0.0.1:{ours.recv()}", {False: list[float](), True: list[float]()}
    for traced in (True, False) * 5:
        os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
        if traced:
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
        seconds[traced].append(episode_seconds(args))
    collector.terminate()
    more = median(seconds[True][1:]) - median(seconds[False])
    return {"traces": more * EPISODES / STEP, "traces_milliseconds_per_episode": 1e3 * more}


def prometheus() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=2**27)
        tracker = Tracker(load_config(None, ["trainer.logger=prometheus", f"trainer.run_dir={folder}"]))
        seconds = []
        for step in range(200):
            began = time.process_time()
            tracker.log({"step": step, **{f"key/{i}": step + i / 7 for i in range(KEYS)}})
            seconds.append(time.process_time() - began)
        tracker.close()
        ray.shutdown()
    return {"prometheus": median(seconds) / STEP, "prometheus_milliseconds_per_step": 1e3 * median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--turns", type=int, default=2)
    found = traces(parser.parse_args()) | prometheus()
    print(json.dumps({name: round(value, 5) for name, value in found.items()}))


if __name__ == "__main__":
    main()
