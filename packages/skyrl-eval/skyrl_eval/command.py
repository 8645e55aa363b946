"""`skyrl-trainer eval agent` and `eval code`: solve, then grade, then results.json and the report.

What is missing is said before anything is spent. Ctrl-C, or worse, keeps every attempt; the same command goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from skyrl_eval import benchmarks, data, grade, metrics, prompts, report, tools
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.endpoint import connect, served
from skyrl_eval.judge import Judge
from skyrl_eval.play import Player, env_processes
from skyrl_eval.sandbox import EXECUTORS
from skyrl_eval.solve import solve
from skyrl_eval.store import Run
from skyrl_eval.types import Attempt
from skyrl_gym.data import read_jsonl
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_client import EnvClient

DEFAULTS = {"agent": ("hle", "150"), "code": ("swe-verified", "50")}
PROGRESS_SECONDS = 10.0


def parse(kind: str, words: Sequence[str]) -> argparse.Namespace:
    """The options of `eval agent` and of `eval code`, which has two more."""
    known, (bench, n) = (benchmarks.AGENT if kind == "agent" else benchmarks.CODE), DEFAULTS[kind]
    parser = argparse.ArgumentParser(prog=f"skyrl-trainer eval {kind}")
    parser.add_argument("--bench", choices=known, metavar="NAME", help=f"{', '.join(known)} (default: {bench})")
    parser.add_argument("--data", help="a file or folder in the official schema, or hf:ID@REVISION")
    parser.add_argument("--images", action="store_true", help="keep the questions that show an image")
    parser.add_argument("--base-url", metavar="URL", help="of an OpenAI-compatible endpoint, up to and with /v1")
    parser.add_argument("--model", default="", help="its name there")
    parser.add_argument("--checkpoint", type=Path, metavar="RUN|MODEL", help="start vLLM on one of ours instead")
    parser.add_argument("--n", default=n, help=f"items, or all (default: {n}); a larger one extends a run")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="tries at each item")
    parser.add_argument("--tools", metavar="URL|JSONL", help="search and open_page: a search endpoint, or a corpus")
    parser.add_argument("--judge-url", metavar="URL")
    parser.add_argument("--judge-model", metavar="NAME")
    parser.add_argument("--prices", type=Path, metavar="JSON", help="dollars for a million tokens, by model")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/eval-BENCH-MODEL)")
    parser.add_argument("--grade-only", action="store_true", help="ask the model nothing: judge what is in --out")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of items, and of sampling")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of one message of the model")
    parser.add_argument("--concurrency", type=int, default=64, help="attempts at a time")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="RUN", help="only compare two graded runs")
    if kind == "code":
        parser.add_argument("--executor", choices=EXECUTORS, help="where code runs (default: docker or podman if here)")
        parser.add_argument("--predictions", metavar="JSONL", help="grade these patches; gold: the official ones")
        parser.add_argument("--repos", type=Path, metavar="DIR", help="clones, as owner__name; else from GitHub")
    parser.set_defaults(kind=kind, executor=None, predictions=None, repos=None, command=run)
    return parser.parse_args(words)


def run(args: argparse.Namespace) -> None:
    """Raises UserError with a sentence."""
    if args.compare:
        print(report.compare(*args.compare))
        return
    prices = metrics.read_prices(args.prices) if args.prices else {}
    with _graded_before(args) if args.grade_only else _solved(args) as run:
        bench = benchmarks.find(run.config["bench"])
        context = _context(args, run.folder)
        verdicts = grade.grade_run(run, bench.name, context)
        samples = 1 + max((verdict.sample for verdict in verdicts), default=0)
        results = grade.results(run, bench.name, samples, context, prices, run.config["model"])
        run.write_results({"title": _title(run), "model": run.config["model"], **results})
        print(report.write_report(run.folder), file=sys.stderr)
        low, high = 100 * results["low"], 100 * results["high"]
        print(f"{_title(run)}: {100 * results['accuracy']:.1f} % ({low:.1f} to {high:.1f}), in {run.folder}")


def _solved(args: argparse.Namespace) -> Run:
    """The run with all attempts that could be made."""
    bench = benchmarks.find(args.bench or DEFAULTS[args.kind][0])
    if sum(map(bool, (args.base_url, args.checkpoint, args.predictions))) != 1:
        what = "--base-url and --model, or --checkpoint" + (", or --predictions" if args.kind == "code" else "")
        raise UserError(f"Say once what is to be evaluated: {what}.")
    if args.n != "all" and not (args.n.isdigit() and int(args.n)):
        raise UserError(f"--n is {args.n!r}, but should be a number of items, or all.")
    found = data.load(bench, args.data, args.images)
    items = data.subset(found.items, None if args.n == "all" else int(args.n), args.seed)
    grade.check_ready(bench.name, items, _context(args, Path()))
    settings: dict[str, Any] = {"seed": args.seed, "images": args.images, "tools": None}
    if args.tools:
        settings |= {"tools": tools.check_provider(args.tools), "tools_prompt": prompts.digest("tools")}
    if args.kind == "code":
        settings["executor"] = _executor(args)
    facts = {"items": len(found.items), "notes": found.notes}

    def open_run(model: str, **more: Any) -> Run:
        name = re.sub(r"[^\w.-]+", "-", model).strip("-")[-60:]
        config = grade.configuration(bench.name, found, model=model, **settings, **more)
        return Run(args.out or Path("runs") / f"eval-{bench.name}-{name}", config, facts, items)

    if args.predictions:
        return _predicted(args.predictions, open_run)
    settings |= {"temperature": args.temperature, "max_tokens": args.max_tokens}
    with ExitStack() as stack:
        if not args.checkpoint:
            return asyncio.run(_solve(args, open_run, args.base_url, None, stack))
        folder, args.model = _policy(args.checkpoint), ""
        settings["weights"] = _fingerprint(folder)
        url, socket = stack.enter_context(served(folder, args.max_tokens, args.concurrency, args.seed))
        return asyncio.run(_solve(args, open_run, url, socket, stack))


async def _solve(args: argparse.Namespace, open_run: Any, url: str, socket: str | None, stack: ExitStack) -> Run:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(args.concurrency + 8))
    endpoint = connect(url, args.model, socket)
    try:
        await endpoint.probe(messages=args.images)
        asked = "tokens" if endpoint.prompt else "messages"
        run: Run = open_run(str(args.checkpoint or endpoint.model), asked=asked)
        stack.push(lambda *raised: run.close() if raised[0] else None)  # a run that is returned stays open
        envs = None
        if any(item.bench.startswith("swe-") for item in run.items):
            envs = EnvClient(stack.enter_context(env_processes(args.concurrency)))
        where = {"executor": args.executor, "repos": args.repos and str(args.repos)} if envs else {}
        where |= {"tools": args.tools} if args.tools else {}
        player = Player(endpoint, args.temperature, args.max_tokens, args.seed, where, envs)
        watch = asyncio.create_task(_progress(run, args.samples))
        errors = await solve(run, args.samples, player.play, args.concurrency)
        watch.cancel()
        if errors:
            print(f"{errors} attempts ended in an error: the same command tries them again.", file=sys.stderr)
        return run
    finally:
        await endpoint.http.close()


async def _progress(run: Run, samples: int) -> None:
    start = time.monotonic()
    while True:
        left, all_ = len(run.missing(samples)), len(run.items) * samples
        tokens = sum(attempt.completion_tokens for attempt in run.attempts.values())
        seconds = time.monotonic() - start
        print(f"{all_ - left} of {all_} attempts, {tokens} tokens, {seconds:.0f} s", file=sys.stderr, flush=True)
        await asyncio.sleep(PROGRESS_SECONDS)


def _graded_before(args: argparse.Namespace) -> Run:
    """A run on disk, with the items that it was made of."""
    path = (args.out or Path()) / "manifest.json"
    if not args.out or not path.is_file():
        raise UserError(f"--grade-only needs --out with the folder of a run; {path} is not there.")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    config, bench = manifest["config"], benchmarks.find(manifest["config"]["bench"])
    source = config["source"] + (f"@{config['revision']}" if config["revision"] else "")
    found = data.load(bench, args.data or (None if config["source"] == bench.source.url else source), config["images"])
    if found.sha256 != config["data_sha256"]:
        raise UserError(f"--data {args.data or source} is not the data that {args.out} was made of.")
    args.executor = args.executor or config.get("executor")
    items = {item.item_id: item for item in found.items}
    chosen = [items[item_id] for _, item_id in manifest["ids"]]
    grade.check_ready(bench.name, chosen, _context(args, args.out))
    return Run(args.out, config, manifest["facts"], chosen)


def _predicted(path: str, open_run: Any) -> Run:
    """Somebody else's patches as attempts."""
    try:
        rows = [] if path == "gold" else [row for _, row in read_jsonl(Path(path))]
        patches = {row["instance_id"]: row["model_patch"] or "" for row in rows}
        names = sorted({str(row["model_name_or_path"]) for row in rows})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--predictions {path} cannot be read ({error!r}): expected jsonl rows with instance_id, "
            "model_name_or_path and model_patch, or gold for the official patches."
        ) from error
    digest = hashlib.sha256(json.dumps(patches, sort_keys=True).encode()).hexdigest()
    run: Run = open_run(", ".join(names) or path, predictions=digest)
    for item, sample in run.missing(1):
        patch = item.gold["patch"] if path == "gold" else patches.get(item.item_id)
        if patch is not None:
            run.add(Attempt(item.bench, item.item_id, sample, patch))
    return run


def _context(args: argparse.Namespace, folder: Path) -> Context:
    if bool(args.judge_url) != bool(args.judge_model):
        raise UserError("A judge needs both, --judge-url and --judge-model.")
    judge = Judge(args.judge_url, args.judge_model, folder / "judge.jsonl") if args.judge_url else None
    return Context(judge, args.executor or "namespace", args.repos, folder / "logs")


def _executor(args: argparse.Namespace) -> str:
    """The official images where containers can be run."""
    args.executor = args.executor or next((name for name in ("docker", "podman") if shutil.which(name)), "namespace")
    return str(args.executor)


def _policy(target: Path) -> Path:
    """The model's folder of a run, or the target itself."""
    folder = target / "model" / "last" if (target / "model").is_dir() else target
    if not (folder / "config.json").is_file():
        raise UserError(f"--checkpoint {target} is neither a run with a saved policy nor a model's folder.")
    return folder.resolve()


def _fingerprint(folder: Path) -> str:
    """Of the weights: the sizes of their files and the ends, which differ where any training was."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 22))
            file.seek(max(0, path.stat().st_size - (1 << 22)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _title(run: Run) -> str:
    """Example: "hle, 150 of 2158 items, text only, no tools"."""
    config = run.config
    with_tools = f"tools: {config['tools']}" if config["tools"] else "no tools"
    how = f"executor {config['executor']}" if "executor" in config else with_tools
    text_only = ["text only"] if config["bench"] == "hle" and not config["images"] else []
    return ", ".join([config["bench"], f"{len(run.items)} of {run.facts['items']} items", *text_only, how])
