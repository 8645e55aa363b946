"""A model's queries in the sandbox, and when two results are the same (docs/environments/sql_lite.md).

The sandbox finds the databases as files in its folder. No true answer is ever in it: rows are compared here.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_gym.envs.sql_lite import queries
from skyrl_gym.tools.python_exec import Limits, shared_sandbox

Result = dict[str, Any]
MOST_ROWS, MOST_MIB = 10_000, 128
"""Of a result that is compared; of all databases of a task."""
PROGRAM = Path(queries.__file__).read_text(encoding="utf-8")
_LIMITS = Limits(20.0, 3, memory_mib=512 + MOST_MIB, output_bytes=32 << 20, folder_mib=2 * MOST_MIB)
sandbox = partial(shared_sandbox, _LIMITS)


def ask(databases: Sequence[bytes], asked: Sequence[str], most: int = MOST_ROWS) -> list[list[Result]]:
    """For each database the result of each query (queries.answer). Raises as Sandbox.start does."""
    files = {f"{number}.sqlite": content for number, content in enumerate(databases)}
    call = f"answers({list(files)!r}, {list(asked)!r}, {most})"
    done = sandbox().run(f"{PROGRAM}\nprint(json.dumps({call}))", files)
    if done.error:
        return [[{"error": done.error.splitlines()[-1]} for _ in asked] for _ in databases]
    return json.loads(done.output)


def same(given: Sequence[Result], truth: Sequence[Result], ordered: bool) -> bool:
    """Whether results on the same databases are the same on each of them."""
    pairs = list(zip(given, truth, strict=True))
    if any("error" in one or one["more"] or _shape(one) != _shape(other) for one, other in pairs):
        return False
    tables = zip(_arranged(given, ordered), _arranged(truth, ordered), strict=True)
    return all(_close(x, y) for one, other in tables for x, y in zip(one, other, strict=True))


def _shape(result: Result) -> tuple[int, int]:
    return len(result["columns"]), len(result["rows"])


def _arranged(found: Sequence[Result], ordered: bool) -> list[list[Any]]:
    def held(place: int) -> list[Any]:
        return [sorted(_key(row[place]) for row in result["rows"]) for result in found]

    order = sorted(range(len(found[0]["columns"])), key=held)
    tables = [[[row[place] for place in order] for row in result["rows"]] for result in found]
    if not ordered:
        tables = [sorted(rows, key=lambda row: [*map(_key, row)]) for rows in tables]
    return [[value for row in rows for value in row] for rows in tables]


def _key(value: Any) -> tuple[int, Any]:
    return (0, 0) if value is None else (2, value) if isinstance(value, str) else (1, round(value, 4))


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, str | None) or isinstance(other, str | None):
        return bool(one == other)
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
