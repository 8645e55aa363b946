"""What else stored trajectories are good for: chats for fine-tuning, tokens scored again, training without rollouts."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_trainer.algorithms.samplers import sampler_class
from skyrl_trainer.cli import main
from skyrl_trainer.config import Config, load_config, to_yaml
from skyrl_trainer.dry_run.doctor import Hardware
from skyrl_trainer.dry_run.plan import obstacles
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.replay.recompute import load_scorer, score
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.rollout.stored import StoredRollouts, stored_folders
from skyrl_trainer.run.checkpoint import Checkpoints
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.run import Run
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory
from tests.trainer.fakes import tiny_policy, tiny_tokenizer
from tests.trainer.recorded import FAMILIES, record

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a model, whose tokens and logprobs two steps of two groups of two have; the second trajectory
    of a group is in two segments, the very last one has failed."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    model = AutoModelForCausalLM.from_pretrained(tiny_policy(folder / "model" / "last")).eval()
    (folder / "config.yaml").write_text(to_yaml(load_config(None, [f"generator.temperature={TEMPERATURE}"])))
    store = JsonlTrajectoryStore(folder / "trajectories")
    for step in (1, 2):
        groups = []
        for number in range(2):
            sample = Sample(f"s{number}", *(FAMILIES[3][0], number, FAMILIES[3][1]))
            group = [record(sample, step, expert=True) for _ in range(2)]
            for generation, trajectory in enumerate(group):
                trajectory.trajectory_id, trajectory.generation = f"{step}/{number}/{generation}", generation
                add_tokens(trajectory, model, new_segments=generation == 1)
            groups.append(group)
        store.write(RolloutBatch(step, groups))
    groups[1][1].stop_reason = StopReason.ENGINE_ERROR
    store.write(RolloutBatch(2, groups))
    return folder


@torch.no_grad()
def add_tokens(trajectory: Trajectory, model: Any, new_segments: bool) -> None:
    """Ids of the texts, and what the model gives them, by its own forward pass."""
    tokenizer, context = tiny_tokenizer(), list[int]()
    for number, turn in enumerate(trajectory.turns):
        turn.prompt_ids, turn.new_segment = tokenizer.encode("12 + 34 = ?"), new_segments and number == 1
        turn.output_ids = [*tokenizer.encode(turn.action), tokenizer.eos_token_id]
        context = turn.prompt_ids if turn.new_segment else [*context, *turn.prompt_ids]
        start, context = len(context), [*context, *turn.output_ids]
        logits = model(torch.tensor([context])).logits[0, start - 1 : -1] / TEMPERATURE
        turn.logprobs = logits.log_softmax(-1).gather(1, torch.tensor(turn.output_ids)[:, None])[:, 0].tolist()
        turn.weight_versions = [0] * len(turn.output_ids)
        turn.advantages, trajectory.scores = [1.0] * len(turn.output_ids), {"brevity": 1.0}


def test_the_models_own_tokens_have_not_moved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--recompute", str(run / "model" / "last")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("max |diff|") == 8 + 2
    assert all(float(line.split("max |diff| ")[1].split(",")[0]) < 1e-5 for line in printed.splitlines() if "|" in line)


def test_the_token_that_moved_most_is_shown_with_both_values(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = JsonlTrajectoryStore(run / "trajectories").read(1)
    turn = batch.groups[1][1].turns[1]
    now = turn.logprobs[3]
    turn.logprobs[3] = -9.5
    JsonlTrajectoryStore(tmp_path / "trajectories").write(batch)
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert main(["replay", str(tmp_path), "--step", "1", "--recompute", str(run / "model" / "last")]) == 0
    lines = capsys.readouterr().out.splitlines()
    worst = lines[lines.index("moved most:") + 1]
    text = tiny_tokenizer().decode([turn.output_ids[3]])
    assert worst == f"  1/1/1, turn 1, token 3: {text!r} recorded -9.500000, now {now:.6f}"


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "alpha": 64}])
def test_a_checkpoint_scores_as_the_learner_that_wrote_it(run: Path, tmp_path: Path, lora: dict[str, int]) -> None:
    settings = config(run, trainer__policy__model__lora=lora)
    learner = make_learner(settings, str(run / "model" / "last"), 1)
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter += 0.01
    path = Checkpoints(tmp_path, 1).save(1, learner.state_dict(), {})
    scorer, _ = load_scorer(settings, str(path))
    trajectories = JsonlTrajectoryStore(run / "trajectories").read(1).trajectories
    for one, other in zip(score(trajectories, learner), score(trajectories, scorer), strict=True):
        assert len(one) > 0 and (one == other).all()
    with open(path / "learner.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(UserError, match="damaged checkpoint"):
        load_scorer(settings, str(path))


def test_a_checkpoint_that_is_no_model_is_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "1", "--recompute", str(run / "nothing")]) == 2
    out, err = capsys.readouterr()
    assert "could not be loaded" in err and "identical" not in out, "before hours of playing"


def test_chats_load_in_datasets_and_train_with_trl(run: Path, tmp_path: Path) -> None:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    out = tmp_path / "new" / "chats.jsonl"
    assert main(["export", str(run), "--trajectories", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    stored = [t for step in (1, 2) for t in JsonlTrajectoryStore(run / "trajectories").read(step).trajectories][:-1]
    assert [row["trajectory"] for row in rows] == [t.trajectory_id for t in stored]
    for row, trajectory in zip(rows, stored, strict=True):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", *["user", "assistant"] * len(trajectory.turns)]
        said = [message["content"] for message in row["messages"]]
        assert said[:2] == [message["content"] for message in trajectory.prompt]
        assert said[2::2] == [turn.action for turn in trajectory.turns]
        assert said[3::2] == [turn.observation for turn in trajectory.turns[:-1]]
        assert (row["reward"], row["env"], row["task"]) == (trajectory.env_reward, "skyrl/tool_use-v0", row["task"])
    dataset = load_dataset("json", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    args = SFTConfig(str(tmp_path / "sft"), max_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False)
    model = str(run / "model" / "last")
    assert SFTTrainer(model=model, args=args, train_dataset=dataset).train().global_step == 1


def test_chats_are_chosen_by_reward_and_success(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "chats.jsonl"
    command = ["export", str(run), "--trajectories", str(out)]
    assert main([*command, "--step", "2", "--only-success", "--min-reward", "1"]) == 0
    assert "3 of 4 trajectories (1 had failed, 0 not chosen)" in capsys.readouterr().out
    before = out.read_bytes()
    assert main([*command, "--min-reward", "2"]) == 2
    assert "None of the 8 trajectories" in capsys.readouterr().err
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_a_reward_of_exactly_the_least_is_enough(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = [each for each in JsonlTrajectoryStore(run / "trajectories").read(2).trajectories if each.turns]
    least = min(each.env_reward for each in played if not each.stop_reason.failed)
    command = ["export", str(run), "--trajectories", str(tmp_path / "chats.jsonl"), "--step", "2"]
    assert main([*command, "--min-reward", repr(least)]) == 0
    assert "(1 had failed, 0 not chosen)" in capsys.readouterr().out


def test_tokens_are_scored_in_float32_whatever_the_run_computes_in(run: Path) -> None:
    half = config(run, trainer__policy__model__dtype="bfloat16")
    scorer, _ = load_scorer(half, str(run / "model" / "last"))
    assert (scorer.published_dtype, half.trainer.policy.model.dtype) == (torch.float32, "bfloat16")


def config(run: Path, **changes: Any) -> Config:
    settings = {
        "data.train_data": [str(run / "trajectories")],
        "trainer.policy.model.path": str(run / "model" / "last"),
        "trainer.algorithm.options.correction": "tis",
        "generator.num_generations": 2,
        "generator.temperature": TEMPERATURE,
        "data.val_size": 1,
    }
    chosen = settings | {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(None, [f"{name}={json.dumps(value)}" for name, value in chosen.items()])


def test_stored_groups_come_instead_of_rollouts_in_the_samplers_order(run: Path, tmp_path: Path) -> None:
    stored = StoredRollouts(config(run), [run], corrects=True)
    groups = [group for step in (1, 2) for group in JsonlTrajectoryStore(run / "trajectories").read(step).groups]
    sampler = sampler_class("uniform")(stored.samples, 0)
    seen = []
    for step in (1, 2, 3, 4):  # two epochs
        samples = sampler.next_tasks(2)
        tasks = {i: stored.new_group(f"{step}/{i}", sample, 2) for i, sample in enumerate(samples)}
        stored.start(list(tasks.values()))
        rollouts = RolloutBatch(step, list(stored.finished(tasks, wait_for_all=True).values()))
        assert [group[0].sample for group in rollouts.groups] == samples
        assert {t.trajectory_id for t in rollouts.trajectories} == {f"{step}/{i}/{j}" for i in (0, 1) for j in (0, 1)}
        seen += [int(sample.sample_id[-1]) + 2 * ("000002" in sample.sample_id) for sample in samples]
        for number, group in zip(seen[-2:], rollouts.groups, strict=True):
            for trajectory, original in zip(group, deepcopy(groups[number]), strict=True):
                assert trajectory.scores == {} and not any(turn.advantages for turn in trajectory.turns)
                trajectory.scores, trajectory.sample = original.scores, original.sample
                trajectory.trajectory_id = original.trajectory_id
                for turn in original.turns:
                    turn.advantages = []
                assert trajectory == original
    assert sorted(seen[:4]) == sorted(seen[4:]) == [0, 1, 2, 3]
    JsonlTrajectoryStore(tmp_path).write(rollouts)
    assert JsonlTrajectoryStore(tmp_path).read(4) == rollouts, "so a resumed run finds the same samples"
    stored.check(tiny_tokenizer())


def test_a_group_of_which_a_try_was_too_long_for_the_store_is_left_out(run: Path, tmp_path: Path) -> None:
    store = JsonlTrajectoryStore(run / "trajectories")

    def kept(*too_long: int) -> list[int]:
        batch = store.read(1)
        for number in too_long:
            batch.trajectories[number].turns[0].observation = "x" * 2**20
        JsonlTrajectoryStore(tmp_path, max_bytes=2**20).write(batch)
        return [len(group) for group in JsonlTrajectoryStore(tmp_path).read(1).groups]

    assert kept(3) == [2, 1]
    assert len(StoredRollouts(config(run), [tmp_path], corrects=True).samples) == 1
    assert kept(1, 2, 3) == [1, 0]
    with pytest.raises(UserError, match=r"has no group of generator\.num_generations=2 tries"):
        StoredRollouts(config(run), [tmp_path], corrects=True)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"trainer__algorithm__options__correction": "none"}, r"options\.correction=tis or bypass"),
    ({"trainer__algorithm__options__correction": "auto"}, r"nothing corrects for that"),
    ({"generator__num_generations": 4}, r"has 2 tries, but generator\.num_generations is 4"),
    ({"trainer__policy__model__path": "tiny"}, r"other tokens than a tiny policy"),
    ({"generator__temperature": 1.0}, r"generator\.temperature=0\.8, not 1"),
    ({"generator__top_p": 0.9}, r"generator\.top_p=1, not 0\.9"),
    ({"trainer__max_staleness": 1}, r"with them trainer\.max_staleness must be 0"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_what_cannot_be_learned_from_is_refused(
    run: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with (
        RunFolder(config(run, trainer__run_dir=str(tmp_path), **changes)) as opened,
        pytest.raises(UserError, match=sentence),
    ):
        Run(opened.config, opened)
    told = list(obstacles(config(run, trainer__run_dir=str(tmp_path), **changes), Hardware(2, 1 << 35, ())))
    assert any(re.search(sentence, each) for each in told), "the dry run says it, too"


def test_folders_stand_alone_and_a_run_does_not_learn_from_itself(run: Path, tmp_path: Path) -> None:
    folder = str(run / "trajectories")
    for specs, found in (([folder], [Path(folder)]), (["text_math", {"env": "text_math"}], [])):
        assert stored_folders(config(run, data__train_data=specs)) == found
    with pytest.raises(UserError, match="holds stored trajectories, and others stand beside it"):
        stored_folders(config(run, data__train_data=[folder, "text_math"]))
    with pytest.raises(UserError, match=r"trainer\.run_dir"):
        StoredRollouts(config(run, trainer__run_dir=str(run)), [run], corrects=True)


def test_a_turn_that_ended_at_a_stop_string_has_its_own_tokens(run: Path, tmp_path: Path) -> None:
    """The string is sampled, and the action is what stands before it."""
    batch = JsonlTrajectoryStore(run / "trajectories").read(1)
    for turn in batch.groups[0][0].turns:
        turn.action, turn.output_ids = turn.action[:-3], turn.output_ids[:-1]
    JsonlTrajectoryStore(tmp_path).write(batch)
    StoredRollouts(config(run), [tmp_path], corrects=True).check(tiny_tokenizer())


def test_tokens_of_another_tokenizer_are_refused(run: Path, tmp_path: Path) -> None:
    batch = JsonlTrajectoryStore(run / "trajectories").read(1)
    turns = batch.groups[0][0].turns
    turns[0] = replace(turns[0], action="something else")
    JsonlTrajectoryStore(tmp_path).write(batch)
    with pytest.raises(UserError, match=r"step_000001\.jsonl\.gz#0' has tokens of another"):
        StoredRollouts(config(run), [tmp_path], corrects=True).check(tiny_tokenizer())
