"""Coroutines that code without `async` waits for: one event loop of a process serves all of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_gym.openenv import loop_of, result_of


async def here() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_calls_from_any_thread_and_from_a_running_loop_share_a_loop_that_goes_on() -> None:
    async def cell() -> asyncio.AbstractEventLoop:
        return result_of(here())

    with ThreadPoolExecutor(8) as pool:
        loop, *others = pool.map(lambda _: result_of(here()), range(16))
    assert {*others, result_of(here()), asyncio.run(cell())} == {loop} and loop.is_running()


def test_what_a_coroutine_raises_arrives_and_the_loop_goes_on() -> None:
    async def fails(error: BaseException) -> None:
        raise error

    for kind in (KeyError, SystemExit, KeyboardInterrupt):
        with pytest.raises(kind):
            result_of(fails(kind("lost")), 20)
    assert result_of(here(), 20).is_running()


def test_work_that_is_late_is_cancelled() -> None:
    ended = []

    async def sleeps() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError):
        result_of(sleeps(), 0.2)
    result_of(asyncio.sleep(0.1))
    assert ended


PROGRAM = """
import asyncio, os, signal, sys, threading
from skyrl_gym.openenv import result_of

assert result_of(asyncio.sleep(0, "parent")) == "parent"
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(result_of(asyncio.sleep(0, "child")) != "child")
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    result_of(asyncio.sleep(600))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_fork_has_a_loop_of_its_own_and_ctrl_c_ends_a_wait() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "interrupted\n", run.stderr


def test_what_holds_up_one_loop_holds_up_no_other() -> None:
    async def blocks() -> str:
        return result_of(asyncio.sleep(0, "done"), 20, loop_of(0, "another"))

    assert result_of(blocks(), 20) == "done"


def test_a_loop_is_made_once_however_many_ask_at_once() -> None:
    def asked(name: str) -> asyncio.AbstractEventLoop:
        together.wait(20)
        return loop_of(0, name)

    for number in range(20):
        together = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(asked, [f"loop {number}"] * 8))) == 1


def test_a_coroutine_that_blocks_costs_its_own_call_alone() -> None:
    async def blocks() -> None:
        time.sleep(6)

    with pytest.raises(TimeoutError):
        result_of(blocks(), 0.2)
    began = time.monotonic()
    assert result_of(asyncio.sleep(0, "next"), 3) == "next" and time.monotonic() - began < 3


def test_a_coroutine_that_is_late_and_does_not_block_leaves_the_loop_to_the_next() -> None:
    loop = result_of(here())
    with pytest.raises(TimeoutError):
        result_of(asyncio.sleep(60), 0.2)
    assert result_of(here()) is loop
