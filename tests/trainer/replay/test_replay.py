"""Stored episodes, of every family of envs, are the same when they are played again in another process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_trainer.cli import main
from skyrl_trainer.replay.player import Difference, Player, compare
from skyrl_trainer.rollout.env_client import EnvClient, RemoteEnv
from skyrl_trainer.rollout.env_worker import CRASHED, EnvReply
from skyrl_trainer.rollout.store import JsonlTrajectoryStore
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn
from tests.trainer.fakes import FakeEnvWorker
from tests.trainer.recorded import CLOCK, FAMILIES, record


def replay(
    trajectories: list[Trajectory], step_timeout: float, live: bool = False
) -> list[tuple[Trajectory, Difference | None]]:
    with Player(step_timeout) as player:
        return [(t, compare(t, player.play(t, live))) for t in trajectories]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> JsonlTrajectoryStore:
    """Step 1: four episodes of each family, two of them the expert's."""
    store = JsonlTrajectoryStore(tmp_path_factory.mktemp("run") / "trajectories")
    samples = [Sample(f"{i}", env_id, 7 * i, options) for i, (env_id, options) in enumerate(FAMILIES * 4)]
    episodes = [record(sample, i, expert=i < 2 * len(FAMILIES)) for i, sample in enumerate(samples)]
    assert any(CLOCK in turn.action for episode in episodes for turn in episode.turns)
    assert any(turn.truncated for episode in episodes for turn in episode.turns)
    store.write(RolloutBatch(1, [[episode] for episode in episodes]))
    return store


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """For the players of this file; the first test starts its own, as a command does."""
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_all_families_are_identical(stored: JsonlTrajectoryStore, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(stored.path(1).parent.parent)
    assert main(["replay", run, "--step", "1"]) == 0
    assert capfd.readouterr().out == f"{4 * len(FAMILIES)} of {4 * len(FAMILIES)} identical\n"

    async def cell() -> int:
        """As in a notebook, where a loop runs already."""
        return main(["replay", run])

    assert asyncio.run(cell()) == 0  # every step
    assert capfd.readouterr().out.startswith(f"step 1: {4 * len(FAMILIES)} of {4 * len(FAMILIES)}\n")


@pytest.mark.usefixtures("one_ray")
def test_tools_with_effects_outside_answer_from_the_record_unless_live(stored: JsonlTrajectoryStore) -> None:
    told_time = [t for t in stored.read(1).trajectories if any(CLOCK in turn.action for turn in t.turns)]
    told_time = [t for t in told_time if t.sample.env_id == "skyrl/tool_use-v0"]
    assert told_time and all(difference is None for _, difference in replay(told_time, 10))
    for trajectory, difference in replay(told_time, 10, live=True):
        first = next(i for i, turn in enumerate(trajectory.turns) if CLOCK in turn.action)
        assert difference is not None and (difference.turn, difference.field) == (first, "observation")


@pytest.mark.usefixtures("one_ray")
def test_a_call_that_is_not_in_the_record_is_a_difference(stored: JsonlTrajectoryStore) -> None:
    trajectory = next(t for t in stored.read(1).trajectories if any(CLOCK in turn.action for turn in t.turns))
    number = next(i for i, turn in enumerate(trajectory.turns) if CLOCK in turn.action)
    trajectory.sample = replace(trajectory.sample, env_id="skyrl/tool_use-v0", options={})
    action, calls = trajectory.turns[number].action, [{"tool": "python_exec", "args": {"code": "1"}, "result": "1"}]
    one = replace(trajectory, turns=[Turn([], [], [], [], action, "x", tool_calls=calls)], prompt=[])
    [(_, difference)] = replay([one], 10)
    assert difference is not None and "no answer to this call of python_exec" in difference.replayed


TAMPERED = [
    ("observation", "There is a lamp."),
    ("reward", 0.5),
    ("reward_parts", {"goal": 0.5}),
    ("terminated", True),
    ("truncated", True),
    ("info", {"success": True}),
]


@pytest.mark.usefixtures("one_ray")
def test_the_first_difference_is_named(stored: JsonlTrajectoryStore) -> None:
    longest = max(stored.read(1).trajectories, key=lambda t: (t.sample.env_id, len(t.turns)))
    tampered = []
    for field, value in TAMPERED:
        turns = list(longest.turns)
        turns[1] = replace(turns[1], **{field: value})
        turns[2] = replace(turns[2], observation="a later difference")
        tampered.append(replace(longest, turns=turns))
    for (field, value), (_, difference) in zip(TAMPERED, replay(tampered, 10), strict=True):
        wanted = (1, "success", True) if field == "info" else (1, field, value)
        assert difference is not None
        assert (difference.turn, difference.field, difference.recorded) == wanted


@pytest.mark.usefixtures("one_ray")
def test_differing_trajectories_are_named_and_the_exit_code_is_1(
    stored: JsonlTrajectoryStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    batch = stored.read(1)
    first = batch.trajectories[0]
    first.prompt[-1]["content"] += "!"
    store = JsonlTrajectoryStore(tmp_path)
    store.write(RolloutBatch(1, batch.groups[:2]))
    assert main(["replay", str(tmp_path)]) == 1
    printed = capfd.readouterr().out
    assert "1/0/0 (skyrl/text_math-v0): reset, observation from character" in printed
    assert printed.endswith("1 of 2 identical\n")
    assert main(["replay", str(tmp_path), "--step", "1", "--index", "1"]) == 0
    assert capfd.readouterr().out == "1 of 1 identical\n"


ENV_FILE = """
import os, time
import gymnasium

class Moody(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options
        if options.get("at") == 0:
            raise ValueError("no such room")
        return "start", {}

    def step(self, action):
        if action == "raise":
            raise ValueError("no such move")
        if action == "hang":
            time.sleep(60)
        if action == "die":
            os.kill(os.getpid(), 9)
        print("on standard output")
        return "ok", 0.0, False, False, {"n": 1}

class Telling(Moody):
    def step(self, action):
        return f"you said {action}", 0.0, False, False, {"answer": "7", "call": {"tool": "search"}}

class Patient(Moody):
    metadata = {"waits": True}

gymnasium.register("test/MoodyAgain-v0", Moody)
gymnasium.register("test/Patient-v0", Patient)
gymnasium.register("test/Telling-v0", Telling)
"""
RAISED = "The env's step raised ValueError: no such move (moody.py, line 15)"
LATE = "The env's step was cut off: it took longer than environment.step_timeout=0.5 seconds."
OK = Turn([], [], [], [], "go", "ok", info={"n": 1})


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    path = tmp_path_factory.mktemp("envs") / "moody.py"
    path.write_text(ENV_FILE)
    yield Sample("m", "test/MoodyAgain-v0", 0, {}, env_file=str(path))


FAILURES: list[tuple[str, StopReason, str | None, bool]] = [
    ("raise", StopReason.ENV_ERROR, RAISED, True),
    ("go", StopReason.ENV_ERROR, RAISED, False),
    ("raise", StopReason.ENV_ERROR, RAISED.replace("move", "room"), False),
    ("hang", StopReason.ENV_ERROR, LATE, True),
    ("die", StopReason.ENV_ERROR, f"{CRASHED}, where no Python code could interrupt it: Fatal", True),
    ("die", StopReason.TERMINATED, None, False),
    ("hang", StopReason.TIMEOUT, "The episode was not over after 3 seconds.", True),
    ("die", StopReason.ENV_ERROR, "3 EnvWorkers died under this episode", True),
]


@pytest.mark.usefixtures("one_ray")
def test_a_failed_episode_is_played_to_its_failure(moody: Sample) -> None:
    prompt = [{"role": "user", "content": "start"}]
    episodes = []
    for last, reason, error, _ in FAILURES:
        turns = [OK, OK, Turn([], [], [], [], last)]
        episodes.append(Trajectory("1/0/0", moody, 0, 0, turns, reason, error, prompt=prompt))
        episodes.append(Trajectory("1/1/0", moody, 0, 0, [OK], StopReason.MAX_TURNS, prompt=prompt))
    differences = [difference for _, difference in replay(episodes, 0.5)]
    for case, difference in zip(FAILURES, differences[::2], strict=True):
        assert (difference is None) == case[-1], case
        assert difference is None or (difference.turn, difference.field) == (2, "error"), case
    assert set(differences[1::2]) == {None}, "the next episode does not suffer"


@pytest.mark.usefixtures("one_ray")
def test_an_engine_error_is_played_up_to_its_last_answer_and_a_failed_reset_fails_again(moody: Sample) -> None:
    cut = Trajectory("1/0/0", moody, 0, 0, [OK, OK], StopReason.ENGINE_ERROR, "The engine is gone.")
    error = "The env's reset raised ValueError: no such room (moody.py, line 10)"
    reset = Trajectory("1/0/1", replace(moody, options={"at": 0}), 1, 0, [], StopReason.ENV_ERROR, error)
    assert [difference for _, difference in replay([cut, reset], 5)] == [None, None]
    reset.sample = moody
    assert [difference for _, difference in replay([reset], 5)] == [Difference(None, "error", error, None)]


@pytest.mark.usefixtures("one_ray")
def test_an_env_that_waits_is_waited_for(moody: Sample) -> None:
    prompt = [{"role": "user", "content": "start"}]
    episode = Trajectory("1/0/0", replace(moody, env_id="test/Patient-v0"), 0, 0, [OK, OK], prompt=prompt)
    episode.stop_reason = StopReason.MAX_TURNS
    [(_, difference), (_, again)] = replay([episode, episode], 5)
    assert difference is None and again is None


@pytest.mark.usefixtures("one_ray")
def test_an_env_that_reports_an_answer_and_a_call_hears_the_policys_own_words_again(moody: Sample) -> None:
    turns = [replace(OK, action=said, observation=f"you said {said}") for said in ("one", "two")]
    for turn in turns:
        turn.info = {"answer": "7", "call": {"tool": "search"}}
    prompt = [{"role": "user", "content": "start"}]
    sample = replace(moody, env_id="test/Telling-v0")
    episode = Trajectory("1/0/0", sample, 0, 0, turns, StopReason.MAX_TURNS, prompt=prompt)
    assert [difference for _, difference in replay([episode], 5)] == [None]


CARDS = {"player_0": "Your card is J.", "player_1": "Your card is K."}


def test_a_game_of_two_roles_is_exported_as_what_each_of_them_read_said_and_won(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loser's moves are not a success, and no role seems to know the other's card."""
    turns, moves = [], [("player_0", "check", 0), ("player_1", "bet", 0), ("player_0", "call", -2)]
    for number, (role, said, won) in enumerate(moves):
        read = [{"role": "user", "content": CARDS[role] if number < 2 else "They bet."}]
        info = {"role": role, "rewards": {"player_0": won, "player_1": -won}, "skyrl/call": number, "skyrl/read": read}
        turns.append(Turn([], [], [], [], said, "", float(won), info=info, new_segment=number == 1))
    turns = [turns[1], turns[0], turns[2]]
    turns[1].new_segment = True
    game = Trajectory("1/0/0", Sample("k#0", "skyrl/kuhn_poker-v0", 0), 0, 0, turns)
    failed = replace(game, stop_reason=StopReason.ENGINE_ERROR)
    JsonlTrajectoryStore(tmp_path / "trajectories").write(RolloutBatch(1, [[game, failed]]))
    out = tmp_path / "chats.jsonl"
    assert main(["export", str(tmp_path), "--trajectories", str(out)]) == 0
    assert "2 of 3 trajectories (1 had failed, 0 not chosen)" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    told = [[message["content"] for message in row["messages"]] for row in rows]
    assert told == [["Your card is J.", "check", "They bet.", "call"], ["Your card is K.", "bet"]]
    assert [(row["reward"], row["success"]) for row in rows] == [(-2.0, False), (2.0, True)]
    assert main(["export", str(tmp_path), "--trajectories", str(out), "--only-success"]) == 0
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [2.0]


def test_steps_and_indices_that_are_not_there_are_sentences(
    stored: JsonlTrajectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(stored.path(1).parent.parent)
    for words, sentence in (
        ([run, "--step", "2"], "no stored trajectories of it, only of 1"),
        ([run, "--step", "1", "--index", "99"], "step 1 has the trajectories 0 to 27"),
        ([run, "--index", "3"], "add --step"),
        ([str(tmp_path)], "holds no stored trajectories"),
    ):
        assert main(["replay", *words]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("out", [".", "/", ".."])
def test_a_folder_takes_no_chats(stored: JsonlTrajectoryStore, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(stored.path(1).parent.parent), "--trajectories", out]) == 2
    assert f"skyrl-trainer: {out} cannot be written: " in capsys.readouterr().err


def test_a_rebuilt_env_hears_what_its_tools_had_said() -> None:
    class Worker(FakeEnvWorker):
        """Each step calls a tool that counts all its calls, ever."""

        fed: list[list[Any]]
        calls = 0

        async def _step(self, item: list[Any]) -> EnvReply:
            self.fed.append(item)
            reply = await super()._step(item)
            self.calls += 1
            reply.info["tool_calls"] = [{"tool": "count", "args": {}, "result": str(self.calls)}]
            return reply

    async def scenario() -> list[list[Any]]:
        worker = Worker()
        worker.fed = []
        env = RemoteEnv(EnvClient([worker]), "key", Sample("s", "fake", 0, options={"turns": 9}))
        await env.reset()
        for action in ("a", "b", "c"):
            if action == "c":
                worker.kill()
            reply = await env.step(action)
            reply.info.pop("tool_calls")  # as an episode does, which gives them a field of their own
        return worker.fed

    one, two = ([{"tool": "count", "args": {}, "result": result}] for result in "12")
    fed = asyncio.run(scenario())
    assert [item[1:] for item in fed] == [["a"], ["b"], ["a", one], ["b", two], ["c"]]
