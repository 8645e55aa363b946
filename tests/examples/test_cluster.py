"""examples/cluster: shell lines run with fakes of srun, scontrol, ray and skyrl-trainer; manifests by their fields."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from skyrl_trainer.config import load_config
from skyrl_trainer.files import local_folder

CLUSTER = Path(__file__).parents[2] / "examples/cluster"
FAKES = {
    "srun": r"""
        echo "srun $*" >> "$LOG"
        while [[ "$1" == -* ]]; do [ "$1" = -w ] && shift; shift; done
        "$@" &
        trap 'kill -KILL $!; exit 137' TERM HUP  # as SLURM's: these two it does not pass on
        wait $! """,
    "scontrol": r"""
        echo "scontrol $*" >> "$LOG"
        [ "$1" != show ] || printf 'first\nsecond\nthird\n'""",
    "hostname": "echo 10.0.0.1 fe80::1",
    "pkill": 'echo "pkill $*" >> "$LOG"',
    "ray": r"""
        echo "env mode=$RAY_AUTH_MODE niceness=$RAY_worker_niceness" >> "$LOG"
        if [[ "$*" == *--address*--block ]] && [ -n "$MISSED" ] && mkdir "$LOG.missed" 2> /dev/null; then exit 1; fi
        echo "ray $*" >> "$LOG"
        if [ "$1" = status ] && grep -q '^pkill' "$LOG"; then exit 1; fi
        if [ "$1" = status ]; then grep '^ray start' "$LOG" | sed 's/.*/ 1 node_ab/'; fi
        case "$*" in *--block*) exec sleep 60 ;; esac""",
    "skyrl-trainer": r"""
        echo "skyrl-trainer $*" >> "$LOG"
        code=$(head -n1 "$CODES"); sed -i 1d "$CODES"
        if [ "$code" = wait ] || [ "$code" = done ]; then
            trap 'echo TERM >> "$LOG"; stop=1' TERM
            echo ready >> "$LOG"
            until [ -n "$stop" ]; do sleep 0.05; done
            for _ in $(seq 10); do sleep 0.05; done
            echo saved >> "$LOG"
            [ "$code" = done ] && code=0 || code=143
        fi
        exit "$code" """,
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the fakes."""
    for name, text in FAKES.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/bash\n" + text + "\n")
        path.chmod(0o755)
    (tmp_path / "log").touch()
    return tmp_path


def start(machine: Path, script: str, *arguments: str, codes: str = "0", **environment: str) -> subprocess.Popen[str]:
    """codes: how the run ends each time that it is started, or `wait`: at SIGTERM, with 143 (`done`: 0)."""
    (machine / "codes").write_text(codes.replace(" ", "\n") + "\n")
    own = {"LOG": str(machine / "log"), "CODES": str(machine / "codes"), "SKYRL_POLL": "0.05"}
    own |= {"PATH": f"{machine / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "42"}
    command = ["bash", str(CLUSTER / script), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=machine, env=os.environ | own | environment, stdout=pipe, stderr=pipe, text=True
    )


def wait_for(machine: Path, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in (machine / "log").read_text():
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def test_slurm_starts_a_node_each_and_the_run_on_the_first(machine: Path) -> None:
    job = start(machine, "slurm.sh", "qwen_8gpu_split", "trainer.run_name=mine")
    output = job.communicate(timeout=60)
    assert job.returncode == 0, output
    log = (machine / "log").read_text()
    assert "-w first ray start --head --node-ip-address=10.0.0.1 --port=6379" in log
    for node in ("second", "third"):
        assert f"-w {node} ray start --address=10.0.0.1:6379 --block" in log
    folder = machine / "runs/42"
    run = f"train qwen_8gpu_split trainer.run_name=mine ray.address=10.0.0.1:6379 trainer.run_dir={folder}"
    assert f"skyrl-trainer {run}\n" in log and "requeue" not in log
    assert load_config(run.split()[1], run.split()[2:]).ray.address == "10.0.0.1:6379"


@pytest.mark.parametrize(("script", "words"), [("slurm.sh", ["quickstart"]), ("ray_start.sh", ["join", "first"])])
@pytest.mark.parametrize("token", ["", "secret"])
def test_nodes_take_the_token_that_ray_has_written_and_no_niceness(
    machine: Path, script: str, words: list[str], token: str
) -> None:
    """`ray start --address` and `ray status` do not by themselves, though `ray start --head` does."""
    (machine / ".ray").mkdir()
    (machine / ".ray/auth_token").write_text(token)
    start(machine, script, *words, HOME=str(machine), RAY_AUTH_MODE="").communicate(timeout=60)
    envs = {line for line in (machine / "log").read_text().splitlines() if line.startswith("env ")}
    assert envs == {f"env mode={'token' if token else ''} niceness=0"}


def test_a_node_whose_ray_was_too_slow_to_start_joins_again(machine: Path) -> None:
    job = start(machine, "slurm.sh", "quickstart", MISSED="1")
    output = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert (machine / "log").read_text().count("ray start --address=10.0.0.1:6379 --block\n") == 2 + 3, (
        "of srun, of ray"
    )
    assert (machine / "log.missed").is_dir()


def test_a_slurm_job_has_all_memory_of_its_nodes_and_keeps_what_its_earlier_tries_wrote() -> None:
    """By default, as a real SLURM showed: so much per core, and a new file at each start."""
    asked = re.findall(r"^#SBATCH (--\S+)", (CLUSTER / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0", "--requeue", "--open-mode=append"} <= set(asked)


def test_slurm_asks_for_the_name_of_a_node_whose_address_is_the_loopback(machine: Path) -> None:
    (machine / "bin/hostname").write_text("#!/bin/bash\necho 127.0.1.1 fe80::1\n")
    start(machine, "slurm.sh", "quickstart").communicate(timeout=60)
    assert "ray start --address=first:6379 --block" in (machine / "log").read_text()


def test_slurm_does_not_queue_a_run_again_that_has_ended(machine: Path) -> None:
    job = start(machine, "slurm.sh", "quickstart", codes="done")
    wait_for(machine, "ready")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 0 and "requeue" not in (machine / "log").read_text()


def test_slurm_saves_and_queues_again_when_it_is_warned(machine: Path) -> None:
    job = start(machine, "slurm.sh", "quickstart", codes="wait")
    wait_for(machine, "ready")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    log = (machine / "log").read_text()
    assert job.returncode == 143 and log.index("saved") < log.index("scontrol requeue 42")


def test_slurm_passes_on_how_the_run_ended(machine: Path) -> None:
    job = start(machine, "slurm.sh", "quickstart", codes="2")
    job.communicate(timeout=60)
    assert job.returncode == 2 and "requeue" not in (machine / "log").read_text()


def test_ray_start_says_head_join_and_train(machine: Path) -> None:
    for words, wanted in (
        (["head"], "ray start --head --port=6379"),
        (["join", "first"], "ray start --address=first:6379"),
        (
            ["train", "quickstart", "trainer.seed=1"],
            "skyrl-trainer train quickstart trainer.seed=1 ray.address=127.0.0.1:6379",
        ),
        (["stop"], "ray stop"),
    ):
        assert start(machine, "ray_start.sh", *words).wait(30) == 0
        assert wanted in (machine / "log").read_text().splitlines()[-1]
    wrong = start(machine, "ray_start.sh", "begin")
    assert "Say head, join" in wrong.communicate(timeout=30)[1] and wrong.returncode == 2


def test_spot_saves_when_the_notice_comes(machine: Path) -> None:
    notice = f"test -e {machine / 'notice'}"
    run = start(machine, "spot.sh", "/shared/run", "quickstart", codes="wait", SKYRL_NOTICE=notice)
    wait_for(machine, "ready")
    (machine / "notice").touch()
    run.communicate(timeout=60)
    log = (machine / "log").read_text()
    assert "skyrl-trainer train quickstart trainer.run_dir=/shared/run" in log
    assert run.returncode == 143 and "saved" in log and log.count("TERM") == 1, "a second one would cut the save"


def test_spot_starts_a_run_again_that_had_saved(machine: Path) -> None:
    folder = machine / "run"
    (folder / "checkpoints/step_000002").mkdir(parents=True)
    run = start(machine, "spot.sh", str(folder), "quickstart", codes="2 1 0")
    assert run.wait(60) == 0 and (machine / "log").read_text().count("skyrl-trainer train") == 3


def test_spot_looks_for_checkpoints_of_an_address_where_the_run_works(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / "cache"))
    address = "s3://bucket/runs/mine"
    (local_folder(address) / "checkpoints/step_000002").mkdir(parents=True)
    run = start(machine, "spot.sh", address, "quickstart", codes="2 0")
    assert run.wait(60) == 0
    assert (machine / "log").read_text().count(f"skyrl-trainer train quickstart trainer.run_dir={address}") == 2


@pytest.mark.parametrize(
    ("saved", "codes", "code", "starts"), [(False, "2", 2, 1), (True, "143", 143, 1), (True, "2 2 2", 2, 2)]
)
def test_spot_gives_up(machine: Path, saved: bool, codes: str, code: int, starts: int) -> None:
    """On a wrong setting, when the machine goes, and after so many tries."""
    if saved:
        (machine / "run/checkpoints/step_000002").mkdir(parents=True)
    run = start(machine, "spot.sh", str(machine / "run"), "quickstart", codes=codes, SKYRL_TRIES="2")
    assert run.wait(60) == code and (machine / "log").read_text().count("skyrl-trainer train") == starts


def test_the_rayjob_has_what_kuberay_wants() -> None:
    job = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["metadata"]["name"]
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    ends = {"backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
    assert set(spec) == {"entrypoint", "entrypointNumCpus", "submissionMode", "rayClusterSpec"} | ends
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    gpus = 0
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay wants strings"
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes == {"runs", "shm"}
        assert container["resources"]["limits"] == container["resources"]["requests"]
        gpus += group.get("replicas", 1) * int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert pod["terminationGracePeriodSeconds"] >= 60
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["skyrl-trainer", "train"]
    config = load_config(words[2], words[3:])
    engines = config.generator.num_inference_engines * config.generator.inference_engine_tensor_parallel_size
    assert config.trainer.placement.policy_num_gpus_per_node + engines == gpus
    assert str(config.run_path).startswith("/runs/")


def test_the_skypilot_file_has_what_it_runs() -> None:
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
    assert task["resources"]["use_spot"] is True and task["num_nodes"] == 2
    assert task["envs"]["RUNS"].startswith("s3://") and 'spot.sh "$RUNS/' in task["run"], "no mount is quick enough"
    assert "s3fs" in task["setup"]
    for script in re.findall(r"examples/cluster/\S+\.sh", task["run"]):
        assert os.access(CLUSTER.parents[1] / script, os.X_OK)
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n", "-c", task[part]], check=False).returncode == 0


def test_the_skypilot_lines_run_on_both_nodes(machine: Path) -> None:
    (machine / "examples").symlink_to(CLUSTER.parent)
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    (machine / "sky.sh").write_text(task["run"].replace("sleep 10", "sleep 0.1"))
    shared = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "t1"}
    shared |= task["envs"]
    other = start(machine, str(machine / "sky.sh"), **shared, SKYPILOT_NODE_RANK="1")
    first = start(machine, str(machine / "sky.sh"), **shared, SKYPILOT_NODE_RANK="0")
    assert first.wait(60) == 0 and other.wait(60) == 0, "the job ends when its first node has"
    log = (machine / "log").read_text()
    assert "ray start --address=10.0.0.1:6379" in log and "ray start --head --port=6379" in log
    assert "ray.address=127.0.0.1:6379 trainer.run_dir=s3://bucket/runs/t1" in log
    (run,) = re.findall("skyrl-trainer train (.*) ray.address", log)
    config = load_config(run.split()[0], run.split()[1:])
    count, gpus = config.generator.num_inference_engines, task["resources"]["accelerators"].split(":")[1]
    assert config.trainer.placement.policy_num_gpus_per_node + count == task["num_nodes"] * int(gpus)
