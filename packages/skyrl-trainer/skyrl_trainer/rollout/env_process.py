"""The processes that envs run in: Python and gymnasium, neither Ray nor torch, so that an env can only harm its like.

    EnvWorker -> template, which has imported all and runs no env -> keeper -> process with envs, a session of its own

The template forks a keeper and its process for every socket that the EnvWorker sends it. The process reads lists of
calls (pickle) and writes a line of JSON per reply as soon as it has it: the first call without one was running when the
process ended. The keeper ends what it left behind and writes how it ended; it kills it if the EnvWorker hangs up.
"""

import contextlib
import faulthandler
import gc
import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium

from skyrl_trainer.agent.prompt import LONGEST_TEXT, well_formed
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample
from skyrl_trainer.user_file import load_user_file

Said = dict[str, Any]
"""Fields of an EnvReply; `info` as JSON."""
LONGEST_INFO = 2**24
"""Characters of an info as JSON."""
LONGEST_ERROR = 1000
FILE_SECONDS = 60.0
"""That a user's file may take to run: it is imported once a process, beside the limits of env calls."""


class EnvTimeout(BaseException):
    """Raised inside an env by SIGALRM; not an Exception, so that an env's `except Exception` lets it through."""


def main(requests_fd: int, step_timeout: float) -> None:
    """The template."""
    import_module("skyrl_gym")  # registers its environments
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    gc.freeze()
    with socket.socket(fileno=requests_fd) as requests:
        while sockets := socket.recv_fds(requests, 1, 1)[1]:
            if os.fork() == 0:
                requests.close()
                _keep(socket.socket(fileno=sockets[0]), step_timeout)
            os.close(sockets[0])


def _keep(channel: socket.socket, step_timeout: float) -> None:
    """The keeper: never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        os.setsid()
        try:
            Envs(channel, step_timeout).serve()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    poll = select.poll()
    poll.register(os.pidfd_open(process), select.POLLIN)
    poll.register(channel, 0)  # that the other side has hung up is always told
    poll.poll()
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    ended = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps({"ended": ended}).encode() + b"\n")
    os._exit(0)


class Envs:
    """Many environments. A call that raises or takes longer than `step_timeout` seconds spoils its own reply only."""

    def __init__(self, channel: socket.socket, step_timeout: float) -> None:
        self._calls, self._replies = channel.makefile("rb"), channel.makefile("wb")
        self._limit = step_timeout
        self._envs: dict[str, gymnasium.Env[Any, Any]] = {}
        self._waits: set[str] = set()
        self._pid, self._home = os.getpid(), os.open(".", os.O_RDONLY)
        self._recursion = sys.getrecursionlimit()
        self._streams = sys.stdin, sys.stdout, sys.stderr

    def serve(self) -> None:
        faulthandler.enable()
        self._say({})
        while True:
            self._play(pickle.load(self._calls))

    def _play(self, calls: list[tuple[Any, ...]]) -> None:
        """One after the other, but steps of envs with `metadata["waits"]`, for other machines say, at once in threads.

        A thread that is late is left to itself: the next steps that wait have new ones.
        """
        waiting = [call for call in calls if call[0] == "step" and call[1] in self._waits]
        pool = ThreadPoolExecutor(len(waiting) or 1)
        begun = {call[1]: pool.submit(self._step, *call[1:]).result for call in waiting}
        pool.shutdown(wait=False)
        for what, key, *arguments in calls:
            said: Said = {}
            if what == "step" and key not in self._envs:
                said = {"error": f"no env {key} in this process", "kind": "lost"}
            elif what == "step":
                said = self._guarded(what, begun.get(key) or partial(self._step, key, *arguments))
            elif what == "reset":
                self._close(key)
                said = self._guarded(what, partial(self._reset, key, *arguments))
            elif what == "load":
                self._guarded(what, partial(_load, key), FILE_SECONDS)  # the reset says what it raised
            elif what == "shutdown":
                list(map(self._close, list(self._envs)))
            if what == "close" or "error" in said or said.get("terminated") or said.get("truncated"):
                said["close_error"] = self._close(key)
            self._say(said)

    def _say(self, said: Said) -> None:
        self._replies.write(json.dumps(said).encode() + b"\n")
        self._replies.flush()

    def _reset(self, key: str, sample: Sample) -> Said:
        if sample.env_file is not None:
            _load(sample.env_file)
        env = gymnasium.make(sample.env_id, disable_env_checker=True)
        self._envs[key] = env
        if (env.metadata or {}).get("waits"):
            self._waits.add(key)
        observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
        return {"observation": _text(observation), "info": _info(info)}

    def _step(self, key: str, action: str, recorded: list[dict[str, Any]] | None = None) -> Said:
        env = self._envs[key]
        feed = getattr(env.unwrapped, "feed_external", None)
        if recorded is not None and feed is not None:
            feed(recorded)
        observation, reward, terminated, truncated, info = env.step(action)
        said = {"observation": _text(observation), "reward": _number("reward", reward), "info": _info(info)}
        return said | {"terminated": bool(terminated), "truncated": bool(truncated)}

    def _close(self, key: str) -> str | None:
        """What `close` raised. The env's last reference goes within its limit, too."""
        return self._guarded("close", partial(self._drop, key)).get("error") if key in self._envs else None

    def _drop(self, key: str) -> Said:
        self._waits.discard(key)
        self._envs.pop(key).close()
        return {}

    def _guarded(self, what: str, call: Callable[[], Said], limit: float | None = None) -> Said:
        """One env call under its limit, `step_timeout` if no other is given."""
        seconds = limit or self._limit
        signal.signal(signal.SIGALRM, _interrupt)
        try:
            try:
                # Again every second: an env that catches everything must not swallow the only signal.
                signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
                return _tried(what, call)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except EnvTimeout:
            setting = f"environment.step_timeout={self._limit:g} seconds"
            return {"error": f"The env's {what} was cut off: it took longer than {setting}.", "kind": "timeout"}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have interrupted the line above
            self._restore()

    def _restore(self) -> None:
        """Puts back what an env changed for everybody, or ends the process, and the env with it, if it cannot."""
        if os.getpid() != self._pid:  # the env has forked, and this is the other one
            os._exit(0)
        os.fchdir(self._home)
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.setrecursionlimit(self._recursion)
        for stream in self._streams[1:]:
            os.fstat(stream.fileno())  # raises if it was closed


def _load(path: str) -> Said:
    load_user_file("environment.env_file", path, "environments")
    return {}


def _interrupt(signum: int, frame: Any) -> None:
    raise EnvTimeout


def _tried(what: str, call: Callable[[], Said]) -> Said:
    """What it answers, or whatever it raised as an answer."""
    try:
        return call()
    except EnvTimeout:
        raise
    except BaseException as error:
        sentence = str(error) if type(error) is UserError else f"The env's {what} raised {_sentence(error)}"
        return {"error": sentence, "kind": "raised"}


def _sentence(error: BaseException) -> str:
    """ValueError: no such move (game.py, line 12)."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        message = str(error).strip()[:LONGEST_ERROR]
    except EnvTimeout:
        raise
    except BaseException:
        message = "with a message that cannot be read"
    return f"{type(error).__name__}: {message or 'without a message'}{where}"


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise UserError(f"The env gave an observation that is a {type(observation).__name__}, and it must be a str.")
    text = well_formed(observation)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} [... {len(text)} characters in all]"


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"The env's step gave {name} {repr(value)[:100]}, and it must be a finite number.")
    return number


def _info(info: Any) -> str:
    if not isinstance(info, dict):
        raise UserError(f"The env gave an info that is a {type(info).__name__}, and it must be a dict.")
    info = plain(info)
    parts = info.get("reward_parts")
    for name, part in parts.items() if isinstance(parts, dict) else ():
        parts[name] = _number(f"reward_parts[{name!r}]", part)
    text = json.dumps(info)
    if len(text) > LONGEST_INFO:
        raise UserError(f"The env gave an info of {len(text)} characters, and {LONGEST_INFO} are the most.")
    return text


def plain(value: Any) -> Any:
    """An info as JSON has it, so that it can be sent, stored and read back anywhere; other objects as their repr."""
    if value is None:
        return None
    if isinstance(value, str):
        return well_formed(value)
    for exact in (bool, int, float):
        if isinstance(value, exact):  # numpy's float64, too
            return exact(value)
    if isinstance(value, dict):
        return {well_formed(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return well_formed(repr(value))[:1000]
