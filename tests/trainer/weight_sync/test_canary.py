"""The canary's verdict, on logprobs that are told; on real engines: tests/e2e/test_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from skyrl_trainer.errors import EngineDied, SyncError
from skyrl_trainer.types import GenerationOutput
from skyrl_trainer.weight_sync.canary import NUM_PREFIXES, TOLERANCE, Canary
from skyrl_trainer.weight_sync.shared_memory import SyncReport

IDS = list(range(8))
REPORT = SyncReport(0.1, 4, "bytes", ("bytes",))


class Told(Canary):
    """Of one engine, whose logprobs are those of a policy with so much more on every token."""

    def __init__(self) -> None:
        super().__init__([None], IDS, TOLERANCE["float32"])
        self.version, self.policy = 0, 0.0

    def _ask(self, engines: list[Any]) -> None: ...

    def _answers(self, engines: list[Any]) -> list[list[GenerationOutput]]:
        value = learner(self.policy)(IDS)[0, 1].item()
        said = {
            "top_logprobs": [{1: value}],
            "weight_versions": [self.version],
            "output_ids": [1],
            "logprobs": [value],
            "finish_reason": "length",
        }
        return [[GenerationOutput(str(i), **said) for i in range(NUM_PREFIXES)]]

    def seen(self, now: float, error: float) -> dict[str, float]:
        """After one more sync, to a policy that is `now`, with an engine that is so far from it."""
        self.version, self.policy = self.version + 1, now + error
        return self.check(self.version, learner(now), REPORT)


def learner(policy: float) -> Any:
    def logprobs(ids: list[int]) -> Tensor:
        return torch.full((len(ids), 3), -2.0 + policy, dtype=torch.float64)

    return logprobs


def test_two_right_implementations_may_be_as_far_apart_as_they_were_before() -> None:
    """Errors and changes of a run with tool_use's clone, on a processor where they are that large."""
    canary, now = Told(), 0.0
    for error, change in ((8.9e-5, 0.0), (7.4e-5, 2.7e-4), (6.3e-5, 8.1e-4), (2.35e-4, 2.08e-3)):
        now += change
        assert canary.seen(now, error)["sync/max_logprob_diff"] == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_visible_update_that_did_not_arrive_in_whole_is_found(share: float) -> None:
    canary = Told()
    for step in range(3):
        canary.seen(step * 1e-4, 2e-5)
    with pytest.raises(SyncError, match=r"the limit is 2\.00e-04 .*a tenth of the change"):
        canary.seen(2e-4 + 2e-3, -share * 2e-3 - 2e-5)


def test_no_error_beyond_the_tolerance_passes_whatever_was_seen_before() -> None:
    canary, now = Told(), 0.0
    for error in (4e-4, 4.9e-4, 4.9e-4):
        canary.seen(now := now + 2e-3, error)
    with pytest.raises(SyncError, match=r"the limit is 5\.00e-04"):
        canary.seen(now + 1e-2, 6e-4)


STOPPED = EngineDied("The engine of m stopped.")


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (RayTaskError("collect", "Traceback\n  ...", STOPPED).as_instanceof_cause(), "The engine of m stopped."),
        (GetTimeoutError("No answer."), "No answer."),
    ],
)
def test_an_engine_that_fails_under_the_canary_is_a_sentence(failed: RayError, reason: str) -> None:
    class Failing(Told):
        def _ask(self, engines: list[Any]) -> None:
            raise failed

    with pytest.raises(EngineDied) as raised:
        Failing().seen(0.0, 0.0)
    assert str(raised.value) == f"An engine failed under the canary: {reason}"
