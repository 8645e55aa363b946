"""The RolloutWorker's side of the EnvWorkers: coalesced calls, and episodes that outlive the worker they were on.

`EnvClient` knows the workers; `RemoteEnv` is one episode's env. When a worker dies, Ray starts another process in
its place; an env is a function of its seed and the actions, so a RemoteEnv resets a new one, repeats the recorded
actions (tools with effects outside answer from the record) and goes on. Not so the episode that hung or crashed the
process, nor one that was on two workers that died.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from ray.exceptions import RayActorError

from skyrl_trainer.rollout.env_worker import CRASHED, EnvReply, Pong, Step
from skyrl_trainer.types import Sample

RESTART_LIMIT = 60.0
"""Seconds that a dead worker is waited for before its episodes go to another one."""
MAX_DEATHS = 2
MAX_BATCH = 64
"""Items of one call: enough to make its cost small, and few enough that the first answers are soon there."""

Item = TypeVar("Item")
Reply = TypeVar("Reply")


class WorkerDied(Exception):
    """The EnvWorker's process went away under a call."""


class Coalescer(Generic[Item, Reply]):
    """Joins single calls into batched ones, without a timer: one is under way, and the next takes all that waits."""

    def __init__(self, call_many: Callable[[list[Item]], Awaitable[list[Reply]]]) -> None:
        self._call_many = call_many
        self._waiting: list[tuple[Item, asyncio.Future[Reply]]] = []
        self._drain: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._drain is None:
            self._drain = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch = [(item, future) for item, future in self._waiting[:MAX_BATCH] if not future.done()]
            del self._waiting[:MAX_BATCH]
            if not batch:
                continue
            await settle([future for _, future in batch], self._call_many([item for item, _ in batch]))
        self._drain = None


async def settle(futures: list[asyncio.Future[Reply]], call: Awaitable[list[Reply]]) -> None:
    """Gives each future its reply, or all of them what the call raised; those that were cancelled are left alone."""
    try:
        replies = await call
    except Exception as error:
        for future in futures:
            if not future.done():
                future.set_exception(error)
        return
    for future, reply in zip(futures, replies, strict=True):
        if not future.done():
            future.set_result(reply)


class Host:
    """One EnvWorker as a RolloutWorker sees it: `life` counts its processes, `unexplained` deaths without a culprit."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.alive = asyncio.Event()
        self.alive.set()
        self.life = 0
        self.unexplained = 0
        self.culprits: dict[str, str] = {}
        self.episodes = 0
        self._pid: int | None = None
        self._recovery: asyncio.Task[None] | None = None
        self.reset: Coalescer[tuple[str, Sample], EnvReply] = Coalescer(self._guarded(handle.reset_many))
        self.step: Coalescer[Step, EnvReply] = Coalescer(self._guarded(handle.step_many))
        self.close: Coalescer[str, str | None] = Coalescer(self._guarded(handle.close_many))

    def _guarded(self, method: Any) -> Callable[[list[Any]], Awaitable[list[Any]]]:
        async def call(items: list[Any]) -> list[Any]:
            life = self.life
            try:
                return await method.remote(items)
            except RayActorError as error:
                self.restart(life)
                raise WorkerDied(str(error).splitlines()[0]) from None

        return call

    def restart(self, life: int) -> None:
        """Something of process number `life` failed: wait for the next process, once however many noticed."""
        if life == self.life and self._recovery is None:
            self.alive.clear()
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        pong: Pong | None = None
        while pong is None:
            try:
                pong = await self._handle.ping.remote()
            except RayActorError:
                await asyncio.sleep(0.1)
        self.life += 1
        if pong.culprit is not None and pong.pid != self._pid:
            self.culprits[pong.culprit] = pong.report
        else:
            self.unexplained += 1
        self._pid = pong.pid
        self._recovery = None
        self.alive.set()


class EnvClient:
    """All EnvWorkers, as one RolloutWorker uses them."""

    def __init__(self, handles: list[Any]) -> None:
        self._hosts = [Host(handle) for handle in handles]

    def make(self, key: str, sample: Sample) -> RemoteEnv:
        return RemoteEnv(self, key, sample)

    async def place(self) -> Host:
        """The living worker with the fewest episodes; waits for one if all are dead."""
        while True:
            alive = [host for host in self._hosts if host.alive.is_set()]
            if alive:
                return min(alive, key=lambda host: host.episodes)
            waits = [asyncio.create_task(host.alive.wait()) for host in self._hosts]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


class RemoteEnv:
    """One episode's env, wherever it lives. `replays` counts how often it was rebuilt from its record."""

    def __init__(self, client: EnvClient, key: str, sample: Sample) -> None:
        self._client = client
        self._key = key
        self._sample = sample
        self._past: list[tuple[str, list[dict[str, Any]]]] = []
        self._host: Host | None = None
        self._life = self._unexplained = self._deaths = 0
        self._open = False
        self.replays = 0
        self.close_error: str | None = None

    async def reset(self) -> EnvReply:
        return await self._settle(None)

    async def step(self, action: str) -> EnvReply:
        reply = await self._settle(action)
        self._past.append((action, reply.info.get("tool_calls") or []))
        return reply

    async def close(self, timeout: float = 1.0) -> None:
        """Tells the worker to close what is still open; an env that is over or failed has been closed there.

        Behind a slow env the worker closes it after `timeout`, when nobody waits any more.
        """
        host, self._host = self._host, None
        if host is None:
            return
        host.episodes -= 1
        if self._open and host.alive.is_set():
            try:
                self.close_error = await asyncio.wait_for(asyncio.shield(host.close(self._key)), timeout)
            except (WorkerDied, TimeoutError) as error:
                self.close_error = f"The env's close was not answered: {type(error).__name__}."

    async def _settle(self, action: str | None) -> EnvReply:
        """Does a reset (None) or a step, on as many workers as it takes."""
        while True:
            host = self._host
            try:
                if host is not None and host.life == self._life and host.alive.is_set():
                    assert action is not None, "reset is called once"
                    reply = await host.step((self._key, action))
                elif host is not None:
                    raise WorkerDied
                else:
                    reply = await self._build(action)
            except WorkerDied:
                failure = await self._mourn()
                if failure is not None:
                    return EnvReply(error=failure, kind="raised")
                continue
            if reply.kind == "lost" and self._host is not None:
                self._host.restart(self._life)
                continue
            self._open = reply.error is None and not (reply.terminated or reply.truncated)
            self.close_error = reply.close_error or self.close_error
            return reply

    async def _build(self, action: str | None) -> EnvReply:
        """A new env on some living worker, brought to where the episode is, and then the call that is due."""
        host = self._host = await self._client.place()
        host.episodes += 1
        self._life, self._unexplained = host.life, host.unexplained
        self._open = True
        reply = await host.reset((self._key, self._sample))
        if action is None:
            return reply
        self.replays += 1
        for past in self._past:
            if reply.error is not None:
                return reply
            reply = await host.step((self._key, *past))
        return reply if reply.error is not None else await host.step((self._key, action))

    async def _mourn(self) -> str | None:
        """After a death: who is to blame? Returns why this episode must fail, or None when it may be replayed."""
        host, self._host = self._host, None
        assert host is not None
        host.episodes -= 1
        try:
            await asyncio.wait_for(host.alive.wait(), RESTART_LIMIT)
            self._deaths += host.unexplained - self._unexplained
            # If the death was noticed late, this episode may have begun in the process that is alive now.
            with contextlib.suppress(WorkerDied):
                await host.close(self._key)
        except TimeoutError:
            self._deaths += 1
        report = host.culprits.pop(self._key, None)
        if report is not None:
            return f"{CRASHED}, where no Python code could interrupt it: {report}."
        if self._deaths >= MAX_DEATHS:
            return "Two EnvWorkers died under this episode (killed, or out of memory): it is not replayed again."
        return None
