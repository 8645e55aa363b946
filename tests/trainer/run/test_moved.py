"""A run folder that was moved between two starts: what names a file in it names the same file, where it lies now."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_trainer.algorithms.curriculum import CurriculumSampler
from skyrl_trainer.data import SampleSource
from skyrl_trainer.errors import UserError
from skyrl_trainer.run import tries
from skyrl_trainer.run.checkpoint import Loaded
from skyrl_trainer.run.resume import check_resumable, resumable
from skyrl_trainer.run.trl_rows import ENV_ID, write_environment
from skyrl_trainer.settings import Config
from skyrl_trainer.types import LearnerState, Sample, Trajectory
from tests.trainer.run import test_tries


def settings(folder: Path, model: str = "init/given", data: str = "data/train.jsonl") -> Config:
    """As a GRPOTrainer writes them, whose model, rows and environments lie in the run folder."""
    found = {
        "data": {"train_data": [str(folder / data), "text_math"]},
        "trainer": {"run_dir": str(folder), "policy": {"model": {"path": str(folder / model)}}},
        "environment": {"env_file": str(folder / "environment.py")},
    }
    return Config.model_validate(found)


def test_files_in_the_run_folder_move_along_and_others_are_compared(tmp_path: Path) -> None:
    saved = json.loads(settings(tmp_path / "a").model_dump_json())
    check_resumable(saved, settings(tmp_path / "elsewhere" / "b"))
    with pytest.raises(UserError, match=r"trainer.policy.model.path was '.*/b/init/given', is '.*/b/init/other'"):
        check_resumable(saved, settings(tmp_path / "b", model="init/other"))
    with pytest.raises(UserError, match=r"data.train_data was .*/b/data/train.jsonl.* is .*/b/data/val.jsonl"):
        check_resumable(saved, settings(tmp_path / "b", data="data/val.jsonl"))
    outside = settings(tmp_path / "b")
    outside.trainer.policy.model.path = str(tmp_path / "a" / "init/given")
    with pytest.raises(UserError, match=r"trainer.policy.model.path was '.*/b/init/given', is '.*/a/init/given'"):
        check_resumable(saved, outside)


class FileRun(test_tries.FakeRun):
    """Its tasks are rows of files in the run folder, and so is the file that registers their envs."""

    def __init__(self, config: Config, checkpoints: list[str]) -> None:
        super().__init__(config, checkpoints, random.Random(0), 0.0, self.sampler)

    def sampler(self, source: object, seed: int) -> CurriculumSampler:
        folder, file = self.config.run_path / "data", self.config.environment.env_file
        parts = [
            [Sample(f"{folder}/{kind}.jsonl#{i}", "test/None-v0", i, env_file=file) for i in range(500)]
            for kind in ("a", "b")
        ]
        return CurriculumSampler(SampleSource(parts), seed)

    def resume(self) -> Any:
        saved = json.loads(self.checkpoints[-1])
        extra = resumable(Loaded(0, LearnerState({}, {}), saved, "0.1"), self.config).extra
        self.tries.load_state_dict(extra["tries"], 0)


def test_tries_that_were_stored_are_taken_and_the_others_played_with_the_files_of_today(tmp_path: Path) -> None:
    here = test_tries.make_config(tmp_path / "a", bound=2)
    here.environment.env_file = str(tmp_path / "old" / "envs.py")
    run = FileRun(here, [])
    run.tries.draw(0)
    run.tries.collect(run.stop.interruptible())
    saved = {"config": here.model_dump(mode="json"), "tries": run.tries.state_dict()}
    ended = {number for number, _, _ in saved["tries"]["open"] if number not in run.tries._playing}
    assert len(ended) == 1
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").rename(tmp_path / "elsewhere" / "b")

    there = here.model_copy(deep=True)
    there.trainer.run_dir = str(tmp_path / "elsewhere" / "b")
    there.environment.env_file = str(tmp_path / "new" / "envs.py")
    again = FileRun(there, [json.dumps(saved)])
    again.resume()
    again.tries.draw(0)
    played = {each.rsplit("/", 1)[0] for each in again.rollouts.begun}
    size = again.tries.flow.size
    names = {number: f"{number // size + 1}/{number % size}" for number, _, _ in saved["tries"]["open"]}
    assert played == {name for number, name in names.items() if number not in ended}
    groups = [*again.tries._playing.values(), *filter(None, again.tries.flow.groups.values())]
    for sample in (each.sample for group in groups for each in group):
        assert sample.sample_id.startswith(f"{there.run_path}/data/") and sample.env_file.endswith("/new/envs.py")
    while again.tries._playing:  # a curriculum knows a source by its file's name
        again.tries.collect(again.stop.interruptible())


def test_another_task_of_the_same_number_is_not_taken_for_it(tmp_path: Path) -> None:
    def group(name: str, seed: int = 1) -> Any:
        return [Trajectory("1/0/0", Sample(name, "test/None-v0", seed), 0, 0)]

    now = Sample("new/a.jsonl#1", "test/None-v0", 1, env_file="new.py")
    assert tries._tries_of(now, old := group("old/a.jsonl#1")) and old[0].sample == now
    assert not tries._tries_of(now, group("old/b.jsonl#1"))
    assert not tries._tries_of(now, group("old/a.jsonl#1", seed=2))


def test_environments_of_a_script_are_found_where_the_folder_lies_now(tmp_path: Path) -> None:
    file = Path(write_environment(tmp_path / "a", None, [], True))
    (tmp_path / "a").rename(tmp_path / "b")
    look = f"import runpy, gymnasium; runpy.run_path({str(tmp_path / 'b' / file.name)!r}); "
    look += f"print(gymnasium.spec({ENV_ID!r}).kwargs['given'])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(tmp_path / "b" / "environment.pkl"), done.stderr
