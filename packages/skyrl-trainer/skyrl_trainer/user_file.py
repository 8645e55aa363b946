"""Python files of the user's that register things: environments, or plug-ins of the algorithms."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_paths
from types import ModuleType
from typing import TYPE_CHECKING

from skyrl_trainer.errors import UserError

if TYPE_CHECKING:  # a process of envs must not load the settings
    from skyrl_trainer.settings import Config

PREFIX = "skyrl_user_file_"  # of the modules that users' files become
_PATHS = get_paths()
NOT_THE_USERS = ("<frozen", _PATHS["stdlib"], _PATHS["purelib"], str(Path(__file__).parent))
"""Beginnings of the names of files that a user cannot mend."""


def load_user_file(setting: str, given: str, what: str) -> ModuleType:
    """Runs the file once per process. UserError with the error's file and line. what: it does."""
    path = Path(given).expanduser().resolve()
    name = f"{PREFIX}{blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path) if path.suffix == ".py" and path.is_file() else None
    if spec is None or spec.loader is None:
        here = "" if path.exists() or given.startswith(("/", "~")) else f" in {Path.cwd()}"
        raise UserError(f"{setting}: {given} is not a Python file{here}; give one that {what}.")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise UserError(f"{setting}: {given} failed with {cause(error)}.") from error
    return module


def load_plugin(config: "Config") -> None:
    """Runs `trainer.algorithm.plugin_file`: every process calls this before it asks a registry for a name."""
    if (given := config.trainer.algorithm.plugin_file) is not None:
        what = "registers trainers, engines, estimators, samplers or rewards"
        load_user_file("trainer.algorithm.plugin_file", given, what)


@contextmanager
def blaming() -> Iterator[None]:
    """Inside, what was raised on the way through a user's file becomes a UserError with its file and line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        files = {module.__file__ for name, module in sys.modules.items() if name.startswith(PREFIX)}
        if any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__)):
            raise UserError(f"A plug-in failed with {cause(error)}.") from error
        raise


def cause(error: BaseException) -> str:
    """What went wrong, and where in the user's own code: "ValueError: no such move (mine.py, line 7)"."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f" ({f.filename}, line {f.lineno})" for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{users[-1] if users else ''}"
