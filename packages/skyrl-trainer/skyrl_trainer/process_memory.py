"""Memory of the processes of a run: what the C library keeps is given back, and the whole is measured."""

import contextlib
import ctypes

import psutil

INTERVAL = 10
"""Steps between two calls of `return_free_memory`: one takes some milliseconds."""
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**30}
"""Elements of the [tokens, vocabulary] logits that exist at any time in the learner; more are scored in chunks."""


def return_free_memory() -> None:
    """glibc's malloc_trim. Without it a process that frees all it takes still grows for hours."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def pss_gib() -> float:
    """GiB of this process and all its descendants (Linux: the sum of PSS; where /proc has no PSS, of RSS)."""
    me, total = psutil.Process(), 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it ended between the two looks
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total / 2**30
