"""`skyrl-trainer doctor`: what is installed, what hardware there is, what would run; imports neither torch nor vLLM."""

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil

from skyrl_trainer.errors import UserError

GIB = 2**30
PACKAGES = ("torch", "transformers", "peft", "accelerate", "ray", "gymnasium")
PROBE = "import torch, vllm; from vllm.platforms import current_platform as p; torch.zeros(1, device=p.device_type or "
PROBE += "'cuda'); print(vllm.__version__, p.device_type)"


class Gpu(NamedTuple):
    name: str
    memory: int
    """Bytes."""


class Hardware(NamedTuple):
    cores: int
    """That this process may use."""
    memory: int
    """Bytes: the machine's, or the container's limit."""
    gpus: tuple[Gpu, ...]


def hardware() -> Hardware:
    memory, limit = psutil.virtual_memory().total, Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return Hardware(len(os.sched_getaffinity(0)), memory, tuple(_gpus(memory)))


# NVIDIA's, by its own tool; CUDA_VISIBLE_DEVICES (indices or UUIDs) hides some.
def _gpus(memory: int) -> Iterator[Gpu]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    try:
        listed = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return
    for line in listed.splitlines() if visible != "" else ():
        name, _, mebibytes = line.rpartition(",")
        own = mebibytes.strip().isdigit()  # some have the machine's memory, and say [N/A]
        yield Gpu(name.strip(), int(mebibytes) * 2**20 if own else memory)


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_gym() -> None:
    """UserError if skyrl_gym is missing, another project, or cannot read a registry."""
    install = "`pip install packages/skyrl-gym` in a checkout of this project."
    spec = importlib.util.find_spec("skyrl_gym")
    if spec is None or spec.origin is None:
        raise UserError(f"skyrl_gym is not installed: run {install}")
    folder, installed = Path(spec.origin).parent, version("skyrl-gym")
    if not (folder / "envs" / "text_math").is_dir() or not (installed or "1!").startswith("1!"):
        raise UserError(
            f"The module skyrl_gym at {folder} (skyrl-gym {installed}) is a different project of the same name: "
            f"run `pip uninstall skyrl-gym`, then {install}"
        )
    try:
        importlib.import_module("skyrl_gym")
    except ValueError as error:
        raise UserError(str(error)) from error


def _try_vllm() -> tuple[bool, str]:
    try:
        done = subprocess.run([sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return False, "does not work here: no answer within 180 s"
    output = done.stderr if done.returncode else done.stdout
    last = (output.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.returncode == 0, f"does not work here: {last}" if done.returncode else last


def examine() -> Iterator[tuple[str, str, str]]:
    """("ok", "warn" or "FAIL"; subject; finding), each as soon as it is made."""
    yield "ok", "python", f"{platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        found = version(package)
        yield "ok" if found else "FAIL", package, found or "not installed"
    try:
        require_gym()
        yield "ok", "skyrl_gym", version("skyrl-gym") or "from a checkout"
    except UserError as error:
        yield "FAIL", "skyrl_gym", str(error)
    machine = hardware()
    yield "ok", "processor", f"{machine.cores} cores, {machine.memory / GIB:.1f} GiB of memory"
    gpus = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in machine.gpus)
    yield "ok", "GPUs", gpus or "none: the learner and the engines run on the processor"
    works, text = _try_vllm()
    yield "ok" if works else "warn", "vLLM", text
    engine = "vllm" if works else "of yours (docs/plug-ins.md)"
    yield "ok", "would run", f"engine {engine}, envs on {machine.cores} cores"
