"""Nothing here is timed: a busy machine must not fail a property."""

import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell's background jobs ignore Ctrl-C, and so does all that they start: tests that send it need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.full`: what takes long and finds little beyond the others is left to `make test FULL=1`."""
    if not os.environ.get("SKYRL_TEST_FULL"):
        left = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
