"""`skyrl-trainer replay` and `export --trajectories`: what stored trajectories are good for."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from skyrl_trainer.agent.chat_api import Json, for_template
from skyrl_trainer.algorithms.rewards import completion
from skyrl_trainer.algorithms.roles import by_role
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import writing
from skyrl_trainer.replay.player import Player, compare
from skyrl_trainer.rollout.stored import open_store
from skyrl_trainer.types import Trajectory


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where every episode was identical to its record, 1 otherwise."""
    files = [folder / "config.yaml" for folder in (args.run, *args.run.resolve().parents[:2])]  # of held_out/NAME, too
    config = load_config(next((str(path) for path in files if path.is_file()), None), [])
    total = same = 0
    if args.recompute:  # before hours of playing: it may be wrong
        from skyrl_trainer.replay.recompute import load_scorer, report

        scorer, tokenizer = load_scorer(config, args.recompute)
    with Player(config.environment.step_timeout) as player:
        for step, trajectories in stored(args.run, args.step, args.index):
            found = 0
            for trajectory in trajectories:
                difference = compare(trajectory, player.play(trajectory, args.live))
                found += difference is None
                if difference is not None:
                    print(f"{trajectory.trajectory_id} ({trajectory.sample.env_id}): {difference}", flush=True)
            if args.step is None:
                print(f"step {step}: {found} of {len(trajectories)}", flush=True)
            total, same = total + len(trajectories), same + found
    print(f"{same} of {total} identical", flush=True)
    if args.recompute:
        for step, trajectories in stored(args.run, args.step, args.index):
            print(f"step {step}, scored by {args.recompute}:", *report(trajectories, scorer, tokenizer), sep="\n")
    return int(same < total)


def stored(run: Path, step: int | None, index: str = "all") -> Iterator[tuple[int, list[Trajectory]]]:
    """(step, its trajectories), in order. UserError for what is not there."""
    store = open_store(run)
    if step is None and index != "all":
        raise UserError(f"--index {index} needs a step: add --step, one of {_listed(store.steps())}.")
    if step is not None and step not in store.steps():
        raise UserError(f"--step {step}: {run} has no stored trajectories of it, only of {_listed(store.steps())}.")
    for number in store.steps() if step is None else [step]:
        trajectories = store.read(number).trajectories
        if index != "all":
            if not (index.isascii() and index.isdigit() and int(index) < len(trajectories)):
                raise UserError(f"--index {index}: step {number} has the trajectories 0 to {len(trajectories) - 1}.")
            trajectories = [trajectories[int(index)]]
        yield number, trajectories


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) < 10 else f"{steps[0]} to {steps[-1]}"


def chat_rows(trajectory: Trajectory) -> Iterator[Json]:
    """A row for each conversation of the policy; TRL's SFTTrainer takes `messages` and `tools`, others choose rows."""
    for segment in trajectory.segments() if "skyrl/read" in trajectory.turns[0].info else [[]]:
        messages = list[Json]()
        for turn in segment:
            messages += [*map(_read, turn.info["skyrl/read"]), {"role": "assistant", "content": turn.action}]
        yield {
            "messages": messages or [*trajectory.prompt, *completion(trajectory)],
            "tools": json.dumps(trajectory.tools) if trajectory.tools else None,  # a text: datasets would mix schemas
            "reward": trajectory.env_reward,
            "success": trajectory.success,
            **({"scores": trajectory.scores} if trajectory.scores else {}),
            "env": trajectory.sample.env_id,
            "task": trajectory.sample.sample_id,
            "trajectory": trajectory.trajectory_id,
            "stop_reason": trajectory.stop_reason.value,
        }


def _read(message: Json) -> Json:
    told = for_template(message)
    told.pop("reasoning_content", None)
    return told | {"weight": 0} if told["role"] == "assistant" else told


def export_chat(run: Path, out: Path, step: int | None, min_reward: float | None, only_success: bool) -> str:
    """Writes the chosen trajectories as chat jsonl, without failed ones; a sentence with the counts."""
    total = failed = written = 0
    aside = out.parent / f".{out.name}.{os.getpid()}"
    with writing(out, out.parent), ExitStack() as stack:
        stack.callback(aside.unlink, missing_ok=True)
        with aside.open("w", encoding="utf-8") as file:
            for _, trajectories in stored(run, step):
                alive = [(0, each) for each in trajectories if each.turns and not each.stop_reason.failed]
                failed += len(trajectories) - len(alive)
                for _, part in by_role(alive):
                    total += 1
                    enough = min_reward is None or part.env_reward >= min_reward
                    if enough and (part.success or not only_success):
                        file.writelines(json.dumps(row) + "\n" for row in chat_rows(part))
                        written += 1
        total += failed
        if not written:
            raise UserError(f"None of the {total} trajectories of {run} is to be exported ({failed} had failed).")
        aside.replace(out)
    return f"{out}: {written} of {total} trajectories ({failed} had failed, {total - failed - written} not chosen)"
