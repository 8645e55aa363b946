"""`skyrl-trainer sft` as a user meets it: what it writes, that it learns, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_trainer import cli
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.history import read_metrics
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.run.sft import FineTuning
from skyrl_trainer.types import StepMetrics

SIZES = (
    "{hidden_size: 64, num_hidden_layers: 2, intermediate_size: 128, num_attention_heads: 2, num_key_value_heads: 1}"
)
FAST = [
    f"trainer.policy.model.tiny.config_kwargs={SIZES}", "trainer.learning_rate=3e-3", "trainer.train_batch_size=8",
    "trainer.num_iterations=2", "trainer.logger=none", "generator.max_model_len=256",
]  # fmt: skip


@pytest.fixture(autouse=True)
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chats in chats.jsonl, and 8 others in held_out.jsonl."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for n in range(72):
        asked = [{"role": "system", "content": "Count on."}, {"role": "user", "content": f"{n} {n + 1}?"}]
        rows.append(json.dumps({"messages": [*asked, {"role": "assistant", "content": f"{n + 2}"}]}) + "\n")
    Path("chats.jsonl").write_text("".join(rows[:64]))
    Path("held_out.jsonl").write_text("".join(rows[64:]))


def sft(run: str, *settings: str) -> int:
    return cli.main(["sft", "sft", "data.train_data=chats.jsonl", f"trainer.run_dir={run}", *FAST, *settings])


def test_a_run_folder_with_curves_and_a_policy_and_the_same_bytes_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("a", "data.val_data=held_out.jsonl", "trainer.eval_interval=5") == 0
    printed = capsys.readouterr().out
    assert "64 of 64 chats, 8 of 8 held-out ones are no longer than" in printed and "step 16 of 16: loss" in printed
    rows = read_metrics(Path("a"))
    assert [row["step"] for row in rows] == list(range(17)) and rows[-1]["epoch"] == 2.0
    assert rows[-1]["loss"] < 0.6 * rows[1]["loss"] and rows[-1]["eval/loss"] < 0.6 * rows[0]["eval/loss"]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 5, 10, 15, 16]
    assert all(row["lr"] >= 0 and row["grad_norm"] > 0 and row["tokens/per_second"] > 0 for row in rows[1:])
    assert load_config("a/config.yaml", []).data.train_data == ["chats.jsonl"]
    assert "eval/loss" in Path("a/report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained("a/model/last")
    assert AutoTokenizer.from_pretrained("a/model/last").chat_template
    assert sft("b", "data.val_data=held_out.jsonl", "trainer.eval_interval=0", "trainer.eval_before_train=false") == 0
    for name, tensor in AutoModelForCausalLM.from_pretrained("b/model/last").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert [row["loss"] for row in read_metrics(Path("b"))] == [row["loss"] for row in rows[1:]]


def test_fewer_chats_than_a_batch_are_learned_as_often_as_is_asked() -> None:
    assert sft("few", "trainer.train_batch_size=100", "trainer.num_iterations=3") == 0
    assert [row["epoch"] for row in read_metrics(Path("few"))] == [1.0, 2.0, 3.0]


def test_a_folder_with_a_run_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is complete, of other settings, of other chats, of `train`, or of which only the policy is there."""
    assert sft("a", "trainer.max_steps=2") == 0
    before = files("a")
    assert sft("a", "trainer.max_steps=2") == 0 and "is complete" in capsys.readouterr().out
    assert sft("a", "trainer.max_steps=2", "trainer.seed=1") == 2
    assert "cannot go on with other settings (trainer.seed was 0, is 1)" in capsys.readouterr().err
    assert (
        cli.main(["train", "sft", "data.train_data=text_math", "data.val_data=text_math", "trainer.run_dir=a", *FAST])
        == 2
    )
    assert "cannot go on with other settings (data.train_data was ['chats.jsonl']" in capsys.readouterr().err
    Path("chats.jsonl").write_text(Path("chats.jsonl").read_text().replace('"5"', '"6"'))
    assert sft("a", "trainer.max_steps=2") == 2
    assert "a has learned from other chats: give another trainer.run_dir" in capsys.readouterr().err
    assert files("a") == before
    shutil.rmtree("a/checkpoints")
    assert sft("a", "trainer.max_steps=2") == 2
    assert "a has a policy, and no checkpoint to go on from: give another trainer.run_dir" in capsys.readouterr().err


def files(run: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def test_any_recipe_will_do_and_what_is_not_held_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "quickstart", "data.train_data=chats.jsonl", "trainer.run_dir=a", "trainer.max_steps=1", *FAST]
    assert cli.main(words) == 0
    assert "64 of 64 chats, 0 of 0 held-out ones are no longer than" in capsys.readouterr().out
    assert "eval/loss" not in read_metrics(Path("a"))[-1]


def test_a_first_save_that_was_cut_short_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is written, and the checkpoint is not: the same command begins again, and keeps the old curve."""

    def cut(*_: object) -> None:
        raise UserError("The power is gone.")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", cut)
        assert sft("a", "trainer.max_steps=2") == 2 and Path("a/model/last").exists()
    assert sft("a", "trainer.max_steps=2") == 0 == sft("b", "trainer.max_steps=2")
    assert [len(read_metrics(Path(run))) for run in "ab"] == [2, 2] and Path("a/metrics.1.jsonl").exists()
    assert Path("a/model/last/model.safetensors").read_bytes() == Path("b/model/last/model.safetensors").read_bytes()


def test_a_schedule_without_an_end_may_be_made_longer_and_shorter(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.lr_scheduler_type=constant", "trainer.max_steps={}"]
    for steps, wanted in ((2, 2), (4, 4), (3, 4)):
        assert sft("a", *(word.format(steps) for word in words)) == 0
        assert len(read_metrics(Path("a"))) == wanted
    assert "The run in" in (said := capsys.readouterr().out) and said.strip().endswith("give another trainer.run_dir.")


@pytest.mark.parametrize(
    "more",
    [
        ["data.val_data=held_out.jsonl", "trainer.eval_interval=5"],
        pytest.param(  # test_learner_group.py stops and resumes several learners
            ["trainer.policy.model.lora={rank: 4}", "trainer.placement.policy_num_nodes=2"], marks=pytest.mark.full
        ),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bytes(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SIGTERM at step 3, which saves what was learned; then by an error at step 7, which goes back to step 5.
    Several learners, which take long to start, are stopped once."""
    log, twice = FineTuning._log, "policy_num_nodes" not in more[-1]

    def stopping(self: FineTuning, metrics: StepMetrics) -> None:
        log(self, metrics)
        if metrics["step"] == 3:
            signal.raise_signal(signal.SIGTERM)
        if metrics["step"] == 7:
            raise UserError("The power is gone.")

    words = ["trainer.ckpt_interval=5", *more]
    assert sft("whole", *words) == 0
    with monkeypatch.context() as patched:
        patched.setattr(FineTuning, "_log", stopping)
        assert sft("a", *words) == 143 and "stopped by SIGTERM" in capsys.readouterr().err
        steps = [row["step"] for row in read_metrics(Path("a"))]
        assert [step for step in steps if step] == [1, 2, 3] and Path("a/report.html").exists()
        assert AutoModelForCausalLM.from_pretrained("a/model/last")
        if twice:
            assert sft("a", *words) == 2 and "going on from the checkpoint of step 3" in capsys.readouterr().out
    assert sft("a", *words) == 0
    assert f"going on from the checkpoint of step {5 if twice else 3}" in capsys.readouterr().out
    assert (
        Path("a/model/last/model.safetensors").read_bytes() == Path("whole/model/last/model.safetensors").read_bytes()
    )
    timed = {"tokens/per_second", "time/train"}
    told, wanted = (
        [{k: v for k, v in row.items() if k not in timed} for row in read_metrics(Path(run))] for run in ("a", "whole")
    )
    assert told == wanted and len(told) >= 16
    assert not list(Path("a").glob("metrics.*.jsonl"))


def test_what_a_refused_start_has_left_is_made_anew_by_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("a", "generator.max_model_len=9", "generator.max_completion_length=2", "trainer.max_steps=1") == 2
    assert "raise it" in capsys.readouterr().err
    assert sft("a", "trainer.max_steps=1", "trainer.logger=swanlab") == 2
    assert "trainer.logger=swanlab cannot start" in capsys.readouterr().err
    assert sft("a", "trainer.max_steps=1", "trainer.seed=1") == 0 == sft("b", "trainer.max_steps=1", "trainer.seed=1")
    first, second = (Path(run, "model/last/model.safetensors").read_bytes() for run in "ab")
    assert first == second, "with the settings of the second start"


def test_adapters_and_a_models_folder_and_several_learners(capsys: pytest.CaptureFixture[str]) -> None:
    """LoRA on what was learned before; two learners have the losses of one."""
    assert sft("a", "trainer.num_iterations=1") == 0
    more = ["trainer.policy.model.path=a/model/last", "trainer.policy.model.lora={rank: 4}", "trainer.max_steps=4"]
    assert sft("one", *more) == 0 and sft("two", *more, "trainer.placement.policy_num_nodes=2") == 0
    assert Path("two/model/last/adapter/adapter_model.safetensors").exists()
    adapter = json.loads(Path("one/model/last/adapter/adapter_config.json").read_text())
    assert adapter["target_modules"] == sorted(adapter["target_modules"])  # peft's is a set, of another order each time
    before, after = read_metrics(Path("a")), read_metrics(Path("one"))
    assert after[0]["loss"] < 0.8 * before[0]["loss"]
    assert [row["loss"] for row in read_metrics(Path("two"))] == pytest.approx([row["loss"] for row in after], rel=1e-4)


def test_weights_that_the_last_update_left_without_a_number_are_not_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of float32's infinity makes them so, and no loss comes after it."""
    assert sft("a", "trainer.max_steps=1", "trainer.learning_rate=1e39") == 2
    assert "After step 1, " in (said := capsys.readouterr().err) and "are not finite: nothing is saved" in said
    assert not Path("a/model").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.train_data=text_math"], "learns from files of chats (.jsonl or .parquet), not from 'text_math'"),
        (["data.train_data=none.jsonl"], "none.jsonl cannot be read"),
        (["data.val_data=none.jsonl"], "none.jsonl cannot be read"),
        (["data.val_data=held_out.jsonl?tries=2"], "of chats (.jsonl or .parquet), not from 'held_out.jsonl?tries=2'"),
        (["generator.max_model_len=9", "generator.max_completion_length=2"], "max_model_len=9 is less than any chat"),
        (["trainer.policy.model.path=nowhere"], "trainer.policy.model.path: there is no folder nowhere"),
        (["trainer.policy.model.lora={rank: 0, quantization: nf4}"], "trainer.policy.model.lora.rank is 0"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_trains_nothing(
    capsys: pytest.CaptureFixture[str], settings: list[str], sentence: str
) -> None:
    assert sft("a", *settings) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("skyrl-trainer: ") and sentence in said
    assert not Path("a/model").exists() and not Path("a/metrics.jsonl").exists()
