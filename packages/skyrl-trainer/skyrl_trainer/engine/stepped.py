"""An engine whose model runs in the actor's own process: one thread that owns it, and queues around it.

The thread alternates between commands (weight updates, pause), admission of queued requests (in the order in which they
came, but for those that go first), and one step of the model. So all requests of one `submit` enter between two steps,
a weight update never meets a running step, and what happens depends on the order of calls only, never on the time.
"""

import gc
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from skyrl_trainer.engine.actor import CALL_SECONDS, LOAD_SECONDS, EngineActor, refusal
from skyrl_trainer.errors import EngineDied, EngineLost, UserError
from skyrl_trainer.process_memory import INTERVAL, return_free_memory
from skyrl_trainer.types import GenerationOutput, GenerationRequest


class SteppedEngine(EngineActor, ABC):
    """The public half of protocols.InferenceEngine. Subclasses run a model."""

    def __init__(self, *settings: Any, **named_settings: Any) -> None:
        super().__init__(*settings, **named_settings)
        self._in_flight: dict[str, tuple[str, GenerationRequest]] = {}
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._next_key = 0

    # What a model runner provides; all of it runs in the engine's thread.

    @abstractmethod
    def _load(self) -> None: ...

    @abstractmethod
    def _fits(self, request: GenerationRequest) -> bool:
        """Whether it can enter before the next step, given what is in flight."""

    @abstractmethod
    def _add(self, key: str, request: GenerationRequest) -> None:
        """Admits a request; ValueError if the model cannot take it."""

    @abstractmethod
    def _step(self) -> list[tuple[str, GenerationOutput]]:
        """One token for every request in flight; the finished ones."""

    @abstractmethod
    def _update(self, phase: str, argument: Any) -> Any:
        """One of vLLM's weight transfer calls: "init", "start", "update" or "finish"."""

    def _rest(self, level: int, tags: list[str]) -> None:
        """Sleeps at a level above 0, or wakes these tags; nothing to do where no memory is given back."""

    def ready(self) -> dict[str, Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        self._call(lambda: None, LOAD_SECONDS)
        return {"pid": os.getpid()}

    def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        with self._lock:
            self._check_alive()
            self._enqueue(client, requests)
            self._lock.notify()

    def pause(self) -> None:
        self._call(lambda: setattr(self, "_paused", True))

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self._call(lambda: self._update("init", init_info))

    def start_weight_update(self) -> None:
        self._call(lambda: self._update("start", None))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call(lambda: self._update("update", update_info))

    def finish_weight_update(self, version: int) -> str:
        checksum = self._call(lambda: self._update("finish", version))
        if version % INTERVAL == 0:
            return_free_memory()
        return checksum

    def resume(self) -> None:
        self._call(lambda: setattr(self, "_paused", False))

    def sleep(self, level: int) -> None:
        self._asleep = True  # no step begins after this, and the command waits for the one that runs
        self._call(lambda: self._rest(level, []))

    def wake_up(self, tags: list[str]) -> None:
        self._call(lambda: self._rest(0, tags))
        with self._lock:
            self._asleep = self._asleep and "kv_cache" not in tags
            self._lock.notify()

    def _call(self, command: Callable[[], Any], timeout: float = CALL_SECONDS) -> Any:
        future = Future[Any]()
        if self._thread is None:
            raise EngineLost(f"The engine of {self.model_path} was started again and has not loaded yet.")
        with self._lock:
            self._check_alive()
            self._commands.append((command, future))
            self._lock.notify()
        try:
            return future.result(timeout)
        except TimeoutError:
            raise EngineDied(
                f"The engine of {self.model_path} did not answer within {timeout:.0f} s: a step hangs, "
                "or the machine is overloaded. See the engine's log."
            ) from None

    def _run(self) -> None:
        try:
            gc.disable()  # collections take a fifth of the start
            self._load()
            gc.enable()
            gc.freeze()  # else a full collection takes 0.25 s
            while True:
                self._turn()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion often says nothing
            reason = said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
            self._fail(f"The engine of {self.model_path} stopped. {reason}")

    def _turn(self) -> None:
        with self._lock:
            while not (self._commands or (self._steps and (self._queue or self._in_flight))):
                self._lock.wait()
            commands, self._commands = self._commands, deque()
        for command, future in commands:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)
        if self._steps:
            refused = self._admit()
            began = time.time()
            finished = self._step() if self._in_flight else []
            if self._in_flight:
                self._note_work(began)
            self._deliver([(self._in_flight.pop(key)[0], output) for key, output in finished] + refused)

    @property
    def _steps(self) -> bool:
        return not (self._paused or self._asleep)

    def _admit(self) -> list[tuple[str, GenerationOutput]]:
        refused = []
        while self._seat(len(self._in_flight)) and self._fits(self._queue[0][1]):
            client, request = self._queue.popleft()
            key = str(self._next_key)
            self._next_key += 1
            try:
                self._room(request)
                self._add(key, request)
            except Exception as error:  # of vLLM, too, whose own are no ValueErrors
                refused.append((client, refusal(request, error)))
            else:
                self._in_flight[key] = (client, request)
        return refused

    def _fail(self, sentence: str) -> None:
        with self._lock:
            super()._fail(sentence)
            for _, future in self._commands:
                future.set_exception(EngineDied(sentence))
            self._commands.clear()
