"""The loop with its tries: killed, stopped and resumed at random points, each task is learned from once, or refused."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from skyrl_trainer.algorithms.curriculum import CurriculumSampler
from skyrl_trainer.algorithms.rewards import Rewards, register_reward
from skyrl_trainer.algorithms.samplers import DynamicSampler
from skyrl_trainer.data import SampleSource
from skyrl_trainer.errors import NothingLearned, UserError
from skyrl_trainer.report.history import Spans
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.run.loop import Loop
from skyrl_trainer.run.run import Run
from skyrl_trainer.run.signals import Stopped, StopSignal
from skyrl_trainer.run.tries import Tries
from skyrl_trainer.run.trl_callbacks import ToldRun
from skyrl_trainer.settings import Config
from skyrl_trainer.types import RewardBatch, RolloutBatch, Sample, StepMetrics, StopReason, Trajectory, Turn

SIZE, STEPS, TRIES = 3, 12, 2


class Killed(BaseException):
    pass


class RandomEnds:
    """In place of Rollouts: groups end in a random order, with tokens of the weights that were published meanwhile."""

    new_group: Any = Rollouts.new_group

    def __init__(self, run: FakeRun) -> None:
        self.run, self.chance, self.version, self.broken = run, run.chance, 0, False
        self._config = run.config
        self.begun: dict[str, int] = {}

    def start(self, groups: list[list[Trajectory]]) -> None:
        self.begun |= {trajectory.trajectory_id: self.version for group in groups for trajectory in group}

    def finished(self, groups: Mapping[int, list[Trajectory]], wait_for_all: bool) -> dict[int, list[Trajectory]]:
        self.run.disturbed()
        ended = list(groups) if wait_for_all else [self.chance.choice(list(groups)[: 2 * SIZE])]
        for each in (each for number in ended for each in groups[number]):
            versions = [self.begun[each.trajectory_id], self.version]
            chance = random.Random(f"{each.trajectory_id} {versions}")
            won = float(chance.random() < 0.5)
            each.turns = [Turn([1], [2, 3], [-0.5, -0.5], versions, "x", reward=won, info={"success": bool(won)})]
            if chance.random() < (1.0 if self.broken and self.version else self.run.failing):
                each.stop_reason = StopReason.ENV_ERROR
        return {number: groups[number] for number in ended}


class Refusing(CurriculumSampler):
    """A curriculum that refuses groups whose returns are equal, as dynamic sampling does; groups that failed, too."""

    def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
        super().accept(group, returns)
        return len(set(returns)) > 1


class FakeRun:
    """What a Loop needs of a Run: real tries, and neither engines nor a learner. One process of a run: at each moment
    it may be killed, get one Ctrl-C or two, or (while it learns) lose its learner or have an update refused."""

    enough = False
    failing = 0.05
    """The share of the tries that fail."""

    def __init__(
        self, config: Config, checkpoints: list[str], chance: random.Random, often: float, sampler: Any = Refusing
    ) -> None:
        self.config, self.checkpoints, self.chance, self.often = config, checkpoints, chance, often
        self.stop, self.over = StopSignal(), False
        self.stop.at_once = False
        self.stack, self.algorithm = ExitStack(), self
        self.table = SimpleNamespace(phase=lambda name: None, note=lambda text: None)
        self.colocation = SimpleNamespace(sleep=lambda: None)
        self.alone = SimpleNamespace(options=SimpleNamespace(max_draws=4, overlong_filter=False))
        self.rewards = Rewards(config, self.alone.options.overlong_filter)
        parts = [[Sample(f"{kind}#{i}", "test/None-v0", i) for i in range(500)] for kind in ("a", "b")]
        store = JsonlTrajectoryStore(config.run_path / "trajectories")
        self.tries = Tries(config, 4, sampler(SampleSource(parts), 0), self.rewards, store)
        self.tries.rollouts = self.rollouts = RandomEnds(self)

    def disturbed(self, *errors: BaseException) -> None:
        """errors: which may be raised here besides."""
        if self.chance.random() >= self.often:
            return
        what = self.chance.choice(["one signal", "two signals", Killed(), *errors])
        self.over = isinstance(what, Killed)
        if isinstance(what, BaseException):
            raise what
        for _ in range(1 + (what == "two signals")):
            self.stop._handle(signal.SIGINT, None)

    def resume(self) -> tuple[int, StepMetrics | None]:
        if not self.checkpoints:
            self.tries.forget()
            assert not list((self.config.run_path / "trajectories").rglob("*.gz"))
            return 0, {}
        saved = json.loads(self.checkpoints[-1])
        self.tries.load_state_dict(saved["tries"], saved["step"])
        return saved["step"], saved["unfinished"]

    def publish(self, step: int) -> StepMetrics:
        self.rollouts.version = step
        self.disturbed()
        return {}

    def update(self, rewards: RewardBatch) -> StepMetrics:
        versions = [v for each in rewards.trajectories for turn in each.turns for v in turn.weight_versions]
        assert min(versions, default=STEPS) >= rewards.rollouts.step - 1 - self.config.trainer.max_staleness
        self.disturbed(NothingLearned("not finite"), UserError("Learner 1 of 2 died during update"))
        return {}

    def evaluate(self, step: int) -> StepMetrics:
        self.disturbed()
        return {}

    def log(self, step: int, metrics: StepMetrics, spans: Spans) -> None:
        assert metrics.get("staleness/max", 0) <= self.config.trainer.max_staleness

    def save(self, step: int, state: dict[str, Any]) -> None:
        if not self.over:
            self.disturbed()
            self.checkpoints.append(json.dumps({"step": step, **state}))


def make_config(folder: Path, bound: int, in_order: bool = False) -> Config:
    folder.mkdir(exist_ok=True)
    trainer = {"run_dir": str(folder), "train_batch_size": SIZE, "max_steps": STEPS, "ckpt_interval": 3}
    trainer |= {"max_staleness": bound, "deterministic": in_order, "eval_before_train": False, "eval_interval": 0}
    return Config.model_validate({"trainer": trainer, "generator": {"num_generations": TRIES}})


def assert_each_was_learned_from_once(folder: Path, last: dict[str, Any]) -> None:
    """Or refused. last: the checkpoint of the last step."""
    store = JsonlTrajectoryStore(folder / "trajectories")
    assert store.steps() == list(range(1, STEPS + 1))
    everyone = [group for step in store.steps() for group in store.read(step).groups]
    assert all(len(group) == TRIES for group in everyone)
    numbers = [SIZE * (int(group[0].trajectory_id.split("/")[0]) - 1) + int(group[0].trajectory_id.split("/")[1])
               for group in everyone]  # fmt: skip
    assert len(numbers) == len(set(numbers)), "none twice"
    assert sorted(numbers) == list(range(last["tries"]["drawn"])), "none left"
    tasks = [group[0].sample.sample_id for group in everyone]
    assert len(tasks) == len(set(tasks)), "no task twice before an epoch is over"


def lives(
    config: Config, chance: random.Random, often: float, failing: tuple[float, ...] = (0.05,)
) -> tuple[int, dict[str, Any]]:
    """As many processes as it takes to come to the last step; how many ended before, and the last checkpoint.
    failing: in the first process, the second, ..., and again from the first."""
    checkpoints, ends, last = list[str](), 0, dict[str, Any]()
    while last.get("step") != STEPS or last["unfinished"] is not None:
        run = FakeRun(config, checkpoints, chance, often if ends < 20 else 0.0)
        run.failing = failing[ends % len(failing)]
        try:
            Loop(run, run.stop).train()  # type: ignore[arg-type]
        except (Killed, Stopped, UserError):
            ends += 1
        last = json.loads(checkpoints[-1]) if checkpoints else {}
    return ends, last


@pytest.mark.parametrize(("bound", "in_order"), [(0, False), (1, True), (2, False)])
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_and_stopped_learns_from_every_task_once(
    tmp_path: Path, seed: int, bound: int, in_order: bool
) -> None:
    """And from the same tries as one that is left alone, without staleness and in lock-step."""
    alone, disturbed = (make_config(tmp_path / name, bound, in_order) for name in ("alone", "disturbed"))
    ends, last = lives(disturbed, random.Random(seed), often=0.08)
    assert ends
    assert_each_was_learned_from_once(disturbed.run_path, last)
    if bound < 2:
        assert lives(alone, random.Random(seed), often=0.0)[0] == 0
        stores = [JsonlTrajectoryStore(config.run_path / "trajectories") for config in (alone, disturbed)]
        for step in range(1, STEPS + 1):
            assert stores[0].read(step).groups == stores[1].read(step).groups, step


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20) if os.environ.get("SKYRL_TEST_FULL") else (4, 18))
def test_a_run_whose_env_is_mended_between_its_processes_learns_from_nothing_too_old(
    tmp_path: Path, seed: int, bound: int
) -> None:
    """Groups that all failed are played again, so that others stand elsewhere than where they stood."""
    config = make_config(tmp_path, bound)
    assert_each_was_learned_from_once(
        config.run_path, lives(config, random.Random(seed), often=0.08, failing=(0.6, 0.0))[1]
    )


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_files_of_steps_that_a_resume_cannot_use_are_not_read(tmp_path: Path, bound: int) -> None:
    config, checkpoints = make_config(tmp_path, bound), list[str]()
    run = FakeRun(config, checkpoints, random.Random(4), often=0.0)
    Loop(run, run.stop).train()  # type: ignore[arg-type]
    store = JsonlTrajectoryStore(config.run_path / "trajectories")
    for step in range(3 + 1 + bound + 1, STEPS + 1):
        store.path(step).write_bytes(b"torn")
    del checkpoints[1:]  # of step 3
    run = FakeRun(config, checkpoints, random.Random(4), often=0.0)
    Loop(run, run.stop).train()  # type: ignore[arg-type]
    assert_each_was_learned_from_once(config.run_path, json.loads(checkpoints[-1]))


@pytest.mark.parametrize("agent", [None, "my_agent.py:agent", ["./agent", "--fast"]])
def test_tries_that_are_stored_are_not_played_again(tmp_path: Path, agent: Any) -> None:
    config, chance = make_config(tmp_path, 0), random.Random(0)
    config.generator.agent.run = agent
    killed = FakeRun(config, [], chance, often=0.0)
    begun = json.dumps({"step": 0, "unfinished": None, "tries": killed.tries.state_dict()})
    resumed = FakeRun(config, [begun], chance, often=0.0)
    for run in (killed, resumed):
        run.resume()
        run.tries.draw(0)
        run.tries.collect(nullcontext())
    assert len(killed.rollouts.begun) == SIZE * TRIES and not resumed.rollouts.begun


def test_a_sampler_that_does_not_say_whether_it_accepts_is_named(tmp_path: Path) -> None:
    """With a `return` forgotten, every group would be refused, and the run would end without an update."""

    class Forgets(CurriculumSampler):
        def accept(self, group: list[Trajectory], returns: list[float]) -> Any:
            super().accept(group, returns)

    run = FakeRun(make_config(tmp_path, 0), [], random.Random(0), 0.0, Forgets)
    run.resume()
    run.tries.draw(0)
    with pytest.raises(UserError, match="accept of the sampler gave None, but should say True or False"):
        run.tries.collect(nullcontext())


def test_a_group_whose_every_try_was_cut_off_and_would_not_be_learned_from_is_drawn_anew(tmp_path: Path) -> None:
    seen = []

    class Watched(DynamicSampler):
        def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
            seen.append((len(group), sorted(returns)))
            return super().accept(group, returns)

    run = FakeRun(make_config(tmp_path, 0), [], random.Random(0), 0.0, Watched)
    run.failing, run.rewards.filter, ends = 0.0, True, run.rollouts.finished

    def cut_off(groups: Mapping[int, list[Trajectory]], wait_for_all: bool) -> dict[int, list[Trajectory]]:
        for number, group in (ended := ends(groups, wait_for_all)).items():
            for reward, each in enumerate(group):
                each.turns[0].reward = float(reward)
                each.stop_reason = StopReason.LENGTH if number == 0 or reward else StopReason.TERMINATED
        return ended

    run.rollouts.finished = cut_off  # type: ignore[method-assign]
    run.resume()
    run.tries.draw(0)
    run.tries.collect(nullcontext())
    assert seen == [(TRIES, [0.0, 0.0])] + [(TRIES, [0.0, 1.0])] * (SIZE - 1)
    assert [*run.tries._refused] == [0] and len(run.tries.flow.groups) == SIZE - 1


def test_a_sampler_that_could_not_be_saved_or_draws_too_few_is_named(tmp_path: Path) -> None:
    """The first before anything is learned: the first checkpoint would be too late."""

    class Stateless:
        next_tasks = accept = None

        def __init__(self, source: Any, seed: int) -> None: ...

    class Short(CurriculumSampler):
        def next_tasks(self, n: int) -> list[Sample]:
            return super().next_tasks(n)[1:]

    config = make_config(tmp_path, 0)
    with pytest.raises(UserError, match="The sampler has no state_dict: make a subclass of UniformSampler"):
        FakeRun(config, [], random.Random(0), 0.0, Stateless)
    run = FakeRun(config, [], random.Random(0), 0.0, Short)
    run.resume()
    with pytest.raises(UserError, match=r"next_tasks of the sampler gave \[.*, and should give \d+ samples"):
        run.tries.draw(0)


def test_what_is_judged_again_after_a_kill_leaves_the_tries_beside_it_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group 1 has ended, group 0 is stored and the process dies as it is judged; the next one merges their files."""
    config, checkpoints, killed = make_config(tmp_path, 2), list[str](), [True]
    config.trainer.algorithm.reward_funcs = {"judge": 1.0}

    @register_reward("judge")
    def judge(completions: list[Any], **columns: Any) -> list[float]:
        if killed[0] and columns["prompts"][0][0]["content"].startswith("1/0/"):
            raise Killed
        return [1.0] * len(completions)

    def life() -> FakeRun:
        run = FakeRun(config, checkpoints, random.Random(0), 0.0, CurriculumSampler)
        run.resume()
        run.tries.draw(0)
        return run

    def end(run: FakeRun, number: int) -> None:
        group = run.tries._playing[number]
        for each in group:
            each.prompt = [{"role": "user", "content": each.trajectory_id}]
            each.turns = [Turn([1], [2], [-0.5], [0], "x", info={"success": True})]
        monkeypatch.setattr(run.rollouts, "finished", lambda groups, wait_for_all: {number: group})
        run.tries.collect(nullcontext())

    run = life()
    end(run, 1)
    checkpoints.append(json.dumps({"step": 0, "unfinished": None, "tries": run.tries.state_dict()}))
    with pytest.raises(Killed):
        end(run, 0)
    killed[0] = False
    run = life()
    run.tries.collect(nullcontext())
    checkpoints.append(json.dumps({"step": 0, "unfinished": None, "tries": run.tries.state_dict()}))
    tries = FakeRun(config, checkpoints, random.Random(0), 0.0, CurriculumSampler)
    tries.resume()
    assert [number for number in (0, 1) if tries.tries.flow.groups[number]] == [0, 1], "neither is played again"


def test_a_policy_is_the_best_once_it_is_saved() -> None:
    """A stop in the middle of it leaves the evaluation to be made again, and the policy to be saved then."""

    def stopped(folder: Path, step: int) -> None:
        raise Stopped(2)

    folder = SimpleNamespace(path=Path("run"))
    run: Any = SimpleNamespace(best=[], folder=folder, processes=Mock(), config=Config())
    run.learner = Mock(save_pretrained=stopped)
    run.held_out = Mock(metrics=lambda rollouts, step: {"eval/success": 0.5})
    with pytest.raises(Stopped):
        Run.evaluate(run, 3)
    assert run.best == []


@pytest.mark.parametrize("weights, best", [({}, [0, 1, 3]), ({"mine": 1.0, "env": 0.0}, [0, 1, 4])])
def test_of_policies_with_one_success_rate_the_better_paid_is_the_best(
    weights: dict[str, float], best: list[int]
) -> None:
    """So an env that never says `success` has a best policy, too: else the first one, before any training. Rewards that
    are chosen decide before success, which may be worth nothing."""
    saved, folder = list[tuple[Path, int]](), SimpleNamespace(path=Path("run"))
    config = Config.model_validate({"trainer": {"algorithm": {"reward_funcs": weights}}})
    run = SimpleNamespace(best=[], folder=folder, processes=Mock(), config=config)
    run.learner = Mock(save_pretrained=lambda folder, step: saved.append((folder, step)))
    for step, (success, reward) in enumerate([(0.0, 0.2), (0.0, 0.9), (0.0, 0.9), (0.5, 0.1), (0.2, 2.0)]):
        figures = {"eval/success": success, "eval/reward/total": reward}
        run.held_out = Mock(metrics=lambda rollouts, step, figures=figures: dict(figures))
        Run.evaluate(cast(Any, run), step)
    assert saved == [(Path("run/model/best"), step) for step in best]


@pytest.mark.parametrize("kind", [Run, ToldRun])
def test_of_policies_that_reward_functions_judge_the_best_is_theirs(kind: type[Run]) -> None:
    """An env that earns nothing by itself would have the first evaluation's policy for ever."""
    saved, run = list[int](), cast(Any, kind.__new__(kind))
    run.best, run.folder, run.processes, run.config = [], SimpleNamespace(path=Path("run")), Mock(), Config()
    run.learner, kept = Mock(save_pretrained=lambda folder, step: saved.append(step)), []
    run.callbacks, run.updates, run.train_tasks = Mock(), 1, range(8)
    figures = {"eval/success": 0.0, "eval/reward/mean": 0.0}
    for total in (0.2, 0.1, 0.9):
        run.held_out = Mock(metrics=lambda rollouts, step, total=total: figures | {"eval/reward/total": total})
        assert run.evaluate(1)["eval/reward/total"] == total
        kept.append(len(saved))
    assert kept == [1, 1, 2]


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("sampler", [CurriculumSampler, Refusing])
def test_tasks_whose_every_episode_failed_are_tried_again_when_the_env_is_mended(
    tmp_path: Path, bound: int, sampler: Any
) -> None:
    """Or others in the place of those that were refused: no step learns from nothing."""
    config, checkpoints, chance = make_config(tmp_path, bound), list[str](), random.Random(0)
    for broken in (True, True, False):
        run = FakeRun(config, checkpoints, chance, often=0.0, sampler=sampler)
        run.rollouts.broken = broken
        if broken:
            with pytest.raises(UserError, match=r"All \d+ episodes of step [2-5] failed"):
                Loop(run, run.stop).train()  # type: ignore[arg-type]
        else:
            Loop(run, run.stop).train()  # type: ignore[arg-type]
    store = JsonlTrajectoryStore(tmp_path / "trajectories")
    alive = [[each for each in store.read(step).trajectories if not each.stop_reason.failed] for step in store.steps()]
    assert all(alive)
    assert_each_was_learned_from_once(tmp_path, json.loads(checkpoints[-1]))


def test_a_checkpoint_that_is_read_and_saved_again_is_the_same_however_much_was_refused(tmp_path: Path) -> None:
    class RefusingAll(CurriculumSampler):
        def accept(self, group: list[Trajectory], returns: list[float]) -> bool:
            return False

    run = FakeRun(make_config(tmp_path, 2), [], random.Random(0), 0.0, RefusingAll)
    run.resume()
    run.tries.draw(0)
    while not run.tries.flow.lost:
        run.tries.collect(nullcontext())
        run.tries.draw(0)
    saved = run.tries.state_dict()
    checkpoint = json.dumps({"step": 0, "unfinished": None, "tries": saved})
    resumed = FakeRun(run.config, [checkpoint], random.Random(0), 0.0, RefusingAll)
    resumed.resume()
    assert resumed.tries.state_dict() == saved
    assert resumed.tries.flow.lost == run.tries.flow.lost, "places that batches to come give back"


def test_a_run_that_goes_on_knows_the_best_score_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its first evaluation would put a worse policy into model/best."""
    monkeypatch.setattr("skyrl_trainer.report.html.write_report", Mock())
    run: Any = SimpleNamespace(best=[0.5, 1.0], folder=Mock(path=Path("run")), config=Config())
    run.learner, run.algorithm, run.checkpoints = Mock(), Mock(), Mock()
    Run.save(run, 3, {"tries": {}, "unfinished": None})
    _, _, extra = run.checkpoints.save.call_args.args
    monkeypatch.setattr("skyrl_trainer.run.run.MetricsWriter", Mock())
    monkeypatch.setattr("skyrl_trainer.report.trackers.Tracker", Mock())
    resumed: Any = Mock(checkpoint=Mock(step=3, extra=extra), config=Config(), best=None)
    Run.resume(resumed)
    assert resumed.best == [0.5, 1.0]
    resumed.tried.forget.assert_called_once_with(3)


def test_a_run_folder_that_is_removed_during_an_update_is_named(tmp_path: Path) -> None:
    run = FakeRun(make_config(tmp_path, 0), [], random.Random(0), 0.0)
    run.tries._check = Mock(side_effect=UserError("The run folder is gone."))
    with pytest.raises(UserError, match="is gone"):
        run.tries.learned(RolloutBatch(1, []))
