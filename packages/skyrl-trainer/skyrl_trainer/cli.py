"""`skyrl-trainer`: train, sft, eval, serve, replay, report, view, export, init-policy, warmstart, envs, doctor.

Exit codes: 0 done; 2 what the user can mend, in one sentence; 3 an evaluation with a caveat; 1 a fault of ours, its
traceback in a file; 128 and the number of the signal that stopped it, 130 after Ctrl-C.
"""

import errno
import math
import os
import re
import signal
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_trainer import __version__
from skyrl_trainer.config import leaf_fields, load_config, resolve
from skyrl_trainer.dry_run.doctor import examine, hardware, require_gym
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.run.model_shape import model_shape
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.user_file import blaming

LOCALHOST = "127.0.0.1"
SETTINGS = "a recipe (quickstart, or the path of a YAML file), then settings such as trainer.max_steps=10"


def main(argv: Sequence[str] | None = None) -> int:
    # Before anything heavy is imported; transformers' own bars follow the first.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONUTF8", "1")  # torch reads its own files in the locale's encoding
    with suppress(AttributeError):  # of names that it cannot show
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with StopSignal(), blaming():
            args = _parse(list(sys.argv[1:] if argv is None else argv))
            # doctor says it among its findings.
            if args.command is not _doctor:
                require_gym()
            code = int(args.command(args) or 0)
            sys.stdout.flush()
            return code
    except UserError as error:
        code, said = 2, str(error)
    except KeyboardInterrupt as stopped:
        number = getattr(stopped, "number", signal.SIGINT)
        code, said = 128 + number, f"stopped by {'Ctrl-C' if number == signal.SIGINT else stopped}."
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            code, said = 2, f"no space is left for {error.filename or 'the disk'}: free some, then start again."
        else:
            with tempfile.NamedTemporaryFile("w", prefix="skyrl-trainer-", suffix=".error.log", delete=False) as log:
                traceback.print_exc(file=log)
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            code, said = 1, f"unexpected error, {what} (the traceback is in {log.name})."
    with suppress(OSError):  # of a closed terminal
        print(f"skyrl-trainer: {said}", file=sys.stderr)
        print(end="", flush=True)
    if argv is None and code > 128:  # Ray's threads may crash at the interpreter's end
        os._exit(code)
    return code


def _parse(words: list[str]) -> Namespace:
    parser = ArgumentParser(prog="skyrl-trainer", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=f"skyrl-trainer {__version__}")
    if words[:1] == ["eval"] and words[1:2] in (["agent"], ["code"]):
        require_gym()
        return load("skyrl_eval.command:parse")(words[1], words[2:])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., Any], text: str) -> ArgumentParser:
        added = commands.add_parser(name, help=text)
        added.set_defaults(command=command)
        return added

    train = add("train", _train, "learn by reinforcement; goes on where the run folder left off")
    train.add_argument("--dry-run", action="store_true", help="show settings, placement, memory, limits; run nothing")
    train.add_argument("--serve", type=int, metavar="PORT", help="also answer OpenAI's API there; 0 takes a free port")
    sft = add("sft", _sft, "learn from chats, the rows of data.train_data, before reinforcement does")

    evaluate = add("eval", _eval, "held-out evaluation; `eval agent` and `eval code` run benchmarks")
    _target_arguments(evaluate, which="best")
    serve = add("serve", _serve, "OpenAI's API for a run's policy or any model")
    _target_arguments(serve, which="last")
    serve.add_argument("--host", default=LOCALHOST, help="0.0.0.0 lets everybody ask who can reach this machine")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")

    _looking_commands(add)
    init = add("init-policy", _init_policy, "make a tiny policy and its tokenizer, without a download")
    clone = add("warmstart", _warmstart, "clone the expert of data.train_data into trainer.policy.model.path")
    clone.add_argument("--seconds", type=float, default=math.inf, help="default: no limit")
    for command in (init, clone):
        command.add_argument("out", type=Path, metavar="DIR", help="new folder of the policy")
    for command in (train, sft, init, clone):
        chosen = command.add_argument("settings", nargs="*", metavar="RECIPE a.b=c", help=SETTINGS)
        chosen.completer = _recipes_and_settings  # type: ignore[attr-defined]
    add("envs", lambda _: load("skyrl_gym.__main__:main")([]), "registered environments")
    doctor = add("doctor", _doctor, "what is installed and would run")
    text = "what each node of the cluster at ray.address (default: auto) has and would run"
    doctor.add_argument("--cluster", nargs="*", metavar="RECIPE a.b=c", help=text)
    if "_ARGCOMPLETE" in os.environ:  # set by the shell, which asks what could come next
        load("argcomplete:autocomplete")(parser)

    args, rest = parser.parse_known_args(words)
    # argparse ends a list of settings at the first option: those after it are settings all the same.
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.settings += rest
    return args


def _folder(text: str) -> Path:
    return load("skyrl_trainer.run.remote:fetched")(text) if "://" in text else Path(text)


def _recipes_and_settings(**_: Any) -> list[str]:
    recipes = (Path(__file__).parent / "recipes").glob("*.yaml")
    return [*(recipe.stem for recipe in recipes), *(f"{name}=" for name in leaf_fields())]


def _looking_commands(add: Callable[..., ArgumentParser]) -> None:
    report = add("report", _report, "write report.html: curves and settings, also of runs side by side")
    report.add_argument("runs", nargs="+", type=_folder, metavar="RUN")
    report.add_argument("-o", "--out", type=Path, help="default: report.html (compare.html) in the first run's folder")

    play = "play stored trajectories again and compare; score their tokens"
    replay = add("replay", lambda args: load("skyrl_trainer.replay.commands:run")(args), play)
    replay.add_argument("run", type=_folder, metavar="RUN", help="a run folder, or a folder of stored trajectories")
    replay.add_argument("--step", type=int, metavar="N", help="default: every stored step")
    replay.add_argument("--index", default="all", metavar="I", help="a trajectory's number in its step; default: all")
    replay.add_argument("--live", action="store_true", help="run tools with effects outside again, as python_exec")
    replay.add_argument("--recompute", metavar="MODEL", help="score the tokens, too, with a model or a checkpoint")

    text = "write trajectories.html: every turn, token and tool call, also of an evaluation"
    view = add("view", _view, text)
    view.add_argument("run", type=_folder, metavar="RUN")
    view.add_argument("--step", type=int, nargs="+", metavar="N", help="default: the newest that fit")
    view.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: trajectories.html in the run's folder")

    export = add("export", _export, "a run's policy as a Hugging Face folder, or its trajectories as chats")
    export.add_argument("run", type=_folder, metavar="RUN")
    what = export.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="copy the policy there, and try to load it")
    what.add_argument("--trajectories", type=Path, metavar="JSONL", help="write the trajectories as chat messages")
    export.add_argument("--which", choices=("last", "best"), help="with --out: of a run's policies, default: last")
    export.add_argument("--card", action="store_true", help="with --out: a model card with the run's curve")
    export.add_argument("--push", metavar="OWNER/NAME", help="with --out: put the folder on Hugging Face, private")
    export.add_argument("--step", type=int, metavar="N", help="of trajectories; default: every stored step")
    export.add_argument("--min-reward", type=float, metavar="X", help="only trajectories that earned so much")
    export.add_argument("--only-success", action="store_true", help="only trajectories that solved their task")


def _target_arguments(parser: ArgumentParser, which: str) -> None:
    text = "a run folder, a Hugging Face folder or a model's name"
    parser.add_argument("target", type=_folder, metavar="RUN|MODEL", help=text)
    parser.add_argument("settings", nargs="*", metavar="RECIPE a.b=c", help=f"{SETTINGS}; a run has its own recipe")
    parser.add_argument("--which", choices=("last", "best"), default=which, help=f"of a run's policies: {which}")


def split_settings(words: list[str]) -> tuple[str | None, list[str]]:
    """The recipe (at most one word without `name=`) and the overrides."""
    overrides = [word for word in words if re.match(r"[\w.]+=", word)]
    recipes = [word for word in words if word not in overrides]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]!r} is not a setting (name=value), and there is a recipe already: {recipes[0]!r}.")
    return (recipes[0] if recipes else None), overrides


def _train(args: Namespace) -> int:
    from skyrl_trainer.dry_run.plan import obstacles, print_plan

    resolved = resolve(*split_settings(args.settings))
    if args.dry_run:
        print_plan(resolved)
        return 0
    for sentence in obstacles(resolved.config, hardware()):
        raise UserError(sentence)
    from skyrl_trainer.run.commands import train

    if args.serve is None:
        return train(resolved.config)
    from skyrl_trainer.serve.server import PolicyServer

    return train(resolved.config, beside=PolicyServer(LOCALHOST, args.serve).beside)


def _sft(args: Namespace) -> None:
    config = load_config(*split_settings(args.settings))
    model_shape(config)  # raises where there is no such model
    print(load("skyrl_trainer.run.sft:fine_tune")(config))


def _init_policy(args: Namespace) -> None:
    from skyrl_trainer.data import tasks

    config = load_config(*split_settings(args.settings))
    load("skyrl_trainer.tiny.start:make_tiny")(config, args.out, tasks(config, config.data.train_data))
    print(f"A new policy is in {args.out}.")


def _warmstart(args: Namespace) -> None:
    warmstart = load("skyrl_trainer.tiny.clone:warmstart")
    print(warmstart(load_config(*split_settings(args.settings)), args.out, args.seconds))


def _policy_of(args: Namespace) -> tuple[Any, str]:
    recipe, overrides = split_settings(args.settings)
    model = str(args.target)
    own = args.target / "config.yaml"
    if own.is_file():
        if recipe:
            raise UserError(f"{args.target} is a run with its own settings; leave out the recipe {recipe!r}.")
        recipe, model = str(own), str(_model_folder(args.target, args.which))
    elif args.target.parts[:1] == ("runs",) and not args.target.exists():  # no owner's name on Hugging Face
        raise UserError(f"There is no run {args.target}: see what `ls runs` lists, or train it first.")
    config = load_config(recipe, [*overrides, f"trainer.policy.model.path={model}"])
    model_shape(config)  # raises where there is no such model
    return config, model


def _serve(args: Namespace) -> None:
    config, model = _policy_of(args)
    from skyrl_trainer.serve.server import PolicyServer, serve

    name = args.target.resolve().name if args.target.is_dir() else model
    serve(config, model, name, PolicyServer(args.host, args.port))


def _eval(args: Namespace) -> None:
    config, model = _policy_of(args)
    metrics = load("skyrl_trainer.run.commands:evaluate")(config, model)
    print(f"{model}: held-out tasks at temperature {config.generator.eval_temperature:g}")
    for name, value in metrics.items():
        print(f"  {name:<20}  {value:.6g}")


def _report(args: Namespace) -> None:
    write_report = load("skyrl_trainer.report.html:write_report")
    out = args.out or args.runs[0] / ("report.html" if len(args.runs) == 1 else "compare.html")
    write_report(args.runs, out)
    print(out)


def _view(args: Namespace) -> None:
    write_viewer = load("skyrl_trainer.report.viewer:write_viewer")
    out = args.out or args.run / "trajectories.html"
    print(f"{out}: {write_viewer(args.run, out, args.step)}")


def _model_folder(run: Path, which: str) -> Path:
    folder = run / "model" / which
    if not (folder / "config.json").is_file():
        raise UserError(f"There is no policy in {folder}: {run} is not a run folder, or its run has saved none yet.")
    return folder


def _export(args: Namespace) -> None:
    if args.trajectories:
        if args.card or args.push or args.which:
            raise UserError("--card, --push and --which belong to a policy: give --out DIR, not --trajectories.")
        from skyrl_trainer.replay.commands import export_chat

        print(export_chat(args.run, args.trajectories, args.step, args.min_reward, args.only_success))
        return
    if (args.step, args.min_reward, args.only_success) != (None, None, False):
        raise UserError("--step, --min-reward and --only-success choose trajectories: give --trajectories, not --out.")
    import shutil

    from skyrl_trainer import hub
    from skyrl_trainer.agent.tokenizer import load_chat_prompt
    from skyrl_trainer.files import written_aside
    from skyrl_trainer.report.card import check_card, write_card
    from skyrl_trainer.tiny.init_policy import refuse_used

    source = _model_folder(args.run, which := args.which or "last")
    refuse_used(args.out)
    if args.card:
        check_card(args.run, source)
    if args.push:
        hub.push(args.push)
    with written_aside(args.out) as folder:
        try:  # by the open folder: a run that goes on may put another in its place
            shutil.copytree(f"/proc/self/fd/{os.open(source, os.O_RDONLY)}", folder, dirs_exist_ok=True)
        except shutil.Error as error:
            what = f"{source} cannot be copied ({error.args[0][0][2]})"
            raise UserError(f"{what}; if its run has just replaced it, export again.") from error
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            model.generation_config.eos_token_id = [*load_chat_prompt(str(folder)).stop_token_ids]  # for other servers
            model.generation_config.save_pretrained(folder)
        except Exception as error:  # transformers and safetensors raise many kinds
            raise UserError(f"The policy in {source} does not load, so nothing was exported: {error}") from error
        if args.card:
            write_card(args.run, which, folder)
    print(f"{args.out}: {model.num_parameters() / 1e6:.2f} M parameters, loads in transformers")
    if args.push:
        print(hub.push(args.push, args.out))


def _doctor(args: Namespace) -> int:
    found = examine()
    if args.cluster is not None:
        from skyrl_trainer.dry_run.cluster import examine_cluster

        config = load_config(*split_settings(args.cluster))
        config.ray.address = config.ray.address or "auto"
        found = examine_cluster(config)
    failed = False
    for mark, subject, text in found:
        print(f"{mark:<4}  {subject:<14} {text}", flush=True)
        failed |= mark == "FAIL"
    return int(failed)
