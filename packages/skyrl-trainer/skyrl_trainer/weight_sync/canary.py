"""The canary: after every sync, does the engine compute what the learner computes?

Every engine gets a few prefixes of one fixed sequence, longer than two blocks of its prefix cache, for one token each;
the logprobs of its 20 likeliest tokens are compared with the learner's. The prefixes stay in the engine's cache, so a
sync that forgets to reset it is seen at the next check.

Old weights, or a stale copy of some, must be caught however small the update was. So the error is also held against
what the update changed; where that is less than the noise of two implementations, the checksum of the bytes decides.
"""

import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import Tensor

from skyrl_trainer.errors import EngineDied, EngineLost, SyncError
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions, StepMetrics
from skyrl_trainer.weight_sync.shared_memory import SyncReport

NUM_PREFIXES = 4
TOP_LOGPROBS = 20
CHECK_SECONDS = 120.0
TOLERANCE = {"float32": 5e-4, "bfloat16": 1.0}
"""By the weights' precision: how far two right implementations may be apart in a logprob."""
VISIBLE, NOISE = 2.0, 4.0
"""An update that changed a logprob by more than VISIBLE tolerances is visible: the error's limit is a tenth of it, but
not less than NOISE times the largest error that passed."""


class Canary:
    """`prompt_ids`: a fixed sequence of tokens, longer than two cache blocks (64 tokens with vLLM on a CPU)."""

    def __init__(self, engines: list[Any], prompt_ids: list[int], tolerance: float) -> None:
        if len(prompt_ids) <= NUM_PREFIXES:
            raise ValueError(f"The canary's sequence has {len(prompt_ids)} tokens; give it more than two cache blocks.")
        self._engines = engines
        self.away: set[int] = set()
        """As EngineCalls has it."""
        self._prefixes = [prompt_ids[: len(prompt_ids) - i] for i in range(NUM_PREFIXES)]
        self._prompt_ids = prompt_ids
        self._tolerance = tolerance
        self._before: Tensor | None = None
        self._noise = 0.0
        self._client = "canary"

    def check(
        self, version: int, learner_logprobs: Callable[[list[int]], Tensor], report: SyncReport, only: int | None = None
    ) -> StepMetrics:
        """`learner_logprobs(ids)`: log-softmax after each token of `ids`, shape (T, V), position t given ids[:t + 1].
        only: an engine that was restored between two syncs. Returns the largest error, and the largest change since the
        previous check of all (0.0 at the first). SyncError; EngineLost when an engine dies meanwhile.
        """
        numbers = [only] if only is not None else [n for n in range(len(self._engines)) if n not in self.away]
        engines = [self._engines[number] for number in numbers]
        try:
            self._ask(engines)
            now_TV = learner_logprobs(self._prompt_ids).detach().float().cpu()  # while the engines compute
            answers = self._answers(engines)
        except ray.exceptions.RayActorError as lost:
            self._client += "+"  # the others' answers are left behind, under the old name
            raise EngineLost(f"An engine died under the canary, after a weight sync: {lost}") from lost
        except ray.exceptions.RayError as failed:
            raise EngineDied(f"An engine failed under the canary: {getattr(failed, 'cause', failed)}") from failed
        before_TV = self._before
        if only is None:
            self._before = now_TV
        worst, largest = 0.0, 0.0
        for index, outputs in zip(numbers, answers, strict=True):
            if any(each.weight_versions != [version] for each in outputs):
                raise SyncError(f"Engine {index} still samples with another version of the policy than {version}.")
            error, change = self._compare(outputs, now_TV, before_TV)
            where = f"engine {index}, version {version}"
            self._judge(where, error, change, report.engine_checksums[index], report)
            worst, largest = max(worst, error), max(largest, change)
        self._noise = max(self._noise, worst)
        return {"sync/max_logprob_diff": worst, "sync/canary_change": largest}

    def _ask(self, engines: list[Any]) -> None:
        options = SamplingOptions(max_tokens=1, top_logprobs=TOP_LOGPROBS)
        requests = [GenerationRequest(str(i), ids, options, i, first=True) for i, ids in enumerate(self._prefixes)]
        ray.get([engine.submit.remote(self._client, requests) for engine in engines], timeout=CHECK_SECONDS)

    def _answers(self, engines: list[Any]) -> list[list[GenerationOutput]]:
        deadline = time.monotonic() + CHECK_SECONDS
        replies = []
        for engine in engines:
            outputs: list[GenerationOutput] = []
            while len(outputs) < len(self._prefixes):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SyncError(f"The canary after a weight sync got no answer within {CHECK_SECONDS:.0f} s.")
                outputs += ray.get(engine.collect.remote(self._client, left), timeout=left + 10)
            replies.append(sorted(outputs, key=lambda output: int(output.request_id)))
        return replies

    def _compare(
        self, outputs: list[GenerationOutput], now_TV: Tensor, before_TV: Tensor | None
    ) -> tuple[float, float]:
        error, change = 0.0, 0.0
        for prefix, output in zip(self._prefixes, outputs, strict=True):
            if output.error is not None or not output.top_logprobs:
                raise SyncError(f"The canary after a weight sync failed in the engine: {output.error}")
            tokens = torch.tensor(list(output.top_logprobs[0]))
            engine_K = torch.tensor(list(output.top_logprobs[0].values()))
            now_K = now_TV[len(prefix) - 1, tokens]
            error = max(error, _distance(engine_K, now_K))
            if before_TV is not None:
                change = max(change, _distance(before_TV[len(prefix) - 1, tokens], now_K))
        return error, change

    def _judge(self, where: str, error: float, change: float, loaded: str | None, report: SyncReport) -> None:
        advice = "Training stops, for its rollouts would not come from the policy that is learned."
        if loaded != report.checksum:
            raise SyncError(
                f"Weight sync failed ({where}): the engine loaded other bytes (checksum {loaded or 'of nothing'}) "
                f"than the learner holds ({report.checksum}). {advice}"
            )
        visible = change > VISIBLE * self._tolerance
        limit = min(self._tolerance, max(change / 10, NOISE * self._noise)) if visible else self._tolerance
        if error >= limit:
            raise SyncError(
                f"Weight sync failed ({where}): the engine's logprobs differ from the learner's by {error:.2e}, "
                f"the limit is {limit:.2e} ({self._tolerance:g}, and a tenth of the change by a "
                f"visible update, {change:.2e}). {advice}"
            )


def _distance(a: Tensor, b: Tensor) -> float:
    distance = (a - b).abs().max()
    return float("inf") if torch.isnan(distance) else distance.item()
