"""Data of benchmarks, from Hugging Face or from files, in the official schemas.

    cais/hle   cais/hle@5a81a4c7   hf:cais/hle@5a81a4c7  a data set on Hugging Face, at a revision
    data/hle.jsonl  .json  .csv  .parquet  data/hle/     files of the same schema, or a folder of them

In a folder, "validation" and "dev" files hold worked examples; items are in the official ones, or in all but "train".
"""

import csv
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from skyrl_eval.types import Item, Source
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import write_whole, writing
from skyrl_trainer.hub import snapshot

if TYPE_CHECKING:
    from skyrl_eval.benchmarks.common import Benchmark

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
SHOTS = ("validation", "dev")
MOST_BAD = 0.1
"""The share of rows that may be unreadable, and left out: more of them are another schema."""


class Row(BaseModel):
    """A row of a data set: each benchmark names its fields, other columns are ignored."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True, populate_by_name=True, frozen=True)


@dataclass(frozen=True)
class Data:
    """Example: Data([item, ...], "cais/hle", "5a81a4c7...", "9c1e...", ["342 items with images are left out"])"""

    items: list[Item]
    source: str
    revision: str | None
    """The commit on Hugging Face."""
    sha256: str
    """Of all items, whatever their order and the format of the file."""
    notes: list[str]
    unreadable: int = 0
    """Rows that are left out."""


def load(bench: "Benchmark", spec: str | None = None, images: bool = False) -> Data:
    """All items of a benchmark. spec: as above; None for the official data. images: keep the questions that show one.
    UserError names the file, the row, the field; or what is needed to fetch the data.
    """
    source, revision, files = locate(bench.source, spec)
    if not files:
        wanted = bench.source.files if revision else f"that ends in {', '.join(SUFFIXES)}"
        raise UserError(f"--data {source} has no file {wanted}.")
    shots = [path for path in files if path.name.startswith(SHOTS)] if len(files) > 1 else []
    bad: list[str] = []
    rows = [row for path in files if path not in shots for row in _rows(path, bench.Row, bad)]
    if len(bad) > MOST_BAD * (len(rows) + len(bad)):
        raise UserError(bad[0])
    examples = [row for path in shots for row in _rows(path, bench.Row, bad)]
    items = list(_named_once(bench.tasks(rows, examples), source))
    kept = [item for item in items if images or not item.image]
    if not kept:
        raise UserError(f"--data {source} has no items" + (" without an image." if items else "."))
    lines = sorted(_digest(astuple(item)) for item in kept)
    notes = [f"{len(items) - len(kept)} items with images are left out"] if len(kept) < len(items) else []
    if bad:
        notes.append(f"{len(bad)} rows that cannot be read are left out, the first: {bad[0]}")
    if bench.source.shots and not examples:
        notes.append("no worked examples are shown, as no validation file is beside the test file")
    if 0 < bench.source.size != len(items):
        notes.append(f"{len(items)} items of the official {bench.source.size} are in the data")
    return Data(kept, source, revision, _digest(lines), notes, len(bad))


def subset(items: Sequence[Item], n: int | None, seed: int = 0) -> list[Item]:
    """The first n (None: all) in the order of a hash of seed and id: 50 of them are among 150 of them."""
    return sorted(items, key=lambda item: _digest(seed, item.item_id))[:n]


def content_id(*parts: Any) -> str:
    """The id of an item whose data set has none."""
    return _digest(*parts)[:16]


def locate(official: Source, spec: str | None) -> tuple[str, str | None, list[Path]]:
    """The data's name for the manifest, its revision, and its files on this machine."""
    if spec and not spec.startswith("hf:"):
        path = Path(spec).expanduser()
        if path.is_dir():
            files, name = [f for f in sorted(path.iterdir()) if f.suffix in SUFFIXES], Path(official.files).stem
            own = [f for f in files if name and (Path(f.stem).match(name) or f.stem == name.removesuffix("-*"))]
            own = own or [f for f in files if not f.name.startswith("train")] or files
            return spec, None, [f for f in files if f in own or f.name.startswith(SHOTS)]
        if path.is_file() and path.suffix in SUFFIXES:
            return spec, None, [path]
        if path.is_file() or path.suffix in SUFFIXES:
            raise UserError(f"--data {spec} is not a file here that ends in {', '.join(SUFFIXES)}.")
    if spec is None and official.url:
        return official.url, None, [_download(official)]
    if not (name := (spec or official.repo).removeprefix("hf:")):
        raise UserError("This benchmark names no source of its rows: give --data a file of them.")
    patterns = [*filter(None, (official.files, official.shots))] or ["*"]
    commit, files = snapshot(name, patterns, "--data")
    return name.partition("@")[0], commit, [file for file in files if file.suffix in SUFFIXES]


def _download(official: Source) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skyrl-eval"
    path = cache / official.url.rpartition("/")[2]
    try:
        content = path.read_bytes() if path.is_file() else urllib.request.urlopen(official.url, timeout=120).read()
    except (OSError, HTTPException) as error:
        raise UserError(f"{official.url} cannot be fetched ({error}). Give --data the path of a local copy.") from error
    if not (found := hashlib.sha256(content).hexdigest()).startswith(official.sha256):
        raise UserError(f"{official.url} hashes to {found}, not to {official.sha256}...: it is not the official file.")
    if not path.is_file():
        with writing(path, cache):
            write_whole(path, content, os.getpid())
    return path


def _rows(path: Path, model: type[BaseModel], bad: list[str]) -> Iterator[Any]:
    for number, values in enumerate(_raw(path), start=1):
        try:
            yield model.model_validate(json.loads(values) if isinstance(values, bytes) else values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "(all)"
            bad.append(f"{path} row {number}, field {field!r}: {first['msg']}.")
        except (ValueError, RecursionError) as error:
            bad.append(f"{path} row {number} is not JSON: {error}.")


def _raw(path: Path) -> Iterator[Any]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(100):  # few rows: some hold images
                yield from batch.to_pylist()
        elif path.suffix == ".csv":  # not pandas: a cell that says None is an answer, not a missing value
            csv.field_size_limit(sys.maxsize)
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        elif path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8-sig"))
            yield from rows if isinstance(rows, list) else [rows]
        else:
            with path.open("rb") as lines:  # to be read one by one: some may be damaged
                yield from filter(bytes.strip, lines)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _named_once(items: list[Item], source: str) -> Iterator[Item]:
    seen: dict[str, list[Item]] = {}
    for item in items:
        same = seen.setdefault(item.item_id, [])
        if same and (same[0].question, same[0].gold) != (item.question, item.gold):
            raise UserError(f"--data {source} has two different items with the id {item.item_id!r}.")
        same.append(item)
        yield replace(item, item_id=f"{item.item_id}#{len(same)}") if len(same) > 1 else item


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
