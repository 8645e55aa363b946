"""The command line as a user meets it: exit codes, one sentence instead of a traceback, the dry run."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import skyrl_trainer.cli as cli
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.config import load_config, resolve
from skyrl_trainer.dry_run import doctor
from skyrl_trainer.dry_run.doctor import Gpu, Hardware, require_gym
from skyrl_trainer.dry_run.limits import ModelShape, limits, memory
from skyrl_trainer.dry_run.plan import obstacles, placement, print_plan
from skyrl_trainer.errors import UserError
from skyrl_trainer.report.page import write_page
from skyrl_trainer.run.commands import train
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.model_shape import model_shape
from skyrl_trainer.run.signals import StopSignal
from skyrl_trainer.settings import Config

LAPTOP = Hardware(cores=2, memory=8 * 2**30, gpus=())
EIGHT_H200 = Hardware(96, 2**40, (Gpu("NVIDIA H200", 141 * 10**9),) * 8)
QWEN_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose engines are on the processor, whatever this one has."""
    monkeypatch.setattr("skyrl_trainer.engine.vllm_args.has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)


def stop_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def command(args: object) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "doctor", command)


def test_help_and_settings_load_neither_torch_nor_vllm_nor_ray() -> None:
    code = """
import sys
from skyrl_trainer import cli
from skyrl_trainer.config import load_config
load_config(None, ["trainer.seed=1"])
try:
    cli.main(["--help"])
except SystemExit:
    pass
loaded = {"torch", "vllm", "ray", "transformers", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_run_shows_no_progress_bars_of_libraries() -> None:
    code = """
from skyrl_trainer import cli
cli.main(["train", "trainer.policy.model.path=./nowhere"])
from transformers.utils import logging
assert not logging.is_progress_bar_enabled() and logging.get_verbosity() == logging.ERROR
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_user_error_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "trainer.max_stepz=3"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "skyrl-trainer: trainer.max_stepz (command line) is not a setting; did you mean trainer.max_steps?\n"
    )


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stop_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "skyrl-trainer: stopped by Ctrl-C.\n"


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    def raised(args: object) -> None:
        signal.raise_signal(signal.Signals[name])
        raise AssertionError("not stopped")

    monkeypatch.setitem(cli.COMMANDS, "doctor", raised)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    assert cli.main(["doctor"]) == code
    said = "Ctrl-C" if name == "SIGINT" else name
    assert capsys.readouterr().err == f"skyrl-trainer: stopped by {said}.\n"
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]


CLOSED = """
import os, sys, time
from skyrl_trainer import cli
from skyrl_trainer.report.table import LiveTable

def run(args):
    with LiveTable(2) as table:
        table.phase("rollout")
        os.write({ready}, b".")
        time.sleep(60)

cli.COMMANDS["doctor"] = run
sys.exit(cli.main(["doctor"]))
"""


def test_a_terminal_that_is_closed_stops_a_run_as_its_signal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ready, other = os.pipe()
    os.set_inheritable(other, True)
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", CLOSED.replace("{ready}", str(other))])
    os.close(other)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    assert not list(tmp_path.glob("*.error.log"))


def test_what_goes_wrong_with_a_disk_while_a_run_stops_is_not_taken_for_the_stop() -> None:
    with pytest.raises(OSError, match="No space"), StopSignal() as stop:
        stop.at_once = False
        signal.raise_signal(signal.SIGTERM)
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("command", [["-m", "skyrl_trainer", "envs"], ["-m", "skyrl_gym"]])
def test_a_reader_that_has_had_enough_gets_no_message(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_a_terminal_cannot_show_is_shown_in_escapes() -> None:
    """It was an unexpected error, at the end of a training that was whole."""
    command = [sys.executable, "-m", "skyrl_trainer", "report", "run", "-o", "报告.html"]
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 0}\n')
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\\u62a5\\u544a.html\n"), done.stderr
    assert Path("报告.html").exists()


def test_under_nohup_a_hangup_is_ignored() -> None:
    code = """
import signal
from skyrl_trainer.run.signals import StopSignal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopSignal():
    signal.raise_signal(signal.SIGHUP)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_full_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.04 GiB of which ..."
    stop_with(monkeypatch, torch.OutOfMemoryError(told))
    assert cli.main(["doctor"]) == 2
    sentence = "CUDA out of memory. Tried to allocate 2.00 GiB: docs/troubleshooting.md says what takes less."
    assert capsys.readouterr().err == f"skyrl-trainer: {sentence}\n"


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stop_with(monkeypatch, OSError(28, "No space left on device", "/data/x"))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "skyrl-trainer: no space is left for /data/x: free some, then start again.\n"


def test_an_unexpected_error_leaves_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_with(monkeypatch, ZeroDivisionError("division by zero\nsecond line"))
    assert cli.main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "skyrl-trainer: unexpected error, ZeroDivisionError: division by zero (the traceback is in "
    )
    log = Path(error.rpartition(" in ")[2].rstrip(").\n"))
    assert "ZeroDivisionError" in log.read_text()
    log.unlink()


def test_settings_may_stand_after_an_option() -> None:
    args = cli._parse(["train", "quickstart", "--dry-run", "trainer.seed=1"])
    assert args.dry_run and args.settings == ["quickstart", "trainer.seed=1"]
    assert cli.split_settings(["a=b/c.yaml", "runs/a=b/c.yaml"]) == ("runs/a=b/c.yaml", ["a=b/c.yaml"])
    weight = "trainer.algorithm.reward_funcs.len-penalty=0.5"
    assert cli.split_settings(["quickstart", weight]) == ("quickstart", [weight])


def test_a_gpu_that_has_no_memory_of_its_own_has_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA GB10, [N/A]'\necho 'NVIDIA H100, 81559'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = doctor.hardware()
    assert found.gpus == (Gpu("NVIDIA GB10", found.memory), Gpu("NVIDIA H100", 81559 << 20))


def test_two_recipes_and_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "one", "two"]) == 2
    assert "'two' is not a setting (name=value), and there is a recipe already: 'one'." in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--fast"])
    assert caught.value.code == 2


def test_eval_keeps_its_tries_in_a_folder_that_holds_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = list[Any]()
    monkeypatch.setattr(cli, "_policy_of", lambda args: (Config(), "m"))
    monkeypatch.setattr("skyrl_trainer.run.commands.evaluate", lambda *each: given.append(each[2]) or {"a": 0.5})
    out = tmp_path / "evals" / "first"
    assert cli.main(["eval", "m"]) == cli.main(["eval", "m", "--out", str(out)]) == 0
    assert given == [None, out] and out.parent.is_dir()
    out.mkdir()
    assert cli.main(["eval", "m", "--out", str(out)]) == 0
    out.mkdir()
    (out / "step_000000.jsonl.gz").write_text("")
    assert cli.main(["eval", "m", "--out", str(out)]) == 2 and len(given) == 3
    assert f"{out} cannot be written: Directory not empty" in capsys.readouterr().err


def test_export_eval_and_report_refuse_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert cli.main(["export", "nowhere", "--out", "out"]) == 2
    assert "There is no policy in nowhere/model/last" in capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "model/best" in capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path), "quickstart"]) == 2
    assert "leave out the recipe 'quickstart'" in capsys.readouterr().err
    assert cli.main(["eval", "nowhere"]) == 2
    assert capsys.readouterr().err == "skyrl-trainer: trainer.policy.model.path: there is no folder nowhere.\n"
    for command in ("eval", "serve"):  # at once, without a look at Hugging Face for an owner `runs`
        assert cli.main([command, "runs/never-begun"]) == 2
        assert "There is no run runs/never-begun" in capsys.readouterr().err
    assert cli.main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "skyrl-trainer: nowhere is not a run folder: it has no config.yaml, no metrics.jsonl and no trajectories.\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["run #2", "a: b", "new\nline", "🚀", "[1]", "1e3", "null"])
def test_a_runs_folder_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (policy := tmp_path / name / "model" / "last").mkdir(parents=True)
    (policy / "config.json").write_text(json.dumps({"model_type": "qwen3", **QWEN_0_6B}))
    (tmp_path / name / "config.yaml").write_text("")
    config, model = cli._policy_of(Namespace(settings=[], target=Path(name), which="last"))
    assert config.trainer.policy.model.path == model == f"{name}/model/last"


def test_a_dry_run_shows_where_each_value_is_from_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("generator:\n  num_generations: 4\n")
    assert cli.main(["train", str(recipe), "--dry-run", "trainer.seed=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ") and "." in line.split()[0]}
    assert found["trainer.seed"] == ["5", "command", "line"]
    assert found["generator.num_generations"] == ["4", "mine.yaml,", "line", "2"]
    assert found["trainer.max_steps"] == ["50", "default"]
    text = "\n".join(lines)
    for heading in (
        "Placement",
        "Memory, estimated (0.85 M parameters of 4 bytes)",
        "Physical limits",
        "decode, at most",
    ):
        assert heading in text
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_dry_run_says_what_would_stop_the_skyrl_command_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = load_config(
        None,
        [
            "data.train_data=['/nowhere/train.parquet']",
            "trainer.policy.model.path=/nowhere/model",
            "trainer.placement.policy_num_gpus_per_node=4",
            "generator.num_inference_engines=4",
            "generator.weight_sync_backend=nccl",
            "trainer.logger=wandb",
        ],
    )
    found = "\n".join(obstacles(config, LAPTOP))
    for part in (
        "trainer.policy.model.path: there is no folder /nowhere/model.",
        "The placement needs 4 GPUs (trainer.placement.policy_num_gpus_per_node=4, 4 engines); this machine has none.",
        "data.train_data: There is no data file /nowhere/train.parquet; expected a .jsonl or .parquet file.",
        "trainer.logger=wandb is not installed: run `pip install wandb`, or use tensorboard or none.",
    ):
        assert part in found


def test_a_model_that_is_not_on_this_machine_is_a_sentence_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    resolved = resolve(None, ["trainer.policy.model.path=nobody/no-such-model-7b"])
    print_plan(resolved)
    assert "Memory and limits are not known: the model is not on this machine" in capsys.readouterr().out
    assert not any("no-such-model" in sentence for sentence in obstacles(resolved.config, LAPTOP))


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("skyrl_trainer.dry_run.plan.hardware", lambda: LAPTOP)
    print_plan(resolve(None, ["generator.max_concurrency=1000000"]))
    assert "GiB of memory are needed, and there are 8.0 GiB." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.policy.model.path=./nowhere", "trainer.policy.model.path: there is no folder nowhere."),
        ("trainer.placement.policy_num_gpus_per_node=8", "The placement needs 8 GPUs"),
        ("data.val_data=[a.jsonl]", "data.val_data: There is no data file a.jsonl"),
    ],
)
def test_training_refuses_what_cannot_work_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, sentence: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["train", override]) == 2
    assert sentence in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("generator.backend=foo", "generator.backend='foo' is not registered; choose one of openai_server, "),
        (
            "trainer.algorithm.advantage_estimator=gae",
            "needs a critic: take trainer.algorithm.name=ppo, or <name>_ppo, or PPOTrainer.",
        ),
        ("trainer.optimizer_kwargs={foo: 3}", "trainer.optimizer_kwargs does not fit torch.optim.AdamW"),
        ("trainer.optimizer_kwargs={betas: [0.9]}", "trainer.optimizer_kwargs does not fit torch.optim.AdamW"),
        ("trainer.optimizer_kwargs={betas: {}}", "trainer.optimizer_kwargs does not fit torch.optim.AdamW"),
        ("trainer.optimizer_kwargs={betas: [0.9, 0.9, 0.9]}", "does not fit torch.optim.AdamW: too many values"),
        ("trainer.lr_scheduler_type=foo", "trainer.lr_scheduler_type='foo' cannot be used"),
        ("trainer.lr_scheduler_type=cosine_with_min_lr", "cannot be used: One of min_lr or min_lr_rate"),
        ("trainer.lr_scheduler_type=constant?cycles=2", "cannot be used: it takes no arguments"),
        ("trainer.lr_scheduler_type=cosine?num_cycles=half", "cannot be used: "),
        ("trainer.lr_scheduler_type=cosine?cycles=2", "unexpected keyword argument 'cycles'"),
        ("trainer.algorithm.reward_funcs={succes: 1}", "Did you mean success?"),
        ("data.train_data=text_math?tries=2", "data.train_data: `tries` are held-out data's; here generator.num_gen"),
        ("trainer.lr_scheduler_type=reduce_lr_on_plateau", "trainer.lr_scheduler_type='reduce_lr_on_plateau' cannot"),
        ("generator.temperature=0", "generator.temperature=0 leaves nothing to learn from"),
        ("trainer.policy.model.tiny.config_kwargs={hidden_size: 0}", "hidden_size is 0; it must be a whole number"),
        ("trainer.policy.model.tiny.config_kwargs={vocab_size: 10}", "vocab_size is 10; it must be a whole number"),
        ("trainer.policy.model.tiny.config_kwargs={head_dim: 7}", "head_dim is 7; vLLM's CPU attention has 32, 64"),
        ("trainer.policy.model.tiny.config_kwargs={nosuch: 1}", "tiny.config_kwargs: Qwen3 has no setting 'nosuch'"),
        ("trainer.policy.model.lora.target_modules=[q_prj]", "q_prj is no torch.nn.Linear of Qwen3ForCausalLM, which"),
        (
            "data.val_data=text_math?split=val&tries=4",
            "data.val_data: `tries` are all the same",
        ),
    ],
)
def test_a_dry_run_says_which_setting_cannot_be_used(override: str, sentence: str) -> None:
    (found,) = set(obstacles(load_config(None, ["trainer.algorithm.name=dapo", override]), LAPTOP))
    assert sentence in found


SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 99}
STRANGE = [
    {"model_type": "qwen3", **SHAPE, "attn_implementation": "flash_attention_2"},
    {"model_type": "qwen3", **SHAPE, "hidden_act": "nosuch"},
    {"model_type": "qwen3", **SHAPE, "layer_types": ["full_attention"] * 3},
    {"model_type": "qwen3", **SHAPE, "dtype": "nosuch"},
    {"model_type": "nosuch", **SHAPE},
    {"model_type": ["qwen3"], **SHAPE},
    {"model_type": "clip", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
    SHAPE,
]


@pytest.mark.parametrize("made", STRANGE)
def test_a_model_that_cannot_be_made_here_is_not_refused_for_its_targets(
    tmp_path: Path, made: dict[str, object]
) -> None:
    """Nor is its code asked for: a dry run downloads and runs nothing."""
    (tmp_path / "config.json").write_text(json.dumps(made))
    settings = [f"trainer.policy.model.path={tmp_path}", "trainer.policy.model.lora.target_modules=[q_prj]"]
    said = [each for each in obstacles(load_config(None, settings), LAPTOP) if "target_modules" in each]
    known = "attn_implementation" in made  # the learner has an attention of its own
    assert len(said) == known and all("q_prj is no torch.nn.Linear of Qwen3ForCausalLM, which" in each for each in said)


@pytest.mark.parametrize("way", ["foreach: true", "foreach: false", "fused: true", "fused: false"])
def test_adamws_own_ways_are_settings(way: str) -> None:
    """Ours is the fused one, which foreach does not go with; what no step could be taken by is refused."""
    assert not list(obstacles(load_config(None, [f"trainer.optimizer_kwargs={{{way}}}"]), LAPTOP))
    (said,) = obstacles(load_config(None, ["trainer.optimizer_kwargs={differentiable: true}"]), LAPTOP)
    assert said.startswith("trainer.optimizer_kwargs does not fit torch.optim.AdamW: ")


@pytest.mark.parametrize("name", ["ppo", "cispo_ppo"])
def test_what_has_a_critic_may_name_gae(name: str) -> None:
    settings = [f"trainer.algorithm.name={name}", "trainer.algorithm.advantage_estimator=gae"]
    assert not list(obstacles(load_config(None, [*settings, "trainer.lr_scheduler_type=cosine"]), LAPTOP))


@pytest.mark.parametrize("name", ["ppo", "cispo_ppo"])
def test_a_critics_adapter_and_gradient_checkpointing_are_refused_before_a_model_is_loaded(name: str) -> None:
    settings = [f"trainer.algorithm.name={name}", "trainer.gradient_checkpointing=true"]
    adapter, shared = "trainer.policy.model.lora.rank=4", "trainer.algorithm.options.critic=backbone"
    [said] = obstacles(load_config(None, [*settings, adapter]), LAPTOP)
    assert said.startswith("trainer.gradient_checkpointing computes layers again")
    for fine in ([*settings, adapter, shared], settings, [settings[0], adapter]):
        assert not list(obstacles(load_config(None, fine), LAPTOP))


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    Path("taken").touch()
    with (
        pytest.raises(
            UserError, match=r"taken/run cannot be written: .* another folder \(a run's is trainer.run_dir\)"
        ),
        RunFolder(load_config(None, ["trainer.run_dir=taken/run"])),
    ):
        pass


def test_a_policy_that_no_run_has_left_is_not_replaced(tmp_path: Path) -> None:
    """As `sft` leaves one, or another program."""
    policy = tmp_path / "tuned" / "model" / "last"
    policy.mkdir(parents=True)
    with pytest.raises(UserError, match=r"tuned has a policy, model/last, of no run: give another"):
        train(load_config(None, [f"trainer.run_dir={tmp_path / 'tuned'}"]))
    assert {path.name for path in (tmp_path / "tuned").iterdir()} == {"model", ".lock"} and not list(policy.iterdir())


@pytest.mark.parametrize("left", ["trajectories", "checkpoints"])
def test_a_run_that_was_cut_short_in_its_last_save_starts_again(tmp_path: Path, left: str) -> None:
    """It had written its policy, and no checkpoint yet."""
    for name in ("model/last", left):
        (tmp_path / "run" / name).mkdir(parents=True)

    class Begun(Exception):
        pass

    def begin(*_: object) -> None:
        raise Begun

    with pytest.raises(Begun):
        train(load_config(None, [f"trainer.run_dir={tmp_path / 'run'}"]), kind=begin)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["trainer.run_dir", "trainer.run_name"])
def test_a_run_folder_has_a_name(setting: str) -> None:
    with pytest.raises(UserError, match=rf'^{setting} is "" \(command line\), but should be at least 1 character'):
        load_config(None, [f"{setting}="])


def test_a_page_does_not_replace_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {}\n")
    with pytest.raises(UserError, match=r"config\.yaml is not named as a page is, whose name ends in \.html"):
        write_page(tmp_path / "config.yaml", "a run", {}, "", "")
    assert (tmp_path / "config.yaml").read_text() == "trainer: {}\n"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    overrides = [f"trainer.policy.model.path={tmp_path}"]
    with pytest.raises(UserError, match=r"there is no .*config.json\."):
        model_shape(load_config(None, overrides))
    (tmp_path / "config.json").write_text("{}")
    assert model_shape(load_config(None, overrides)) is None
    (tmp_path / "config.json").write_text(json.dumps(QWEN_0_6B))
    assert model_shape(load_config(None, overrides)) == ModelShape.of(QWEN_0_6B, "float32")


def test_a_context_is_no_longer_than_a_models_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said by the dry run, too; but a model whose positions are stretched may have more."""
    for path, most, more in (("tiny", 8192, []), (str(tmp_path), 4000, [f"trainer.policy.model.path={tmp_path}"])):
        (tmp_path / "config.json").write_text(json.dumps(QWEN_0_6B | {"max_position_embeddings": 4000}))
        assert model_shape(load_config(None, [f"generator.max_model_len={most}", *more]))
        sentence = f"generator.max_model_len={most + 1}, and trainer.policy.model.path={path} has {most} positions"
        with pytest.raises(UserError, match=re.escape(sentence)):
            model_shape(load_config(None, [f"generator.max_model_len={most + 1}", *more]))
        assert cli.main(["train", "quickstart", f"generator.max_model_len={most + 1}", *more, "--dry-run"]) == 0
        assert sentence in capsys.readouterr().out
    yarn = {"rope_type": "yarn"}
    for rope in ({"rope_scaling": yarn}, {"rope_parameters": yarn}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}):
        (tmp_path / "config.json").write_text(json.dumps(QWEN_0_6B | {"max_position_embeddings": 4000} | rope))
        assert model_shape(load_config(None, ["generator.max_model_len=4001", *more]))


def test_the_estimate_agrees_with_published_sizes() -> None:
    shape = ModelShape.of(QWEN_0_6B, "bfloat16")
    assert shape.parameters == pytest.approx(596e6, rel=0.001)
    assert shape.kv_bytes == 112 * 1024
    rows = dict(memory(load_config(None, []), shape))
    assert rows["processes themselves, about"] == 2.25 * 2**30, "measured: 2.2 GiB with one engine, 3.7 with three"
    three = load_config(None, ["generator.num_inference_engines=3"])
    assert dict(memory(three, shape))["processes themselves, about"] == 3.75 * 2**30
    assert rows["learner: weights, gradients, AdamW's two moments, in float32"] == 4 * 4 * shape.parameters


def test_the_limit_on_a_known_gpu_is_that_of_its_data_sheet() -> None:
    overrides = [
        "trainer.policy.model.dtype=bfloat16",
        "trainer.placement.policy_num_gpus_per_node=1",
        "generator.max_completion_length=2048",
        "generator.max_model_len=4096",
    ]
    figures = dict(limits(load_config(None, overrides), ModelShape.of(QWEN_0_6B, "bfloat16"), EIGHT_H200))
    assert figures["memory bandwidth, arithmetic"] == "4,800.0 GB/s, 989,000 GFLOP/s (data sheet of 1 x NVIDIA H200)"
    # B = 256, c = 1024: the reference note derives 39 thousand.
    assert figures["decode, at most"].startswith("39,") and "bound by memory" in figures["decode, at most"]


def test_placement_names_devices() -> None:
    gpus = ["trainer.placement.policy_num_gpus_per_node=4", "generator.num_inference_engines=2"]
    assert placement(load_config(None, gpus), EIGHT_H200)[1] == (
        "engines (2 x vllm)",
        "GPUs 0-1, taking turns with the learner",
    )
    apart = placement(load_config(None, [*gpus, "trainer.placement.colocate_all=false"]), EIGHT_H200)
    assert apart[0] == ("learners (4)", "GPUs 2-5") and apart[1][1] == "GPUs 0-1"
    assert placement(load_config(None, []), LAPTOP)[0][1].startswith("processor (2 cores")


def test_a_plan_is_printed_even_when_there_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(resolve(None, ["trainer.policy.model.path=/nowhere"]))
    text = capsys.readouterr().out
    assert "there is no folder /nowhere" in text and "Physical" not in text


@pytest.mark.parametrize(("device", "works"), [("cpu", True), ("cuda", False), ("", False)])
def test_doctor_lets_torch_compute_where_vllm_would(
    device: str, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build beside no driver (""), or one that is too old for it, or torch for CPUs alone, shows only then."""
    platforms = tmp_path / "vllm" / "platforms.py"
    platforms.parent.mkdir()
    (platforms.parent / "__init__.py").write_text("__version__ = '0.32.0'")
    platforms.write_text(f"class current_platform:\n    device_type = '{device}'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, said = doctor._try_vllm()
    assert (found, said) == (True, "0.32.0 cpu") if works else not found and "CUDA" in said


def test_a_foreign_skyrl_gym_stops_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_trainer.dry_run.doctor.version", lambda name: "0.4.0")
    with pytest.raises(UserError, match="is a different project of the same name: run `pip uninstall skyrl-gym`"):
        require_gym()


@pytest.mark.parametrize("words", [["envs"], ["train", "quickstart", "--dry-run"], ["eval", "code"], ["doctor"]])
def test_a_registry_that_cannot_be_read_is_a_sentence_of_every_command(words: list[str], tmp_path: Path) -> None:
    variables = os.environ | {"SKYRL_ENVS_REGISTRY": str(tmp_path / "none.yaml")}
    command = [sys.executable, "-m", "skyrl_trainer", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    said = f"The environment registry {tmp_path}/none.yaml cannot be read: [Errno 2] No such file or directory"
    if words == ["doctor"]:
        assert done.returncode == 1 and f"FAIL  skyrl_gym      {said}" in done.stdout
    else:
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"skyrl-trainer: {said}")


def test_export_copies_a_policy_that_loads_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl_trainer.settings import TinyConfig
    from skyrl_trainer.tiny.init_policy import init_policy

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = TinyConfig(config_kwargs={**sizes, "num_key_value_heads": 1})
    init_policy(tmp_path / "run/model/last", ["What is 1 + 1?"], tiny, seed=0)
    ends = load_chat_prompt("run/model/last").stop_token_ids
    settings = Path("run/model/last/generation_config.json")
    other = ends[0] + 1
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": other}))
    for choice in (["--step", "2"], ["--min-reward", "1"], ["--only-success"]):
        assert cli.main(["export", "run", "--out", "copy", *choice]) == 2
        assert "choose trajectories: give --trajectories, not --out" in capsys.readouterr().err
    assert cli.main(["export", "run", "--out", "copy"]) == 0
    assert "copy: 0.02 M parameters, loads in transformers" in capsys.readouterr().out
    assert sorted(path.name for path in Path("copy").iterdir()) == sorted(
        path.name for path in Path("run/model/last").iterdir()
    )
    assert json.loads(Path("copy/generation_config.json").read_text())["eos_token_id"] == [*ends, other]
    assert cli.main(["export", "run", "--out", "copy"]) == 2
    assert "copy already exists and is not empty" in capsys.readouterr().err
    assert Path("copy/model.safetensors").stat().st_mode == Path("copy/config.json").stat().st_mode, "by the umask"
    monkeypatch.setattr("shutil.copytree", Mock(side_effect=shutil.Error([("a", "b", "[Errno 2] No such file")])))
    assert cli.main(["export", "run", "--out", "other"]) == 2
    assert "cannot be copied ([Errno 2] No such file); if its run has just replaced it" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    Path("run/model/last/model.safetensors").write_bytes(b"cut short")
    assert cli.main(["export", "run", "--out", "other"]) == 2
    assert "does not load, so nothing was exported" in capsys.readouterr().err
    assert not Path("other").exists()


AGENT_FAULTS = {
    "run=nofile.py:agent": "agent.run: nofile.py is not a Python file in {cwd}; give one that has your agent in it.",
    "run=mine.py:nobody": "generator.agent.run=mine.py:nobody: mine.py has no function 'nobody'.",
    "run=mine.py": "name a file and a function in it, as my.py:agent.",
    "run=[nosuchprogram]": "generator.agent.run=['nosuchprogram']: there is no such program on this machine.",
}


@pytest.mark.parametrize("given", AGENT_FAULTS)
def test_an_agent_that_is_not_there_is_said_before_anything_starts(given: str) -> None:
    Path("mine.py").write_text("def agent(task): ...\n")
    config = load_config("quickstart", [f"generator.agent.{given}"])
    assert any(
        sentence.endswith(AGENT_FAULTS[given].replace("{cwd}", str(Path.cwd())))
        for sentence in obstacles(config, LAPTOP)
    )


def test_an_agent_beside_a_memory_of_ours_is_refused() -> None:
    with pytest.raises(UserError, match=r"keeps its own history: leave out generator\.agent\.memory"):
        load_config("quickstart", ["generator.agent={run: 'a.py:b', memory: 'window:2'}"])
