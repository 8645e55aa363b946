"""Two learners in Ray actors are one learner: gradients, metrics, weights, checkpoints; and one that hangs or dies."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import ray
import torch
from ray import cloudpickle
from tiny_models import make_batch, make_chats, make_config, save_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from skyrl_trainer.errors import NothingLearned, UserError
from skyrl_trainer.learner import group as group_module
from skyrl_trainer.learner import model as learner_module
from skyrl_trainer.learner.batch import Row, make_rows
from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.group import LearnerGroup, LearnerProcess
from skyrl_trainer.learner.grpo import GRPO
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.learner.ppo import Critic
from skyrl_trainer.learner.ranks import Ranks, shares, whole
from skyrl_trainer.learner.sft import SFTTrainer, share_beginning
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.user_file import load_plugin
from skyrl_trainer.weight_sync.digest import Digest
from skyrl_trainer.weight_sync.nccl import WeightSender

LOAD_MODEL = learner_module.load_model


def load_double(*arguments: Any, **named: Any) -> Any:
    return LOAD_MODEL(*arguments, **named).double()


class Probe(LearnerProcess):
    def do(self, function: Any, *arguments: Any) -> Any:
        return function(self, *arguments)


class ProbedGroup(LearnerGroup):
    process = Probe


def move_reference(algorithm: Any) -> None:
    """Makes it another policy than the learner's, so that the KL is not zero."""
    with torch.no_grad():
        for parameter in algorithm.reference.model.parameters():
            parameter.mul_(1.02)


def gradient(algorithm: Any, batch: Any, more: Any) -> torch.Tensor:
    """The gradient that the first optimizer step would see."""
    seen: list[torch.Tensor] = []
    algorithm.learner.step = lambda: (
        seen.append(torch.cat([whole(each.grad).flatten().clone() for each in algorithm.learner.parameters])) or 0.0
    )
    algorithm.update(batch, more)
    del algorithm.learner.step
    algorithm.learner.clear_gradients()
    return seen[0]


def two_config(**trainer: Any) -> Any:
    return make_config(trainer={"placement": {"policy_num_nodes": 2}, "num_mini_batches": 2, **trainer})


def one(config: Any, path: str) -> Any:
    """The algorithm with one learner, in this process."""
    algorithm = algorithm_class(config.trainer.algorithm.name)(config)
    learner = make_learner(config, path, 10)
    return algorithm.start(learner, learner.reference() if algorithm.beta > 0 else None)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedGroup]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the actors import this file
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=2**27,
    )  # fmt: skip
    made = ProbedGroup(two_config(), GRPO(two_config()), save_model(tmp_path_factory.mktemp("model")), 10)
    yield made
    made.close()
    ray.shutdown()
    patch.undo()


def prepare(process: Probe, config: Any, double: bool) -> None:
    process.config = config
    learner_module.load_model = load_double if double else LOAD_MODEL


def load(group: ProbedGroup, config: Any, path: str, double: bool = False) -> None:
    """The same processes with another policy and configuration."""
    group._everywhere("do", prepare, config, double)
    sent = cloudpickle.dumps(algorithm_class(config.trainer.algorithm.name)(config))
    group._everywhere("load", sent, path, 10)


def test_learners_have_what_a_script_has_set_on_its_algorithm(group: ProbedGroup, tmp_path: Path) -> None:
    config, path = two_config(), save_model(tmp_path)
    algorithm: Any = algorithm_class("ppo")(config)
    algorithm.value_coef = 7.0
    group._everywhere("load", cloudpickle.dumps(algorithm), path, 10)
    assert group._everywhere("do", lambda process: process.algorithm.value_coef) == [7.0, 7.0]
    algorithm.lock = threading.Lock()
    with pytest.raises(UserError, match=r"^PPO cannot go to 2 learners: cannot pickle '_thread.lock' object\.$"):
        LearnerGroup(config, algorithm, path, 10)


@pytest.mark.parametrize("kind, double, tolerance", [("qwen3", False, 1e-5), ("gpt2", True, 1e-10)])
@pytest.mark.parametrize("budget", [100, 10**6])
def test_the_gradient_does_not_depend_on_the_number_of_learners(
    group: ProbedGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, double: bool, tolerance: float,
    budget: int,
) -> None:  # fmt: skip
    """Off-policy, with KL and entropy; many micro-batches, and one that the second learner has to share."""
    path = save_model(tmp_path, kind)
    algorithm = {"name": "grpo", "options": {"beta": 0.1, "entropy_coef": 0.01, "kl_estimator": "k3_ratio"}}
    config = two_config(algorithm=algorithm, micro_batch_tokens=budget, max_grad_norm=1e9, num_mini_batches=1)
    batch = make_batch(equal=(1,), turns=3, rewritten=(2,))
    old = [torch.tensor([x for turn in t.turns for x in turn.logprobs]) for t in batch.trajectories]
    monkeypatch.setattr(learner_module, "load_model", load_double if double else LOAD_MODEL)
    alone = one(config, path)
    move_reference(alone)
    load(group, config, path, double)
    group._everywhere("do", lambda process: move_reference(process.algorithm))
    types = group._everywhere("do", lambda process: {type(each.data) for each in process.learner.parameters})
    assert types == [{DTensor}] * 2
    expected = gradient(alone, batch, old)
    for actual in group._everywhere("do", lambda process: gradient(process.algorithm, batch, old)):
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    "algorithm, lora",
    [
        ({"options": {"beta": 0.1}}, {}),
        pytest.param({"name": "ppo", "options": {"critic": "model"}}, {}, marks=pytest.mark.full),
        ({"name": "ppo", "options": {"critic": "backbone", "beta": 0.1, "kl_estimator": "k1_in_reward"}}, {}),
        ({"name": "ppo", "options": {"critic": "model", "beta": 0.1}}, {"rank": 4}),
    ],
)
def test_updates_and_checkpoints_are_those_of_one_learner(
    group: ProbedGroup, tmp_path: Path, algorithm: dict[str, Any], lora: dict[str, Any]
) -> None:
    """Metrics, weights, logprobs; what two save one goes on from, and the other way round; an unlike share of rows."""
    path = save_model(tmp_path / "model")
    config = two_config(algorithm=algorithm, policy={"model": {"lora": lora}})
    alone, checkpoints = one(config, path), Checkpoints(tmp_path, keep=9)
    load(group, config, path)

    def update(step: int, **batch: Any) -> None:
        rollouts = make_batch(step=step, seed=step, **batch)
        metrics = group.update(rollouts)
        assert metrics == pytest.approx(alone.update(rollouts), rel=1e-4, abs=1e-6)

    def agree() -> None:
        ours, theirs = dict(alone.learner.named_tensors()), dict(group.named_tensors())
        assert list(ours) == list(theirs)
        assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-5) for name in ours)
        torch.testing.assert_close(group.token_logprobs([1, 2, 3]), alone.learner.token_logprobs([1, 2, 3]))

    group.share_weights().unlink()
    update(1)
    update(2, groups=1, generations=3)
    agree()
    for step, (source, target) in enumerate([(group, alone), (alone, group)]):
        checkpoints.save(step, source.state_dict(), {})
        update(7)  # away from what was saved
        source.load_state_dict(checkpoints.load_latest().learner)
        target.load_state_dict(checkpoints.load_latest().learner)
        saved, again = source.state_dict(), target.state_dict()
        assert saved.numbers == again.numbers and list(saved.tensors) == list(again.tensors)
        assert all(torch.equal(saved.tensors[name], again.tensors[name]) for name in saved.tensors)
        update(3 + step)
        agree()
    group.save_pretrained(tmp_path / "out", step=7)
    assert json.loads((tmp_path / "out/config.json").read_text())["skyrl_step"] == 7
    out = dict(make_learner(config, str(tmp_path / "out"), 1).named_tensors())
    assert all(torch.equal(tensor, out[name]) for name, tensor in group.named_tensors())


def test_two_learners_teach_what_one_would(group: ProbedGroup, tmp_path: Path) -> None:
    """Gradient, metrics and weights after two updates, in micro-batches of which one learner has fewer."""
    path, rows, config = save_model(tmp_path / "model"), make_chats(count=9), two_config(micro_batch_tokens=60)
    share_beginning(rows)
    alone = SFTTrainer(config).start(make_learner(config, path, 10))
    group._everywhere("do", prepare, config, False)
    group._everywhere("load", cloudpickle.dumps(SFTTrainer(config)), path, 10)
    expected = gradient(alone, rows, True)
    for found in group._everywhere("do", lambda process: gradient(process.algorithm, rows, True)):
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    for part in (rows[:5], rows[5:]):
        assert group.call("algorithm", "update", part) == pytest.approx(alone.update(part), rel=1e-4, abs=1e-6)
    looked = group.call("algorithm", "update", rows, False)
    assert looked == pytest.approx(alone.update(rows, learn=False), rel=1e-4)
    group.save_pretrained(tmp_path / "two")
    start, two = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (path, tmp_path / "two"))
    for name, tensor in alone.learner.named_tensors():
        assert (two[name] - tensor).norm() <= 1e-3 * (start[name] - tensor).norm(), name


@torch.no_grad()
def what_is_sent(sender: WeightSender) -> tuple[str, int]:
    digest = Digest()
    for name, tensor in sender._full(digest):
        assert not isinstance(tensor, DTensor), name
    return digest.hexdigest(), digest.nbytes


@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
def test_two_learners_send_between_gpus_what_one_would(
    group: ProbedGroup, tmp_path: Path, lora: dict[str, Any]
) -> None:
    path = save_model(tmp_path)
    config = two_config(policy={"model": {"lora": lora}})
    load(group, config, path)
    alone = WeightSender(one(config, path).learner.named_tensors, 0)
    told = group.transfer("metadata")
    assert told == alone.metadata() and set(told["dtype_names"]) == {"float32"}
    sent = group._everywhere("do", lambda process: what_is_sent(process.learner._sender))
    assert sent == [what_is_sent(alone)] * 2
    assert sent[0][1] == 4 * sum(math.prod(shape) for shape in told["shapes"])


def test_no_weight_stays_gathered_beside_an_awake_engine(group: ProbedGroup, tmp_path: Path) -> None:
    def types(process: Any) -> set[type]:
        return {
            type(each.data) for model in (process.learner.model, process.reference.model) for each in model.parameters()
        }

    load(group, two_config(algorithm={"options": {"beta": 0.1}}), save_model(tmp_path))
    group.update(make_batch())  # the reference scores
    assert group._everywhere("do", types) == [{DTensor}] * 2
    group.token_logprobs([1, 2, 3])  # as the canary does
    assert group._everywhere("do", types) == [{DTensor}] * 2


def test_what_learners_exchange_is_sent_and_held_without_what_it_is_a_part_of(group: ProbedGroup) -> None:
    def held(process: Any) -> tuple[int, set[int]]:
        parts = torch.zeros(1000).split(10)
        got = process.learner.ranks.exchange({i: part for i, part in enumerate(parts) if i % 2 == process.rank})
        return len(got), {each.untyped_storage().nbytes() for each in got.values()}

    assert group._everywhere("do", held) == [(100, {40})] * 2


def test_a_loss_that_is_not_finite_on_one_learner_stops_all_with_its_name(group: ProbedGroup, tmp_path: Path) -> None:
    path = save_model(tmp_path)
    load(group, two_config(algorithm={"options": {"correction": "tis"}}, num_mini_batches=1), path)
    batch = make_batch(step=7)
    group.update(batch)
    batch.trajectories[9].turns[0].logprobs[0] = float("nan")
    with pytest.raises(UserError, match=r"loss of step 7 is not finite.* 7/2/1"):
        group.update(batch)
    group.update(make_batch(step=8))  # nobody waits for anybody


def test_a_plugins_loss_that_raises_in_a_learners_process_is_a_sentence_with_its_file_and_line(
    group: ProbedGroup, tmp_path: Path
) -> None:
    text = """
from skyrl_trainer.plugins import PolicyLoss, register_algorithm

@register_algorithm("absent_minded")
class AbsentMinded(PolicyLoss):
    def surrogate(self, ratio_N, tokens):
        return tokens.weights_N * ratio_N, {}
"""
    (tmp_path / "absent.py").write_text(text)
    config = two_config(algorithm={"name": "absent_minded", "plugin_file": str(tmp_path / "absent.py")})
    load_plugin(config)
    group._everywhere("do", lambda process: load_plugin(config))
    load(group, config, save_model(tmp_path))
    with pytest.raises(NothingLearned, match=r"^A plug-in failed with AttributeError: .*absent\.py, line 7\)\.$"):
        group.update(make_batch())
    load(group, two_config(), save_model(tmp_path))
    group.update(make_batch())  # the processes are of use still


def rows_of(groups: int, generations: int) -> list[Row]:
    return make_rows(make_batch(groups=groups, generations=generations).trajectories)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rows_are_dealt_whole_even_in_tokens_and_with_their_group(size: int) -> None:
    rows = rows_of(32, 8)
    dealt = shares(rows, range(len(rows)), size)
    assert sorted(i for share in dealt for i in share) == list(range(len(rows)))
    assert all(len({k for k, share in enumerate(dealt) if i in share or i + 7 in share}) == 1 for i in range(0, 256, 8))
    loads = [sum(len(rows[i].rest) for i in share) for share in dealt]
    assert max(loads) <= 1.15 * sum(loads) / size
    alone = [len(share) for share in shares(rows, range(8), size)]  # one group: it has to be divided
    assert max(alone) - min(alone) <= 1


def test_a_long_row_weighs_as_much_as_many_short_ones() -> None:
    """Else the learner with the long ones keeps all others waiting, who gather weights with it."""
    rows = []
    for row, length in zip(rows_of(11, 1), [100] + 10 * [10], strict=True):
        ids, zeros = row.token_ids[0] + np.arange(length), np.zeros(length)
        mask = np.arange(length) > 0
        rows.append(replace(row, token_ids=ids, mask=mask, rollout_logprobs=zeros, advantages=zeros))
    assert sorted(len(share) for share in shares(rows, range(11), 2)) == [1, 10]


@pytest.mark.parametrize("chosen", [range(64), range(1), range(0)])
def test_all_learners_make_equally_many_passes_and_each_row_counts_once(chosen: range) -> None:
    rows, seats = rows_of(8, 8), [Ranks() for _ in range(4)]
    for rank, seat in enumerate(seats):
        seat.rank, seat.size = rank, 4
    passes = [seat.passes(rows, chosen, 60) for seat in seats]
    assert len({len(each) for each in passes}) == 1
    assert sorted(i for each in passes for part, counts in each if counts for i in part) == list(chosen)


def test_a_learner_that_hangs_or_dies_is_named_and_nothing_is_left(
    group: ProbedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(group.pids[1], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(group_module, "CALL_SECONDS", 0.5)
        patch.setattr(group_module, "BLAME_SECONDS", 0.5)
        with pytest.raises(UserError, match=r"Learner 0 of 2 did not finish update within"):
            group.update(make_batch(step=1))
    group.failure = None
    killer = threading.Timer(1.0, os.kill, (group.pids[1], signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    with pytest.raises(UserError, match=r"Learner 1 of 2 died during update; the last .* update of step \d\."):
        group.update(make_batch(step=2))
    with pytest.raises(UserError, match=r"Learner 1 of 2 died during update"):
        group.state_dict()
    assert time.monotonic() - start < 30
    group.close()
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in group.pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("each", "seen", "given"),
    [
        (2, "4,5,6,7", ["4", "5", "0"]),
        (2, "GPU-a,GPU-b", ["GPU-a", "GPU-b", "0"]),
        (2, None, ["0", "1", "0"]),
        (1, "3", ["3", "0"]),
        (1, "", ["0", "0"]),
        (1, None, ["0", "0"]),
    ],
)
def test_learners_beside_engines_take_of_the_gpus_that_the_driver_sees(
    monkeypatch: pytest.MonkeyPatch, each: int, seen: str | None, given: list[str]
) -> None:
    """Those of another machine are numbered there; no learner is left without, on the processor."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    made: list[dict[str, Any]] = []
    gpus = {"a": 2.0, "b": 1.0, "c": 4.0}
    nodes = [{"NodeID": name * 56, "Alive": True, "Resources": {"GPU": has}} for name, has in gpus.items()]
    actor = Mock(options=lambda **options: (made.append(options), Mock())[1])
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("skyrl_trainer.weight_sync.machines.node_of", lambda _: "a" * 56)
    monkeypatch.setattr(group_module, "ray", Mock(remote=lambda cls: actor))
    place = {"colocate_all": True, "policy_num_gpus_per_node": each, "policy_num_nodes": 2}
    group = Mock(config=make_config(trainer={"placement": place}), size=2 * each)
    for rank in range(each + 1):
        LearnerGroup._start(group, rank, "10.0.0.1")
    assert [options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for options in made] == given
    assert [options["scheduling_strategy"].node_id[0] for options in made] == ["a"] * each + ["c"], "b has fewer"
    del nodes[each:]
    said = rf"policy_num_nodes is more than Ray's 1 machines with {each} GPUs: lower it\."
    with pytest.raises(UserError, match=said):
        LearnerGroup._start(group, each, "10.0.0.1")


@pytest.mark.parametrize(("size", "device"), [(1, "meta"), (2, "cpu")])
def test_no_learner_of_several_takes_all_weights_to_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, device: str
) -> None:
    """Nor does its reference, or a critic; fully_shard takes them there layer by layer."""
    config, ranks, found = two_config(), Ranks(), []
    ranks.size = size

    def shard(_: Ranks, model: Any) -> None:
        found.append({each.device.type for each in model.parameters()})

    monkeypatch.setattr(learner_module.Scorer, "device", torch.device("meta"))
    monkeypatch.setattr(learner_module, "check_architecture", lambda _: None)
    monkeypatch.setattr(Ranks, "shard", shard)
    learner = make_learner(config, save_model(tmp_path), 10, ranks)
    learner.reference()
    Critic(config, learner, "model", 1.0)
    assert found == [{device}] * 3
