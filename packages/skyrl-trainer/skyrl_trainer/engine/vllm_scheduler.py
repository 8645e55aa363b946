"""vLLM's schedulers, with a short way for sequences that go on by one token; for all others vLLM does its own work.

On a GPU a small model waits for what Python does for every sequence in every step, and most of that was here.
"""

from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus


class ShortScheduler(Scheduler):
    """Leaves out only what comes to nothing: with plain attention and plain sampling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache, *others = self.kv_cache_manager.coordinator.single_type_managers
        self._block = self._cache.block_size
        connectors = (self.connector, self.ec_connector, self.aux_output_connector)
        rare = (others, *connectors, self.num_spec_tokens, self.return_sampling_mask, self.log_stats)
        whole = type(self._cache) is FullAttentionManager and self._block == self.hash_block_size
        self._plain = whole and not any(rare)
        if self._plain:
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

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, EngineCoreOutputs]:
        """Appends the tokens of sequences that go on; first and last ones, prefills and the rest are vLLM's."""
        tokens, rows, logprobs = sampled.sampled_token_ids, sampled.req_id_to_index, sampled.logprobs
        if not (self._plain and tokens and logprobs):
            return super().update_from_output(scheduled, sampled)
        outputs, others = [], {}
        for key, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(key)
            if request is None or count > 1 or not self._goes_on(request, tokens[rows[key]]):
                others[key] = count
                continue
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(tokens[rows[key]][0])
            if request.num_output_placeholders:  # of steps planned before this token was known
                request.num_output_placeholders -= 1
            outputs.append(EngineCoreOutput(key, tokens[rows[key]], logprobs.slice_request(rows[key], 1)))
        found = super().update_from_output(replace(scheduled, num_scheduled_tokens=others), sampled)
        found.setdefault(0, EngineCoreOutputs()).outputs.extend(outputs)
        return found

    def _goes_on(self, request: Any, tokens: list[int]) -> bool:
        """Whether one more token is all that happens, by vLLM's `check_stop` and what VLLMEngine asks for."""
        params = request.sampling_params
        return (
            request.status is RequestStatus.RUNNING
            and len(tokens) == 1
            and request.prefill_stats is None
            and not request.num_stale_output_tokens
            and tokens[0] != params.eos_token_id
            and tokens[0] not in (params.stop_token_ids or ())
            and request.num_tokens + 1 < self.max_model_len
            and request.num_output_tokens + 1 < request.max_tokens
        )


class ShortAsyncScheduler(ShortScheduler, AsyncScheduler):
    """The same for steps that are planned before the one before has ended, vLLM's choice on a GPU."""


def scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """For vLLM's `scheduler_cls`, which it calls when it knows whether it plans ahead."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (ShortAsyncScheduler if ahead else ShortScheduler)(vllm_config, **options)
