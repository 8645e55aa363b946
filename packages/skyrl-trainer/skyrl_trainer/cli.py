"""`skyrl-trainer`: train, sft, eval, serve, replay, report, view, export, init-policy, warmstart, envs, doctor.

Exit codes: 0 done; 2 what the user can mend, in one sentence; 3 an evaluation with a caveat; 1 a fault of ours, its
traceback in a file; 128 and the number of the signal that stopped it, 130 after Ctrl-C.
"""

import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from skyrl_trainer import __version__
from skyrl_trainer.config import leaf_fields, load_config, resolve
from skyrl_trainer.data import tasks
from skyrl_trainer.dry_run.doctor import examine, hardware, require_gym
from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.run.model_shape import model_shape
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.user_file import blaming


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
            if args.command is not COMMANDS["doctor"]:  # which says it itself
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
        elif str(type(error)) == "<class 'torch.OutOfMemoryError'>":
            code, said = 2, f"{str(error).partition('. GPU')[0]}: docs/troubleshooting.md says what takes less."
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
    # Read here and not by skyrl_gym.options: `doctor` has to speak where skyrl-gym is missing.
    for name, form in yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text()).items():
        arguments = form.pop("arguments", {})
        command = commands.add_parser(name, **form)
        command.set_defaults(command=COMMANDS[name])
        for spelled, given in arguments.items():
            kind = {"type": TYPES[given["type"]]} if "type" in given else {}
            added = command.add_argument(*spelled.split(), **given | kind)
            if spelled == "settings":
                added.completer = _recipes_and_settings  # type: ignore[attr-defined]
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


def split_settings(words: list[str]) -> tuple[str | None, list[str]]:
    """The recipe (at most one word without `name=`) and the overrides."""
    overrides = [word for word in words if re.match(r"[\w.-]+=", word)]
    recipes = [word for word in words if word not in overrides]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]!r} is not a setting (name=value), and there is a recipe already: {recipes[0]!r}.")
    return (recipes[0] if recipes else None), overrides


def _train(args: Namespace) -> int:
    resolved = resolve(*split_settings(args.settings))
    if args.dry_run:
        load("skyrl_trainer.dry_run.plan:print_plan")(resolved)
        return 0
    for sentence in load("skyrl_trainer.dry_run.plan:obstacles")(resolved.config, hardware()):
        raise UserError(sentence)
    train = load("skyrl_trainer.run.commands:train")
    if args.serve is None:
        return train(resolved.config)
    server = load("skyrl_trainer.serve.server:PolicyServer")("127.0.0.1", args.serve)
    return train(resolved.config, beside=server.beside)


def _sft(args: Namespace) -> None:
    config = load_config(*split_settings(args.settings))
    model_shape(config)  # raises where there is no such model
    print(load("skyrl_trainer.run.sft:fine_tune")(config))


def _init_policy(args: Namespace) -> None:
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
    config = load_config(recipe, overrides)
    config.trainer.policy.model.path = model
    model_shape(config)  # raises where there is no such model
    return config, model


def _serve(args: Namespace) -> None:
    config, model = _policy_of(args)
    name = args.target.resolve().name if args.target.is_dir() else model
    server = load("skyrl_trainer.serve.server:PolicyServer")(args.host, args.port)
    load("skyrl_trainer.serve.server:serve")(config, model, name, server)


def _eval(args: Namespace) -> None:
    config, model = _policy_of(args)
    if args.out:
        with load("skyrl_trainer.files:writing")(args.out, args.out):
            args.out.rmdir()  # it can be made, and holds nothing
    metrics = load("skyrl_trainer.run.commands:evaluate")(config, model, args.out)
    print(f"{model}: held-out tasks at temperature {config.generator.eval_temperature:g}")
    for name, value in metrics.items():
        print(f"  {name:<20}  {value:.6g}")


def _report(args: Namespace) -> None:
    out = args.out or args.runs[0] / ("report.html" if len(args.runs) == 1 else "compare.html")
    load("skyrl_trainer.report.html:write_report")(args.runs, out)
    print(out)


def _view(args: Namespace) -> None:
    out = args.out or args.run / "trajectories.html"
    print(f"{out}: {load('skyrl_trainer.report.viewer:write_viewer')(args.run, out, args.step)}")


def _model_folder(run: Path, which: str) -> Path:
    folder = run / "model" / which
    if not (folder / "config.json").is_file():
        raise UserError(f"There is no policy in {folder}: look what {run} holds, and choose with --which.")
    return folder


def _export(args: Namespace) -> None:
    if bool(args.out) == bool(args.trajectories):
        raise UserError("export takes one of --out DIR, for the policy, and --trajectories JSONL.")
    if args.trajectories:
        if args.card or args.push or args.which:
            raise UserError("--card, --push and --which belong to a policy: give --out DIR, not --trajectories.")
        export = load("skyrl_trainer.replay.commands:export_chat")
        print(export(args.run, args.trajectories, args.step, args.min_reward, args.only_success))
        return
    if (args.step, args.min_reward, args.only_success) != (None, None, False):
        raise UserError("--step, --min-reward and --only-success choose trajectories: give --trajectories, not --out.")
    from skyrl_trainer import hub
    from skyrl_trainer.agent.tokenizer import load_chat_prompt
    from skyrl_trainer.files import written_aside
    from skyrl_trainer.report.card import check_card, write_card

    source = _model_folder(args.run, which := args.which or "last")
    load("skyrl_trainer.tiny.init_policy:refuse_used")(args.out)
    if args.card:
        check_card(args.run, source)
    if args.push:
        hub.push(args.push)
    with written_aside(args.out) as folder:
        try:  # by the open folder: its run may put another in its place
            shutil.copytree(f"/proc/self/fd/{os.open(source, os.O_RDONLY)}", folder, dirs_exist_ok=True)
        except shutil.Error as error:
            what = f"{source} cannot be copied ({error.args[0][0][2]})"
            raise UserError(f"{what}; if its run has just replaced it, export again.") from error
        try:
            model = load("transformers:AutoModelForCausalLM").from_pretrained(folder, dtype="auto")
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
        config = load_config(*split_settings(args.cluster))
        config.ray.address = config.ray.address or "auto"
        found = load("skyrl_trainer.dry_run.cluster:examine_cluster")(config)
    failed = False
    for mark, subject, text in found:
        print(f"{mark:<4}  {subject:<14} {text}", flush=True)
        failed |= mark == "FAIL"
    return int(failed)


COMMANDS = {
    "train": _train,
    "sft": _sft,
    "eval": _eval,
    "serve": _serve,
    "report": _report,
    "replay": lambda args: load("skyrl_trainer.replay.commands:run")(args),
    "view": _view,
    "export": _export,
    "init-policy": _init_policy,
    "warmstart": _warmstart,
    "envs": lambda _: load("skyrl_gym.__main__:main")([]),
    "doctor": _doctor,
}
TYPES = {"int": int, "float": float, "path": Path, "folder": _folder}
"""Named in commands.yaml."""
