"""The two distributions: what is in them, that they install from nothing, and the README's first example from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[2]
GYM, TRAINER = ROOT / "packages/skyrl-gym", ROOT / "packages/skyrl-trainer"
HOME = "https://example.org/owner/name"


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PROJECT_URL"] = HOME
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def checked(*command: str | Path, cwd: Path = ROOT) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def empty_environment(folder: Path) -> Path:
    """A virtual environment without any package; returns its interpreter."""
    checked(sys.executable, "-m", "venv", "--without-pip", folder)
    return folder / "bin/python"


def install(python: Path, *requirements: str | Path) -> None:
    """With uv: from what the set-up left in uv's cache if that is all there, else from the sources pip is set to."""
    pinned = ("-c", ROOT / "requirements/constraints.txt")
    command = (sys.executable, "-m", "uv", "pip", "install", "--python", python, *pinned, *requirements)
    if run(*command, "--offline").returncode != 0:
        script = f'python="{sys.executable}"; source scripts/pip_settings.sh; "$@"'
        checked("bash", "-euo", "pipefail", "-c", script, "bash", *command)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `checkout/`, wheels from the checkout, and `sdist/`, sdists and the wheels made from those."""
    out = tmp_path_factory.mktemp("built")
    build = (sys.executable, "-m", "build", "--no-isolation")
    for package in (GYM, TRAINER):
        checked(*build, "--wheel", "--outdir", out / "checkout", package)
        checked(*build, "--outdir", out / "sdist", package)
    return out


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def wheel_contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_contents(sdist: Path) -> dict[str, bytes]:
    """Path below the sdist's top folder -> bytes."""
    with tarfile.open(sdist) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        return {member.name.split("/", 1)[1]: file.read() for member, file in members if file is not None}


def sources(folder: Path) -> dict[str, bytes]:
    """Every file of a package's folder that git would keep, by its path from the folder's parent."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder.parent)): path.read_bytes() for path in files}


def test_gym_distributions_carry_the_registry_file(built: Path) -> None:
    expected = (ROOT / "envs-registry.yaml").read_bytes()
    assert wheel_contents(only(built / "checkout", "skyrl_gym-*.whl"))["skyrl_gym/envs-registry.yaml"] == expected
    assert sdist_contents(only(built / "sdist", "skyrl_gym-*.tar.gz"))["envs-registry.yaml"] == expected


def test_trainer_distributions_carry_all_sources_and_skyrl_eval(built: Path) -> None:
    expected = sources(TRAINER / "skyrl_trainer") | sources(ROOT / "packages/skyrl-eval/skyrl_eval")
    for contents in (
        wheel_contents(only(built / "checkout", "skyrl_trainer-*.whl")),
        sdist_contents(only(built / "sdist", "skyrl_trainer-*.tar.gz")),
    ):
        assert expected.items() <= contents.items()


@pytest.mark.parametrize("name", ["skyrl_gym", "skyrl_trainer"])
def test_wheel_from_sdist_equals_wheel_from_checkout(built: Path, name: str) -> None:
    from_checkout, from_sdist = (only(built / place, f"{name}-*.whl") for place in ("checkout", "sdist"))
    assert wheel_contents(from_sdist) == wheel_contents(from_checkout)


@pytest.mark.parametrize("name", ["skyrl_gym", "skyrl_trainer"])
def test_every_wheel_has_the_licence(built: Path, name: str) -> None:
    contents = wheel_contents(only(built / "checkout", f"{name}-*.whl"))
    (licence,) = (text for path, text in contents.items() if path.endswith("licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_foreign_skyrl_gym_never_satisfies_the_trainer(built: Path) -> None:
    metadata = wheel_contents(only(built / "checkout", "skyrl_trainer-*.whl"))
    (text,) = (value.decode() for path, value in metadata.items() if path.endswith("/METADATA"))
    required = re.search(r"^Requires-Dist: skyrl-gym(.*)$", text, re.MULTILINE)
    assert required
    specifier = SpecifierSet(required[1].strip())
    assert specifier.contains("1!0.1.0")
    assert not any(specifier.contains(version, prereleases=True) for version in ("0.4.0", "0.9", "2.0", "999.0"))


@pytest.mark.parametrize("name", ["skyrl_gym", "skyrl_trainer"])
def test_the_metadata_is_what_an_index_asks_for(built: Path, name: str) -> None:
    wheel = wheel_contents(only(built / "sdist", f"{name}-*.whl"))
    (text,) = (value for path, value in wheel.items() if path.endswith("/METADATA"))
    found = Metadata.from_email(text)  # raises for what the specification does not allow
    assert found.author and found.summary and found.keywords and found.license_expression == "Apache-2.0"
    assert set(found.classifiers or ()) <= classifiers and len(found.classifiers or ()) > 8
    assert found.project_urls == {"Repository": HOME, "Issues": f"{HOME}/issues"} | {
        kind: f"{HOME}/blob/main/{path}" for kind, path in (("Changelog", "CHANGELOG.md"), ("Documentation", "docs/"))
    }
    assert all((ROOT / url.split("/main/")[1]).exists() for url in found.project_urls.values() if "/main/" in url)
    assert found.description_content_type == "text/markdown" and "pip install" in (found.description or "")


@pytest.mark.parametrize("package", [GYM, TRAINER], ids=lambda path: path.name)
def test_all_is_every_extra_but_the_builds_of_vllm(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {extra for each in extras["all"] for extra in Requirement(each).extras} - {"all"}
    assert extras.keys() - {"all", "cpu", "gpu", "mcp", "server"} == named - {"mcp", "server"}
    assert package == GYM or "skyrl-gym[all]" in extras["all"]
    for extra in extras:
        assert f"`{extra}`" in (package / "README.md").read_text(), f"the long description says nothing of {extra}"


def test_both_packages_have_the_same_build_hook() -> None:
    """Each sdist has to carry it at the place where its pyproject.toml names it, which cannot be outside the sdist."""
    assert (GYM / "hatch_build.py").read_bytes() == (TRAINER / "hatch_build.py").read_bytes()


def test_another_name_for_a_distribution_is_one_command(tmp_path: Path) -> None:
    for folder in ("packages", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    checked(sys.executable, "scripts/name_distribution.py", "skyrl-gym", "other-gym", cwd=tmp_path)
    gym, trainer = (
        tomllib.loads((tmp_path / "packages" / name / "pyproject.toml").read_text())["project"]
        for name in ("skyrl-gym", "skyrl-trainer")
    )
    assert gym["name"] == "other-gym" and trainer["name"] == "skyrl-trainer"
    assert any(each.startswith("other-gym>=") for each in trainer["dependencies"])
    assert trainer["optional-dependencies"]["mcp"] == ["other-gym[mcp]"]
    doctor = (tmp_path / "packages/skyrl-trainer/skyrl_trainer/dry_run/doctor.py").read_text()
    assert 'version("other-gym")' in doctor and "pip install packages/skyrl-gym" in doctor
    assert run(sys.executable, "scripts/name_distribution.py", "skyrl-gym", "-", cwd=tmp_path).returncode == 1
    refused = run(sys.executable, "scripts/name_distribution.py", "skyrl-gym", "third", cwd=tmp_path)
    assert "No distribution here is called 'skyrl-gym'." in refused.stderr


def test_readme_example_of_environments_runs_from_the_wheel_alone(built: Path, tmp_path: Path) -> None:
    example = re.search(r"```python\n(import gymnasium.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example, "README.md has no ```python block that imports gymnasium"
    python = empty_environment(tmp_path / "venv")
    install(python, only(built / "checkout", "skyrl_gym-*.whl"))
    (tmp_path / "example.py").write_text(example[1])
    assert checked(python, "example.py", cwd=tmp_path).strip()


def test_editable_installs_import_all_three_packages(tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    install(python, "--no-deps", "-e", GYM, "-e", TRAINER)
    names = ("skyrl_gym", "skyrl_trainer", "skyrl_eval")
    script = f"import importlib.util as u; [print(u.find_spec(name).origin) for name in {names}]"
    origins = [Path(line) for line in checked(python, "-c", script, cwd=tmp_path).splitlines()]
    assert [path.parents[1] for path in origins] == [GYM, TRAINER, ROOT / "packages/skyrl-eval"]


@pytest.mark.full  # asks the index about 330 packages
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_what_a_gpu_machine_installs_can_be_resolved(python: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked.in"
    asked.write_text(f"-r {ROOT}/requirements/dev.txt\n-e {GYM}\n-e {TRAINER}[gpu,prometheus]\n")
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-platform", "x86_64-manylinux_2_28"]
    pins = ["-c", "requirements/constraints.txt", "-c", "requirements/constraints-gpu.txt"]
    script = f'python="{sys.executable}"; source scripts/pip_settings.sh; "$@"'
    found = checked("bash", "-euo", "pipefail", "-c", script, "bash", *uv, "--python-version", python, *pins, asked)
    assert re.search(r"^vllm==", found, re.MULTILINE) and re.search(r"^nvidia-nccl-cu13==", found, re.MULTILINE)
