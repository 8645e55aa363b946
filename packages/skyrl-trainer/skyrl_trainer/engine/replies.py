"""Replies of endpoints on disk: what was asked once costs nothing the second time."""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_trainer.files import writing


class Replies:
    """A folder with a JSON file per reply, named by the hash of what was asked; processes may share it.
    Example: Replies(Path("cache")).put({"text": "2"}, "a-model", "1+1?"), then get("a-model", "1+1?")["text"] == "2"
    """

    def __init__(self, folder: str | Path) -> None:
        """folder: made with the first reply; "" keeps none."""
        self._folder = folder and Path(folder)

    def get(self, *asked: Any) -> Any:
        """None where there is none, or where its file is damaged."""
        with suppress(OSError, ValueError):
            return json.loads(self._path(asked).read_bytes()) if self._folder else None

    def put(self, reply: Any, *asked: Any) -> None:
        if not self._folder:
            return
        path = self._path(asked)
        with writing(path, path.parent):
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as aside:
                json.dump(reply, aside)
            os.replace(aside.name, path)

    def _path(self, asked: tuple[Any, ...]) -> Path:
        return Path(self._folder, hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest())
