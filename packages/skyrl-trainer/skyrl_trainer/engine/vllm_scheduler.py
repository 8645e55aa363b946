"""vLLM's schedulers, with a short way for sequences that go on by one token; for all others vLLM does its own work.

On a GPU a small model waits for what Python does for every sequence in every step, and most of that was here.
"""

from typing import Any

from vllm import __version__
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


class ShortScheduler(Scheduler):
    """Leaves out only what comes to nothing: in the vLLM it was made for, with plain attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache, *others = self.kv_cache_manager.coordinator.single_type_managers
        self._block = self._cache.block_size
        plain = type(self._cache) is FullAttentionManager and self._block == self.hash_block_size and not others
        if plain and __version__.startswith("0.32."):
            self._allocate = self.kv_cache_manager.allocate_slots
            self.kv_cache_manager.allocate_slots = self._slots

    def _slots(self, request: Any, count: int, **options: Any) -> Any:
        """None to add where a sequence's blocks have room for `count` tokens, and the full ones are shared already."""
        tokens, key = request.num_computed_tokens + count, request.request_id
        room = tokens <= len(self._cache.req_to_blocks.get(key, ())) * self._block
        shared = min(tokens, request.num_tokens) // self._block <= self._cache.num_cached_block.get(key, 0)
        if room and shared and options == {"num_lookahead_tokens": 0}:  # a waiting sequence comes with more of them
            return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate(request, count, **options)


class ShortAsyncScheduler(ShortScheduler, AsyncScheduler):
    """The same for steps that are planned before the one before has ended, vLLM's choice on a GPU."""


def scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """For vLLM's `scheduler_cls`, which it calls when it knows whether it plans ahead."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (ShortAsyncScheduler if ahead else ShortScheduler)(vllm_config, **options)
