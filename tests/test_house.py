"""The house: which room may know which, what must be read to understand the loop, and how large things are.

The figures are printed (`pytest tests/test_house.py -s`). A feature may add a file; it may not add to the closure.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("skyrl_gym", "skyrl_trainer", "skyrl_eval")
GROUND = (
    *(
        "types",
        "protocols",
        "errors",
        "registry",
        "settings",
        "config",
        "recipe",
        "files",
        "hub",
        "user_file",
        "chats",
        "data",
    ),
    "process_memory",
)
ROOMS = (
    "skyrl_gym",
    *("skyrl_trainer", "algorithms", "engine", "agent", "rollout", "weight_sync", "learner", "tiny", "report", "run"),
    *("replay", "dry_run", "serve", "skyrl_eval", "cli"),
)
"""In the order in which they may know each other; `skyrl_trainer` is the ground floor, `cli` all entry points."""
SPINE = (
    *("types", "run.loop", "run.run", "rollout.manager", "rollout.rollout_worker", "rollout.episode", "agent.prompt"),
    *(
        "rollout.flow",
        "algorithms.losses",
        "algorithms.policy_loss",
        "algorithms.advantages",
        "learner.grpo",
        "learner.batch",
    ),
    "learner.model",
)
ONE_STEP = (
    *SPINE,
    *("rollout.env_client", "rollout.env_worker", "rollout.env_process", "rollout.pool", "rollout.store"),
    *("rollout.metrics", "rollout.workers", "run.tries"),
    *("engine.actor", "engine.client", "engine.stepped", "engine.vllm_actor", "weight_sync.buffer"),
    *("weight_sync.shared_memory", "weight_sync.vllm_backend", "weight_sync.cpu_load", "weight_sync.canary"),
    *("weight_sync.colocation", "run.processes", "run.checkpoint", "run.engine_watch", "algorithms.options"),
    *("algorithms.rewards", "algorithms.samplers"),
)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for package in PACKAGES:
        folder = next(ROOT.glob(f"packages/*/{package}"))
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def imported(name: str, everywhere: bool = True) -> set[str]:
    """Dotted names, first-party and others: of the module's top level, or of its functions, too.

    What only type checkers read does not count.
    """
    parsed = tree(name)
    for_types = [n for n in ast.walk(parsed) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    left_out = {id(node) for branch in for_types for node in ast.walk(branch)}
    found: set[str] = set()
    for node in ast.walk(parsed) if everywhere else parsed.body:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room(name: str) -> str:
    package, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    if first in ("cli", "__main__", "plugins", "eval_agent", "eval_code") and package != "skyrl_gym":
        return "cli"
    if package != "skyrl_trainer":
        return package
    return first if first in ROOMS else "skyrl_trainer"


def lines(names: list[str]) -> int:
    return sum(modules()[name].read_text().count("\n") for name in names)


def classes(names: list[str]) -> int:
    return sum(isinstance(node, ast.ClassDef) for name in names for node in ast.walk(tree(name)))


def spelled(parts: tuple[str, ...]) -> list[str]:
    names = [f"skyrl_trainer.{part}" for part in parts]
    assert not set(names) - modules().keys(), "a module of the list was renamed"
    return names


def closure(start: str) -> list[str]:
    """First-party modules that `start` imports at top level, transitively."""
    seen: set[str] = set()
    queue = [start]
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += imported(name, everywhere=False) & modules().keys()
    return sorted(seen)


def test_each_room_knows_only_those_before_it() -> None:
    ground = {name for name in modules() if room(name) == "skyrl_trainer"}
    assert ground == {"skyrl_trainer", *(f"skyrl_trainer.{name}" for name in GROUND)}
    order = {name: place for place, name in enumerate(ROOMS)}
    arrows = [
        f"{name} imports {other}"
        for name in modules()
        for other in sorted(imported(name) & modules().keys())
        if order[room(other)] > order[room(name)]
    ]
    assert not arrows


def test_no_module_imports_itself_in_a_circle() -> None:
    """A package's __init__ is no target: whoever imports a module of it would point there, too."""
    targets = {name for name, path in modules().items() if path.name != "__init__.py"}
    graphlib.TopologicalSorter({name: imported(name) & targets - {name} for name in modules()}).prepare()


@pytest.mark.parametrize("package", ["skyrl-gym", "skyrl-trainer"])
def test_what_is_imported_is_declared(package: str) -> None:
    """skyrl_eval is shipped within skyrl-trainer."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    wanted = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    declared = {re.split(r"[\[<>=!~ ;]", each)[0].lower().replace("_", "-") for each in wanted} | {package}
    own = ("skyrl_gym", "confine") if package == "skyrl-gym" else ("skyrl_trainer", "skyrl_eval")  # confine: a script's
    distributions = packages_distributions()
    missing = {
        f"{name} imports {top}"
        for name in modules()
        if name.partition(".")[0] in own
        for top in {each.partition(".")[0] for each in imported(name)} - sys.stdlib_module_names - {*own, ""}
        if not declared & {each.lower().replace("_", "-") for each in (*distributions.get(top, [top]), top)}
    }
    assert not missing


def test_what_must_be_read_and_how_large_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(modules())
    functions = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for name in names
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    text = [line for name in names for line in modules()[name].read_text().splitlines()]
    code = [len(line) for line in text if line.strip() and not line.lstrip().startswith("#")]
    spine, step = spelled(SPINE), spelled(ONE_STEP)
    found = {  # the value, what it may not exceed, and the goal where that is lower
        "reading closure of the loop": (lines(closure("skyrl_trainer.run.loop")), 7376, 7500),
        "spine, lines": (lines(spine), 2559, 2600),
        "spine, classes": (classes(spine), 30, 30),
        "one step, lines": (lines(step), 6284, 5800),
        "one step, classes": (classes(step), 71, 85),
        "product, lines": (len(text), 27849, 18500),
        "characters per code line": (round(sum(code) / len(code), 1), 56.6, 53),
        "largest function": (functions[-1], 60, 60),
        "95th percentile of functions": (functions[len(functions) * 95 // 100], 25, 25),
    }
    with capsys.disabled():
        print()
        for name, (value, held, goal) in found.items():
            print(f"  {name:<32} {value:>8,}   held at {held:>6,}   goal {goal:>6,}")
    over = {name: value for name, (value, held, _) in found.items() if value > held}
    assert not over
