"""Runs a submission against tests so that it cannot make up a verdict.

What is right never gets into the sandbox's child, which prints what the submission returns: it is compared here, where
it is read as literals. What a row's asserts say of it is worked out in another child (docs/environments/code_lite.md).
"""

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

from skyrl_gym.envs.code_lite.rows import same_output

CALLS = """
import contextlib, io, sys, traceback, types

def plain(value):
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain, value))
    return {plain(key): plain(each) for key, each in value.items()} if isinstance(value, dict) else value

def problem(error):
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == "<solution>"]
    return f"{said} (line {lines[-1]})" if lines else said

def main(setup, code, calls):
    told, module = sys.stdout, types.ModuleType("solution")
    sys.modules["solution"] = module
    def load():
        exec(compile(setup, "<setup>", "exec"), module.__dict__)
        exec(compile(code, "<solution>", "exec"), module.__dict__)
    for work in (load, *calls):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                line = "=" + repr(plain(load() if work is load else eval(work, module.__dict__)))
        except BaseException as error:
            line = "!" + ascii(problem(error))
        print(line, file=told, flush=True)
        if work is load and line[0] == "!":
            return
"""
PROGRAM = """
import os

def main(setup, code, given):
    names = {"__name__": "__main__"}
    os.dup2(os.open(given, os.O_RDONLY), 0)
    try:
        exec(compile(setup, "<setup>", "exec"), names)
        exec(compile(code, "<solution>", "exec"), names)
    except SystemExit:
        pass
"""


class Failure(NamedTuple):
    """The first test that fails, from 0, and how. Example: Failure(3, "wrong", "[1, 2]")"""

    test: int
    kind: str
    """"load", "raised", "stopped" or "wrong"."""
    got: str


def call_failure(code: str, tests: Sequence[Sequence[str]], setup: str, rows: bool) -> Failure | None:
    """Of tests [call, value]; a tuple passes for a list."""
    for place, found in enumerate(_called(setup, code, [call for call, _ in tests], rows)):
        if isinstance(found, Failure):
            return found._replace(test=place)
        got, right = ast.literal_eval(found), ast.literal_eval(tests[place][1])
        if right != (list(got) if isinstance(got, tuple) and isinstance(right, list) else got):
            return Failure(place, "wrong", found)
    return None


def assert_failure(code: str, tests: Sequence[Sequence[Any]], setup: str) -> Failure | None:
    """Of tests [calls, expression]: the expression has `_0`, `_1` and so on in place of the calls."""
    made = iter(_called(setup, code, [call for calls, _ in tests for call in calls], rows=True))
    checks, shown, last = [], [], None
    for place, (calls, expression) in enumerate(tests):
        values = [next(made) for _ in calls]
        if last := next((each._replace(test=place) for each in values if isinstance(each, Failure)), None):
            break
        named = ", ".join(f"_{number}={ast.literal_eval(value)!r}" for number, value in enumerate(values))
        checks.append(f"(lambda {named}: bool({expression}))()")
        shown.append(", ".join(values))
    for place, holds in enumerate(_called(setup, "", checks, rows=True)):
        if holds != "True":
            return Failure(place, "wrong", shown[place])
    return last


def program_failure(code: str, tests: Sequence[Sequence[str]], setup: str) -> Failure | None:
    """Of tests [input, output], each with a process of its own."""
    for place, (text, output) in enumerate(tests):
        result = _run(PROGRAM, setup, code, "input", rows=True, input=text.encode("utf-8", "replace"))
        if result.error:
            said = result.error.splitlines()[-1]
            stopped = said.startswith(("Timed out", "Killed", "Exited"))
            return Failure(place, "stopped" if stopped else "raised", said)
        if not same_output(result.output, output):
            return Failure(place, "wrong", repr(result.output))
    return None


def _run(program: str, setup: str, code: str, given: Any, rows: bool, **files: bytes) -> Any:
    return sandbox(rows).run(f"{program}\nmain({setup!r}, {code!r}, {given!r})", files)


def sandbox(rows: bool) -> Any:
    """Programs of data sets' rows need more. What counts is the processor's time: a busy machine fails no program."""
    from skyrl_gym.tools.python_exec import Limits, shared_sandbox

    more = Limits(wall_seconds=20, cpu_seconds=6, memory_mib=1024, output_bytes=1 << 20)
    return shared_sandbox(more if rows else Limits(wall_seconds=10))


def _called(setup: str, code: str, calls: list[str], rows: bool) -> list[Any]:
    head, *lines = _run(CALLS, setup, code, calls, rows).output.split("\n")
    if isinstance(loaded := _found(head), Failure):
        return [loaded._replace(kind="load" if loaded.kind == "raised" else loaded.kind) for _ in calls]
    lines += [""] * len(calls)
    return [_found(line) for line, _ in zip(lines, calls, strict=False)]


def _found(line: str) -> Any:
    try:
        # Of numbers with one hash a long set takes the env's process minutes.
        value = ast.literal_eval(line[1:] if "{" not in line or len(line) < 2**14 else "")
        repr(value)  # ValueError of a very long number
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Failure(0, "wrong" if line[:1] == "=" else "stopped", line[1:])
    return line[1:] if line[0] == "=" else Failure(0, "raised", str(value))
