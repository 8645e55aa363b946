"""What stops a command keeps its name, wherever it is caught."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from skyrl_trainer.errors import UserError
from skyrl_trainer.run.processes import Processes
from skyrl_trainer.run.signals import Stopped, StopSignal
from skyrl_trainer.settings import Config


def test_signals_reach_the_main_thread_alone_and_others_say_so() -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(UserError, match="call them in the main thread of a process"):
        pool.submit(StopSignal().__enter__).result()


def test_a_ray_of_the_users_own_is_left_alone() -> None:
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with (
            pytest.raises(UserError, match="has a Ray already"),
            Processes(Config(), "", plays=False),
        ):
            pass
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.parametrize("wait", [ray.get, lambda never: ray.wait([never], timeout=60)], ids=["get", "wait"])
def test_a_signal_in_a_call_of_ray_is_named(wait: Callable[[ray.ObjectRef], object]) -> None:
    """Ray makes a KeyboardInterrupt of its own of whatever a signal raises in there."""

    @ray.remote(num_cpus=0)
    class Never:
        def answer(self) -> None:
            threading.Event().wait(60)

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    try:
        timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt) as found, StopSignal():
            answer = Never.remote().answer.remote()  # type: ignore[attr-defined]
            timer.start()
            wait(answer)
        assert isinstance(found.value, Stopped) and found.value.number == signal.SIGTERM
    finally:
        ray.shutdown()
