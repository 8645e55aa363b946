"""Gives memory back that the C library keeps for itself after tensors of ever changing sizes were freed."""

from __future__ import annotations

import contextlib
import ctypes

INTERVAL = 10
"""Steps between two calls: one takes some milliseconds."""


def return_free_memory() -> None:
    """glibc's malloc_trim; elsewhere nothing. Without it a process that frees all it takes still grows for hours."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
