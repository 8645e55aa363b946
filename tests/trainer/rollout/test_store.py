"""What the trajectory store gives back, and what it says when it cannot."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.store import JsonlTrajectoryStore, encoded
from skyrl_trainer.types import RolloutBatch, Sample, StopReason, Trajectory, Turn

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2))
FLOAT32 = st.floats(width=32, allow_nan=False)
TURNS = st.builds(
    Turn,
    prompt_ids=st.lists(st.integers(0, 2**31), max_size=5),
    output_ids=st.lists(st.integers(0, 2**31), max_size=5),
    logprobs=st.lists(FLOAT32, max_size=5),
    weight_versions=st.lists(st.integers(0, 9), max_size=5),
    action=st.text(),
    observation=st.text(),
    reward=st.floats(allow_nan=False),
    reward_parts=st.dictionaries(st.text(), FLOAT32, max_size=2),
    terminated=st.booleans(),
    truncated=st.booleans(),
    tool_calls=st.lists(st.dictionaries(st.text(), JSON, max_size=2), max_size=2),
    info=st.dictionaries(st.text(), JSON, max_size=2),
    new_segment=st.booleans(),
    advantages=st.lists(st.floats(allow_nan=False), max_size=5),
    seconds=st.dictionaries(st.sampled_from(["env", "generate"]), FLOAT32),
)
TRAJECTORIES = st.builds(
    Trajectory,
    trajectory_id=st.text(),
    sample=st.builds(Sample, st.text(), st.text(), st.integers(), st.dictionaries(st.text(), JSON, max_size=2), JSON),
    generation=st.integers(0, 9),
    seed=st.integers(0, 2**48),
    turns=st.lists(TURNS, max_size=3),
    stop_reason=st.sampled_from(StopReason),
    error=st.none() | st.text(),
    metrics=st.dictionaries(st.text(), FLOAT32, max_size=2),
    prompt=st.lists(st.dictionaries(st.text(), st.text(), max_size=2), max_size=2),
    scores=st.dictionaries(st.text(), st.none() | st.floats(allow_nan=False), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(TRAJECTORIES, max_size=3), max_size=3), st.integers(0, 10**6))
def test_round_trip_is_exact(groups: list[list[Trajectory]], step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = JsonlTrajectoryStore(Path(folder))
        store.write(RolloutBatch(step, groups))
        assert store.read(step) == RolloutBatch(step, groups)
        assert store.steps() == [step]
        assert [path.name for path in Path(folder).iterdir()] == [f"step_{step:06d}.jsonl.gz"], "nothing left aside"


def one(text: str = "x", step: int = 3) -> RolloutBatch:
    turn = Turn([1], [2], [math.log(0.1)], [0], text, info={"success": True})
    return RolloutBatch(step, [[Trajectory(f"{step}/0/{i}", Sample("s", "e", 0), i, 0, [turn]) for i in range(4)]])


def test_header_names_schema_and_counts_what_was_too_long(tmp_path: Path) -> None:
    """A step's file holds all others, however many: a bound on the file would lose those of large steps."""
    store = JsonlTrajectoryStore(tmp_path, max_bytes=1500)
    batch = one("y" * 200)
    batch.groups[0][2].turns = [Turn([1], [2], [0.0], [0], "long" * 1000)]
    store.write(batch)
    header, *lines = store.lines(3)
    assert (header["schema"], header["trajectories"], header["omitted"], len(lines)) == (1, 3, 1, 3)
    assert sum(len(json.dumps(line)) for line in lines) > 1500
    assert [each.trajectory_id for each in store.read(3).trajectories] == ["3/0/0", "3/0/1", "3/0/3"]


def test_rewriting_a_step_replaces_its_file_and_the_same_batch_has_the_same_bytes(tmp_path: Path) -> None:
    store = JsonlTrajectoryStore(tmp_path)
    store.write(one("first"))
    store.write(one("second"))
    before = store.path(3).read_bytes()
    store.write(one("second"))
    assert store.path(3).read_bytes() == before
    assert store.read(3).trajectories[0].turns[0].action == "second"


DAMAGES = ["truncated", "not gzip", "not json", "missing line", "other schema", "empty", "absent", "no object"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_file_is_a_sentence_with_its_path(tmp_path: Path, damage: str) -> None:
    store = JsonlTrajectoryStore(tmp_path)
    store.write(one())
    path = store.path(3)
    whole = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    match damage:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-20])
        case "not gzip":
            path.write_text("hello")
        case "not json":
            path.write_bytes(gzip.compress((whole[0] + "{]\n").encode()))
        case "missing line":
            path.write_bytes(gzip.compress("".join(whole[:-1]).encode()))
        case "other schema":
            path.write_bytes(gzip.compress((json.dumps({"schema": 99}) + "\n").encode()))
        case "no object":
            path.write_bytes(gzip.compress(f"{whole[0]}3\n".encode()))
        case "empty":
            path.write_bytes(gzip.compress(b""))
        case "absent":
            path.unlink()
    with pytest.raises(UserError, match=path.name):
        store.read(3)


def test_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trainer\.run_dir"):
        JsonlTrajectoryStore(tmp_path / "file" / "trajectories").write(one())


def test_a_torn_file_goes_away_with_the_next_write_of_its_step(tmp_path: Path) -> None:
    store = JsonlTrajectoryStore(tmp_path)
    if (child := os.fork()) == 0:
        os.fsync = lambda descriptor: os._exit(9)  # type: ignore[assignment]
        store.write(one())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert store.steps() == [] and len(list(tmp_path.iterdir())) == 1
    store.write(one())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003.jsonl.gz"]


def test_a_flipped_bit_is_a_sentence(tmp_path: Path) -> None:
    store = JsonlTrajectoryStore(tmp_path)
    store.write(one())
    whole, read = store.path(3).read_bytes(), store.read(3)
    for bit in random.Random(0).sample(range(8 * len(whole)), 300):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        store.path(3).write_bytes(damaged)
        try:
            assert store.read(3) == read  # a bit of gzip's header that nobody reads
        except UserError as error:
            assert store.path(3).name in str(error)


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gz cannot be written: No such file or directory"):
        JsonlTrajectoryStore(tmp_path / "run" / "trajectories").write(one())
    assert not (tmp_path / "run").exists()


def test_what_a_rollout_worker_encoded_is_written_as_it_is_and_gives_the_same_file(tmp_path: Path) -> None:
    batches = [one(), one()]
    for trajectory in batches[1].trajectories:
        trajectory.encoded = encoded(trajectory)
    for trajectory in (*batches[0].trajectories, *batches[1].trajectories):
        trajectory.turns[0].advantages, trajectory.scores = [0.5], {"brief": 0.25}  # known later
    files = []
    for batch in batches:
        JsonlTrajectoryStore(tmp_path).write(batch)
        files.append(JsonlTrajectoryStore(tmp_path).path(3).read_bytes())
        assert JsonlTrajectoryStore(tmp_path).read(3) == batch
    assert files[0] == files[1] and batches[1].trajectories[0].encoded[0] in files[1]
    assert not JsonlTrajectoryStore(tmp_path).read(3).trajectories[0].encoded


def test_what_a_run_that_goes_on_has_undone_is_forgotten(tmp_path: Path) -> None:
    store = JsonlTrajectoryStore(tmp_path / "held_out")
    for step in (0, 3, 4, 9):
        for each in (store, store.inside("gsm8k")):
            each.write(RolloutBatch(step, []))
    (tmp_path / "held_out/step_9 (copy).jsonl.gz").write_text("somebody's")
    store.forget(3)
    assert store.steps() == store.inside("gsm8k").steps() == [0, 3]
    store.forget(-1)
    assert store.steps() == store.inside("gsm8k").steps() == [] and len(list(tmp_path.rglob("*.gz"))) == 1
    JsonlTrajectoryStore(tmp_path / "none").forget(0)
