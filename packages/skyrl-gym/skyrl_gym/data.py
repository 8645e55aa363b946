"""Rows in SkyRL's dataset format, from jsonl or parquet; docs/environments/README.md shows some.

Only `prompt` is required, which LiveCodeBench calls `question_content` and MBPP `text`; a string is the user's message.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PROMPTS = ("prompt", "question_content", "text")
ROLES = ("system", "user", "assistant", "tool")


@cache
def beside(module: str, name: str) -> Any:
    """What the YAML or JSON file `name` beside a module's `__file__` holds; read once a process."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    if name.endswith(".json"):
        return json.loads(text)  # ten times as fast
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def plain(value: Any) -> Any:
    """For JSON: of numpy's, or a date of a parquet file."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_list(path: str, what: str) -> list[Any]:
    """A JSON file's list, not an empty one. OSError, or ValueError with the file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file in UTF-8 ({error}).") from None
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: expected a list of {what}, got {found!r:.60}.")
    return found


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """Reads and checks every row of a .jsonl or .parquet file (parquet needs pyarrow, else ImportError).
    FileNotFoundError, or ValueError with the file, the line (jsonl) or row (parquet, from 1) and the field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no data file {path}; expected a .jsonl or .parquet file.")
    readers = {".jsonl": read_jsonl, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path} ends in {path.suffix!r}; data files end in .jsonl or .parquet.")
    rows = []
    with_truth: dict[str | None, bool] = {}
    for where, value in readers[path.suffix](path):
        row = read_row(value, where)
        has = ground_truth(row) is not None
        if has != with_truth.setdefault(row.get("env_class"), has):
            wrong = "a ground truth is here, and earlier rows have none"
            if not has:
                wrong = "field 'reward_spec.ground_truth' is missing, or a plain 'ground_truth': earlier rows have one"
            raise ValueError(f"{where}: {wrong}.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows.")
    return rows


def read_row(row: Any, where: str) -> dict[str, Any]:
    """The row as above, its ground truth, if any, in `reward_spec`. ValueError has `where` and the wrong field."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with 'prompt' and 'ground_truth', got {type(row).__name__}.")
    prompt = next((row[name] for name in PROMPTS if row.get(name) is not None), None)
    if prompt is None:
        raise ValueError(f"{where}: field 'prompt' is missing; the row has {sorted(map(str, row))}.")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    require(isinstance(prompt, list) and prompt != [], where, "prompt", "a string or a list of messages", prompt)
    for number, message in enumerate(prompt):
        field = f"prompt[{number}]"
        require(isinstance(message, dict), where, field, "an object with 'role' and 'content'", message)
        role, content = message.get("role"), message.get("content")
        require(role in ROLES, where, f"{field}.role", f"one of {', '.join(ROLES)}", role)
        require(isinstance(content, str), where, f"{field}.content", "a string", content)
    if all(each["role"] != "user" for each in prompt):
        raise ValueError(f"{where}: field 'prompt' has no message with role 'user'.")
    for name in ("data_source", "env_class"):
        require(isinstance(row.get(name), str | None), where, name, "a string", row.get(name))
    for name in ("reward_spec", "reward_model", "extra_info"):
        require(isinstance(row.get(name), dict | None), where, name, "an object", row.get(name))
    spec, truth = row.get("reward_spec") or row.get("reward_model") or {}, ground_truth(row)
    return {**row, "prompt": prompt, "reward_spec": spec if truth is None else {**spec, "ground_truth": truth}}


def ground_truth(row: Mapping[str, Any]) -> Any:
    """A row's ground truth: that of its `reward_spec`, else of `reward_model`, else its own; None without one."""
    places = (row.get("reward_spec") or {}, row.get("reward_model") or {}, row)
    return next((place["ground_truth"] for place in places if place.get("ground_truth") is not None), None)


def require(fine: bool, where: str, field: str, expected: str, value: Any) -> None:
    if not fine:
        raise ValueError(f"{where}: field '{field}' must be {expected}, got {value!r:.60}.")


def row_id(content: Any) -> str:
    """The id of a task that comes from a row: a digest of what decides it."""
    digest = hashlib.blake2b(json.dumps(content, default=str).encode(), digest_size=6).hexdigest()
    return f"row:{digest}"


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", value) of every line that is not blank; ValueError names the line that is no JSON."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text (byte {error.start}).") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not one JSON object on this line ({error}).") from None
            yield where, row


def read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"Reading {path} needs pyarrow: `pip install pyarrow`, or convert the file.") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file ({error}).") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row
