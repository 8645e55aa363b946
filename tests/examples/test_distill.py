"""examples/distill.py: a policy learns from what a teacher would have said, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_trainer.algorithms.advantages import estimator
from skyrl_trainer.config import load_config
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.compose import algorithm_class
from skyrl_trainer.learner.model import make_learner
from skyrl_trainer.user_file import load_plugin
from tests.trainer.learner.tiny_models import make_batch, save_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill.py"


def settings(teacher: str) -> list[str]:
    return [
        f"trainer.algorithm.plugin_file={EXAMPLE}",
        "trainer.algorithm.name=distill",
        "trainer.algorithm.advantage_estimator=teacher",
        f"trainer.algorithm.options.teacher={teacher}",
        "generator.num_generations=1",
        "trainer.learning_rate=1e-2",
        "trainer.lr_scheduler_type=constant",
        "trainer.warmup_steps=0",
    ]


def test_an_advantage_is_the_teachers_log_probability_less_the_policys_own(tmp_path: Path) -> None:
    config = load_config(None, settings(save_model(tmp_path, seed=7)))
    load_plugin(config)
    batch = make_batch(turns=4, rewritten=(2,))  # every try has two contexts
    options = algorithm_class("distill")(config).options
    found = estimator("teacher")(batch, options, None).advantages
    turn, tokenizer = batch.trajectories[0].turns[0], AutoTokenizer.from_pretrained(tmp_path)
    for said in (tokenizer.decode(turn.output_ids), tokenizer.decode(turn.output_ids[:-1])):
        turn.action = said
        assert estimator("teacher")(batch, options, None).advantages == found
    turn.action = "other tokens"
    with pytest.raises(UserError, match=r"^The teacher reads other tokens: 'other tokens' is "):
        estimator("teacher")(batch, options, None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for trajectory, advantages in zip(batch.trajectories, found, strict=True):
        expected, read = [], list[int]()
        for turn in trajectory.turns:
            read = turn.prompt_ids if turn.new_segment else [*read, *turn.prompt_ids]
            for token, ours in zip(turn.output_ids, turn.logprobs, strict=True):
                with torch.no_grad():
                    theirs = model(torch.tensor([read])).logits[0, -1].log_softmax(-1)[token]
                expected.append(float(theirs) - ours)
                read = [*read, token]
        assert advantages == pytest.approx(expected, abs=1e-4)


def test_a_policy_that_samples_from_itself_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    """The KL, exactly, at the positions that the policy itself has come to; without any reward."""
    config = load_config(None, settings(save_model(tmp_path / "teacher", seed=7)))
    load_plugin(config)
    learner = make_learner(config, save_model(tmp_path / "policy", seed=1), 100)
    algorithm = algorithm_class("distill")(config).start(learner)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    torch.manual_seed(0)
    divergences = []
    for step in range(1, 46):
        batch = make_batch(seed=step, groups=12, generations=1)
        turns = [trajectory.turns[0] for trajectory in batch.trajectories]
        for turn in turns:
            turn.prompt_ids = turn.prompt_ids[:3]
        asked_BT = torch.tensor([turn.prompt_ids for turn in turns])  # and what the policy of now says to them
        said_BT = learner.model.generate(asked_BT, max_new_tokens=8, min_new_tokens=8, do_sample=True, top_k=0)
        with torch.no_grad():
            both = [model(said_BT).logits[:, 2:-1].log_softmax(-1) for model in (learner.model, teacher)]
        divergences.append(float((both[0].exp() * (both[0] - both[1])).sum(-1).mean()))
        for turn, said_T, ours_TV in zip(turns, said_BT[:, 3:], both[0], strict=True):
            turn.output_ids, turn.weight_versions = said_T.tolist(), [step - 1] * 8
            turn.logprobs = ours_TV.gather(1, said_T[:, None])[:, 0].tolist()
        batch.rewards = [[0.0] for _ in batch.trajectories]
        algorithm.update(batch)
    first, last = sum(divergences[:2]) / 2, sum(divergences[-2:]) / 2
    assert last < 0.65 * first, (first, last)


def test_a_run_without_a_teacher_is_told_before_it_starts() -> None:
    config = load_config(None, [word for word in settings("none") if "teacher=" not in word])
    load_plugin(config)
    with pytest.raises(UserError, match=r"^trainer\.algorithm\.options\.teacher is missing: give it a value\.$"):
        algorithm_class("distill")(config)
