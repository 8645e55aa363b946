"""Whether this engine's process is a second life."""

from __future__ import annotations

import warnings

import ray


def was_restarted() -> bool:
    """True in an actor that Ray made again after its process died: it starts paused, for its weights are old."""
    if not ray.is_initialized():
        return False
    with warnings.catch_warnings(action="ignore"):  # Ray warns of a call that it makes itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
