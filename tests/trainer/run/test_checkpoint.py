"""Checkpoints: the same bytes after a resume, whole or absent whatever happens, and refusals in a sentence."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_trainer import __version__
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.run.checkpoint import (
    DAMAGED,
    MANIFEST,
    SCHEMA,
    Checkpoints,
    Loaded,
    _manifest,
    read_checkpoint,
)
from skyrl_trainer.run.resume import check_resumable, resumable
from skyrl_trainer.run.run import Run
from skyrl_trainer.settings import Config
from skyrl_trainer.types import LearnerState
from tests.trainer.learner.tiny_models import make_batch, make_config, save_model

SETTINGS = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "num_mini_batches": 2, "deterministic": True}

FILES = ("learner.safetensors", "state.json", MANIFEST)
FLIPS = 3000 if os.environ.get("SKYRL_TEST_FULL") else 300
"""Bits flipped in each file of a checkpoint."""


def run(path: str, folder: Path, steps: range) -> list[dict[str, float]]:
    """Goes on from the newest checkpoint, updates, and saves after the last step."""
    config = make_config(trainer=SETTINGS)
    learner = Learner(config, path, 12)
    checkpoints = Checkpoints(folder, keep=2)
    loaded = checkpoints.load_latest()
    if loaded is not None:
        assert loaded.step == steps.start
        learner.load_state_dict(loaded.learner)
    trainer = GRPO(config).start(learner)
    metrics = [trainer.update(make_batch(seed=step, step=step, equal=(step % 4,))) for step in steps]
    checkpoints.save(steps.stop, learner.state_dict(), {"steps": steps.stop})
    return metrics


def small(value: float = 1.0) -> LearnerState:
    return LearnerState({"model.w": torch.full((4096,), value)}, {"optimizer_steps": 1})


def test_a_resumed_run_has_the_bytes_of_one_left_alone(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    alone = run(path, tmp_path / "alone", range(0, 6))
    again = run(path, tmp_path / "again", range(0, 6))
    halves = run(path, tmp_path / "halves", range(0, 3)) + run(path, tmp_path / "halves", range(3, 6))
    assert alone == again == halves
    for name in FILES:
        contents = [
            (tmp_path / r / "checkpoints/step_000006" / name).read_bytes() for r in ("alone", "again", "halves")
        ]
        assert contents[0] == contents[1] == contents[2]


def test_saved_policy_loads_in_transformers_with_its_tokenizer(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    learner = Learner(make_config(), path, 1)
    GRPO(learner.config).start(learner).update(make_batch())
    for _ in range(2):  # the second replaces the first
        learner.save_pretrained(tmp_path / "model_out" / "best")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model_out" / "best")
    assert {p.name for p in (tmp_path / "model_out").iterdir()} == {"best"}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in learner.named_tensors())
    names = [name for name, _ in learner.named_tensors()]
    assert "lm_head.weight" not in names and len(names) == len(set(names))  # tied: once
    assert AutoTokenizer.from_pretrained(tmp_path / "model_out" / "best").get_vocab()["w7"] == 7
    expected = model(torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    torch.testing.assert_close(learner.token_logprobs([1, 2, 3]), expected, rtol=1e-5, atol=1e-5)


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    one = Learner(make_config(), save_model(tmp_path / "a"), 1)
    other = Learner(make_config(), save_model(tmp_path / "b", hidden_size=16), 1)
    with pytest.raises(UserError, match=r"checkpoint is not of"):
        other.load_state_dict(one.state_dict())


def test_the_newest_are_kept_and_read_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load_latest() is None
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {"sampler": {"drawn": step}})
    assert checkpoints.names() == ["step_000002", "step_000003"]
    checkpoints.save(3, small(3.5), {"sampler": {"drawn": 3}})  # saved again after a resume
    loaded = checkpoints.load_latest()
    assert loaded.step == 3 and loaded.extra == {"sampler": {"drawn": 3}}
    assert torch.equal(loaded.learner.tensors["model.w"], torch.full((4096,), 3.5))
    assert len(checkpoints.names()) == 2


def test_a_step_that_is_saved_again_and_again_replaces_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    names = [checkpoints.save(10, small(), {}).name for _ in range(4)]
    assert names == ["step_000010", "step_000010-01", "step_000010-02", "step_000010-03"]
    assert checkpoints.names() == names[-1:]


@pytest.mark.parametrize("name", ["step_000002.bak", "step_000002 (copy)", "step_000009.old-3", "step_000009-before"])
def test_a_copy_of_a_checkpoint_under_another_name_is_neither_read_nor_deleted_nor_in_the_way(
    tmp_path: Path, name: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        saved = checkpoints.save(step, small(step), {})
    shutil.copytree(saved, saved.with_name(name))
    saved.rename(saved.with_name("step_000002.bad"))  # which asks for the one before
    assert checkpoints.load_latest().step == 1 and checkpoints.names() == ["step_000001"]
    for step in (2, 3, 9):
        checkpoints.save(step, small(step), {})
    assert checkpoints.load_latest().step == 9 and len(checkpoints.names()) == 2
    assert read_checkpoint(saved.with_name(name)).step == read_checkpoint(saved.with_name("step_000002.bad")).step == 2


@pytest.mark.parametrize("moment", ["mkdir", "rename"])
def test_a_process_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path, moment: str) -> None:
    """It dies before anything is written, and before the folder is renamed."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small(1.0), {})
    child = os.fork()
    if child == 0:
        setattr(Path, moment, lambda *args, **kwargs: os._exit(9))
        checkpoints.save(2, small(2.0), {})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert checkpoints.load_latest().step == 1
    checkpoints.save(2, small(2.0), {})
    assert checkpoints.load_latest().step == 2
    assert not [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_a_sentence_and_harms_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small(1.0), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # half of what the tensor needs
    try:
        with pytest.raises(UserError, match=r"step_000002 cannot be written.*What was saved before is intact"):
            checkpoints.save(2, small(2.0), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000001"]
    assert checkpoints.load_latest().step == 1


def test_a_run_whose_last_policy_could_not_be_written_is_not_complete(tmp_path: Path) -> None:
    """Its checkpoint alone may fit on a disk: of adapters it is small, and the policy is a whole model."""
    run: Any = Run.__new__(Run)
    run.config, run.checkpoints = Config.model_validate({"trainer": {"max_steps": 3}}), Checkpoints(tmp_path, keep=2)
    run.folder, run.best = SimpleNamespace(path=tmp_path, check=lambda: None), [0.0, 0.0]
    run.algorithm = SimpleNamespace(state_dict=lambda: small(1.0))
    run.learner = SimpleNamespace(save_pretrained=Mock(side_effect=UserError("the disk is full")))
    with pytest.raises(UserError, match="the disk is full"):
        run.save(3, {})
    run.checkpoint = run.checkpoints.load_latest()
    assert not run.complete


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {})
    flip(tmp_path / "checkpoints/step_000003/learner.safetensors", -1)
    (tmp_path / "checkpoints/step_000002/state.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.load_latest().step == 1
    assert "step_000003 is damaged" in caplog.text and "step_000002 is damaged" in caplog.text
    assert "damaged-step_000003; going on from step_000001" in caplog.text
    (tmp_path / "checkpoints/step_000001/state.json").unlink()
    for _ in range(2):  # the refusal stays
        with pytest.raises(UserError, match=r"No checkpoint in .* can be read"):
            checkpoints.load_latest()


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, name: str) -> None:
    saved = Checkpoints(tmp_path, keep=2).save(1, small(), {"sampler": {"drawn": 1}, "unfinished": None})
    bits, found = 8 * (saved / name).stat().st_size, 0
    for bit in random.Random(0).choices(range(bits), k=FLIPS):
        flip(saved / name, bit)
        with pytest.raises(DAMAGED):
            read_checkpoint(saved)
        flip(saved / name, bit)
        found += 1
    assert found == FLIPS and read_checkpoint(saved).step == 1


@pytest.mark.parametrize("name", FILES)
def test_the_older_checkpoint_that_replaced_a_damaged_one_is_kept(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (8, 10):
        checkpoints.save(step, small(step), {})
    flip(tmp_path / "checkpoints/step_000010" / name, 3)
    assert checkpoints.load_latest().step == 8
    checkpoints.save(10, small(10), {})
    assert checkpoints.names() == ["step_000008", "step_000010-01"]
    assert (tmp_path / "checkpoints/damaged-step_000010").is_dir()
    assert Checkpoints(tmp_path, keep=2).load_latest().step == 10


@pytest.mark.parametrize("content", [b"[]", b"null", b"7", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_state_that_is_something_else_is_damaged(tmp_path: Path, content: bytes) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small(), {})
    (checkpoints.save(2, small(), {}) / "state.json").write_bytes(content)
    (tmp_path / "checkpoints/latest").write_bytes(b"\xff")  # of an older version
    assert checkpoints.load_latest().step == 1


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (999_999, 1_000_000, 1_000_000):
        checkpoints.save(step, small(step), {})
    assert checkpoints.names() == ["step_999999", "step_1000000", "step_1000000-01"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small(1.0), {})
    for value in (float("nan"), float("inf")):
        with pytest.raises(
            UserError, match=r"After step 2, 1 of 1 tensors of the learner \(model.w, ...\) are not fin"
        ):
            checkpoints.save(2, small(value), {})
    assert checkpoints.names() == ["step_000001"]


def test_a_checkpoint_of_when_there_were_no_manifests_goes_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = checkpoints.save(1, small(), {"sampler": 5})
    (saved / MANIFEST).unlink()
    with pytest.raises(UserError, match="No checkpoint"):
        checkpoints.load_latest()
    record = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(record | {"checksum": 1234}))
    assert checkpoints.load_latest().extra == {"sampler": 5}


@pytest.mark.parametrize(
    "trainer, generator, names",
    [
        ({"learning_rate": 2e-3}, {}, ["trainer.learning_rate was 0.001, is 0.002"]),
        ({"seed": 1, "train_batch_size": 8}, {}, ["trainer.seed", "trainer.train_batch_size"]),
        ({"policy": {"model": {"path": "other"}}}, {"num_generations": 4}, ["trainer.policy.model.path", "num_gener"]),
        ({"optimizer_kwargs": {"betas": [0.9, 0.95]}}, {}, ["trainer.optimizer_kwargs"]),
        ({"lr_scheduler_type": "linear", "max_steps": 60}, {}, ["trainer.lr_scheduler_type", "trainer.max_steps"]),
    ],
)
def test_a_configuration_that_cannot_continue_is_refused_with_its_fields(
    trainer: dict[str, object], generator: dict[str, object], names: list[str]
) -> None:
    saved = json.loads(make_config().model_dump_json())
    with pytest.raises(UserError) as refusal:
        check_resumable(saved, make_config(trainer=trainer, generator=generator))
    assert all(name in str(refusal.value) for name in names)


def test_settings_that_do_not_change_the_run_are_free() -> None:
    saved = json.loads(make_config().model_dump_json())
    free = {"logger": "none", "eval_interval": 3, "ckpt_interval": 1, "max_steps": 500, "micro_batch_tokens": 512}
    check_resumable(saved, make_config())
    check_resumable(saved, make_config(trainer=free, ray={"address": "auto"}, environment={"num_workers": 4}))
    endless = {"lr_scheduler_type": "inverse_sqrt?timescale=100"}
    saved = json.loads(make_config(trainer=endless).model_dump_json())
    check_resumable(saved, make_config(trainer=endless | {"max_steps": 500}))


def exam(run: str) -> list[Any]:
    return [f"{run}/val.jsonl", f"skyrl_eval:gsm8k?data={run}/b.jsonl", {"env": "text_math", "rows": f"{run}/c.jsonl"}]


@pytest.mark.parametrize(
    ("changed", "score"),
    [
        ({}, [0.9, 1.1]),
        ({"generator": {"episode_timeout": 5.0}, "trainer": {"run_dir": "runs/a", "eval_interval": 3}}, [0.9, 1.1]),
        ({"trainer": {"run_dir": "moved"}, "data": {"val_data": exam("moved")}}, [0.9, 1.1]),
        ({"data": {"val_data": ["text_math?split=val&difficulty=2"]}}, []),
        ({"data": {"val_data": exam("runs/a"), "val_size": 5}}, []),
        ({"generator": {"eval_temperature": 1.0}}, []),
    ],
)
def test_a_score_on_other_held_out_tasks_keeps_no_later_policy_from_being_the_best(
    changed: dict[str, Any], score: list[float]
) -> None:
    given = {"trainer": {"run_dir": "runs/a"}, "data": {"val_data": exam("runs/a")}}
    saved = json.loads(Config.model_validate(given).model_dump_json())
    found = Loaded(1, small(), {"config": saved, "tries": {"open": []}, "score": [0.9, 1.1]}, __version__)
    assert resumable(found, Config.model_validate(given | changed)).extra["score"] == score


def test_the_same_bytes_need_the_same_cut_and_a_schedule_with_an_end_the_same_length() -> None:
    saved = json.loads(make_config(trainer=SETTINGS).model_dump_json())
    check_resumable(saved, make_config(trainer=SETTINGS))
    with pytest.raises(UserError, match=r"micro_batch_tokens"):
        check_resumable(saved, make_config(trainer=SETTINGS | {"micro_batch_tokens": 512}))
    with pytest.raises(UserError, match=r"max_steps"):
        check_resumable(saved, make_config(trainer=SETTINGS | {"max_steps": 500}))
    with pytest.raises(UserError, match=r"not one of this version. trainer.gone \(checkpoint\) is .*skyrl-trainer 7"):
        check_resumable({"trainer": {"gone": 1}}, make_config(), "7.0")


def test_a_checkpoint_of_another_schema_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = checkpoints.save(1, small(), {}) / "state.json"
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded.version == __version__
    state.write_text(
        state.read_text().replace(f'"schema": {SCHEMA}', '"schema": 9').replace(f'"{__version__}"', '"9.1"')
    )
    (state.parent / MANIFEST).write_bytes(_manifest(state.parent))
    with pytest.raises(UserError, match=r"step_000001 was written by skyrl-trainer 9\.1: resume with that version"):
        checkpoints.load_latest()


def test_a_checkpoint_of_when_sections_were_dictionaries_goes_on() -> None:
    """What it held of the model and the agent: the entries that were given. Its settings are still compared."""
    saved = json.loads(make_config().model_dump_json())
    model = saved["trainer"]["policy"]["model"]
    model |= {"tiny": {"induction": True}, "lora": {"quantization": "nf4"}, "warmstart": {}}
    saved["generator"]["agent"] = {"tools": "template"}
    now = {"tiny": {"induction": True}, "lora": {"rank": 32, "quantization": "nf4"}}
    agent = {"agent": {"tools": "template"}}
    check_resumable(saved, make_config(trainer={"policy": {"model": now}}, generator=agent))
    with pytest.raises(UserError, match=r"trainer\.policy\.model\.lora\.rank was 32, is 16"):
        lora = {"lora": {"rank": 16, "quantization": "nf4"}}
        check_resumable(saved, make_config(trainer={"policy": {"model": now | lora}}, generator=agent))
