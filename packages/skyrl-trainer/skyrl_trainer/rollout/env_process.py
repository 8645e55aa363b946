"""The processes that envs run in: Python and gymnasium, neither Ray nor torch, so that an env can only harm its like.

    EnvWorker -> template, which has imported all and runs no env -> keeper -> process with envs, a session of its own

The template forks a keeper and its process for every socket that the EnvWorker sends it, with a file of shared memory.
The process reads lists of calls (pickle), notes in that file which one it is in, and writes the replies in lines of
JSON. The keeper writes how it ended and ends what it left behind, daemons too; it kills it if the EnvWorker hangs up.
"""

import ctypes
import faulthandler
import gc
import json
import math
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
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
REPLY_SECONDS = 0.005
"""How long a reply may lie here while the next calls are made."""
LOST: Said = {"error": "This process has no such env.", "kind": "lost"}
LONGEST_INFO = 2**24
"""Characters of an info as JSON."""
LONGEST_ERROR = 1000
LARGEST_REWARD = 1e9  # its square in a critic's loss is finite, in float32
FILE_SECONDS = 60.0
"""That a user's file may take to run: it is imported once a process, beside the limits of env calls."""
MAX_LEFT = 100
"""Late threads that a process may have: it ends with one more, and with it what they hold."""


class EnvTimeout(BaseException):
    """Raised inside an env by SIGALRM; not an Exception, so that an env's `except Exception` lets it through."""


def main(requests_fd: int, step_timeout: float, agent: str | list[str] | None) -> None:
    """The template. agent: of the user's, whose imports would cost each episode a second."""
    import_module("skyrl_gym")  # registers its environments
    learn = import_module("skyrl_trainer.agent.agent_env").prepare(agent) if isinstance(agent, str) else lambda: None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    gc.freeze()
    with socket.socket(fileno=requests_fd) as requests:
        while files := socket.recv_fds(requests, 1, 2)[1]:
            learn()
            if os.fork() == 0:
                requests.close()
                _keep(socket.socket(fileno=files[0]), mmap.mmap(files[1], 0), step_timeout)
            for file in files:
                os.close(file)


# The keeper: never returns. Orphans become its children.
def _keep(channel: socket.socket, note: mmap.mmap, step_timeout: float) -> None:
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        os.setsid()
        try:
            Envs(channel, note, step_timeout).serve()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    poll = select.poll()
    poll.register(os.pidfd_open(process), select.POLLIN)
    poll.register(channel, 0)  # that the other side has hung up is always told
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not poll.poll(1000):
        while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != process:
            os.waitpid(ended.si_pid, 0)
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
    with suppress(OSError):
        channel.sendall(json.dumps(how).encode() + b"\n")
    with suppress(OSError):
        while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
    os._exit(0)


class Waiting(threading.Thread):
    """A call of an env that waits; it has `said` its answer when it has ended."""

    def __init__(self, what: str, call: Callable[[], Said]) -> None:
        super().__init__(daemon=True)
        self.what, self.began, self._call = what, time.monotonic(), call
        self.start()

    def run(self) -> None:
        with suppress(EnvTimeout):
            self.said = _tried(self.what, self._call)

    def leave(self) -> None:
        """It ends when it next runs Python; one that never does is left behind."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(EnvTimeout))


class Envs:
    """Many envs. A call that raises or takes longer than `step_timeout` seconds spoils its own reply only."""

    # Calls are made in turn, but resets and steps of envs with `metadata["waits"]` (for other machines) in threads.

    def __init__(self, channel: socket.socket, note: mmap.mmap, step_timeout: float) -> None:
        self._calls, self._channel = channel.makefile("rb"), channel
        self._note = memoryview(note).cast("I")
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
        self._say([{}])
        while True:
            self._play(pickle.load(self._calls))
            self._left = [each for each in self._left if each.is_alive()]
            if len(self._left) > MAX_LEFT:
                os._exit(1)

    def _play(self, calls: list[tuple[Any, ...]]) -> None:
        replies, began = list[Said](), time.monotonic()
        for number, call in enumerate(calls):
            self._note[0] = number
            replies.append(self._answer(*call))
            if number + 1 == len(calls) or time.monotonic() > began + REPLY_SECONDS:
                self._say(replies)
                replies, began = [], time.monotonic()

    def _answer(self, what: str, key: str, *arguments: Any) -> Said:
        if what == "reset":
            self._close(key)
            return self._over(key, self._guarded(what, partial(self._reset, key, *arguments)))
        if what == "step" and key not in self._envs:
            return LOST
        if what == "step":
            return self._over(key, self._call(key, what, partial(self._step, key, *arguments)))
        if what == "ended":
            ended = [f"{json.dumps(key)}: {_json(said)}" for key, said in self._ended(*arguments)]
            return {"info": f"{{{', '.join(ended)}}}"}
        if what == "load":
            self._guarded(what, partial(_load, key), FILE_SECONDS)  # the reset says what it raised
        elif what == "shutdown":
            list(map(self._close, list(self._envs)))
        return self._close(key)

    def _over(self, key: str, said: Said) -> Said:
        over = "error" in said or said.get("terminated") or said.get("truncated")
        return said | self._close(key) if over else said

    def _say(self, replies: list[Said]) -> None:
        self._channel.sendall(f"[{', '.join(map(_json, replies))}]\n".encode())

    # alone: in a process of its own, where nobody minds that it waits.
    def _reset(self, key: str, sample: Sample, alone: bool = False) -> Said:
        if sample.env_file is not None:
            _load(sample.env_file)
        agent = {"id": "skyrl_trainer.agent.agent_env:skyrl/agent-v0", "sample": sample}
        made = agent if sample.agent else {"id": sample.env_id}
        env = self._envs[key] = gymnasium.make(**made, disable_env_checker=True)
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
        self._threads[key] = Waiting(what, call)
        return {"kind": "waiting"}

    def _ended(self, keys: list[str]) -> Iterator[tuple[str, Said]]:
        for key in keys:
            thread = self._threads.get(key)
            if thread is None:
                yield key, LOST
            elif not thread.is_alive():
                yield key, self._over(key, self._threads.pop(key).said)
            elif time.monotonic() > thread.began + self._limit:
                yield key, self._over(key, self._late(thread.what))

    def _close(self, key: str) -> Said:
        if thread := self._threads.pop(key, None):
            thread.leave()
            self._left.append(thread)
        if key not in self._envs:
            return {}
        return {"close_error": self._guarded("close", partial(self._drop, key)).get("error")}

    def _drop(self, key: str) -> Said:
        self._waits.discard(key)
        self._envs.pop(key).close()
        return {}

    def _guarded(self, what: str, call: Callable[[], Said], limit: float | None = None) -> Said:
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

    # Puts back what an env changed for everybody; ends the process, and the env, if it cannot.
    def _restore(self) -> None:
        if os.getpid() != self._pid:  # the env has forked, and this is the other one
            os._exit(0)
        os.fchdir(self._home)
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.setrecursionlimit(self._recursion)
        for stream in self._streams[1:]:
            os.fstat(stream.fileno())  # raises if it was closed


def _load(path: str) -> Said:
    load_user_file("environment.env_file", path, "registers environments")
    return {}


def _begun(env: gymnasium.Env[Any, Any], sample: Sample) -> Said:
    observation, info = env.reset(seed=sample.seed, options=dict(sample.options))
    return {"observation": _text(observation), "info": _info(info)}


def _json(said: Said) -> str:
    return f"[{json.dumps(said | {'info': None})}, {said.get('info', '{}')}]"


def _interrupt(signum: int, frame: Any) -> None:
    raise EnvTimeout


def _tried(what: str, call: Callable[[], Said]) -> Said:
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
        message = " ".join(str(error).strip()[:LONGEST_ERROR].split())
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
    number = math.nan
    with suppress(TypeError, ValueError, OverflowError):
        number = math.nan if isinstance(value, str) else float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise UserError(f"The env's step gave {name} {repr(value)[:100]}, and it must be a number up to 1e9.")
    return number


def _info(info: Any) -> str:
    if not isinstance(info, dict):
        raise UserError(f"The env gave an info that is a {type(info).__name__}, and it must be a dict.")
    if isinstance(parts := info.get("reward_parts"), dict):
        parts = {str(name)[:100]: _number(f"reward_parts[{name!r}]", part) for name, part in parts.items()}
        info = info | {"reward_parts": parts}
    if isinstance(solved := info.get("success"), str):
        raise UserError(f"The env gave info['success'] as the text {solved!r:.100}, and it must be True or False.")
    text = "\\ud"
    with suppress(TypeError, ValueError):  # not where it holds other things
        text = json.dumps(info)
    if "\\ud" in text:  # or may hold half a character
        text = json.dumps(plain(info))
    if len(text) > LONGEST_INFO:
        raise UserError(f"The env gave an info of {len(text)} characters, and {LONGEST_INFO} are the most.")
    return text


def plain(value: Any) -> Any:
    """An info as JSON has it; other objects as their repr."""
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
