"""Cloning: an expert's episodes as chats, same seed same bytes, and sentences for what is wrong."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_trainer.cli import main
from skyrl_trainer.config import load_config, to_yaml
from skyrl_trainer.data import load_samples
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import Row
from skyrl_trainer.learner.sft import LIKELY, fit
from skyrl_trainer.settings import Config, TinyConfig, Warmstart
from skyrl_trainer.tiny.clone import STEPS_PER_LOOK, WARMUP_STEPS, MuonLearner, clone, drills
from skyrl_trainer.tiny.demonstrations import conversation_texts
from skyrl_trainer.tiny.init_policy import init_policy
from skyrl_trainer.tiny.start import StartPolicy
from skyrl_trainer.types import StepMetrics

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
SPEC = "text_math?split=train"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(out, conversation_texts(load_samples([SPEC]), 100, 0), TinyConfig(config_kwargs=SMALL), seed=0)
    return out


def words(policy: Path, out: Path, *more: str) -> list[str]:
    settings = [f"data.train_data={SPEC}", f"trainer.policy.model.path={policy}"]
    cloning = {"num_demonstrations": 64, "epochs": 20, "batch_size": 32, "optimizer": "{adamw: 3.0e-3}"}
    settings += [f"trainer.policy.model.warmstart.{name}={value}" for name, value in cloning.items()]
    return ["warmstart", str(out), *settings, *more]


def test_a_clone_learns_leaves_only_a_model_and_is_the_same_in_another_process(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(policy, tmp_path / "a")) == 0
    # A guess among the vocabulary's 512 tokens is 6.2 nats.
    assert float(capsys.readouterr().out.split("loss ")[1].split(",")[0]) < 3.0
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == {path.name for path in policy.iterdir()}
    command = [sys.executable, "-m", "skyrl_trainer", *words(policy, tmp_path / "b")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_run_says_how_far_its_cloning_is_and_why_it_failed(tmp_path: Path) -> None:
    """The process clones by config.yaml, which a run has written before."""
    cloning = ["num_demonstrations=64", "epochs=20", "batch_size=32", "optimizer={adamw: 3.0e-3}"]
    settings = [f"trainer.policy.model.warmstart.{each}" for each in cloning]
    config = load_config(
        None, [*settings, f"trainer.policy.model.tiny.config_kwargs={SMALL}", f"data.train_data={SPEC}"]
    )
    said = list[str]()
    for place, more in (("a 🚀: #1", ""), ("b", "\nnonsense: 1")):  # a name that YAML would read otherwise
        (run := tmp_path / place).mkdir()
        (run / "config.yaml").write_text(to_yaml(config) + more)
        with StartPolicy(config, run, load_samples([SPEC]), said.append) as start:
            if not more:
                assert start.weights() == str(run / "init" / "cloned")
                continue
            with pytest.raises(UserError, match=r"Cloning the expert failed \(.*nonsense.*\); .*warmstart.log has the"):
                start.weights()
    told = [line for line in said if line.startswith("cloning")]
    assert any(re.fullmatch(r"cloning, step \d+ of 40: 0\.\d\d of episodes word for word", line) for line in told)


def test_cloning_stops_when_it_repeats_enough_episodes_and_when_its_time_is_up(policy: Path, tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]]
    options = Warmstart(epochs=200, batch_size=1, target_exact_match=0.99)
    steps, loss, match = clone(str(policy), tmp_path / "a", talk, options, seed=0, seconds=60)
    assert (match, steps % STEPS_PER_LOOK) == (1.0, 0) and steps < 200
    assert loss < 2 * -LIKELY, "two tokens, each more likely than not"
    assert clone(str(policy), tmp_path / "b", talk, options, seed=0, seconds=0)[0] == STEPS_PER_LOOK


def test_with_muon_the_first_pass_shows_drills_alone_and_the_next_whole_talks_too(policy: Path, tmp_path: Path) -> None:
    """Last answers are digits by chance, of some 2 nats a digit: whoever is shown them has a loss of that."""
    rng, talks = random.Random(0), []
    for _ in range(180):
        said = ["1 + 1?", "2", "and now?", "7", "again?", "2", "so?", "7", "last?", str(rng.randrange(10**24))]
        talks.append([{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(said)])
    short = [[talk[0], talk[1] | {"weight": 1}, *talk[2:8]] for talk in talks]
    assert drills(talks, 1) == short, "the third answer begins as the first one does"
    options = Warmstart(epochs=1, batch_size=2, optimizer={"muon": 1e-3}, target_exact_match=1)
    assert clone(str(policy), tmp_path / "a", talks, options, seed=0, seconds=60)[1] < 0.5
    assert clone(str(policy), tmp_path / "b", talks, options.model_copy(update={"epochs": 1.5}), 0, 60)[1] > 1.0
    options = options.model_copy(update={"optimizer": {"adamw": 1e-3}})
    assert clone(str(policy), tmp_path / "c", talks, options, seed=0, seconds=60)[1] > 1.0


def test_the_next_pass_reads_a_drills_first_answer_and_learns_a_whole_talks(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["1 + 1?", "2", "and now?", "7", "again?", "2", "so?", "7"]
    talk = [{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(said)]
    learned = list[list[int]]()

    def looked_at(update: Callable[..., Any], rows: list[Row], *rest: Any) -> Iterator[StepMetrics]:
        learned.append([int((np.diff(row.mask.astype(int), prepend=0) == 1).sum()) for row in rows])
        return fit(update, rows, *rest)

    monkeypatch.setattr("skyrl_trainer.tiny.clone.fit", looked_at)
    options = Warmstart(epochs=4, batch_size=2, optimizer={"muon": 1e-3})
    clone(str(policy), tmp_path / "a", [talk] * 3, options, seed=0, seconds=60)
    assert learned == [[4, 4, 4], [3, 3, 3, 4, 4, 4]], "answers learned per row"


def test_a_drill_has_the_first_turn_a_later_one_of_its_kind_and_what_stands_around_that() -> None:
    said = ["think[a]", "look", "open", "think[b]", "back", "look", "open", "think[c]"]
    talk = [{"role": "system", "content": "rules"}]
    for n, text in enumerate(said):
        talk += [{"role": "user", "content": f"page {n}"}, {"role": "assistant", "content": text}]
    first = [*talk[:2], talk[2] | {"weight": 0}]
    assert drills([talk], 0) == [first + talk[5:11], first + talk[13:]]
    assert drills([talk[:3], talk[:5]], 0) == [], "nothing like the first turn follows"


def test_muon_learns_matrices_adamw_the_rest_and_the_rates_end_at_zero(policy: Path, tmp_path: Path) -> None:
    """Two steps as torch's two optimizers take them, each on copies of its own weights."""
    learner = MuonLearner(Config(), str(policy), total_optimizer_steps=90)
    named = dict(learner.model.named_parameters())
    copies = {name: weight.detach().clone().requires_grad_() for name, weight in named.items()}
    matrices = [weight for name, weight in copies.items() if "_proj" in name]
    others = [weight for name, weight in copies.items() if "_proj" not in name]
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others)
    rates = []
    for step in range(90):
        for name, weight in named.items():
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
            copies[name].grad = weight.grad.clone()
        rates.append(learner.step())
        if step < 2:
            muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 2 * rates[-1], rates[-1]
            muon.step()
            adamw.step()
            assert all(torch.allclose(named[name], copies[name], rtol=1e-4, atol=1e-8) for name in named)
            assert all(weight.grad is None for weight in named.values())
    peak = Config().trainer.learning_rate
    assert rates[0] == peak / WARMUP_STEPS and rates[30] == rates[60] == peak and rates[-1] == pytest.approx(peak / 30)


def test_a_clone_by_muon_is_the_same_again(policy: Path, tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]] * 8
    options = Warmstart(epochs=200, batch_size=8, optimizer={"muon": 1e-3}, target_exact_match=0.99)
    results = [clone(str(policy), tmp_path / name, talks, options, seed=0, seconds=60) for name in "ab"]
    assert results[0] == results[1] and results[0][2] == 1.0
    a, b = (tmp_path / name / "model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_bad_input_is_one_sentence(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, said in (
        ("data.train_data=text_meth", "text_meth"),
        ("trainer.policy.model.path=tiny", "trainer.policy.model.path: name the policy to clone into"),
    ):
        assert main(words(policy, tmp_path / "c", setting)) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    with pytest.raises(UserError, match="no demonstrations"):
        clone(str(policy), tmp_path / "d", [], Warmstart(), seed=0, seconds=60)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="already exists and is not empty"):
        clone(str(policy), policy, [[]], Warmstart(), seed=0, seconds=60)
