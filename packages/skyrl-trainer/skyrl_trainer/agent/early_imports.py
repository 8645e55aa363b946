"""Modules that agents import on their way, as SDKs do, and the data that the episodes of an env share: the first
episode's process tells the one that it was forked from, which imports and reads them, so that no later episode pays for
them again."""

import fcntl
import gc
import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

LONGEST = 2**16
"""Bytes that a pipe takes at once."""


class EarlyImports:
    def __init__(self) -> None:
        self._known = set(sys.modules)
        self._read, self._write = os.pipe()
        fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, LONGEST)
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def tell(self, env: Any) -> None:
        """In an episode's process. env: None, or what it plays. Whoever comes later tells nothing new."""
        new = sorted(set(sys.modules) - self._known)
        owner = next((each for each in type(env).__mro__ if "preload" in vars(each)), object)
        options = getattr(env, "options", {})
        told = json.dumps([new, owner.__module__, owner.__name__, options], default=repr).encode() + b"\n"
        if new and len(told) < LONGEST:
            with suppress(OSError):  # it is full: others have told
                os.write(self._write, told)

    def learn(self) -> None:
        """In the process that is forked. What fails here is said by the episode that needs it."""
        with suppress(BlockingIOError):
            first, *_ = os.read(self._read, LONGEST).splitlines()
            new, module, owner, options = json.loads(first)
            for name in new:
                with suppress(Exception):
                    import_module(name)
            with suppress(Exception):  # as skyrl_gym.core.TextEnv has it; no env is made here
                getattr(import_module(module), owner).preload(options)
            self._known |= set(sys.modules)
            gc.freeze()
