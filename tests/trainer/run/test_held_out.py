"""An evaluation tries the whole of its data, so many tasks at a time, unless a setting says how many."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.rollout.stored import open_store
from skyrl_trainer.run import commands
from skyrl_trainer.run.held_out import TASKS_OF_ENVS, HeldOut
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, RolloutBatch, StopReason, Trajectory, Turn
from skyrl_trainer.user_file import load_plugin

ENV = "text_math?split=val&difficulty=1"


class Solved:
    """Rollouts in which everybody solves the task."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.names: list[str] = []

    def run(self, batch: PromptBatch, eval: bool) -> RolloutBatch:
        assert eval and batch.num_generations == 1
        self.sizes.append(len(batch.samples))
        numbers = range(batch.offset, batch.offset + len(batch.samples))
        self.names += [f"eval/{batch.step}/{number}/0" for number in numbers]
        turn = Turn([1], [2], [0.0], [0], "x", info={"success": True})
        groups = [
            [Trajectory(n, s, 0, 0, [turn])] for n, s in zip(self.names[-len(numbers) :], batch.samples, strict=True)
        ]
        return RolloutBatch(batch.step, groups)


def rows(path: Path, number: int) -> str:
    lines = [{"prompt": f"{i} + 1 = ?", "ground_truth": str(i + 1)} for i in range(number)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize("size, sizes", [(None, [8, 8, 8, 6]), (10, [8, 2]), (100, [8, 8, 8, 6])])
def test_a_file_is_tried_whole_and_in_parts(tmp_path: Path, size: int | None, sizes: list[int]) -> None:
    data = {"val_data": [rows(tmp_path / "val.jsonl", 30)], "val_size": size}
    rollouts: Any = Solved()
    held_out = HeldOut(Config.model_validate({"data": data, "trainer": {"eval_batch_size": 8}}), None)
    metrics = held_out.metrics(rollouts, step=3)
    assert rollouts.sizes == sizes and len(set(rollouts.names)) == sum(sizes) == metrics["eval/episodes"]
    assert metrics["eval/success"] == 1.0


def test_what_was_tried_is_kept(tmp_path: Path) -> None:
    """Of each evaluation that had tasks; one that is made again replaces its file."""
    config = Config.model_validate({"data": {"val_data": [rows(tmp_path / "val.jsonl", 3)]}})
    rollouts, store = cast(Any, Solved()), JsonlTrajectoryStore(tmp_path / "held_out")
    held_out = HeldOut(config, None, store)
    for step in (0, 10, 10):
        held_out.metrics(rollouts, step)
    assert store.steps() == [0, 10]
    assert [each.trajectory_id for each in store.read(10).trajectories] == [f"eval/10/{k}/0" for k in range(3)]


def test_tries_of_a_task_are_a_group_and_give_pass_at_k(tmp_path: Path) -> None:
    """Those that a spec asks for, and those of equal rows: DAPO's AIME has every row 32 times."""

    class SomeSolved(Solved):
        def run(self, batch: PromptBatch, eval: bool) -> RolloutBatch:
            played = super().run(batch, eval)
            for trajectory in played.trajectories:  # of the first task one try of four
                number = int(trajectory.trajectory_id.split("/")[2])
                trajectory.turns = [replace(trajectory.turns[0], info={"success": number == 2})]
            return played

    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(json.dumps({"prompt": f"{i % 2} + 1 = ?", "ground_truth": "1"}) for i in range(8)))
    rollouts: Any = SomeSolved()
    for spec in (rows(tmp_path / "val.jsonl", 2) + "?tries=4", str(again)):
        data = {"data": {"val_data": [spec]}, "generator": {"eval_temperature": 0.6}}
        store = JsonlTrajectoryStore(tmp_path / "held_out")
        found = HeldOut(Config.model_validate(data), None, store).metrics(rollouts, step=3)
        assert found["eval/success"] == 1 / 8 and found["eval/episodes"] == 8
        assert (found["eval/pass_at/2"], found["eval/pass_at/4"]) == (0.25, 0.5)
        groups = store.read(3).groups
        assert [[each.generation for each in group] for group in groups] == [[0, 1, 2, 3]] * 2
        assert all(len({repr(each.sample.options) for each in group}) == 1 for group in groups)
    specs = [rows(tmp_path / "one.jsonl", 1) + "?tries=4", f"{ENV}&size=2"]
    both = HeldOut(Config.model_validate({"data": {"val_data": specs}, "generator": {"eval_temperature": 0.6}}), None)
    assert (len({each.sample_id for each in both.tasks}), len(both.tasks)) == (3, 6)
    rollouts.names.clear()
    found = both.metrics(rollouts, step=3)
    assert (found["eval/pass_at/2"], found["eval/pass_at/4"]) == (0.5, 1.0), "of the source with tries"
    with pytest.raises(UserError, match=r"`tries` are all the same at generator.eval_temperature=0"):
        HeldOut(Config.model_validate({"data": {"val_data": [f"{ENV}&tries=2"]}}), None)


@pytest.mark.parametrize("solved, fails", [(8, False), (0, True)])
def test_only_an_evaluation_of_which_all_failed_ends_a_run(tmp_path: Path, solved: int, fails: bool) -> None:
    """Not one whose last part, a single task, did; nor the failure of the only task."""

    class Failing(Solved):
        def run(self, batch: PromptBatch, eval: bool) -> RolloutBatch:
            played = super().run(batch, eval)
            for trajectory in played.trajectories:
                if int(trajectory.trajectory_id.split("/")[2]) >= solved:
                    trajectory.stop_reason, trajectory.error = StopReason.ENV_ERROR, "no"
            return played

    def examine(tasks: int) -> float:
        data = {"val_data": [rows(tmp_path / "val.jsonl", tasks)]}
        held_out = HeldOut(Config.model_validate({"data": data, "trainer": {"eval_batch_size": 8}}), None)
        rollouts: Any = Failing()
        return held_out.metrics(rollouts, step=3)["eval/failed"]

    with (
        pytest.raises(UserError, match="All 9 episodes of the evaluation at step 3 failed") if fails else nullcontext()
    ):
        assert examine(9) == 1
    assert examine(1) == (1 if fails else 0)


def test_tasks_of_envs_are_as_many_as_the_setting_or_the_spec_says(tmp_path: Path) -> None:
    def number(*specs: str, **data: Any) -> int:
        return len(HeldOut(Config.model_validate({"data": {"val_data": list(specs), **data}}), None).tasks)

    assert number(ENV) == TASKS_OF_ENVS and number(ENV, val_size=20) == 20 and number(f"{ENV}&size=7") == 7
    assert number(ENV, rows(tmp_path / "val.jsonl", 30)) == TASKS_OF_ENVS + 30


@pytest.mark.parametrize("known", [True, False])
def test_eval_shows_what_reward_functions_say(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a plug-in. What a script brought is not here, and the env's rewards stay."""
    plugin = tmp_path / "judges.py"
    plugin.write_text(
        "from skyrl_trainer.plugins import register_reward\n\n\n@register_reward('always')\n"
        "def always(completions, **columns):\n    return [0.25] * len(completions)\n"
    )
    algorithm: dict[str, Any] = {"reward_funcs": {"always" if known else "of_a_script": 2.0}}
    algorithm |= {"plugin_file": str(plugin)} if known else {}
    data = {"val_data": [rows(tmp_path / "val.jsonl", 3)]}
    monkeypatch.setattr(commands, "check_engines", lambda config, *given, **more: load_plugin(config))
    processes = SimpleNamespace(rollouts=Solved(), wait_for_engines=lambda: None)
    monkeypatch.setattr(commands, "Processes", lambda *given: nullcontext(processes))
    config = Config.model_validate({"data": data, "trainer": {"algorithm": algorithm}})
    found = commands.evaluate(config, str(tmp_path), tmp_path / "tries" if known else None)
    said = capsys.readouterr().out
    kept = open_store(tmp_path / "tries").read(0).trajectories if known else []
    assert [each.scores for each in kept] == [{"always": 0.25}] * 3 * known
    assert found["eval/success"] == 1.0
    if known:
        assert (found["eval/reward/always"], found["eval/reward/total"], said) == (0.25, 0.5, "")
    else:
        assert not {"eval/reward/total", "eval/reward/of_a_script"} & found.keys()
        assert said.startswith("Rewards are the env's: trainer.algorithm.reward_funcs='of_a_script' is not registered")
