"""Nothing here is timed: a busy machine must not fail a property."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
import ray
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell's background jobs ignore Ctrl-C, those of nohup SIGHUP, and so does all that they start: tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.full`: what takes long and finds little beyond the others is left to `make test FULL=1`."""
    if not os.environ.get("SKYRL_TEST_FULL"):
        left = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


for unused in ("monitor", "log_monitor", "api_server"):  # nor does run/processes.py start them
    setattr(ray._private.node.Node, f"start_{unused}", lambda *_, **__: None)


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environments that a test registers are gone after it."""
    import gymnasium

    from skyrl_gym import registry

    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    before = set(gymnasium.registry)
    yield
    for env_id in set(gymnasium.registry) - before:
        del gymnasium.registry[env_id]


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """The evaluations of a file that this process runs share the Ray that the first of them starts."""
    import ray

    from skyrl_trainer.run import processes

    start, stop = processes.start_ray, ray.shutdown
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:

        def start_once(config: processes.Config) -> None:
            if not ray.is_initialized():
                with pytest.MonkeyPatch.context() as outside:  # the evaluation's own temporary files end with it
                    outside.setenv("TMPDIR", folder)
                    outside.setattr(tempfile, "tempdir", folder)
                    start(config)

        patch.setattr(processes, "start_ray", start_once)
        patch.setattr(ray, "shutdown", lambda: None)
        yield
        stop()
