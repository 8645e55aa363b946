"""What every engine actor has: its settings, a queue of requests, a mailbox a client, and the reason why it is dead.

Its coroutine, `collect`, makes it an asyncio actor: any number of clients can wait in it. Other methods may block it.
"""

import asyncio
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from skyrl_trainer.errors import EngineDied
from skyrl_trainer.registry import Registry, load
from skyrl_trainer.settings import Config
from skyrl_trainer.types import GenerationOutput, GenerationRequest
from skyrl_trainer.user_file import load_plugin

LOAD_SECONDS = 900.0
"""Longest wait for a model to load."""
CALL_SECONDS = 300.0
"""Longest wait for a step to end plus a command to run: a large model's weights are loaded well within it."""
FIRST_SEQS = 4
"""Sequences beyond max_num_seqs, for requests that go first: the canary's do not wait."""
SHORT_REST = 0.05
"""Seconds between two steps of a model that count as work."""


def was_restarted() -> bool:
    """Whether Ray made this actor again after a death: it starts paused, for its weights are old."""
    if not ray.is_initialized():
        return False
    with warnings.catch_warnings(action="ignore"):  # Ray warns of a call that it makes itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


@dataclass
class Mailbox:
    done: list[GenerationOutput] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """In the event loop of the one who waits."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class EngineActor:
    @staticmethod
    def env_vars() -> dict[str, str]:
        """That its process needs."""
        return {}

    def __init__(
        self,
        model_path: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
        engine_kwargs: dict[str, Any],
    ) -> None:
        self.settings = (model_path, dtype, max_model_len, max_num_seqs, seed, engine_kwargs)
        self.model_path = model_path
        self.dtype = dtype
        self.seed = seed
        self.engine_kwargs = engine_kwargs
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self._queue: deque[tuple[str, GenerationRequest]] = deque()
        self._mail: dict[str, Mailbox] = {}
        self._lock = threading.Condition()
        self._paused = was_restarted()
        self._asleep = False
        self._error: str | None = None
        self._worked: list[tuple[float, float]] = []

    def worked(self) -> list[tuple[float, float]]:
        with self._lock:
            worked, self._worked = self._worked, []
        return worked

    def _note_work(self, began: float) -> None:
        with self._lock:
            if self._worked and began - self._worked[-1][1] < SHORT_REST:
                began = self._worked.pop()[0]
            self._worked.append((began, time.time()))
            del self._worked[:-10_000]  # as serve, where nobody asks

    async def collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        """At most one call a client at a time."""
        with self._lock:
            box = self._mail.setdefault(client, Mailbox())
            box.waiter = waiter = asyncio.get_running_loop().create_future()
            if box.done or self._error is not None:
                box.wake()
        await asyncio.wait([waiter], timeout=timeout)
        with self._lock:
            box.waiter = None
            if not box.done:
                self._check_alive()
            done, box.done = box.done, []
        return done

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDied(self._error)

    def _fail(self, sentence: str) -> None:
        with self._lock:
            self._error = sentence
            self._wake(set(self._mail))

    def _deliver(self, outputs: list[tuple[str, GenerationOutput]]) -> None:
        with self._lock:
            for client, output in outputs:
                self._mail.setdefault(client, Mailbox()).done.append(output)
            self._wake({client for client, _ in outputs})

    def _wake(self, clients: set[str]) -> None:
        for client in clients:
            box = self._mail[client]
            if box.waiter is not None:
                box.waiter.get_loop().call_soon_threadsafe(box.wake)

    def _enqueue(self, client: str, requests: list[GenerationRequest]) -> None:
        self._queue.extend((client, each) for each in requests if not each.first)
        self._queue.extendleft((client, each) for each in reversed(requests) if each.first)

    def _seat(self, running: int) -> bool:
        return bool(self._queue) and running < self.max_num_seqs + FIRST_SEQS * self._queue[0][1].first

    def _room(self, request: GenerationRequest) -> int:
        room = self.max_model_len - len(request.prompt_ids)
        if room <= 0:
            raise ValueError(
                f"The prompt has {len(request.prompt_ids)} tokens and leaves no room for an answer in "
                f"generator.max_model_len={self.max_model_len}."
            )
        return room


def refusal(request: GenerationRequest, error: Exception) -> GenerationOutput:
    """The answer to a request that the model cannot take."""
    said = str(error) if isinstance(error, ValueError) else repr(error)
    return GenerationOutput(request.request_id, [], [], [], "error", said)


E = TypeVar("E", bound=type[EngineActor])
HERE = "skyrl_trainer.engine"
ENGINES: Registry[type[EngineActor]] = Registry(
    "generator.backend",
    {"vllm": f"{HERE}.vllm_actor:VLLMEngine", "openai_server": f"{HERE}.openai_server:OpenAIServerEngine"},
)


def register_engine(name: str) -> Callable[[E], E]:
    """A class decorator: `generator.backend: name` takes this engine, given `generator.engine_kwargs`."""

    def register(engine: E) -> E:
        ray.cloudpickle.register_pickle_by_value(sys.modules[engine.__module__])  # it cannot import the file
        ENGINES.register(name)(engine)
        return engine

    return register


def engine_class(config: Config) -> type[EngineActor]:
    """UserError with the valid names, or for an argument unknown to vLLM."""
    load_plugin(config)
    engine = ENGINES.get(config.generator.backend)
    if engine.__module__ == f"{HERE}.vllm_actor":
        load(f"{HERE}.vllm_args:check_names")(config.generator.engine_kwargs)
    return engine
