"""vLLM's schedulers, with a short way for sequences that go on by one token; for all others vLLM does its own work."""

from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus


class ShortScheduler(Scheduler):
    """Leaves out only what comes to nothing: with plain attention and plain sampling."""

    running: list[Any]
    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache, *others = self.kv_cache_manager.coordinator.single_type_managers
        self._block = self._cache.block_size
        rare = [others, self.connector, self.ec_connector, self.aux_output_connector, self.use_pp]
        rare += [self.num_spec_tokens, self.return_sampling_mask, self.log_stats, self.defer_block_free]
        rare += [self.needs_kv_cache_zeroing, self.kv_cache_manager.watermark_blocks]
        rare += [self.scheduler_config.long_prefill_token_threshold]
        whole = type(self._cache) is FullAttentionManager and self._block == self.hash_block_size
        self._plain = whole and not any(rare)

    def _new_blocks(self, request: Any) -> Any:
        tokens, key = request.num_computed_tokens + 1, request.request_id
        room = tokens <= len(self._cache.req_to_blocks.get(key, ())) * self._block
        shared = min(tokens, request.num_tokens) // self._block <= self._cache.num_cached_block.get(key, 0)
        if room and shared:
            return None
        added = self.kv_cache_manager.allocate_slots(request, 1)
        return added.get_block_ids(allow_none=True)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A token of every running sequence, and vLLM's plan for those that wait; or all vLLM's."""
        running, going = self.running, self._going() if self._plain else []
        if not going:
            return super().schedule(throttle_prefills)
        keys = [each.request_id for each in going]
        blocks = [self._new_blocks(each) for each in going]
        limits = self.max_num_active_reqs, self.max_num_scheduled_tokens
        self.running, self.max_num_active_reqs = [], limits[0] - len(running)
        self.max_num_scheduled_tokens -= len(going)
        plan = super().schedule(throttle_prefills)
        self.running = running + self.running
        self.max_num_active_reqs, self.max_num_scheduled_tokens = limits
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(keys)
        plan.num_scheduled_tokens = dict.fromkeys(keys, 1) | plan.num_scheduled_tokens
        plan.total_num_scheduled_tokens += len(keys)
        cached = plan.scheduled_cached_reqs
        cached.req_ids[:0], cached.new_block_ids[:0] = keys, blocks
        cached.num_computed_tokens[:0] = [each.num_computed_tokens for each in going]
        cached.num_output_tokens[:0] = [each.num_output_tokens + each.num_output_placeholders for each in going]
        for each in going:
            self._planned(each)
        return plan

    def _going(self) -> list[Any]:
        going = [each for each in self.running if not self._ends(each)]
        room = min(self.kv_cache_manager.block_pool.get_num_free_blocks(), self.max_num_scheduled_tokens)
        unpaused = self._pause_state is PauseState.UNPAUSED
        return going if unpaused and len(going) <= room and all(map(self._takes_one, going)) else []

    # Whether its last token is planned already.
    @staticmethod
    def _ends(request: Any) -> bool:
        planned = request.num_output_placeholders
        return planned and request.num_computed_tokens + 2 - planned >= request.num_prompt_tokens + request.max_tokens

    def _takes_one(self, request: Any) -> bool:
        left = len(request._all_token_ids) + request.num_output_placeholders - request.num_computed_tokens
        return (
            left == 1
            and not (request.is_prefill_chunk or request.spec_token_ids or request.structured_output_request)
            and request.num_computed_tokens + 1 < self.max_model_len
            and (self.use_v2_model_runner or request.request_id in self.prev_step_scheduled_req_ids)
        )

    def _planned(self, request: Any) -> None:
        request.num_computed_tokens += 1
        request.num_in_flight_tokens += 1

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, EngineCoreOutputs]:
        """Appends the tokens of sequences that go on, a number for logprob if no more is asked; the rest is vLLM's."""
        tokens, rows, logprobs = sampled.sampled_token_ids, sampled.req_id_to_index, sampled.logprobs
        if not (self._plain and tokens and logprobs and logprobs.cu_num_generated_tokens is None):
            return super().update_from_output(scheduled, sampled)
        outputs, others, chosen = [], {}, logprobs.logprobs[:, 0].tolist()
        for key, count in scheduled.num_scheduled_tokens.items():
            request, row = self.requests.get(key), rows[key]
            if request is None or count > 1 or not self._goes_on(request, tokens[row]):
                others[key] = count
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids += tokens[row]
            request._all_token_ids += tokens[row]
            if not len(request._all_token_ids) % self._block:
                request.update_block_hashes()
            if request.num_output_placeholders:  # of steps planned before this token was known
                request.num_output_placeholders -= 1
            found = logprobs.slice_request(row, 1) if request.sampling_params.logprobs else chosen[row]
            outputs.append(EngineCoreOutput(key, tokens[row], found))
        all_outputs = super().update_from_output(replace(scheduled, num_scheduled_tokens=others), sampled)
        all_outputs.setdefault(0, EngineCoreOutputs()).outputs.extend(outputs)
        return all_outputs

    # Whether one more token is all that happens, by vLLM's `check_stop` and what VLLMEngine asks for.
    def _goes_on(self, request: Any, tokens: list[int]) -> bool:
        params = request.sampling_params
        return (
            request.status is RequestStatus.RUNNING
            and len(tokens) == 1
            and request.prefill_stats is None
            and not request.num_stale_output_tokens
            and tokens[0] != params.eos_token_id
            and tokens[0] not in (params.stop_token_ids or ())
            and len(request._all_token_ids) + 1 < self.max_model_len
            and len(request._output_token_ids) + 1 < request.max_tokens
        )


class ShortAsyncScheduler(ShortScheduler, AsyncScheduler):
    """The same for steps that are planned before the one before has ended, vLLM's choice on a GPU."""

    def _planned(self, request: Any) -> None:
        super()._planned(request)
        request.num_output_placeholders += 1
        request.next_decode_eligible_step = self.current_step + 1


def scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """For vLLM's `scheduler_cls`, which it calls when it knows whether it plans ahead."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (ShortAsyncScheduler if ahead else ShortScheduler)(vllm_config, **options)
