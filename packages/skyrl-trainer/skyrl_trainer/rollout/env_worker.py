"""EnvWorker: a process that holds many environments. Python and gymnasium only; it never loads torch.

Every call takes a list and answers with one `EnvReply` an item, in order; an env that raises or hangs spoils its own
reply and nothing else. Two limits guard each env call: SIGALRM interrupts Python code after `step_timeout` seconds,
and a watchdog thread (faulthandler's, which needs no GIL) ends the process when a library hangs or the env swallows
the interruption. A file says which env was running, so that the process that Ray starts in its place knows whom to
blame: that episode fails, and its neighbours are replayed. An env is closed by the worker when it is over or failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium

from skyrl_trainer.types import Sample

Step = tuple[str, str] | tuple[str, str, list[dict[str, Any]]]
"""(key, action), and for a repeated step the tool calls that it made the first time."""
LONGEST_TEXT = 2**20
"""Characters of an observation that are encoded and recorded, whatever the context holds."""
CRASHED = "The env hung or crashed its EnvWorker"
MAX_THREADS = 64
"""Steps of envs that wait, at a time."""
KEY_BYTES = 256
"""Size of the running env's key at the head of the worker's file; the watchdog's report follows it."""


class EnvTimeout(BaseException):
    """Raised inside an env by SIGALRM; not an Exception, so that an env's `except Exception` lets it through."""


@dataclass(slots=True)
class EnvReply:
    """What an env said. Example: EnvReply(observation="12+30=?", info={"instructions": ""}) after a reset."""

    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    kind: str = ""
    """With an error: "raised", "timeout", or "lost" (no such env here: the worker has been restarted)."""
    close_error: str | None = None


@dataclass(slots=True)
class Pong:
    """Who answers a ping, and what the process before it died of, if it was an env's doing."""

    pid: int
    culprit: str | None = None
    """Key of the env in which the previous process hung or crashed; None when it was killed from outside."""
    report: str = ""


class EnvWorker:
    """Made an actor by `ray.remote(EnvWorker)`; an ordinary (not threaded) one, so that signals reach its calls."""

    def __init__(self, step_timeout: float, name: str = "") -> None:
        """`step_timeout`: wall-clock seconds of one env call. `name`: the same for all restarts of one worker."""
        import_module("skyrl_gym")  # registers its environments: here, for who owns the worker plays none
        self._limit = step_timeout
        self._envs: dict[str, gymnasium.Env[Any, Any]] = {}
        self._loaded: dict[str, str | None] = {}
        self._watchdog_until = 0.0
        self._threads = ThreadPoolExecutor(MAX_THREADS)
        path = Path(tempfile.gettempdir()) / f"skyrl-env-worker-{name or os.getpid()}"
        self._pong = Pong(os.getpid(), *_last_words(path))
        self._notes = path.open("w+b", buffering=0)
        self._path = path
        self._note("")
        os.lseek(self._notes.fileno(), KEY_BYTES, os.SEEK_SET)
        faulthandler.enable(file=self._notes)
        signal.signal(signal.SIGALRM, _interrupt)

    def ping(self) -> Pong:
        return self._pong

    def reset_many(self, items: list[tuple[str, Sample]]) -> list[EnvReply]:
        """Makes one env an item under its key (closing an older one of that key) and resets it."""
        with self._watchdog():
            return [self._guarded(key, "reset", partial(self._reset, key, sample)) for key, sample in items]

    def step_many(self, items: list[Step]) -> list[EnvReply]:
        """One after the other, but envs with `metadata["waits"]`, for other machines say, all at once in threads."""
        waits = [item[0] in self._envs and self._envs[item[0]].metadata.get("waits") for item in items]
        with self._watchdog():
            calls = [
                self._threads.submit(self._step, *item).result if in_thread else partial(self._step, *item)
                for item, in_thread in zip(items, waits, strict=True)
            ]
            return [self._guarded(item[0], "step", call) for item, call in zip(items, calls, strict=True)]

    def close_many(self, keys: list[str]) -> list[str | None]:
        """Closes what is still open; answers with what `close` raised."""
        with self._watchdog():
            return [self._close(key) for key in keys]

    def shutdown(self) -> None:
        self.close_many(list(self._envs))
        faulthandler.disable()
        self._path.unlink(missing_ok=True)

    def _reset(self, key: str, sample: Sample) -> EnvReply:
        if sample.env_file is not None:
            self._load(sample.env_file)
        env = gymnasium.make(sample.env_id, disable_env_checker=True)
        self._envs[key] = env
        observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
        return EnvReply(_text(observation), info=plain(info))

    def _step(self, key: str, action: str, recorded: list[dict[str, Any]] | None = None) -> EnvReply:
        env = self._envs[key]
        feed = getattr(env.unwrapped, "feed_external", None)
        if recorded is not None and feed is not None:
            feed(recorded)
        observation, reward, terminated, truncated, info = env.step(action)
        return EnvReply(_text(observation), float(reward), bool(terminated), bool(truncated), plain(info))

    def _guarded(self, key: str, what: str, call: Callable[[], EnvReply]) -> EnvReply:
        """One env call under both limits, its failure as a reply."""
        if what == "reset":
            self._close(key)
        elif key not in self._envs:
            return EnvReply(error=f"no env {key} on this worker", kind="lost")
        try:
            reply = self._limited(key, call)
        except EnvTimeout:
            limit = f"environment.step_timeout={self._limit:g} seconds"
            reply = EnvReply(error=f"The env's {what} was cut off: it took longer than {limit}.", kind="timeout")
        except EnvFileError as error:
            reply = EnvReply(error=str(error), kind="raised")
        except Exception as error:
            reply = EnvReply(error=f"The env's {what} raised {_sentence(error)}", kind="raised")
        if reply.error is not None or reply.terminated or reply.truncated:
            reply.close_error = self._close(key)
        return reply

    def _close(self, key: str) -> str | None:
        env = self._envs.pop(key, None)
        if env is None:
            return None
        try:
            self._limited(key, env.close)
        except EnvTimeout:
            return f"The env's close took longer than environment.step_timeout={self._limit:g} seconds."
        except Exception as error:
            return f"The env's close raised {_sentence(error)}"
        return None

    def _limited(self, key: str, call: Callable[[], Any]) -> Any:
        self._note(key)
        self._feed_watchdog()
        try:
            try:
                # Again every second: an env that catches everything must not swallow the only signal.
                signal.setitimer(signal.ITIMER_REAL, self._limit, 1.0)
                return call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have interrupted the line above
            self._note("")

    def _note(self, key: str) -> None:
        os.pwrite(self._notes.fileno(), key.encode()[:KEY_BYTES].ljust(KEY_BYTES), 0)

    @contextlib.contextmanager
    def _watchdog(self) -> Iterator[None]:
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._watchdog_until = 0.0

    def _feed_watchdog(self) -> None:
        """Re-armed only when needed: arming starts a thread, too dear for every env call."""
        now = time.monotonic()
        if self._watchdog_until < now + self._limit + 2:
            seconds = 2 * self._limit + 2
            self._watchdog_until = now + seconds
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._notes)

    def _load(self, path: str) -> None:
        """Runs a user's file once; what it raised is told to every episode that needs it."""
        if path not in self._loaded:
            self._loaded[path] = _load_file(path)
        error = self._loaded[path]
        if error is not None:
            raise EnvFileError(error)


class EnvFileError(Exception):
    """environment.env_file cannot be loaded."""


def _load_file(path: str) -> str | None:
    import importlib.util

    name = "skyrl_env_file_" + Path(path).stem
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            return f"environment.env_file={path} is not a Python file: its name must end in .py."
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        return f"environment.env_file={path} cannot be loaded, it raised {_sentence(error)}"
    return None


def _interrupt(signum: int, frame: Any) -> None:
    raise EnvTimeout


def shortened(text: str) -> str:
    """An observation as it is recorded."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} [... {len(text)} characters in all]"


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"a text env's observation is a str, this one is a {type(observation).__name__}")
    return observation


def _sentence(error: BaseException) -> str:
    """ValueError: no such move (game.py, line 12)."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip() or 'without a message'}{where}"


def _last_words(path: Path) -> tuple[str | None, str]:
    """Reads what the previous process of this name left: the env it was in, if the watchdog or a crash ended it."""
    try:
        left = path.read_bytes()
    except OSError:
        return None, ""
    key, report = left[:KEY_BYTES].decode(errors="replace").strip(), left[KEY_BYTES:].decode(errors="replace").strip()
    if not key or not report:
        return None, ""
    return key, report.splitlines()[0].rstrip("!")


def plain(value: Any) -> Any:
    """An info as JSON has it, so that it can be sent, stored and read back anywhere; other objects as their repr."""
    if value is None or isinstance(value, (str, bool, int, float)):
        # numpy's float64 and str are subclasses of Python's
        if value is None or type(value).__module__ == "builtins":
            return value
        return value.item() if hasattr(value, "item") else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return repr(value)[:1000]
