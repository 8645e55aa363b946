"""scripts/setup.sh where it cannot go on: one sentence, before anything was made. Programs on PATH play the machine.

It runs in a copy without .venv; the programs that it asks are the stand-ins of each test and a few of coreutils.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "bash",
    "env",
    "dirname",
    "cat",
    "cksum",
    "awk",
    "sed",
    "grep",
    "tr",
    "tail",
    "xargs",
    "rm",
    "mkdir",
    "chmod",
    "df",
)
LINUX = {"uname": "echo Linux", "nvidia-smi": "exit 9", "cc": "true"}
PYTHON = """case "$*" in
  --version) echo Python 3.{minor}.1 ;;
  *venv*) {venv} ;;
  *version_info*) exit {bad} ;;
  *Python.h*) exit {headers} ;;
  *) echo $0 ;;
esac"""
NO_NETWORK = 'mkdir -p .venv/bin; printf "#!/bin/sh\\nexit 1\\n" >.venv/bin/python; chmod 755 .venv/bin/python'


def python(minor: int, venv: str = "exit 1", headers: int = 0) -> str:
    return PYTHON.format(minor=minor, venv=venv, headers=headers, bad=int(not 11 <= minor < 15))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, folder / name)
    for path in ROOT.glob("packages/*/*"):
        if path.is_file():
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.relative_to(ROOT))
    return folder


def set_up(checkout: Path, programs: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Without a terminal, in a session of its own: there is no /dev/tty to open."""
    folder = checkout.parent / "bin"
    folder.mkdir()
    for tool in TOOLS:
        if (found := shutil.which(tool)) and tool not in programs:
            (folder / tool).symlink_to(found)
    for name, text in programs.items():
        (folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        [checkout / "scripts/setup.sh"],
        env={"PATH": str(folder), "HOME": str(checkout.parent), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )


DISK = "echo head; echo disk 100 100 {kib} 1% /"
REFUSED = {
    "macOS": ({**LINUX, "uname": "echo Darwin"}, "need Linux, this is macOS. Use a container"),
    "Windows": ({**LINUX, "uname": "echo MINGW64_NT"}, "need Linux, this is MINGW64_NT. On Windows use WSL 2."),
    "disk": (
        {**LINUX, "df": DISK.format(kib=2 << 20)},
        "has 2 GB of free space, and the packages for this machine take 4",
    ),
    "disk of a GPU machine": (
        {**LINUX, "df": DISK.format(kib=8 << 20), "nvidia-smi": "echo 'GPU 0: made up'"},
        "has 8 GB of free space, and the packages for this machine take 12 GB",
    ),
    "compiler": (
        {name: text for name, text in LINUX.items() if name != "cc"},
        "there is no C compiler, and some packages have to be compiled. Install one",
    ),
    "headers": ({**LINUX, "python3": python(12, headers=1)}, "has no Python.h, and some packages have to be compiled."),
    "too old": ({**LINUX, "python3": python(10)}, "Python 3.10.1 is not one of these"),
    "too new": ({**LINUX, "python3": python(15)}, "Python 3.15.1 is not one of these"),
    "no Python": (LINUX, "python3 does not run is not one of these"),
    "no venv": ({**LINUX, "python3": python(12)}, "cannot create virtual environments. Install its venv module"),
    "no network": (
        {**LINUX, "python3": python(12, NO_NETWORK)},
        "pip could not install uv. Check the network, set HTTPS_",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_said_in_one_sentence_with_the_way_out(checkout: Path, case: str) -> None:
    programs, sentence = REFUSED[case]
    done = set_up(checkout, programs)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("set-up: ") and sentence in line, line
    assert case.startswith("no ") or not (checkout / ".venv").exists()
    if case in ("macOS", "Windows", "compiler", "headers") or case.startswith("disk"):
        assert line.endswith("The environments alone work everywhere: python -m pip install packages/skyrl-gym")
        assert done.stdout == ""


def test_a_folder_of_packages_that_is_there_is_renewed_on_a_full_disk(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    done = set_up(checkout, {**LINUX, "df": DISK.format(kib=0), "python3": python(10)})
    assert "free space" not in done.stderr and (checkout / ".venv").is_dir()


def test_it_says_first_what_it_will_do_and_how_long_that_takes(checkout: Path) -> None:
    said = set_up(checkout, {**LINUX, "python3": python(12)}).stdout.splitlines()
    assert "for the CPU: some two minutes where they are cached" in said[0] and "creating .venv" in said[1]
    lines = (ROOT / "Makefile").read_text().partition("\ntrain:")[2].splitlines()
    assert "minutes" in lines[1] and lines[2].strip() == "@scripts/setup.sh"


def test_uv_is_told_the_proxy_that_pip_was_told() -> None:
    script = 'python=false; source scripts/pip_settings.sh; echo "$HTTPS_PROXY $HTTP_PROXY"'

    def proxies(**more: str) -> str:
        bare = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
        command = ["bash", "-euo", "pipefail", "-c", script.replace("$HTTP", "${HTTP").replace("_PROXY", "_PROXY:-}")]
        done = subprocess.run(
            command, cwd=ROOT, env=bare | more, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    assert proxies(PIP_PROXY="http://proxy:3128") == "http://proxy:3128 http://proxy:3128"
    assert proxies(PIP_PROXY="http://proxy:3128", HTTPS_PROXY="http://own:1") == "http://own:1 http://proxy:3128"
    assert proxies() == ""
