"""The RolloutWorker's side of the EnvWorkers: coalesced calls, and episodes that outlive the process they were in.

`EnvClient` knows the workers; `RemoteEnv` is one episode's env. An env is a function of its seed and the actions, so a
RemoteEnv whose process has ended resets a new one, repeats the recorded actions (tools with effects outside answer from
the record) and goes on: where, and when it fails instead, is in docs/architecture.md ("Life cycles").
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, TypeVar

from ray.exceptions import ObjectLostError, RayActorError, RayError

from skyrl_trainer.errors import UserError
from skyrl_trainer.rollout.env_worker import Call, EnvReply
from skyrl_trainer.types import Sample

RESTART_LIMIT = 60.0
"""Seconds that a dead EnvWorker is waited for."""
RETRY_SECONDS = 0.02
ASK_SECONDS = 0.02
"""Between two questions for all the calls of envs that wait."""
MAX_SHARED_DEATHS = 2
MAX_BATCH = 64
"""Items of one call: enough to make its cost small, and few enough that the first answers are soon there."""
Item = TypeVar("Item")
Reply = TypeVar("Reply")


class Coalescer(Generic[Item, Reply]):
    """Joins calls into batched ones, without a timer: one is under way, the next takes all that waits."""

    def __init__(self, call_many: Callable[[list[Item]], Awaitable[list[Reply]]]) -> None:
        self._call_many = call_many
        self._waiting: list[tuple[Item, asyncio.Future[Reply]]] = []
        self._drain: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Reply:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._drain is None:
            self._drain = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch = [(item, future) for item, future in self._waiting[:MAX_BATCH] if not future.done()]
            del self._waiting[:MAX_BATCH]
            if batch:
                items, futures = zip(*batch, strict=True)
                await settle(futures, self._call_many, list(items))
        self._drain = None


async def settle(futures: Collection[asyncio.Future[Reply]], call: Callable[..., Any], asked: list[Any]) -> None:
    """Gives each future its reply, if any, or all what the call raised; not those cancelled."""
    try:
        replies = await call(asked)
    except Exception as error:
        for future in futures:
            if not future.done():
                future.set_exception(error)
        return
    for future, reply in zip(futures, replies, strict=True):
        if reply is not None and not future.done():
            future.set_result(reply)


class Host:
    """One EnvWorker as a RolloutWorker sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._shared: Coalescer[Call, EnvReply] = Coalescer(handle.call_many.remote)
        self.episodes = 0
        self.recovery: asyncio.Task[None] | None = None
        """Under way while the worker is dead."""
        self.gone = self.replaced = False
        """Replaced by another: its node died, or was crowded."""
        self._unsure: list[tuple[bool, str]] = []
        """Envs that were lost, or live on if the worker was only out of reach."""
        self._waiting: dict[str, asyncio.Future[EnvReply]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def call(self, alone: bool, *call: Any) -> EnvReply:
        """alone: in a process of its own. A dead worker has lost the env."""
        try:
            reply = await (self._handle.alone.remote(call) if alone else self._shared(call))
            return await self._ended(call[1]) if reply.kind == "waiting" else reply
        except (RayActorError, ObjectLostError) as error:
            self._unsure.append((alone, call[1]))
            if self.recovery is None:
                self.recovery = asyncio.create_task(self._recover())
            return EnvReply(error=str(error).splitlines()[0], kind="lost")

    async def _ended(self, key: str) -> EnvReply:
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await future

    async def _ask(self) -> None:
        while self._waiting:
            await asyncio.sleep(ASK_SECONDS)
            asked = {key: future for key, future in self._waiting.items() if not future.done()}
            await settle(asked.values(), self._answers, list(asked))
            self._waiting = {key: future for key, future in self._waiting.items() if not future.done()}
        self._asking = None

    async def _answers(self, keys: list[str]) -> list[EnvReply | None]:
        reply = await self._shared(("ended", "", keys))
        if reply.error is not None:
            return [EnvReply(error=reply.error, kind="lost")] * len(keys)
        return [EnvReply.read(reply.info[key]) if key in reply.info else None for key in keys]

    async def _recover(self) -> None:
        deadline = time.monotonic() + RESTART_LIMIT
        while not self.gone:
            closing = self._handle.call_many.remote([("close", key) for alone, key in self._unsure if not alone])
            try:
                await asyncio.wait_for(closing, RESTART_LIMIT)
                for key in (key for alone, key in self._unsure if alone):
                    self._handle.alone.remote(("close", key))  # which may wait for a call under way
                break
            except (RayError, TimeoutError):
                self.gone = self.gone or time.monotonic() > deadline
                await asyncio.sleep(RETRY_SECONDS)
        self._unsure, self.recovery = [], None


class EnvClient:
    """All EnvWorkers, as one RolloutWorker uses them."""

    def __init__(self, handles: list[Any]) -> None:
        self._hosts: dict[Any, Host] = {}
        self.use(handles)

    def use(self, handles: list[Any]) -> None:
        """From now on these."""
        for handle in self._hosts.keys() - handles:
            self._hosts[handle].gone = self._hosts[handle].replaced = True
        self._hosts = {handle: self._hosts.get(handle) or Host(handle) for handle in handles}

    async def place(self) -> Host:
        """The living worker with the fewest episodes; waits if all are dead. UserError when none comes back."""
        while hosts := [host for host in self._hosts.values() if not host.gone]:
            if living := [host for host in hosts if host.recovery is None]:
                return min(living, key=lambda host: host.episodes)
            await asyncio.wait([host.recovery for host in hosts if host.recovery], return_when=asyncio.FIRST_COMPLETED)
        raise UserError(
            f"No EnvWorker is left: the last one died and was not back after {RESTART_LIMIT:g} seconds; "
            "see ray-logs in the run's folder, and whether memory ran out."
        )


class RemoteEnv:
    """One episode's env, wherever it lives. `replays` counts how often it was rebuilt from its record."""

    def __init__(self, client: EnvClient, key: str, sample: Sample) -> None:
        self._client = client
        self._key = key
        self._sample = sample
        self._past: list[tuple[str, list[dict[str, Any]]]] = []
        self._host: Host | None = None
        self._deaths = 0
        self._alone, self._open = sample.agent is not None, False
        self.replays = 0
        self.close_error: str | None = None

    async def reset(self) -> EnvReply:
        return await self._settle(None)

    async def step(self, action: str) -> EnvReply:
        reply = await self._settle(action)
        self._past.append((action, reply.info.get("tool_calls") or []))
        return reply

    async def close(self, timeout: float = 5.0) -> None:
        """Tells the worker to close what is still open; an env that is over or failed has been closed there."""
        # Behind a slow env the worker closes it after `timeout`, when nobody waits any more.
        host = self._leave()
        if host is not None and self._open:
            try:
                reply = await asyncio.wait_for(asyncio.shield(host.call(self._alone, "close", self._key)), timeout)
                self.close_error = reply.close_error or reply.error
            except TimeoutError:
                self.close_error = f"The env's close was not answered after {timeout:g} seconds."

    async def _settle(self, action: str | None) -> EnvReply:
        while True:
            if self._host is None:
                reply = await self._build(action)
            else:
                reply = await self._host.call(self._alone, "step", self._key, action)
            if reply.kind not in ("died", "lost"):
                break
            host = self._leave()
            if (self._alone or self._deaths) and host and host.recovery:  # it matters whose fault it was
                await asyncio.wait([host.recovery])
            if host and host.replaced:
                continue
            self._deaths += 1
            if self._alone:
                break
            self._alone = reply.kind == "died" or self._deaths == MAX_SHARED_DEATHS
        if reply.kind == "lost":
            several = f"{self._deaths} EnvWorkers died under this episode (killed, or out of memory)"
            return EnvReply(error=f"{several}: it is not played again.", kind="raised")
        self._open = reply.error is None and not (reply.terminated or reply.truncated)
        self.close_error = reply.close_error or self.close_error
        return reply

    async def _build(self, action: str | None) -> EnvReply:
        host = self._host = await self._client.place()
        host.episodes += 1
        self._open = True
        reply = await host.call(self._alone, "reset", self._key, self._sample)
        if action is None:
            return reply
        self.replays += 1
        for step in (*self._past, (action,)):
            if reply.error is not None:
                break
            reply = await host.call(self._alone, "step", self._key, *step)
        return reply

    def _leave(self) -> Host | None:
        host, self._host = self._host, None
        if host is not None:
            host.episodes -= 1
        return host
