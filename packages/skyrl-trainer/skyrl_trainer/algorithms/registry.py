"""A registry that a recipe's setting chooses from, and the loading of the user's file that adds to registries."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_paths
from typing import Generic, TypeVar

from skyrl_trainer.config import Config
from skyrl_trainer.errors import UserError

T = TypeVar("T")
_PATHS = get_paths()
NOT_THE_USERS = ("<frozen", _PATHS["stdlib"], _PATHS["purelib"], str(Path(__file__).parents[1]))
"""Beginnings of the names of files that a user cannot mend."""


class Registry(Generic[T]):
    """Example: `TRAINERS = Registry("trainer.algorithm.name")`, then `@TRAINERS.register("mine")` on a class."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator; a later registration of the same name replaces the earlier one."""

        def add(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Raises UserError with the valid names."""
        if name not in self._entries:
            names = ", ".join(sorted(self._entries))
            raise UserError(f"{self.setting}={name!r} is not registered; choose one of {names}, or register your own.")
        return self._entries[name]


def load_plugin(config: Config) -> None:
    """Runs `trainer.algorithm.plugin_file`, once a process: every process that asks a registry calls this before.

    Raises UserError with the error's file and line.
    """
    if config.trainer.algorithm.plugin_file is None:
        return
    path = Path(config.trainer.algorithm.plugin_file).expanduser().resolve()
    name = f"skyrl_plugin_{blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return
    setting = f"trainer.algorithm.plugin_file={config.trainer.algorithm.plugin_file}"
    spec = spec_from_file_location(name, path) if path.suffix == ".py" and path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"{setting} is not a Python file; give one that registers what the recipe names.")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{setting} cannot be loaded: {cause(error)}.") from error


def cause(error: Exception) -> str:
    """What went wrong, and where in the user's own code: "ValueError: no such move (mine.py, line 7)"."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    users = [f"{f.filename}, line {f.lineno}" for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    return f"{type(error).__name__}: {str(error).rstrip('.')}" + (f" ({users[-1]})" if users else "")
