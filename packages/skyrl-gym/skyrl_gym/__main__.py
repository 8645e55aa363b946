"""`python -m skyrl_gym` lists the environments; `play ENV` plays one; `demos ENV` writes the expert's
episodes; `serve ENV` serves one by the OpenEnv protocol; `baseline ENV` says what an agent reaches in one."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from skyrl_gym.baseline import Episode, episodes, figures, make_agent
from skyrl_gym.data import beside
from skyrl_gym.options import add_options
from skyrl_gym.play import demonstrations, play
from skyrl_gym.registry import list_envs, resolve_env_id


def _table() -> str:
    rows = [("id", "steps", "reward", "splits", "description")]
    for entry in list_envs():
        steps = str(entry.max_episode_steps or "-")
        reward = "{:g} to {:g}".format(*entry.reward_range) if entry.reward_range else "-"
        rows.append((entry.id, steps, reward, " ".join(entry.splits) or "-", entry.description))
    line = "  ".join(f"{{:<{max(map(len, column))}}}" for column in zip(*rows, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


def _write_demos(env_id: str, n: int, out: Path, options: dict[str, Any]) -> None:
    made = solved = 0
    for demonstration in demonstrations(env_id, n, options):
        with out.open("a" if made else "w", encoding="utf-8") as file:
            file.write(json.dumps(demonstration, ensure_ascii=False) + "\n")
        made, solved = made + 1, solved + demonstration["success"]
        if made % max(1, n // 10) == 0:
            print(f"{made} of {n} demonstrations", file=sys.stderr)
    if solved < n:
        print(f"The expert failed in {n - solved} of them; `success` in {out} says which.", file=sys.stderr)


def _baseline(args: argparse.Namespace, options: dict[str, Any]) -> None:
    if args.episodes < 2:
        raise ValueError(f"--episodes is {args.episodes}, expected 2 or more.")
    env_id, played = resolve_env_id(args.env), list[Episode]()
    agent = make_agent(args.agent, args.model, env_id, options)
    try:
        played.extend(episodes(gymnasium.make(env_id), agent, range(args.episodes), options))
    finally:  # those before an endpoint's fault count, too
        if len(played) > 1:
            found = figures(played)
            print(f"{env_id}, {args.agent}, {len(played)} episodes, {found['steps']:.2f} steps each")
            for name in ("success", "reward"):
                print("{:<8}{:.3f}, 95 %: {:.3f} to {:.3f}".format(name, found[name], *found[f"{name}_95"]))


def _serve(args: argparse.Namespace) -> None:
    try:
        from skyrl_gym.openenv.server import Limits, prepared, write_manifest
    except ImportError as error:
        raise ValueError(f"Serving needs more ({error}): pip install 'skyrl-gym[server]'.") from error
    env_id = resolve_env_id(args.env)
    if args.write_openenv:
        write_manifest(args.write_openenv, env_id, args.port)
        return
    limits = Limits(args.max_sessions, args.idle_seconds)
    server, listening = prepared(env_id, args.host, args.port, args.key, limits)
    print(f"{env_id} is served at ws://{args.host}:{listening.getsockname()[1]}", flush=True)
    server.run(sockets=[listening])


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, for example solution=worked")
    try:
        return name, yaml.safe_load(value)
    except (ValueError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} has no value of YAML: put it in quotes, {name}='...'") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m skyrl_gym", description="Lists the environments.")
    commands = parser.add_subparsers(dest="command", metavar="{play,demos,serve,baseline}")
    for name, form in beside(__file__, "commands.yaml").items():
        command = commands.add_parser(name, help=form["help"])
        add_options(command, form["options"])
        command.add_argument("env", help="an id, or a short name such as text_math")
        if name == "serve":
            command.set_defaults(key=os.environ.get("SKYRL_OPENENV_KEY"))
        else:
            command.add_argument("--option", type=_option, action="append", default=[], help="another: NAME=VALUE")
    args = parser.parse_args(arguments)
    try:
        named = {name: getattr(args, name, None) for name in ("task_id", "difficulty", "split", "lang")}
        named |= getattr(args, "option", ())
        options = {name: value for name, value in named.items() if value is not None}
        if args.command is None:
            print(_table())
        elif args.command == "serve":
            _serve(args)
        elif args.command == "play":
            play(args.env, args.seed, options)
        elif args.command == "baseline":
            _baseline(args, options)
        else:
            _write_demos(args.env, args.n, args.out, options)
    except BrokenPipeError:  # of whoever reads this
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, OSError, ImportError, gymnasium.error.Error) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
