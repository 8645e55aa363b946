"""Rows of MBPP and LiveCodeBench, and how the latter's programs are prepared and compared."""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

STANDARD = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io"
MODULES = [*STANDARD.split(), "sys", "json"]
PRELUDE = "".join(f"from {module} import *\n" for module in (*MODULES, "builtins", "typing"))
PRELUDE += f"import {', '.join(MODULES)}\nsys.setrecursionlimit(50000)\n"
PRELUDE += "sys.set_int_max_str_digits(50000)\n"
MOST = 900_000  # characters of what is run at once
BROKEN = zlib.error, pickle.UnpicklingError, SyntaxError, RecursionError, MemoryError
METHOD = """
def {name}(*arguments):
    return Solution().{name}(*arguments)
"""


class _Text(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"private_test_cases holds {module}.{name}, not just text")


def opened(private: str) -> list[dict[str, str]]:
    """The private tests. Only text is unpickled: a file that holds anything else is refused."""
    try:
        return json.loads(private)
    except ValueError:
        return json.loads(_Text(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load())


def same_output(output: str, expected: str) -> bool:
    """As many lines, each the same text without outer blanks, or the same numbers as decimals."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    return len(ours) == len(theirs) and all(a == b or _same_numbers(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_numbers(a: str, b: str) -> bool:
    try:
        return [Decimal(word) for word in a.split()] == [Decimal(word) for word in b.split()]
    except InvalidOperation:
        return False


def read_tests(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's tests: their `kind` ("asserts", "calls" or "stdin"), `tests` for judge.py, how many of them are `shown`,
    and what is run before the submission, `setup`; of asserts also their texts. ValueError says what is wrong."""
    try:
        found = _mbpp(row) if "test_list" in row else _livecodebench(row)
        sizes = [len(test[0] if found["kind"] == "stdin" else repr(test[0])) for test in found["tests"]]
        if not sizes or (max if found["kind"] == "stdin" else sum)(sizes) > MOST:
            raise ValueError(f"there are no tests, or they have more than {MOST} characters")
        return found
    except (KeyError, TypeError, ValueError, AttributeError, *BROKEN) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(
            "options['task'] must be a row of MBPP, with 'code' and 'test_list', or of LiveCodeBench, with "
            f"'public_test_cases' and 'private_test_cases'; this one cannot be read ({said:.200})."
        ) from None


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    asserts = list(dict.fromkeys([*row["test_list"], *(row.get("challenge_test_list") or ())]))
    functions = {node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)}
    setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
    tests = [_split(text, functions) for text in asserts]
    return {"kind": "asserts", "tests": tests, "shown": 1, "setup": setup, "asserts": asserts}


# Puts `_0`, `_1` and so on in place of the calls of some functions, and keeps these.
class _Calls(ast.NodeTransformer):
    def __init__(self, functions: set[str]) -> None:
        self.functions, self.calls = functions, list[str]()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name) or node.func.id not in self.functions:
            return self.generic_visit(node)
        self.calls.append(ast.unparse(node))
        return ast.Name(f"_{len(self.calls) - 1}", ast.Load())


def _split(text: str, functions: set[str]) -> list[Any]:
    body, calls = ast.parse(text).body, _Calls(functions)
    expression = ast.unparse(calls.visit(body[0].test)) if len(body) == 1 and isinstance(body[0], ast.Assert) else ""
    if not calls.calls:
        raise ValueError(f"{text!r:.99} is no assert with a call of a function that 'code' defines")
    return [calls.calls, expression]


def _livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    """Lists may come as JSON, too."""
    given = (row.get(name) or {} for name in ("metadata", "public_test_cases"))
    metadata, public = (json.loads(each) if isinstance(each, str) else each for each in given)
    name = metadata.get("func_name")
    cases = [(each["input"], each["output"]) for each in [*public, *opened(row["private_test_cases"])]]
    if name and not name.isidentifier():
        raise ValueError(f"metadata's func_name is {name!r}")
    tests = [_call(name, *each) if name else list(each) for each in cases]
    setup = PRELUDE + METHOD.format(name=name) * bool(name)
    return {"kind": "calls" if name else "stdin", "tests": tests, "shown": len(public), "setup": setup}


def _call(name: str, given: str, output: str) -> list[str]:
    arguments = ", ".join(repr(json.loads(line)) for line in given.split("\n"))
    return [f"{name}({arguments})", repr(json.loads(output))]
