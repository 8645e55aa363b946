"""What a published project has beside its code: that it parses, names what exists, and says what the code says.

The images of docker/ are read here, not built: there is no container engine where these tests run.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import json
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
ANY = "\0"  # stands in a text for what an f-string, a %s or a shell variable puts there


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def project(package: str) -> dict[str, Any]:
    return tomllib.loads(read(f"packages/{package}/pyproject.toml"))["project"]


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of every table of a page with so many columns, without its heads."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| ")]
    heads = [re.split(r"(?<!\\)\|", head)[1:-1] for head in re.findall(r"^(\| .*\n)\|-", page, re.MULTILINE)]
    return [[cell.strip() for cell in row] for row in found if len(row) == columns and row not in heads]


# CITATION.cff


def test_citation_has_what_its_schema_asks_for_and_the_version_of_the_packages() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # all that 1.2.0 requires
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert all(author.keys() & {"name", "family-names", "alias"} for author in citation["authors"])
    for package in ("skyrl-gym", "skyrl-trainer"):
        assert project(package)["version"].removeprefix("1!") == citation["version"]
        assert project(package)["license"] == citation["license"]
        assert project(package).get("authors", citation["authors"]) == citation["authors"]
    assert not citation.keys() & {"doi", "identifiers"}, "nothing was archived yet"


# .github


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_can_be_filled_in(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() >= {"name", "description", "body"} and form.keys() <= {"name", "description", "labels", "body"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert fields and all(part["type"] in ("textarea", "input", "dropdown") for part in fields)
    ids = [part["id"] for part in fields]
    assert len(ids) == len(set(ids)) and all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
    for part in fields:
        assert part["type"] != "dropdown" or len(part["attributes"]["options"]) > 1
    for name in re.findall(r"[\w/.-]+\.md", path.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), f"{path.name} names {name}"


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [path.stem for path in FORMS] == ["benchmark", "bug", "environment"]


def workflow() -> dict[str, Any]:
    return yaml.load(read(".github/workflows/tests.yml"), Loader=yaml.BaseLoader)  # which leaves `on` a word


def commands() -> list[str]:
    """Every line that the workflow runs."""
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"]]
    return [line for step in steps if "run" in step for line in step["run"].splitlines()]


def test_the_workflow_has_the_keys_that_every_workflow_needs() -> None:
    found = workflow()
    assert set(found["on"]) == {"push", "pull_request", "workflow_call"}  # the last by release.yml
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys(), name
        for step in job["steps"]:
            assert len(step.keys() & {"uses", "run"}) == 1, f"{name}: {step}"
            assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), f"{name}: {step}"


def test_the_workflow_runs_what_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    for line in commands():
        program, *words = line.split()
        if program == "make":
            assert words and set(words) <= targets, line
        elif words[:2] == ["-m", "skyrl_gym"]:
            assert importlib.util.find_spec("skyrl_gym.__main__"), line
        else:
            assert program in ("python", "sudo"), line
        for word in words:
            if word.startswith(("packages/", "scripts/", "tests/")):
                assert (ROOT / word.split("/dist/")[0]).exists(), line


def test_the_demonstrations_of_the_workflow_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from skyrl_gym.__main__ import main

    (line,) = (line for line in commands() if " demos " in line)
    out = tmp_path / "demos.jsonl"
    main([str(out) if word == "demos.jsonl" else word for word in line.split()[3:]])
    written = [json.loads(each) for each in out.read_text().splitlines()]
    assert len(written) == 20 and all(each["success"] for each in written)


def test_the_workflow_tries_each_python_that_is_declared() -> None:
    matrix = workflow()["jobs"]["gym"]["strategy"]["matrix"]["python"]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project("skyrl-gym")["requires-python"]).groups()  # type: ignore[union-attr]
    assert matrix == [f"3.{minor}" for minor in range(int(low), int(high))]


# docker/, .devcontainer/


def instructions(path: Path) -> list[tuple[str, str]]:
    """Each instruction and its words, continued lines joined, comments left out."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(kept))
    return [(head, rest) for head, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_images_are_the_two_that_the_page_describes() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]
    page = read("docker/README.md")
    assert "No image was built" in page
    for path in DOCKERFILES:
        assert f"docker build -f docker/{path.name} " in page
        assert "was not built" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_names_files_that_exist_and_ends_as_an_ordinary_user(path: Path) -> None:
    lines = instructions(path)
    for head, rest in lines:
        assert head in ("FROM", "RUN", "USER", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"), head
        for name in re.findall(r"(?:packages|requirements|scripts)/[\w./-]+", rest):
            assert (ROOT / name).exists(), f"{path.name} names {name}"
    last = dict(lines)  # of each kind, the one that counts
    assert last["USER"] not in ("root", "0")
    (start,) = json.loads(last["ENTRYPOINT"])
    folder, _, program = start.partition("/.venv/bin/")
    assert folder == last["WORKDIR"] and program in project("skyrl-trainer")["scripts"]
    assert json.loads(last["CMD"]) == ["doctor"]
    assert dict(lines)["FROM"].split()[0] in ("base", "nvidia/cuda:13.0.2-runtime-ubuntu24.04")


def test_the_gpu_image_installs_what_the_set_up_does() -> None:
    """Which it cannot call: at build time no nvidia-smi answers."""
    (steps,) = (
        rest for head, rest in instructions(ROOT / "docker/Dockerfile.gpu") if head == "RUN" and "uv pip" in rest
    )
    script = read("scripts/setup.sh").replace("$hardware", "gpu")
    for words in (
        "-c requirements/constraints.txt",
        "requirements/constraints-gpu.txt",
        "-r requirements/dev.txt",
        "-e packages/skyrl-gym",
        '-e "packages/skyrl-trainer[gpu',
    ):
        assert words in script and words in steps, words
    assert "prometheus]" in steps, "KubeRay's head has Ray's dashboard, which is in this extra"


def test_no_package_is_pinned_twice() -> None:
    """The set-up reads two files of constraints, and two versions of one package leave none to install."""

    def pinned(name: str) -> set[str]:
        return set(re.findall(r"^([\w.-]+)==", read(f"requirements/{name}.txt"), re.MULTILINE))

    for hardware in ("cpu", "gpu"):
        assert not pinned("constraints") & pinned(f"constraints-{hardware}")


def test_both_images_have_the_user_that_a_machine_gives_its_first() -> None:
    for name in ("cpu", "gpu"):
        assert "--uid 1000 skyrl" in read(f"docker/Dockerfile.{name}")


def test_no_file_that_the_set_up_reads_is_kept_from_an_image() -> None:
    patterns = [line for line in read(".dockerignore").splitlines() if line and not line.startswith("#")]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    needed = ("packages", "scripts", "requirements", "Makefile", "pyproject.toml", "envs-registry.yaml", "examples")
    for name in listed.splitlines():
        if name.split("/")[0] in needed:
            folders = ["/".join(name.split("/")[:end]) for end in range(1, name.count("/") + 2)]
            ignored = [p for p in patterns if any(fnmatch.fnmatch(f"/{f}", p.replace("**", "*")) for f in folders)]
            assert not ignored and not set(folders) & set(patterns), name


def test_the_devcontainer_starts_from_a_stage_of_an_image_here() -> None:
    found = json.loads(read(".devcontainer/devcontainer.json"))
    build = found["build"]
    image = (ROOT / ".devcontainer" / build["dockerfile"]).resolve()
    assert image in DOCKERFILES and (ROOT / ".devcontainer" / build["context"]).resolve() == ROOT
    assert any(head == "FROM" and rest.endswith(f" AS {build['target']}") for head, rest in instructions(image))
    assert found["remoteUser"] == dict(instructions(image))["USER"]
    assert found["postCreateCommand"] == "make setup"


# CONTRIBUTING.md, AGENTS.md


def test_the_tour_is_of_six_files_of_the_spine_with_their_lengths() -> None:
    from tests.test_house import SPINE

    tour = re.findall(r"^\d\. \[.*?\]\((.*?)\), (\d+) lines", read("CONTRIBUTING.md"), re.MULTILINE)
    assert len(tour) == 6
    for path, _ in tour:
        assert path.split("skyrl_trainer/")[-1].removesuffix(".py").replace("/", ".") in SPINE


def test_lengths_of_files_are_true() -> None:
    said = re.findall(r"\]\((\S+\.py)\), (\d+) lines", read("CONTRIBUTING.md"))
    assert len(said) == 7
    for path, lines in said:
        assert int(lines) == pytest.approx(len(read(path).splitlines()), rel=0.05), path


def test_a_first_change_is_as_long_as_the_table_says() -> None:
    (bounds,) = re.findall(r"^LINES = (\{.*\})$", read("tests/examples/test_small_examples.py"), re.MULTILINE)
    promised, changes = ast.literal_eval(bounds), rows(read("CONTRIBUTING.md"), 5)
    assert len(changes) == len(promised)
    for _, most, has, start, test in changes:
        path = re.findall(r"\((examples/\S+?)\)", start)[0]
        assert promised[Path(path).name] == int(most) >= int(has) == len(read(path).splitlines()), path
        assert Path(path).stem in read(test.strip("`")), f"{test} does not run {path}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "AGENTS.md", "SECURITY.md"])
def test_paths_and_make_targets_that_a_page_names_exist(page: str) -> None:
    text = read(page)
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"\bmake (setup|train|test|lint|clean|[a-z]+(?=`| +#))", text)) <= targets
    for name in re.findall(r"(?<![\w/.])(?:docs|tests|scripts|benchmarks|packages|examples)/[\w./-]*\w", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_agents_read_less_than_eighty_lines() -> None:
    assert len(read("AGENTS.md").splitlines()) < 80


# docs/troubleshooting.md


@cache
def texts() -> tuple[str, ...]:
    """Every text of the packages' code and of the set-up, with ANY in the place of what varies."""
    found = set()
    for path in ROOT.glob("packages/*/skyrl_*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else ANY for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.replace("%s", ANY))
    for path in (*ROOT.glob("packages/*/hatch_build.py"), ROOT / "scripts/setup.sh"):
        text = re.sub(r'"\s*\\\n\s*"', " ", path.read_text(encoding="utf-8"))
        found.add(re.sub(r"\$\{[^}]*\}|\$\w+|\{\w+\}", ANY, text))
    return tuple(found)


def stands_in_the_code(quoted: str) -> bool:
    """Whether one text has these words, in which `...` stands for something that varies and little beside it."""
    pieces = [re.escape(piece) for piece in quoted.removeprefix("...").removesuffix("...").split("...")]
    pattern = re.compile(rf"[^{ANY}]{{0,20}}{ANY}.{{0,20}}".join(pieces))
    return any(pattern.search(text) for text in texts())


def quoted_errors() -> list[str]:
    """Code spans of the first column; what is in italics there is another program's."""
    return [error for row in rows(read("docs/troubleshooting.md"), 3) for error in re.findall(r"`([^`]+)`", row[0])]


def test_each_error_of_ours_stands_in_the_code() -> None:
    errors = quoted_errors()
    assert len(errors) > 60
    missing = [error for error in errors if not stands_in_the_code(error)]
    assert not missing


def test_words_that_do_not_stand_in_the_code_are_found_out() -> None:
    assert stands_in_the_code("The run folder ... is in use by process")
    assert not stands_in_the_code("The run folder ... is in use by somebody")
    assert not stands_in_the_code("There is no recipe ... in use by process")


def test_each_trouble_has_a_cause_and_a_cure_and_is_said_once_per_place() -> None:
    page = read("docs/troubleshooting.md")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert len(sections) >= 8 and len(rows(page, 3)) >= 30
    for section in sections:
        entries = rows(section, 3)
        says = [entry[0] for entry in entries]
        assert entries and len(says) == len(set(says)), section[:30]
        assert all(cell for entry in entries for cell in entry), section[:30]
        assert len([line for line in section.splitlines() if line.startswith("| ")]) == len(entries) + 1, section[:30]


def test_settings_that_a_cure_names_exist() -> None:
    from skyrl_trainer.config import leaf_fields

    known = set(leaf_fields())
    sections = {name.rpartition(".")[0] for name in known}
    open_ended = ("generator.engine_kwargs.", "trainer.algorithm.options.")
    for page in ("docs/troubleshooting.md", "SECURITY.md"):
        for name in re.findall(r"`'?((?:trainer|generator|environment|data|ray)\.[a-z_.]+)", read(page)):
            plain = name.rstrip(".")
            assert plain in known or plain in sections or plain.startswith(open_ended), f"{page} names {name}"
