"""Solving: every missing try is played once; an episode becomes the attempt that it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest

from skyrl_eval import benchmarks
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.solve import attempt_of, solve
from skyrl_eval.store import Run
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample, SamplingOptions, StopReason, Trajectory, Turn
from tests.eval.made_up import items


def turn(action: str, prompt: int, output: int, **fields: object) -> Turn:
    return Turn([0] * prompt, [0] * output, [0.0] * output, [0] * output, action, **fields)  # type: ignore[arg-type]


def episode(sample: Sample, number: int, **fields: object) -> Trajectory:
    return Trajectory(f"{sample.sample_id}/{number}", sample, number, 0, [turn("#### 999", 5, 2)], **fields)  # type: ignore[arg-type]


class Scripted:
    """Rollouts whose episodes say what a function makes of them."""

    def __init__(self, play: Callable[[Trajectory], Trajectory]) -> None:
        self._play = play

    def play(self, empty: Iterable[Trajectory], sampling: SamplingOptions, seeded: bool) -> Iterator[Trajectory]:
        assert seeded == (sampling.temperature > 0)
        return map(self._play, empty)


SAMPLING = SamplingOptions(16, temperature=0.0)


def test_what_is_missing_is_played_once_and_errors_are_tried_again(tmp_path: Path) -> None:
    tasks, played = items("gsm8k"), []

    def play(empty: Trajectory) -> Trajectory:
        sample, number = empty.sample, empty.generation
        assert not {"gold", "answer"} & sample.options["task"].keys() and sample.options["task"]["tools"] == "x"
        played.append((sample.sample_id, number))
        if number == 1 and played.count((sample.sample_id, number)) == 1:
            return replace(empty, stop_reason=StopReason.ENGINE_ERROR, error="down")
        return episode(sample, number)

    with Run(tmp_path, {}, {}, tasks) as run:
        assert solve(run, 4, Scripted(play), SAMPLING, 0, {"tools": "x"}) == 2
        assert len(played) == 8
        assert run.attempts["gsm8k", tasks[0].item_id, 1].error == "down"
        assert solve(run, 4, Scripted(play), SAMPLING, 0, {"tools": "x"}) == 0
        assert len(played) == 10 and run.missing(4) == []
    with Run(tmp_path, {}, {}, tasks) as run:
        assert run.missing(4) == [] and {attempt.stop for attempt in run.attempts.values()} == {"done"}


def test_a_seed_is_the_attempts_own_whatever_else_is_played(tmp_path: Path) -> None:
    found: dict[str, dict[str, int]] = {}
    for name, tasks in (("all", items("gsm8k")), ("last", items("gsm8k")[1:])):
        seeds = found[name] = {}

        def play(empty: Trajectory, seeds: dict[str, int] = seeds) -> Trajectory:
            seeds[empty.trajectory_id] = empty.seed
            return episode(empty.sample, empty.generation)

        with Run(tmp_path / name, {}, {}, tasks) as run:
            solve(run, 2, Scripted(play), replace(SAMPLING, temperature=1.0), 7)
    assert len(set(found["all"].values())) == 4 and found["last"].items() < found["all"].items()


def test_a_mistake_of_the_user_ends_everything(tmp_path: Path) -> None:
    def play(empty: Trajectory) -> Trajectory:
        raise UserError("There is no model of that name.")

    with Run(tmp_path, {}, {}, items("gsm8k")) as run, pytest.raises(UserError, match="no model"):
        solve(run, 1, Scripted(play), SAMPLING, 0)
    assert (tmp_path / "attempts.jsonl").read_text() == ""


def test_an_episode_becomes_an_attempt() -> None:
    (item, _), sample = items("gsm8k"), Sample("s", "e", 0)
    calls = [{"tool": "search", "result": "x"}, {"tool": "search", "error": "no"}, {"tool": None, "error": "not JSON"}]
    first = turn("look", 10, 4, observation="found", tool_calls=calls, info={"urls": ["http://made.up/a"]})
    second = turn("think", 3, 2, observation="more")
    third = turn("#### 9", 7, 1, new_segment=True)
    played = Trajectory("t", sample, 0, 0, [first, second, third], StopReason.MAX_TURNS, metrics={"seconds": 1.23456})
    played.prompt = [{"role": "user", "content": "?"}]
    found = attempt_of(played, item, 2)
    assert (found.key, found.answer, found.stop) == (("gsm8k", item.item_id, 2), "#### 9", "max_steps")
    assert (found.steps, found.tool_calls, found.tool_errors, found.seconds) == (3, 2, 1, 1.235)
    assert (found.prompt_tokens, found.completion_tokens) == (10 + (10 + 4 + 3) + 7, 7)
    assert found.urls == ["http://made.up/a"]
    assert [message["content"] for message in found.messages] == ["?", "look", "found", "think", "more", "#### 9"]
    third.info["submission"] = "diff"
    assert attempt_of(played, item, 0).answer == "diff"
    played.stop_reason, played.metrics = StopReason.TERMINATED, {"ended/1/tool_calls": 1, "ended/0/refusal": 1}
    assert attempt_of(played, item, 0).stop == "done"
    played.metrics["ended/2/empty"] = 1
    assert attempt_of(played, item, 0).stop == "empty"
    empty = attempt_of(Trajectory("t", sample, 0, 0, [], StopReason.ENGINE_ERROR, error="It died."), item, 0)
    assert (empty.stop, empty.answer, empty.error) == ("error", "", "It died.")


@pytest.mark.parametrize(
    ("said", "status", "stop"),
    [
        ("Is it 999? No, it", "truncated", StopReason.LENGTH),
        ("Is it 1? No.</think>#### 999", "correct", StopReason.TERMINATED),
    ],
)
def test_no_thought_is_an_answer_where_the_template_begins_it(said: str, status: str, stop: StopReason) -> None:
    item = items("gsm8k")[0]
    played = Trajectory("t", Sample("s", "e", 0), 0, 0, [turn(said, 5, 9)], stop, metrics={"thinks": 1})
    item = replace(item, gold="999")
    verdict = benchmarks.find("gsm8k").grade(item, attempt_of(played, item, 0), Context())
    assert verdict.status == status


@pytest.mark.parametrize("bench", ["hle", "browsecomp", "deepsearchqa", "mmlu", "mmlu-pro", "gpqa", "math", "gsm8k"])
def test_the_env_asks_what_the_benchmark_says_and_ends_with_the_answer(bench: str) -> None:
    item = items(bench)[0]
    sample = benchmarks.find(bench).env(item)
    env = gymnasium.make(sample.env_id)
    observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
    assert item.question in observation or bench == "mmlu-pro"
    assert info["instructions"] == sample.options["task"]["instructions"]
    observation, reward, terminated, _, info = env.step("an answer")
    assert (observation, reward, terminated, info["valid_action"]) == ("", 0, True, True)


def test_the_env_has_no_questions_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"give one as options\['task'\]"):
        gymnasium.make("skyrl_eval:skyrl/question-v0").reset(seed=0)
