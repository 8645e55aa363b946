"""How much memory a run takes, and may take: proportional set size, so that shared pages count once."""

from __future__ import annotations

from pathlib import Path

import psutil

LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
"""Elements of the [tokens, vocabulary] logits that exist at any time in the learner; more are scored in chunks."""


def pss_gib() -> float:
    """GiB of this process and all its descendants (Linux: the sum of PSS; where /proc has no PSS, of RSS)."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue  # it ended between the two looks
    return total / 2**30
