"""`skyrl-trainer eval agent` and `eval code`: solve, then grade, then results.json and the report."""

import contextlib
import hashlib
import json
import math
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from skyrl_eval import benchmarks, data, grade, metrics, prompts, report, sandbox, tools
from skyrl_eval.benchmarks.common import QUESTION_ENV, Benchmark, Context
from skyrl_eval.judge import Judge
from skyrl_eval.solve import solve
from skyrl_eval.store import Run, read_json, without_login, write_json
from skyrl_eval.types import Attempt, Item
from skyrl_gym.data import beside, read_jsonl
from skyrl_gym.openenv import result_of
from skyrl_gym.options import add_options
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.engine.endpoint import UNBOUNDED, Endpoint, probe
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.run.guardian import guarded
from skyrl_trainer.run.processes import Processes
from skyrl_trainer.settings import Config
from skyrl_trainer.types import SamplingOptions
from skyrl_trainer.user_file import load_user_file

DEFAULTS = {"agent": ("hle", "150"), "code": ("swe-verified", "50")}
PROGRESS_SECONDS = 10.0
OURS = {"model", "messages", "n", "stream", "seed", "temperature", "max_tokens", "max_completion_tokens"}
UNGRADED = 3
"""The exit code of a figure with a caveat."""
TOOL_STEPS, EPISODE_SECONDS = 50, 7200.0
STEP_SECONDS = (180.0, 600.0)
"""Longest step of an env, and of one that is slow."""
WAITING_WORKERS = 8
"""EnvWorkers for tools that wait for other machines: steps of one wait for the slowest."""


def parse(kind: str, words: Sequence[str]) -> Namespace:
    """The options of `eval agent` and of `eval code`, which has two more."""
    bench, n = DEFAULTS[kind]
    parser = ArgumentParser(prog=f"skyrl-trainer eval {kind}")
    known = ", ".join(benchmarks.names(kind))
    parser.add_argument("--bench", default=bench, metavar="NAME", help=f"{known} (default: {bench}), or yours")
    options = beside(__file__, "options.yaml")
    add_options(parser, options["both"])
    if kind == "code":
        parser.add_argument("--executor", choices=sandbox.EXECUTORS, help="where code runs (default: what works here)")
        add_options(parser, options["code"])
    else:
        parser.set_defaults(executor="namespace", predictions=None, repos=None)
    parser.set_defaults(kind=kind, command=run, n=n)
    return parser.parse_args(words)


def run(args: Namespace) -> int:
    """The exit code: 0, or 3 where tries are not graded. UserError where there is no figure."""
    if args.compare:
        print(report.compare(*args.compare))
        return 0
    for name in ("samples", "max_tokens", "concurrency", "token_limit", "cost_limit", "temperature", "seed"):
        least = int(name not in ("cost_limit", "temperature", "seed"))
        if (value := getattr(args, name)) is not None and not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but should be {least} or more.")
    if args.n != "all" and not (re.fullmatch("[0-9]{1,9}", args.n) and int(args.n)):
        raise UserError(f"--n is {args.n!r}, but should be a number of items, or all.")
    if args.plugin:
        load_user_file("--plugin", args.plugin, "registers benchmarks")
    if args.cache:
        args.cache = str(folder := args.cache.expanduser().resolve())
        there = next(filter(Path.exists, (folder, *folder.parents)))
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise UserError(f"--cache: {there} is no folder that can be written.")
    args.prices = metrics.read_prices(args.prices) if args.prices else {}
    with guarded(), _solved_before(args) if args.grade_only else _solved(args) as run:
        bench, model = run.config["bench"], run.config["model"]
        if "samples" not in run.facts:
            found = f"{run.folder} was begun by an earlier version"
            raise UserError(f"{found}: grade it with that, or begin another --out.")
        context, title, samples = _context(args, run.folder), _title(run), run.facts["samples"]
        verdicts = grade.grade_run(run, bench, context)
        results = grade.results(run, bench, samples, context, args.prices, model)
        results |= {"title": title, "model": model, "notes": [*run.facts["notes"], *results["notes"]]}
        caveat = f", {results['caveat']}" if results["caveat"] else ""
        for one in [one for one in verdicts if one.score is None and one.sample < samples][:1]:
            caveat += f"; the first: {str(one.error).rstrip('.')}"
        nothing = results["accuracy_graded"] is None
        old = nothing and (run.folder / "results.json").is_file() and read_json(run.folder, "results.json")
        if old and old.get("accuracy_graded") is not None:
            raise UserError(f"{title}: no figure{caveat}. The page stays as it was.")
        write_json(run.folder / "results.json", results)
        page = report.write_report(run.folder)
        if nothing:
            raise UserError(f"{title}: no figure{caveat}. {page}")
        accuracy, low, high = (100 * results[name] for name in ("accuracy", "low", "high"))
        print(f"{title}: {accuracy:.1f} % ({low:.1f} to {high:.1f}){caveat}. {page}")
        return UNGRADED if caveat else 0


def _solved(args: Namespace) -> Run:
    if sum(map(bool, (args.base_url, args.checkpoint, args.predictions))) != 1:
        what = "--base-url and --model, or --checkpoint" + (", or --predictions" if args.kind == "code" else "")
        raise UserError(f"Say once what is to be evaluated: {what}.")
    bench = benchmarks.find(args.bench)
    if bench.kind != args.kind:
        raise UserError(f"{bench.name} is a benchmark of `eval {bench.kind}`, not of `eval {args.kind}`.")
    args.executor = args.executor or _executor(bench)
    found = data.load(bench, args.data, args.images)
    items = _chosen(args, found.items)
    bench.check(context := _context(args, None))
    grade.check_judge(bench, items[0], context)
    settings = {name: getattr(args, name) for name in ("seed", "images", "tools")}
    if args.tools:
        if bench.env(items[0]).env_id != QUESTION_ENV:
            raise UserError(f"--tools: {bench.name} has an environment with tools of its own, so leave it out.")
        settings |= {"tools": tools.check_provider(args.tools), "tools_prompt": prompts.digest("tools")}
    if bench.executors:
        settings["executor"] = args.executor
    settings |= {"only": sorted(args.only)} if args.only else {}
    settings |= {"request": _members(args.request)} if args.request else {}
    settings |= {"native_tools": True} if args.native_tools else {}

    def open_run(model: str, **more: Any) -> Run:
        name = re.sub(r"[^\w.-]+", "-", model).strip("-")[-60:]
        config = grade.configuration(bench.name, found, model=model, **settings, **more)
        return Run(args.out or Path("runs") / f"eval-{bench.name}-{name}", config, facts | _limits(args, model), items)

    samples = 1 if args.predictions else args.samples
    facts = {"items": len(found.items), "notes": found.notes, "unreadable": found.unreadable, "samples": samples}
    for option, given in (("--request", args.request), ("--native-tools", args.native_tools)):
        if given and not args.base_url:
            raise UserError(f"{option} goes to an endpoint: give --base-url.")
    if args.native_tools and not args.tools and bench.steps == 1:
        raise UserError(f"--native-tools: {bench.name} has no tools of its own, so give --tools.")
    if args.predictions:
        return _predicted(args.predictions, found, open_run)
    settings |= {"temperature": args.temperature, "max_tokens": args.max_tokens}
    if not args.checkpoint:
        endpoint = result_of(_endpoint(args, settings.get("request", {})))
        facts["base_url"] = without_login(endpoint.url)
        if args.temperature and not (endpoint.seeded or endpoint.tokenizer):
            found.notes.append("The endpoint takes no seed: the same command samples other answers.")
        asked, length = ("tokens", endpoint.max_model_len) if endpoint.tokenizer else ("messages", UNBOUNDED)
        run = open_run(endpoint.model, asked=asked)
        return _solve(args, run, Processes(_config(args, bench, length), endpoint.tokenizer, endpoint=endpoint))
    if any(item.image for item in items):
        raise UserError("--images shows nothing to a --checkpoint, which reads tokens: serve it, and give --base-url.")
    folder = _policy(args.checkpoint)
    files = (path.open("rb") for path in sorted(folder.glob("[!.]*.*")) if path.is_file())
    weights = data.content_id([hashlib.file_digest(file, "sha256").hexdigest() for file in files])
    name = args.checkpoint if "://" in args.checkpoint else str(Path(args.checkpoint))
    run = open_run(name, asked="tokens", weights=weights)
    return _solve(args, run, Processes(_config(args, bench, *_engine(folder, args.max_tokens)), str(folder)))


def _chosen(args: Namespace, items: list[Item]) -> list[Item]:
    if args.only:
        items = [item for item in items if {item.item_id, item.meta.get("category")} & {*args.only}]
        if not items:
            raise UserError(f"--only {' '.join(args.only)} is the id or the category of no item.")
    items = data.subset(items, None if args.n == "all" else int(args.n), args.seed)
    if args.predictions == "gold" and not all(isinstance(item.gold, dict) and "patch" in item.gold for item in items):
        raise UserError(f"--predictions gold: the items of {args.bench} have no official patch. Give a file.")
    return items


def _members(text: str) -> dict[str, Any]:
    try:
        found = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f'--request {text} is not JSON such as {{"top_p": 0.9}}: {error}.') from error
    if taken := sorted(OURS & found.keys()):
        raise UserError(f"--request cannot hold {taken[0]}, which the evaluation sets itself.")
    return found


async def _endpoint(args: Namespace, request: dict[str, Any]) -> Endpoint:
    given = Endpoint(args.base_url.rstrip("/"), args.model, request=request, cache=args.cache or "")
    # With a tool, if there will be some: a server that reads no calls says so now.
    shown = {"tools": [{"type": "function", "function": {"name": "search"}}]} if args.native_tools else {}
    messages = args.images or args.native_tools or bool(request)
    found = replace(await probe(replace(given, request=shown | request), messages, args.temperature), request=request)
    try:
        if found.tokenizer:
            load_chat_prompt(found.tokenizer)
    except UserError:
        return await probe(given, True, args.temperature)
    return found


def _engine(folder: Path, max_tokens: int) -> tuple[int, dict[str, Any]]:
    config = load("transformers:AutoConfig").from_pretrained(folder)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    length = min(config.get_text_config().max_position_embeddings, 4 * max_tokens + 8192)
    return length, {"path": str(folder), "dtype": "float32" if dtype == "float32" else "bfloat16"}


def _config(args: Namespace, bench: Benchmark, length: int, model: dict[str, Any] | None = None) -> Config:
    steps = max(bench.steps, TOOL_STEPS) if args.tools else bench.steps
    workers = 2 * (os.cpu_count() or 1) if bench.slow else WAITING_WORKERS if args.tools else 1
    generator = {"max_turns": steps, "max_concurrency": args.concurrency, "max_model_len": length}
    agent = {"tools": "template" if args.native_tools else "env"}
    generator |= {"episode_timeout": EPISODE_SECONDS, "agent": agent}
    environment = {"num_workers": min(args.concurrency, workers), "step_timeout": STEP_SECONDS[bench.slow]}
    trainer = {"seed": args.seed, "policy": {"model": model or {}}}
    return Config.model_validate({"generator": generator, "environment": environment, "trainer": trainer})


def _solve(args: Namespace, run: Run, processes: Processes) -> Run:
    if metrics.limit_reached(run.facts.get("limits"), run.tries) or not run.missing(args.samples):
        return run
    where = {"executor": args.executor, "repos": args.repos and str(args.repos), "tools": args.tools}
    with processes:
        processes.wait_for_engines()
        rollouts = processes.rollouts
        sampling = SamplingOptions(args.max_tokens, args.temperature, stop_token_ids=rollouts.stop_token_ids)
        more = {name: value for name, value in where.items() if value}
        plugin = args.plugin and str(Path(args.plugin).expanduser().resolve())
        over = Event()
        Thread(target=_progress, args=(run, args.samples, over), daemon=True).start()
        try:
            errors = solve(run, args.samples, rollouts, sampling, args.seed, more, plugin)
        except UserError as error:  # what was made is graded all the same
            print(f"skyrl-trainer: {error}", file=sys.stderr)
            return run
        finally:
            over.set()
    if errors:
        last = next(each.error for each in reversed(run.tries) if each.stop == "error")
        print(f"{errors} attempts ended in an error; the same command tries them again. One: {last}", file=sys.stderr)
    return run


def _progress(run: Run, samples: int, over: Event) -> None:
    start, total = time.monotonic(), len(run.items) * samples
    while not over.wait(PROGRESS_SECONDS):
        done = total - len(run.missing(samples))
        print(f"{done} of {total} attempts, {time.monotonic() - start:.0f} s", file=sys.stderr)


def _solved_before(args: Namespace) -> Run:
    if not args.out:
        raise UserError("--grade-only needs --out with the folder of a run.")
    manifest = read_json(args.out, "manifest.json")
    config, bench = manifest["config"], benchmarks.find(manifest["config"]["bench"])
    then, usual = config | {"samples": manifest["facts"].get("samples", args.samples)}, vars(parse(args.kind, []))
    for name in ("bench", "model", "images", "samples", "temperature", "seed", "max_tokens"):
        if (given := getattr(args, name)) not in (usual[name], then.get(name, usual[name])):
            raise UserError(f"--grade-only: {name} is {then.get(name)!r} in {args.out}, not {given!r}.")
    official = config["source"] + (f"@{config['revision']}" if config["revision"] else "")
    found = data.load(bench, args.data or (official if official != bench.source.url else None), config["images"])
    if found.sha256 != config["data_sha256"]:
        raise UserError(f"--data {args.data or official} is not the data that {args.out} was made of.")
    args.executor = config["executor"] if config.get("executor") in bench.executors else "namespace"
    args.seed, ids = config.get("seed", args.seed), {item_id for _, item_id in manifest["ids"]}
    if (args.n, args.only) != (usual["n"], None) and {item.item_id for item in _chosen(args, found.items)} != ids:
        raise UserError(f"--grade-only: {args.out} has other items than --n and --only choose: leave them out.")
    items = {item.item_id: item for item in found.items}
    chosen = [items[item_id] for _, item_id in manifest["ids"]]
    bench.check(_context(args, None))
    return Run(args.out, config, manifest["facts"], chosen)


def _predicted(path: str, found: data.Data, open_run: Any) -> Run:
    try:
        rows: Any = [] if path == "gold" else None
        if path.endswith(".json"):  # a list, or by their ids, as mini-SWE-agent writes them
            with contextlib.suppress(ValueError):
                rows = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        rows = [row for _, row in read_jsonl(Path(path))] if rows is None else rows
        rows = [{"instance_id": name} | row for name, row in rows.items()] if isinstance(rows, dict) else rows
        patches = {str(row["instance_id"]): row["model_patch"] or "" for row in rows}
        names = ", ".join(sorted({str(row["model_name_or_path"]) for row in rows}))
        if len(patches) < len(rows) or not all(isinstance(patch, str) for patch in patches.values()):
            raise ValueError("an instance twice, or a patch that is no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        wanted = "rows with instance_id, model_name_or_path and model_patch, or gold for the official patches"
        raise UserError(f"--predictions {path} cannot be read ({error!r}): expected {wanted}.") from error
    if unknown := sorted(patches.keys() - {item.item_id for item in found.items}):
        found.notes.append(f"{len(unknown)} of {len(patches)} predictions are of no item of the data: {unknown[0]}")
        if len(unknown) == len(patches):
            raise UserError(f"--predictions {path}: {found.notes[-1]}.")
    run = open_run(names or path, predictions=data.content_id(patches))
    for item, sample in run.missing(1):
        if (patch := item.gold["patch"] if path == "gold" else patches.get(item.item_id)) is not None:
            run.add(Attempt(item.bench, item.item_id, sample, patch))
    return run


def _context(args: Namespace, folder: Path | None) -> Context:
    if bool(args.judge_url) != bool(args.judge_model):
        raise UserError("A judge needs both, --judge-url and --judge-model.")
    cache = folder and (args.cache or folder / "judge")
    judge = Judge(args.judge_url, args.judge_model, cache or "") if args.judge_url else None
    return Context(judge, args.executor, args.repos, folder and folder / "logs", args.lenient)


def _limits(args: Namespace, model: str) -> dict[str, Any]:
    if args.cost_limit is not None and model not in args.prices:
        raise UserError(f"--cost-limit needs the price of {model} in the file of --prices.")
    limits = {"tokens": args.token_limit, "dollars": args.cost_limit, "price": args.prices.get(model)}
    return {"limits": limits} if args.token_limit or args.cost_limit is not None else {}


def _executor(bench: Benchmark) -> str:
    for name in bench.executors:
        with contextlib.suppress(UserError):
            sandbox.check(name)
            return name
    return "namespace"


def _policy(target: str) -> Path:
    run = load("skyrl_trainer.run.remote:fetched")(target) if "://" in target else Path(target)
    for folder in (run / "model" / "best", run / "model" / "last", run):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise UserError(f"--checkpoint {target} is neither a run with a saved policy nor a model's folder.")


def _title(run: Run) -> str:
    config = run.config
    tooled = f"tools: {config['tools']}" if config["tools"] else "no tools"
    how = f"executor {config['executor']}" if "executor" in config else tooled
    only = [f"only {', '.join(config['only'])}"] if "only" in config else []
    text_only = ["text only"] * (benchmarks.find(config["bench"]).images and not config["images"])
    items = f"{len(run.items)} of {run.facts['items']} items"
    return ", ".join([config["bench"], items, *only, *text_only, how])
