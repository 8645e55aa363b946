"""Training from a folder of stored trajectories: groups that another run has sampled, in place of rollouts.

`data.train_data: [runs/x/trajectories]`. Each stored group is a task; the sampler draws them as it draws any others,
so that a resumed run goes on where it was, and after the last group it goes round in another order. Evaluation still
plays its episodes. The tokens come from other weights than the ones that learn, so a correction has to be chosen.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.config import Config, load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.store import JsonlTrajectoryStore, open_store
from skyrl_trainer.types import PromptBatch, RolloutBatch, Sample, Trajectory


def stored_folders(specs: Sequence[str | dict[str, Any]]) -> list[Path]:
    """Those of `data.train_data` that hold trajectories. UserError where other sources stand beside them."""
    paths = [Path(spec).expanduser() for spec in specs if isinstance(spec, str)]
    folders = [p for p in paths if any(JsonlTrajectoryStore(f).steps() for f in (p, p / "trajectories"))]
    if folders and len(folders) < len(specs):
        raise UserError(
            f"Data source {str(folders[0])!r} holds stored trajectories, and others stand beside it: a run learns "
            "either from those or from its own, so name folders only, or none."
        )
    return folders


class StoredRollouts:
    """Stands in for rollout.manager.Rollouts: `samples` are its tasks, `run` gives the tries that are stored of them.

    Held in memory, compressed, about as large as the files. UserError for what this configuration cannot learn from.
    """

    def __init__(self, config: Config, folders: list[Path], old_logprobs: str, correction: str) -> None:
        source = f"Data source {str(folders[0])!r}"
        if config.trainer.policy.model.path == "tiny":
            raise UserError(
                f"{source} has another model's tokens than those of trainer.policy.model.path=tiny, which are made "
                "anew: name the model that sampled them, for example its run's init/cloned or model/last."
            )
        if old_logprobs != "rollout" and correction == "none":
            raise UserError(
                f"{source} was sampled by another policy, and nothing corrects for that: set "
                "trainer.algorithm.options.old_logprobs=rollout, or trainer.algorithm.options.correction=tis."
            )
        self.samples: list[Sample] = []
        self._packed: dict[str, bytes] = {}
        for folder in folders:
            self._load(open_store(folder), config)

    def run(self, batch: PromptBatch) -> RolloutBatch:
        """The stored tries of these tasks as this step's; what the other run made of them is left out."""
        groups = []
        for number, sample in enumerate(batch.samples, batch.offset):
            group: list[Trajectory] = pickle.loads(zlib.decompress(self._packed[sample.sample_id]))
            for trajectory in group:
                trajectory.trajectory_id = f"{batch.step}/{number}/{trajectory.generation}"
                trajectory.sample, trajectory.scores = sample, {}
                for turn in trajectory.turns:
                    turn.advantages = []
            groups.append(group)
        return RolloutBatch(batch.step, groups)

    def check(self, tokenizer: Any) -> None:
        """UserError when the ids (of the first group) are not this tokenizer's."""
        for turn in (turn for t in self.run(PromptBatch(0, self.samples[:1], 1)).trajectories for turn in t.turns):
            if max(turn.output_ids, default=0) >= len(tokenizer) or (
                ChatPrompt(tokenizer).decode(turn.output_ids) != turn.action
            ):
                raise UserError(
                    f"The tokens of {self.samples[0].sample_id} are not those of trainer.policy.model.path: name the "
                    "model that sampled them, or one with its tokenizer."
                )

    def _load(self, store: JsonlTrajectoryStore, config: Config) -> None:
        folder, wanted, now = store.path(0).parent, config.generator.num_generations, config.generator.temperature
        if folder.resolve() == (config.run_path.expanduser() / "trajectories").resolve():
            raise UserError(f"Data source {str(folder)!r} is this run's own folder: give another trainer.run_dir.")
        recipe = folder.parent / "config.yaml"
        if recipe.is_file() and (then := load_config(str(recipe), []).generator.temperature) != now:
            raise UserError(
                f"Data source {str(folder)!r} was sampled at generator.temperature={then:g}, not {now:g}: set it so."
            )
        for step in store.steps():
            for number, group in enumerate(store.read(step).groups):
                name = f"{store.path(step)}#{number}"
                if len(group) != wanted:
                    raise UserError(
                        f"{name} has {len(group)} tries, but generator.num_generations is {wanted}: set it to the size "
                        "of the stored groups, or leave that file out."
                    )
                self.samples.append(replace(group[0].sample, sample_id=name))
                self._packed[name] = zlib.compress(pickle.dumps(group), 1)
