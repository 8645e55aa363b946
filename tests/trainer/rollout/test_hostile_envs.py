"""What a bad environment may do to its neighbours, to its EnvWorker and to the run: nothing but fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.rollout.metrics import rollout_metrics
from skyrl_trainer.settings import Config
from skyrl_trainer.types import PromptBatch, Sample, StopReason
from tests.trainer.fakes import FakeEngine, tiny_tokenizer
from tests.trainer.rollout import hostile

GOOD = 20
AT_ONCE = 1 if os.environ.get("SKYRL_TEST_FULL") else 14
"""Hostile envs beside the good ones of a rollout."""
NOT_IN_A_THREAD = ("directory", "shallow", "streams")
"""What belongs to the whole process is put back after the call, too late for whoever runs beside it."""
FAIL_IN_A_THREAD = {"alarm": "The env's step raised ValueError: signal only works in main thread"}
SAYS = {
    "exit": "The env's step raised SystemExit: without a message (hostile.py, line",
    "reset_raises": "The env's reset raised Own: no never (hostile.py, line",
    "mute": "The env's step raised Mute: with a message that cannot be read (hostile.py, line",
    "exit_3": "hung or crashed its EnvWorker: its process ended with exit status 3.",
    "kill": "hung or crashed its EnvWorker: its process ended with SIGKILL.",
    "null": "hung or crashed its EnvWorker: its process ended with SIGSEGV.",
    "hang": "The env's step was cut off: it took longer than environment.step_timeout=2 seconds.",
    "hang_in_c": "hung or crashed its EnvWorker: its process was silent for 6 seconds.",
    "nan": "The env's step gave reward nan, and it must be a number up to 1e9.",
    "giant": "The env's step gave reward -1e+20, and it must be a number up to 1e9.",
    "part_text": "The env's step gave reward_parts['a'] 'much', and it must be a number up to 1e9.",
    "clock": "hung or crashed its EnvWorker: its process ended with exit status 1.",
    "observation_bytes": "The env gave an observation that is a bytes, and it must be a str.",
    "info_none": "The env gave an info that is a NoneType, and it must be a dict.",
    "success_text": "The env gave info['success'] as the text 'false', and it must be True or False.",
    "info_giant": "The env gave an info of 20000012 characters, and 16777216 are the most.",
    "exits.py": "exits.py failed with SystemExit: 3 (",
}
IMPORTS = {
    "exits.py": "import sys\nsys.exit(3)\n",
    "ends.py": "import os\nos._exit(3)\n",
    "cancels.py": "import asyncio\nraise asyncio.CancelledError\n",
    "syntax.py": "def\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, two_cores: None) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    for name, text in IMPORTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def rollouts(folder: Path) -> Iterator[Rollouts]:
    """One EnvWorker."""
    made = make_rollouts(folder)
    yield made
    made.close()


def make_rollouts(folder: Path) -> Rollouts:
    config = Config(
        generator={"max_turns": 6, "max_model_len": 2048, "max_concurrency": 64, "max_completion_length": 16},
        environment={"num_workers": 1, "step_timeout": 2.0},
    )
    return Rollouts(config, [ray.remote(FakeEngine).options(num_cpus=0).remote()], str(folder / "tokenizer"))


def sample(do: str, env: str = "Drill", file: str = hostile.__file__) -> Sample:
    return Sample(do or "good", f"test/{env}-v0", 0, {"do": do}, env_file=file)


def cases(folder: Path) -> list[tuple[str, Sample]]:
    """By name, so that what is wrong can be read."""
    envs = [(f"Drill:{do}", sample(do)) for do in hostile.ALL]
    envs += [(f"DrillWaiting:{do}", sample(do, "DrillWaiting")) for do in hostile.ALL if do not in NOT_IN_A_THREAD]
    files = [(f"Drill:{name}", sample("exit", file=str(folder / name))) for name in IMPORTS]
    return [*envs, *files, ("Drill:unreadable", sample("exit", "DrillUnreadable"))]


def is_good(name: str) -> bool:
    env, _, kind = name.partition(":")
    return kind in hostile.ODD and not (env == "DrillWaiting" and kind in FAIL_IN_A_THREAD)


def test_hostile_envs_fail_alone_and_are_counted(rollouts: Rollouts, folder: Path) -> None:
    wrong, failed = {}, 0
    left = [case for case in cases(folder) if AT_ONCE == 1 or case[0].startswith("Drill:")]
    hostile_ones = sum(not is_good(name) for name, _ in left)
    assert hostile_ones >= 50
    while left:
        bad, left = left[:AT_ONCE], left[AT_ONCE:]
        good = [sample("")] * (GOOD // 2)
        done = rollouts.run(PromptBatch(len(left), [*good, *(each for _, each in bad), *good], 1))
        trajectories = done.trajectories
        failed += int(rollout_metrics(done)["stop/env_error"])
        for neighbour in (*trajectories[: GOOD // 2], *trajectories[-GOOD // 2 :]):
            if not neighbour.success:
                wrong[f"a neighbour of {[name for name, _ in bad]}"] = str(neighbour.error)
        for (name, _), played in zip(bad, trajectories[GOOD // 2 :], strict=False):
            kind, error = name.partition(":")[2], str(played.error)
            good = played.success if is_good(name) else played.stop_reason is StopReason.ENV_ERROR
            says = SAYS.get(kind, "" if is_good(name) else FAIL_IN_A_THREAD.get(kind, ""))
            if not good or says not in error or len(error) > 1200:
                wrong[name] = f"{played.stop_reason}: {error[:1200]}"
    assert not wrong
    assert failed == hostile_ones


def test_the_run_ends_in_a_sentence_when_a_rollout_worker_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = make_rollouts(folder)
    assert rollouts.stop_token_ids  # it has started
    monkeypatch.setattr("skyrl_trainer.rollout.workers.START_LIMIT", 5.0)
    threading.Timer(1.0, ray.kill, rollouts._workers, {"no_restart": True}).start()
    with pytest.raises(UserError, match=r"A RolloutWorker died in the episodes: .+$"):
        rollouts.run(PromptBatch(1, [sample("slow")] * 8, 1))
    rollouts.close()
