"""The agent for code: a scripted policy solves a made-up repository; what it may see and do; what is paid."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from skyrl_eval import benchmarks, grade, sandbox, swe
from skyrl_eval.benchmarks.common import Context
from skyrl_eval.report import TRAJECTORIES, write_report
from skyrl_eval.solve import solve
from skyrl_eval.store import Run, write_json
from skyrl_eval.swe_env import OUTPUT, SWEEnv, cut, snapshot
from skyrl_trainer.engine.endpoint import UNBOUNDED, Endpoint
from skyrl_trainer.errors import UserError
from skyrl_trainer.run.processes import Processes
from skyrl_trainer.settings import Config
from skyrl_trainer.types import SamplingOptions
from tests.eval.scripted_server import served
from tests.eval.test_swe import BUGGY, CONFTEST, FIXED, IN_SOURCE, Instance, git, instance

__all__ = ["instance"]
FIX = ("replace", {"path": "calc.py", "old": "n + 2", "new": "2 * n"})
SUBMIT: tuple[str, dict[str, Any]] = ("submit", {})
Env = gymnasium.Env[str, str]


def say(*calls: tuple[str, dict[str, Any]]) -> str:
    return "I see." + "".join(
        f"<tool_call>{json.dumps({'tool': name, 'args': args})}</tool_call>" for name, args in calls
    )


def options(instance: Instance, tests: bool = True) -> dict[str, Any]:
    task = dict(benchmarks.find("swe-verified").env(instance.item).options["task"])
    return {"task": task | {"repos": str(instance.repos)} | ({"tests": instance.item.gold} if tests else {})}


@pytest.fixture
def env() -> Iterator[Env]:
    made: Env = gymnasium.make("skyrl_eval:skyrl/swe-v0", disable_env_checker=True)
    yield made
    made.close()


def play(env: Env, instance: Instance, *actions: str, tests: bool = True) -> list[tuple[str, float, bool, bool, dict]]:
    env.reset(seed=0, options=options(instance, tests))
    return [env.step(action) for action in actions]


def patch_of(steps: list[Any]) -> str:
    return next(str(step[4]["submission"]) for step in reversed(steps) if "submission" in step[4])


def test_a_scripted_policy_solves_a_repository_from_the_env_to_the_verdict(env: Env, instance: Instance) -> None:
    observation, info = env.reset(seed=0, options=options(instance))
    assert "double(5) gives 7." in observation and "made/up" in observation
    assert '"name": "bash"' in info["instructions"] and {t["function"]["name"] for t in info["tools"]} == {
        "bash",
        "view",
        "replace",
        "submit",
    }
    check = ("bash", {"command": "python -c 'import calc; print(calc.double(5))'; git status --short"})
    actions = (say(("bash", {"command": "ls"}), ("view", {"path": "calc.py"})), say(FIX), say(check), say(SUBMIT))
    steps = [env.step(action) for action in actions]
    assert "calc.py\ntest_calc.py" in steps[0][0] and "     1  def double(n):" in steps[0][0]
    assert "\n10\n M calc.py\n" in steps[2][0]
    assert [step[1] for step in steps] == [0, 0, 0, 1] and [step[2] for step in steps] == [False] * 3 + [True]
    assert ["submission" in step[4] for step in steps] == [True, True, False, True]
    verdict = instance.graded(patch_of(steps))
    assert verdict.status == "correct" and verdict.detail["resolved_guarded"] and verdict.detail["flags"] == []


@pytest.mark.parametrize(
    ("name", "text", "flag"),
    [("conftest.py", CONFTEST, "touches_test_setup"), ("calc.py", IN_SOURCE + BUGGY, "imports_pytest_in_src")],
)
def test_cheats_are_flagged_and_not_paid(env: Env, instance: Instance, name: str, text: str, flag: str) -> None:
    written = say(("bash", {"command": f"rm -f {name}"}), ("replace", {"path": name, "old": "", "new": text}), SUBMIT)
    ((_, reward, over, _, info),) = play(env, instance, written)
    verdict = instance.graded(info["submission"])
    assert over and verdict.score == 1 and flag in verdict.detail["flags"] and info["flags"] == [flag]
    assert reward == 0


def test_what_git_does_not_take_is_not_paid_and_fails_no_episode(env: Env, instance: Instance) -> None:
    """Only `patch` applies it, and then no git adds it."""
    hidden = "git config core.protectNTFS false; mkdir 'git~1'; echo x > 'git~1/x'"
    ((_, reward, over, _, info),) = play(env, instance, say(FIX, ("bash", {"command": hidden}), SUBMIT))
    assert "git~1" in info["submission"] and over and reward == 0 and info["flags"] == ["refused_by_git"]


def test_a_closed_workspace_is_the_agents_own_fault(env: Env, instance: Instance) -> None:
    steps = play(
        env, instance, *(say(("bash", {"command": c})) for c in ("chmod 000 /testbed", "ls", "echo 1\0\ud800"))
    )
    assert steps[2][0] == "<tool_response>\n1?\n</tool_response>"


def test_without_the_tests_nothing_is_paid_and_they_are_nowhere_to_be_seen(env: Env, instance: Instance) -> None:
    _, info = env.reset(seed=0, options=options(instance))
    look = "grep -rlF --exclude-dir=.venv 'double(5) == 10' /testbed /tmp; git log --all --oneline | wc -l; git remote"
    find = say(("bash", {"command": look}))
    seen = env.step(find)
    assert "test_five" not in json.dumps(info) and seen[0] == "<tool_response>\n1\n</tool_response>"
    ((_, reward, over, _, info),) = play(env, instance, say(FIX, SUBMIT), tests=False)
    assert (reward, over, info["success"]) == (0.0, True, False)
    assert info["submission"].startswith("diff --git a/calc.py")


def test_the_last_step_submits(instance: Instance) -> None:
    env: Env = gymnasium.make("skyrl_eval:skyrl/swe-v0", max_episode_steps=2, steps=2, disable_env_checker=True)
    steps = play(env, instance, say(FIX), "I am done.")
    assert [(step[1], step[2], step[3]) for step in steps] == [(0, False, False), (1, False, True)]
    assert "No tool call was found" in steps[1][0] and steps[1][4]["submission"].startswith("diff --git")
    env.close()


def test_commands_are_bounded(env: Env, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = 'import socket; socket.create_connection(("192.0.2.1", 80), 1)'
    commands = (
        "yes | head -c 100000",
        "exit 125; kill -9 $PPID",
        "echo kept > /tmp/note",
        f"cat /tmp/note; python -c '{connect}'",
    )
    said = [step[0] for step in play(env, instance, *(say(("bash", {"command": c})) for c in commands))]
    assert len(said[0].encode()) < OUTPUT + 100 and "bytes left out" in said[0]
    assert "[exit code 125]" in said[1] and "\nkept\n" in said[3] and "unreachable" in said[3]
    monkeypatch.setattr("skyrl_eval.swe_env.SECONDS", 2.0)
    began = time.monotonic()
    step = env.step(say(("bash", {"command": "echo begun; sleep 600"})))
    assert "begun\n\n[stopped after 2 s]" in step[0] and time.monotonic() - began < 30


def test_a_command_ends_with_the_step_that_is_interrupted(env: Env, instance: Instance) -> None:
    """EnvWorkers end a step that takes too long by an alarm."""

    class Alarm(BaseException):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    def is_running() -> bool:
        commands = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit())
        return any(b"sleep\x0061234" in sandbox.read_back(command).encode() for command in commands)

    env.reset(seed=0, options=options(instance))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2)
        with pytest.raises(Alarm):
            env.step(say(("bash", {"command": "sleep 61234"})))
    finally:
        signal.signal(signal.SIGALRM, before)
    until = time.monotonic() + 60
    while is_running() and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running()


def test_view_and_replace_stay_in_the_workspace(env: Env, instance: Instance, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    links = f"ln -s {secret} link; ln -s /etc folder; ln -s loop loop; mkfifo pipe; printf '\\377\\r\\n' > odd"
    paths = ("link", "folder/passwd", "../etc/passwd", "/etc/passwd", "/tmp/../etc/passwd", "pipe", "none", "loop")
    (_, *said, odd) = play(
        env,
        instance,
        say(("bash", {"command": links})),
        *(say(("view", {"path": path})) for path in paths),
        say(
            ("replace", {"path": "odd", "old": "\r\n", "new": "x\r\n"}),
            ("replace", {"path": "link", "old": "mine", "new": ""}),
        ),
    )
    assert all("Error:" in step[0] for step in said) and "mine" not in json.dumps([step[4] for step in said])
    assert isinstance(env.unwrapped, SWEEnv)
    assert (env.unwrapped._path / "testbed/odd").read_bytes() == b"\xffx\r\n" and secret.read_text() == "mine"
    assert [call.get("error") is None for call in odd[4]["tool_calls"]] == [True, False]


def test_wrong_calls_are_sentences(env: Env, instance: Instance) -> None:
    wrong = (
        ("replace", {"path": "calc.py", "old": "n", "new": "m"}),
        ("replace", {"path": "calc.py", "old": "", "new": "m"}),
        ("bash", {"cmd": "ls"}),
        ("edit", {}),
    )
    (step,) = play(env, instance, say(*wrong))
    thought = env.step(f"<think>{say(FIX)}</think>Hm.")
    assert "No tool call was found" in thought[0] and thought[4]["tool_calls"] == []
    errors = [call["error"] for call in step[4]["tool_calls"]]
    assert errors[0].startswith("`old` stands in calc.py 3 times") and errors[1].startswith("calc.py exists")
    assert not step[4]["valid_action"] and step[4]["submission"] == ""


def test_a_state_and_a_replay_bring_the_changes_back(env: Env, instance: Instance) -> None:
    actions = (say(FIX, ("bash", {"command": "date +%N; echo new > new.txt"})), say(SUBMIT))
    first = play(env, instance, *actions)
    assert isinstance(env.unwrapped, SWEEnv)
    state = env.unwrapped.get_state()
    env.reset(seed=0, options=options(instance))
    again = []
    for action, step in zip(actions, first, strict=True):
        env.unwrapped.feed_external(step[4]["tool_calls"])
        again.append(env.step(action))
    assert again == first and first[-1][1] == 1
    other = SWEEnv()
    other.set_state(state)
    assert (other._path / "testbed/calc.py").read_text() == FIXED and other._diff() == patch_of(first)
    assert git(other._path / "testbed", "rev-list", "--all", "HEAD").split() == [instance.row["base_commit"]]
    other.close()


def test_an_images_tree_is_taken_with_what_is_built_in_it_and_without_its_history(tmp_path: Path) -> None:
    image, copy = tmp_path / "image", tmp_path / "copy"
    image.mkdir()
    copy.mkdir()
    git(image, "init", "-q")
    for name, text in ((".gitignore", "*.so\n"), ("kept.so", "1"), ("calc.py", BUGGY), ("later.py", "")):
        (image / name).write_text(text)
        git(image, "add", "-f", name)
        git(image, "commit", "-qm", name)
    (image / "built.so").write_text("2")
    commit = snapshot(copy, [(image, "/testbed", False)])
    assert git(copy, "rev-list", "--all", "HEAD").split() == [commit] and git(copy, "status", "--short") == ""
    assert git(copy, "ls-files").split() == [".gitignore", "calc.py", "kept.so", "later.py"]
    assert (copy / "built.so").read_text() == "2"


DOCKER = r"""#!/bin/bash
# Stands in for docker. Bash takes back the rights of a root who has lent himself to another user. An image is a folder.
[ "$1" = run ] || exit 0
shift
binds=()
while [[ $1 = -* ]]; do
  case $1 in
    -v) binds+=("$2") ;;
    -w) work=$2 ;;
    --rm) shift; continue ;;
  esac
  shift 2
done
image=$1 work=$work root=ROOT exec unshare NAMESPACES bash -c '
trap "exit 125" ERR
for ((i = 0; i < $0; i++)); do binds+=("$1"); shift; done
mount --make-rprivate /
mount -t tmpfs none "$root"; cd "$root"
for folder in usr bin sbin lib lib64 etc dev; do [ -e /$folder ]; mkdir $folder; mount --rbind /$folder $folder; done
mkdir -p tmp opt/miniconda3/bin testbed
cp STEPS/activate opt/miniconda3/bin
mount --bind "$image" testbed
for bind in "${binds[@]}"; do
  IFS=: read -r outside inside _ <<< "$bind"
  mkdir -p ".$inside"; mount --bind "$outside" ".$inside"
done
exec chroot . /bin/bash -c "cd \"\$0\" && exec \"\$@\"" "$work" "$@"
' ${#binds[@]} "${binds[@]}" "${@:2}"
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """For a docker that runs as root: where the tests do, it is asked by another user, as on most machines."""
    image, programs = tmp_path / "image", Path(tempfile.mkdtemp(dir="/tmp"))
    image.mkdir()
    (image / "calc.py").write_text(BUGGY)
    (image / "odd.py").write_text("")
    (image / "odd.py").chmod(0o654)
    git(image, "init", "-q")
    git(image, "add", "-A")
    git(image, "commit", "-qm", "first")
    rootful = not os.getuid() and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    words = {"ROOT": str(programs / "root"), "NAMESPACES": "-m" if rootful else "-rm", "STEPS": str(swe.STEPS)}
    for name in ("root", "tmp"):
        (programs / name).mkdir()
    docker = programs / "docker"
    docker.write_text(functools.reduce(lambda text, word: text.replace(*word), words.items(), DOCKER))
    for path, mode in ((programs, 0o755), (docker, 0o755), (programs / "tmp", 0o777)):
        path.chmod(mode)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(programs / "tmp"))
    if rootful:
        os.seteuid(65534)
    yield str(image)
    os.seteuid(os.getuid())
    shutil.rmtree(programs)


def test_a_containers_root_leaves_files_that_the_user_can_change_and_delete(image: str) -> None:
    env, task = SWEEnv(), {"question": "?", "repo": "made/up", "base_commit": "0" * 40}
    env.reset(seed=0, options={"task": task | {"executor": "docker", "container": image}})
    made = ("bash", {"command": "mkdir new; echo x > new/file; chmod u+x calc.py; git checkout -q calc.py; ls -a"})
    env.step(say(made))
    *_, info = env.step(say(FIX, ("replace", {"path": "new/file", "old": "x", "new": "y"}), SUBMIT))
    assert [call.get("error") for call in info["tool_calls"]] == [None] * 3
    patch = info["submission"]
    assert re.findall("(?m)^diff --git a/(.*) b/", patch) == ["calc.py", "new/file"] and "old mode" not in patch
    folder = env._path
    env.close()
    assert not folder.exists()


def test_an_env_closes_where_the_container_is_gone(image: str) -> None:
    env, task = SWEEnv(), {"question": "?", "repo": "made/up", "base_commit": "0" * 40}
    env.reset(seed=0, options={"task": task | {"executor": "docker", "container": image}})
    env._where["image"] = "none"
    env.close()
    env.close()


def test_too_much_is_not_a_patch(env: Env, instance: Instance) -> None:
    commands = ("yes | head -c 2000000 > big", "rm big; touch small")
    big, small = play(env, instance, *(say(("bash", {"command": command})) for command in commands))
    assert "they do not count" in big[0] and big[4]["submission"] == "" and big[4]["patch_too_long"] > 2_000_000
    assert "diff --git a/small" in small[4]["submission"]


def test_a_task_that_is_none_is_refused(env: Env) -> None:
    with pytest.raises(ValueError, match="field 'repo': expected a string"):
        env.reset(options={"task": {"question": "?"}})
    with pytest.raises(ValueError, match="no tasks of its own"):
        env.reset(seed=0)


def test_what_grades_is_asked_for_before_the_agent_works(
    env: Env, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"graded by the package swebench: pip install"):
        env.reset(seed=0, options=options(instance))
    env.reset(seed=0, options=options(instance, tests=False))


def test_output_is_cut_from_the_middle() -> None:
    assert cut("short") == "short"
    long = "a" * OUTPUT + "é" * OUTPUT
    assert cut(long).startswith("aaa") and cut(long).endswith("ééé") and len(cut(long).encode()) < OUTPUT + 60


def test_the_agent_loop_solves_it_over_an_endpoint_and_the_page_shows_it(instance: Instance, tmp_path: Path) -> None:
    script = (say(("bash", {"command": "false"}), ("nope", {})), say(FIX), say(SUBMIT))

    def evaluate(run: Run, url: str) -> int:
        generator = {"max_turns": 50, "max_concurrency": 2, "max_model_len": UNBOUNDED, "episode_timeout": 600}
        config = Config.model_validate({"generator": generator, "environment": {"num_workers": 2, "step_timeout": 60}})
        with Processes(config, "", endpoint=Endpoint(url, "scripted")) as processes:
            sampling = SamplingOptions(4096, 0.0, stop_token_ids=processes.rollouts.stop_token_ids)
            return solve(run, 2, processes.rollouts, sampling, 0, {"repos": str(instance.repos)})

    def reply(request: dict[str, Any]) -> tuple[int, str]:
        number = sum(message["role"] == "assistant" for message in request["messages"])
        return 200, script[number]

    context = Context(repos=instance.repos)
    with served(reply) as (url, _), Run(tmp_path, {"bench": "swe-verified"}, {}, [instance.item]) as run:
        assert evaluate(run, url) == 0
        attempt = run.attempts["swe-verified", "made__up-1", 1]
        assert (attempt.stop, attempt.steps, attempt.tool_calls, attempt.tool_errors) == ("done", 3, 4, 1)
        assert attempt.answer.startswith("diff --git a/calc.py") and "[exit code 1]" in attempt.messages[3]["content"]
        assert [verdict.status for verdict in grade.grade_run(run, "swe-verified", context)] == ["correct"] * 2
        results = grade.results(run, "swe-verified", 2, context, {}, "scripted")
        write_json(run.folder / "results.json", results)
    assert (results["accuracy"], results["own"]["resolved_guarded"]) == (1.0, 1.0)
    page = write_report(tmp_path)
    assert "double(5) gives 7." not in page.read_text() and page.with_name(TRAJECTORIES).is_file()
