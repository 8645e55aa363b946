"""The processes that envs run in: Python and gymnasium, neither Ray nor torch, so that an env can only harm its like.

    EnvWorker -> template, which has imported all and runs no env -> keeper -> process with envs, a session of its own

The template forks a keeper and its process for every socket that the EnvWorker sends it. The process reads lists of
calls (pickle) and writes a line of JSON per reply as soon as it has it: the first call without one was running when the
process ended. The keeper ends what it left behind and writes how it ended; it kills it if the EnvWorker hangs up.
"""

import contextlib
import ctypes
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
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium

from skyrl_trainer.agent.prompt import well_formed
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample
from skyrl_trainer.user_file import load_user_file

Said = dict[str, Any]
"""Fields of an EnvReply; `info` as JSON."""
LOST: Said = {"error": "This process has no such env.", "kind": "lost"}
LONGEST_TEXT = 2**20
"""Characters of an observation that are read, whatever the context holds."""
LONGEST_INFO = 2**24
"""Characters of an info as JSON."""
LONGEST_ERROR = 1000
FILE_SECONDS = 60.0
"""That a user's file may take to run: it is imported once a process, beside the limits of env calls."""
MAX_LEFT = 100
"""Late threads that a process may have: it ends with one more, and with it what they hold."""


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


class Waiting(threading.Thread):
    """A call of an env that waits, and the close of one that is over then. It has `said` all when it has ended."""

    def __init__(self, what: str, call: Callable[[], Said], close: Callable[[], Said]) -> None:
        super().__init__(daemon=True)
        self.what, self.since, self._pid = what, time.monotonic(), os.getpid()
        self.said: Said = {}
        self._call, self._close = call, close
        self.start()

    def run(self) -> None:
        with contextlib.suppress(EnvTimeout):
            self.said = _tried(self.what, self._call)
            if os.getpid() != self._pid:  # the env has forked, and this is the other one
                os._exit(0)
            if self.what == "close" or _over(self.said):
                self.what, self.since = "close", time.monotonic()
                self.said["close_error"] = _tried("close", self._close).get("error")

    def leave(self) -> None:
        """It ends when it next runs Python; one that never does is left behind."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(EnvTimeout))


class Envs:
    """Many environments. A call that raises or takes longer than `step_timeout` seconds spoils its own reply only.

    Calls are made one after the other, but those of an env with `metadata["waits"]` (for other machines, say) in
    threads: they are answered at once with kind "waiting", and in truth when ("ended", "", keys) asks for them.
    """

    def __init__(self, channel: socket.socket, step_timeout: float) -> None:
        self._calls, self._replies = channel.makefile("rb"), channel.makefile("wb")
        self._limit = step_timeout
        self._envs: dict[str, gymnasium.Env[Any, Any]] = {}
        self._waits: set[str] = set()
        self._threads: dict[str, Waiting] = {}
        self._left: list[Waiting] = []
        self._pid, self._home = os.getpid(), os.open(".", os.O_RDONLY)
        self._recursion = sys.getrecursionlimit()
        self._streams = sys.stdin, sys.stdout, sys.stderr

    def serve(self) -> None:
        faulthandler.enable()
        self._say({})
        while True:
            for call in pickle.load(self._calls):
                self._say(self._answer(*call))
            self._left = [thread for thread in self._left if thread.is_alive()]
            if len(self._left) > MAX_LEFT:
                os._exit(1)

    def _answer(self, what: str, key: str, *arguments: Any) -> Said:
        said: Said = {}
        if what == "reset":
            self._close(key)
            said = self._guarded(what, partial(self._reset, key, *arguments))
        elif what == "step" and key not in self._envs:
            said = LOST
        elif what == "step":
            said = self._call(key, what, partial(self._step, key, *arguments))
        elif what == "ended":
            said = {"info": json.dumps(self._ended(*arguments))}
        elif what == "load":
            self._guarded(what, partial(_load, key), FILE_SECONDS)  # the reset says what it raised
        elif what == "shutdown":
            self._shutdown()
        return said | self._close(key) if what == "close" or _over(said) else said

    def _say(self, said: Said) -> None:
        self._replies.write(json.dumps(said).encode() + b"\n")
        self._replies.flush()

    def _reset(self, key: str, sample: Sample, alone: bool = False) -> Said:
        """alone: in a process of its own, where nobody minds that it waits."""
        if sample.env_file is not None:
            _load(sample.env_file)
        env = self._envs[key] = gymnasium.make(sample.env_id, disable_env_checker=True)
        if not (env.metadata or {}).get("waits") or alone:
            return _begun(env, sample)
        self._waits.add(key)
        return self._call(key, "reset", partial(_begun, env, sample))

    def _step(self, key: str, action: str, recorded: list[dict[str, Any]] | None = None) -> Said:
        env = self._envs[key]
        feed = getattr(env.unwrapped, "feed_external", None)
        if recorded is not None and feed is not None:
            feed(recorded)
        observation, reward, terminated, truncated, info = env.step(action)
        said = {"observation": _text(observation), "reward": _number("reward", reward), "info": _info(info)}
        return said | {"terminated": bool(terminated), "truncated": bool(truncated)}

    def _call(self, key: str, what: str, call: Callable[[], Said]) -> Said:
        if key not in self._waits:
            return self._guarded(what, call)
        self._threads[key] = Waiting(what, call, partial(_closed, self._envs[key]))
        return {"kind": "waiting"}

    def _ended(self, keys: list[str]) -> dict[str, Said]:
        """By key, what the calls in threads have answered that have ended or taken too long."""
        threads = {key: self._threads.get(key) for key in keys}
        return {key: self._end(key, thread) for key, thread in threads.items() if self._has_ended(thread)}

    def _has_ended(self, thread: Waiting | None) -> bool:
        return thread is None or not thread.is_alive() or time.monotonic() > thread.since + self._limit

    def _end(self, key: str, thread: Waiting | None) -> Said:
        if thread is None:
            return LOST
        late = self._late(thread.what) if thread.is_alive() else {}
        if late and thread.what != "close":
            self._close(key)
            self._left.append(self._threads.pop(key))
            return late
        del self._threads[key]
        if late:
            self._leave(thread)
            thread.said = thread.said | {"close_error": late["error"]}
        if thread.what == "close":
            self._waits.discard(key)
            self._envs.pop(key, None)
        return thread.said

    def _leave(self, thread: Waiting) -> None:
        thread.leave()
        self._left.append(thread)

    def _close(self, key: str) -> Said:
        """What `close` raised. The env's last reference goes within its limit, too."""
        if key not in self._envs:
            return {}
        if key not in self._waits:
            return {"close_error": self._guarded("close", partial(self._drop, key)).get("error")}
        if key in self._threads:
            self._leave(self._threads[key])
        self._waits.discard(key)
        self._threads[key] = Waiting("close", dict, partial(_closed, self._envs.pop(key)))
        return {"kind": "waiting"}

    def _drop(self, key: str) -> Said:
        return _closed(self._envs.pop(key))

    def _shutdown(self) -> None:
        for key in list(self._envs):
            self._close(key)
        for thread in self._threads.values():
            thread.join(max(0.0, thread.since + self._limit - time.monotonic()))

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
            return self._late(what)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have interrupted the line above
            self._restore()

    def _late(self, what: str) -> Said:
        setting = f"environment.step_timeout={self._limit:g} seconds"
        return {"error": f"The env's {what} was cut off: it took longer than {setting}.", "kind": "timeout"}

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


def _begun(env: gymnasium.Env[Any, Any], sample: Sample) -> Said:
    observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
    return {"observation": _text(observation), "info": _info(info)}


def _closed(env: gymnasium.Env[Any, Any]) -> Said:
    env.close()
    return {}


def _over(said: Said) -> bool:
    return "error" in said or said.get("terminated", False) or said.get("truncated", False)


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
