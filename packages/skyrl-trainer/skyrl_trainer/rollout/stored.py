"""Trajectories that are stored already: opened, and trained on in place of rollouts by `data.train_data: [runs/x]`.

Each stored group is a task; the sampler draws them as any others, after the last group in another order. The tokens
come from another policy, so a correction has to be chosen.
"""

import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.settings import OPTIONS, Config
from skyrl_trainer.types import Sample, Trajectory


def open_store(path: Path) -> JsonlTrajectoryStore:
    """The trajectories of a run, or of their folder itself. UserError where there are none."""
    for folder in (path / "trajectories", path):
        store = JsonlTrajectoryStore(folder)
        if store.steps():
            return store
    raise UserError(f"{path} holds no stored trajectories: give a run folder, or a folder with step_*.jsonl.gz files.")


def stored_folders(config: Config) -> list[Path]:
    """Those of `data.train_data` that hold trajectories. UserError where they cannot be trained on so."""
    specs = config.data.train_data
    paths = [Path(spec).expanduser() for spec in specs if isinstance(spec, str)]
    folders = [p for p in paths if any(JsonlTrajectoryStore(f).steps() for f in (p, p / "trajectories"))]
    if folders and len(folders) < len(specs):
        wanted = "a run learns either from those or from its own, so name folders only, or none"
        raise _unfit(folders[0], f"holds stored trajectories, and others stand beside it: {wanted}")
    if folders and config.trainer.max_staleness:
        raise UserError("Stored trajectories are as old as they are: with them trainer.max_staleness must be 0.")
    return folders


def stored_rollouts(config: Config, algorithm: Callable[[], Any]) -> "StoredRollouts | None":
    if not (folders := stored_folders(config)):
        return None
    own = algorithm()
    return StoredRollouts(config, folders, own.options.correction == "bypass" or own.correction_range[0] != "none")


class StoredRollouts:
    """Stands in for rollout.manager.Rollouts: `samples` are its tasks, `finished` gives their tries.
    Held in memory, compressed, about as large as the files. UserError for what this configuration cannot learn from.
    """

    def __init__(self, config: Config, folders: list[Path], corrects: bool) -> None:
        if config.trainer.policy.model.path == "tiny":
            name = "name the model that sampled it in trainer.policy.model.path, as its run's init/cloned or model/last"
            raise _unfit(folders[0], f"has other tokens than a tiny policy, whose are made anew: {name}")
        if not corrects:
            wanted = f"set {OPTIONS}.correction=tis or bypass"
            raise _unfit(folders[0], f"was sampled by another policy, and nothing corrects for that: {wanted}")
        self.samples: list[Sample] = []
        self._packed: dict[str, bytes] = {}
        self._size = config.generator.num_generations
        for folder in folders:
            self._load(open_store(folder), config)
        if not self.samples:
            raise _unfit(folders[0], f"has no group of generator.num_generations={self._size} tries: lower it")

    def new_group(self, name: str, sample: Sample, size: int) -> list[Trajectory]:
        return [Trajectory(f"{name}/{number}", sample, number, 0) for number in range(size)]

    def start(self, groups: list[list[Trajectory]]) -> None:
        """Nothing has to be played."""

    def finished(self, groups: Mapping[int, list[Trajectory]], wait_for_all: bool) -> dict[int, list[Trajectory]]:
        """The stored tries in place of each group; what the other run made of them is left out."""
        return {number: self._stored(group) for number, group in groups.items()}

    def _stored(self, empty: list[Trajectory]) -> list[Trajectory]:
        group = pickle.loads(zlib.decompress(self._packed[empty[0].sample.sample_id]))
        for each, named in zip(group, empty, strict=True):
            each.trajectory_id, each.sample, each.scores = named.trajectory_id, named.sample, {}
            for turn in each.turns:
                turn.advantages = []
        return group

    def check(self, tokenizer: Any) -> None:
        """UserError when the ids (of the first group) are not this tokenizer's."""
        decode, size = ChatPrompt(tokenizer).decode, len(tokenizer)
        first = self._stored(self.new_group("0/0", self.samples[0], self._size))
        for turn in (turn for each in first for turn in each.turns):
            if max(turn.output_ids, default=0) >= size or not decode(turn.output_ids).startswith(turn.action):
                wanted = "name the model that sampled them in trainer.policy.model.path, or one with its tokenizer"
                raise _unfit(self.samples[0].sample_id, f"has tokens of another tokenizer: {wanted}")

    def _load(self, store: JsonlTrajectoryStore, config: Config) -> None:
        folder, wanted = store.path(0).parent, self._size
        if folder.resolve() == (config.run_path / "trajectories").resolve():
            raise _unfit(folder, "is this run's own folder: give another trainer.run_dir")
        recipe, now = folder.parent / "config.yaml", config.generator
        then = load_config(str(recipe), []).generator if recipe.is_file() else now
        for name in ("temperature", "top_p"):
            before, here = getattr(then, name), getattr(now, name)
            if before != here:
                raise _unfit(folder, f"was sampled at generator.{name}={before:g}, not {here:g}: set it so")
        for step in store.steps():
            full = store.header(step)["omitted"]
            for number, group in enumerate(store.read(step).groups):
                if full and len(group) < wanted:
                    continue
                name = f"{store.path(step)}#{number}"
                if len(group) != wanted:
                    raise _unfit(name, f"has {len(group)} tries, but generator.num_generations is {wanted}: set it so")
                self.samples.append(replace(group[0].sample, sample_id=name))
                self._packed[name] = zlib.compress(pickle.dumps(group), 1)


def _unfit(source: object, why: str) -> UserError:
    return UserError(f"Data source {str(source)!r} {why}.")
