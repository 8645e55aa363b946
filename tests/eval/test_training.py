"""Benchmarks among the held-out data of a training run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_eval.training import Exam
from skyrl_trainer.config import load_config
from skyrl_trainer.data import take_exams
from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.metrics import pass_at_k
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.rollout.stored import open_store
from skyrl_trainer.run.run import HeldOut
from skyrl_trainer.types import PromptBatch, RolloutBatch, StopReason, Trajectory, Turn
from tests.eval.made_up import ROWS
from tests.eval.test_command import write


class Scripted:
    """Answers every sample with the next of its texts; None is an episode that failed."""

    def __init__(self, *answers: str | None) -> None:
        self.answers, self.batches = answers, list[PromptBatch]()

    def run(self, batch: PromptBatch, eval: bool = False) -> RolloutBatch:
        assert eval
        self.batches.append(batch)
        groups = []
        for number, sample in enumerate(batch.samples):
            text = self.answers[number]
            turns = [] if text is None else [Turn([1], [2], [0.0], [0], text)]
            reason = StopReason.ENV_ERROR if text is None else StopReason.TERMINATED
            groups.append(
                [Trajectory(f"{number}/{n}", sample, n, 0, turns, reason) for n in range(batch.num_generations)]
            )
        return RolloutBatch(batch.step, groups)


def test_a_benchmark_is_tried_and_graded(tmp_path: Path) -> None:
    exam = Exam("gsm8k", {"data": write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"]), "n": 2}, tmp_path)
    answers = {"Ann": "#### 999", "Bob": None}
    order = ["Ann" if "Ann" in str(sample.options) else "Bob" for sample in tried(exam).batches[0].samples]
    exam.store = JsonlTrajectoryStore(tmp_path / "held_out")
    found = exam.run(Scripted(*(answers[name] for name in order)), 3)
    assert found == {f"eval/gsm8k/{name}": value for name, value in
                     {"accuracy": 0.5, "ungraded": 1.0, "unparsed": 0.0, "truncated": 0.0}.items()}  # fmt: skip
    kept = open_store(tmp_path / "held_out" / "gsm8k").read(3).trajectories
    assert [each.scores for each in kept] == [{"gsm8k": {"Ann": 1.0, "Bob": None}[name]} for name in order]
    assert [turn.action for each in kept for turn in each.turns] == ["#### 999"]


def test_a_benchmark_is_tried_as_often_as_its_source_says(tmp_path: Path) -> None:
    spec = f"skyrl_eval:gsm8k?data={write(tmp_path / 'gsm8k.jsonl', ROWS['gsm8k'])}&n=2&tries=4"
    words = [f"data.val_data=['{spec}']", f"trainer.run_dir={tmp_path}"]
    with pytest.raises(UserError, match="`tries` are all the same"):
        HeldOut(load_config(None, words), None)
    held_out = HeldOut(load_config(None, [*words, "generator.eval_temperature=0.6"]), None)

    class RightOnce(Scripted):
        def run(self, batch: PromptBatch, eval: bool = False) -> RolloutBatch:
            tries = super().run(batch, eval)
            (ann,) = [group for group in tries.groups if "Ann" in str(group[0].sample.options)]
            ann[2].turns = [replace(ann[2].turns[0], action="#### 999")]
            return tries

    rollouts = RightOnce("", "")
    found = held_out.metrics(rollouts, 2)
    assert rollouts.batches[0].num_generations == 4
    figures = ("accuracy", "unparsed", "pass_at/2", "pass_at/4")
    assert [found[f"eval/gsm8k/{name}"] for name in figures] == [1 / 8, 7, pass_at_k(4, 1, 2) / 2, 1 / 2]


def tried(exam: Exam) -> Scripted:
    rollouts = Scripted("", "")
    exam.run(rollouts, 0)
    return rollouts


def test_without_tasks_of_envs_success_is_the_mean_accuracy(tmp_path: Path) -> None:
    specs = [
        f"skyrl_eval:{bench}?data={write(tmp_path / f'{bench}.jsonl', ROWS[bench])}&n=1" for bench in ("gsm8k", "math")
    ]
    config = load_config(None, [f"data.val_data={specs}", f"trainer.run_dir={tmp_path}"])
    held_out = HeldOut(config, None)
    assert held_out.tasks == []
    before = sorted(tmp_path.iterdir())
    found = held_out.metrics(Scripted("#### 999, or 1200: 1200"), 2)
    assert sorted(tmp_path.iterdir()) == before, "`skyrl-trainer eval` writes nothing"
    kept = JsonlTrajectoryStore(tmp_path / "held_out")
    HeldOut(config, None, kept).metrics(Scripted("#### 999, or 1200: 1200"), 2)
    assert {path.name for path in (tmp_path / "held_out").iterdir()} == {"gsm8k", "math"}
    assert found["eval/success"] == (found["eval/gsm8k/accuracy"] + found["eval/math/accuracy"]) / 2


def test_other_held_out_data_is_left_as_it_is(tmp_path: Path) -> None:
    specs = ["text_math?split=val", {"env": "text_math", "split": "test"}, "skyrl_eval:skyrl/question-v0"]
    assert take_exams(specs, tmp_path) == (specs, [])


def test_any_package_can_bring_exams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def exam(name, options, folder):\n    return (name, options, folder)\n"
    (tmp_path / "made_up_exams.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    specs = ["made_up_exams:oral?n=3", "made_up_exams:Env-v0", "made_up_exams:space/env", "no_such_package:oral"]
    assert take_exams(specs, tmp_path) == (specs[1:], [("oral", {"n": 3}, tmp_path)])


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("skyrl_eval:gsm9k", "Did you mean gsm8k"),
        ("skyrl_eval:gsm8k?m=2", "not m"),
        ("skyrl_eval:gsm8k?data=DATA&n=few", "n=few"),
        ("skyrl_eval:gsm8k?data=none.jsonl", "none.jsonl is not a file"),
        ("skyrl_eval:hle?data=DATA", "graded by a judge"),
        ("skyrl_eval:gsm8k?data=GSM skyrl_eval:gsm8k?data=GSM&n=2", "'skyrl_eval:gsm8k' is listed twice, and a bench"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(spec: str, sentence: str, tmp_path: Path) -> None:
    for name, bench in (("DATA", "hle"), ("GSM", "gsm8k")):
        spec = spec.replace(name, write(tmp_path / f"{bench}.jsonl", ROWS[bench]))
    with pytest.raises(UserError, match=sentence):
        take_exams(spec.split(), tmp_path)
