"""A run folder on an object store, at any address that fsspec knows: s3://bucket/runs/a.

What is copied when: docs/clusters.md. A folder there counts with its marker, which goes up last and is deleted first.
"""

import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from skyrl_gym.openenv import in_thread
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import local_folder, write_whole
from skyrl_trainer.run.checkpoint import MANIFEST, NAME
from skyrl_trainer.run.folder import RunFolder
from skyrl_trainer.run.run import Run
from skyrl_trainer.settings import Config

MARKERS = {"checkpoints": MANIFEST, "model": "config.json", "init": "config.json"}
FOLDERS = ("checkpoints/step_*[0-9]", "trajectories", "held_out", "model")
REPLACED = (*FOLDERS, "metrics*.jsonl", "timeline.*", "config.*", "report.*")
"""What a fetch replaces here; of the rest it brings what is missing."""
OWNER, RECORD = "owner.txt", ".uploaded.json"
WAIT_SECONDS, SLOWEST = 120.0, 2**20
"""Limit of a call, and the bytes per second that its files may take beyond it."""


class Unreachable(UserError):
    """A call of the store failed, or took too long."""


class Store:
    """The folder at `address`, and the local one for it. UserError where fsspec cannot open it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.local = local_folder(address)
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}".encode()
        self._late: Future[Any] | None = None
        """A call that took too long: what it writes may still come."""
        options = {"auto_mkdir": True} if address.startswith("file:") else {}
        try:
            self._files, root = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
        except Exception as error:  # each store has its own kinds
            what = str(error).strip() or type(error).__name__
            raise UserError(f"The run folder {address} cannot be opened here: {what.splitlines()[0]}.") from error
        self._root = root.rstrip("/") + "/"
        self._sent: dict[str, list[int]] = {}
        with suppress(OSError, ValueError):  # none there, or a torn one: all is sent once more
            self._sent = json.loads((self.local / RECORD).read_text())

    def fetch(self, checkpoints: bool = True) -> None:
        """Where there is no checkpoint here, or an older one. checkpoints: the newest, or what readers want."""
        found = self._ask("find", self._root, detail=True)
        sizes = {path[len(self._root) :]: about["size"] for path, about in found.items()}
        names = [n for n in sizes if _marker(n) in (None, *sizes) and n != OWNER and not {"", ".."} & {*n.split("/")}]
        # The next upload deletes what other machines left, after its own is there, and sends what the store has lost.
        kept = {name: self._sent[name] for name in self._sent if name in sizes}
        self._sent = {name: [] for name in sizes if re.match(f"checkpoints/{NAME}/", name)} | kept
        here = (path.relative_to(self.local).as_posix() for path in self.local.glob(f"*/*/{MANIFEST}"))
        ours, theirs = (max(filter(_age, each), key=_age, default="") for each in (here, names))
        same = ours and ours == theirs and (self.local / ours).read_bytes() == self._ask("cat_file", self._root + ours)
        if same or _age(ours) > _age(theirs) or not (theirs if checkpoints else names):
            return
        newest = theirs.removesuffix(MANIFEST)
        names = [n for n in names if not n.startswith("checkpoints/") or (checkpoints and n.startswith(newest))]
        aside = self.local / ".fetched"
        shutil.rmtree(aside, ignore_errors=True)
        there = [self._root + name for name in names]
        copies = [str(aside / name) for name in names]
        self._ask("get", there, copies, size=sum(sizes[name] for name in names))
        for path in (path for pattern in REPLACED for path in self.local.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in sorted(names, key=theirs.__eq__):  # until its marker is there, no checkpoint is
            path = self.local / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._sent[name] = _stat((aside / name).rename(path))

    def claim(self) -> None:
        """The folder is this run's now."""
        self._ask("pipe_file", self._root + OWNER, self._owner)

    def upload(self) -> None:
        """What has changed. UserError where the folder is another run's by now, Unreachable as `fetch`."""
        if (owner := self._ask("cat_file", self._root + OWNER)) != self._owner:
            raise UserError(f"{self.address} is now of {owner.decode()}: this run ends, and stays in {self.local}.")
        now = dict[str, list[int]]()
        for path in self.local.rglob("*"):  # neither hidden nor damaged ones, nor links to what lies elsewhere
            name = path.relative_to(self.local).as_posix()
            if path.is_file() and not path.is_symlink() and not re.search(r"(^|/)(\.|damaged-)", name):
                now[name] = _stat(path)
        changed = {name for name, stat in now.items() if self._sent.get(name) != stat}
        markers = {str(_marker(name)) for name in changed} & now.keys()
        try:
            self._delete(markers & self._sent.keys())
            for part in (changed - markers, markers):
                here = [str(self.local / name) for name in part]
                there = [self._root + name for name in part]
                self._ask("put", here, there, size=sum(now[name][0] for name in part))
                self._sent |= {name: now[name] for name in part}
            self._delete(sorted(self._sent.keys() - now.keys(), key=lambda name: name != _marker(name)))
        finally:
            with suppress(OSError):
                write_whole(self.local / RECORD, json.dumps(self._sent).encode())

    def try_upload(self) -> None:
        """The same where something else goes on, and another upload follows."""
        try:
            self.upload()
        except Unreachable as error:
            logging.getLogger(__name__).warning("%s The next upload sends it, too.", error)

    def _delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            if self._ask("exists", self._root + name):
                self._ask("rm_file", self._root + name)
            del self._sent[name]

    def _ask(self, call: str, *arguments: Any, size: int = 0, **more: Any) -> Any:
        """What fsspec's `call` returns."""
        try:
            if self._late is not None and not self._late.done():
                raise TimeoutError("an earlier call still runs")
            self._late = in_thread(partial(getattr(self._files, call), *arguments, **more))
            return self._late.result(WAIT_SECONDS + size / SLOWEST)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".rstrip(": .")
            raise Unreachable(
                f"The run folder {self.address} could not be reached ({what}): check the address, your credentials and "
                f"the network. What the run has written is in {self.local}."
            ) from error


# Of a file's folder: model/last/config.json of model/last/tokenizer.json.
def _marker(name: str) -> str | None:
    room, folder, *rest = [*name.split("/"), ""]
    return f"{room}/{folder}/{MARKERS[room]}" if room in MARKERS and any(rest) else None


def _age(name: str) -> list[int]:
    if not re.fullmatch(rf"checkpoints/{NAME}/{MANIFEST}", name):
        return []
    return [int(number) for number in re.findall(r"\d+", name)]


def _stat(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


@contextmanager
def mirrored(config: Config, kind: type[Run]) -> Iterator[type[Run]]:
    """Around a run that has its folder's lock. Gives a kind of run that uploads its checkpoints, or `kind`."""
    if "://" not in config.run_address:
        yield kind
        return
    store = Store(config.run_address)
    store.fetch()
    store.claim()
    print(f"{store.address}: the run works in {store.local}, and uploads its checkpoints.")

    class Uploading(kind):  # type: ignore[misc, valid-type]
        def save(self, step: int, loop_state: dict[str, Any]) -> None:
            super().save(step, loop_state)
            store.try_upload()

    try:
        yield Uploading
    except BaseException:
        store.try_upload()
        raise
    store.upload()


def fetched(address: str) -> Path:
    """The local folder, with what the store has of the run but its checkpoints."""
    store = Store(address)
    with RunFolder(Config.model_validate({"trainer": {"run_dir": address}})) as folder:
        store.fetch(checkpoints=False)
    if not (folder.path / "config.yaml").exists():
        raise UserError(f"There is no run at {address}.")
    return folder.path
