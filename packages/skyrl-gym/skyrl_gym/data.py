"""Rows in SkyRL's dataset format, from jsonl or parquet.

    {"data_source": "synthetic_multiply",
     "prompt": [{"role": "system", "content": "..."}, {"role": "user", "content": "12 * 34 = ?"}],
     "env_class": "text_math",
     "reward_spec": {"method": "rule", "ground_truth": "408"},
     "extra_info": {"split": "train"}}

`prompt` and `reward_spec` are required. `env_class` may be left to the trainer's `environment.env_class`. Fields that
are not listed here are kept. A row is played by `env.reset(options={"task": row})`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """Reads and checks every row of a .jsonl or .parquet file (parquet needs pyarrow).

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: a parquet file, and pyarrow is not installed.
        ValueError: the file is empty or a row is wrong; names the file, the line (jsonl) or row (parquet, from 1) and
            the field, and says what was expected.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no data file {path}; expected a .jsonl or .parquet file.")
    readers = {".jsonl": read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path} ends in {path.suffix!r}; data files end in .jsonl or .parquet.")
    rows = []
    for where, row in readers[path.suffix](path):
        check_row(row, where)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows.")
    return rows


def check_row(row: Any, where: str) -> None:
    """Raises ValueError with a sentence that begins with `where` and names the field, unless `row` is in the format."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with 'prompt' and 'reward_spec', got {type(row).__name__}.")
    for name in ("prompt", "reward_spec"):
        if row.get(name) is None:
            raise ValueError(f"{where}: field '{name}' is missing; the row has {sorted(map(str, row))}.")
    _check_prompt(row["prompt"], where)
    if not isinstance(row["reward_spec"], dict):
        raise ValueError(f"{where}: field 'reward_spec' must be an object, got {_show(row['reward_spec'])}.")
    if row["reward_spec"].get("ground_truth") is None:
        raise ValueError(f"{where}: field 'reward_spec.ground_truth' is missing.")
    for name, kind in (("data_source", str), ("env_class", str), ("extra_info", dict)):
        value = row.get(name)
        if value is not None and not isinstance(value, kind):
            expected = "a string" if kind is str else "an object"
            raise ValueError(f"{where}: field '{name}' must be {expected}, got {_show(value)}.")


def _check_prompt(prompt: Any, where: str) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}: field 'prompt' must be a list of messages, got {_show(prompt)}.")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise ValueError(
                f"{where}: field 'prompt[{number}]' must be an object with 'role' and 'content', got {_show(message)}."
            )
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: field 'prompt[{number}].role' must be one of {', '.join(ROLES)}, "
                f"got {_show(message.get('role'))}."
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"{where}: field 'prompt[{number}].content' must be a string, got {_show(message.get('content'))}."
            )
    if all(message["role"] != "user" for message in prompt):
        raise ValueError(f"{where}: field 'prompt' has no message with role 'user'.")


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
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not one JSON object on this line ({error}).") from None
            yield where, row


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            f"Reading {path} needs pyarrow, which is missing: `pip install pyarrow`, or convert the file to jsonl."
        ) from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file ({error}).") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text
