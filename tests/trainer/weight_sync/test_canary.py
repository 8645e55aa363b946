"""The canary's verdict, on logprobs that are told; on real engines: tests/e2e/test_engine.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_trainer.errors import EngineDied, SyncError
from skyrl_trainer.learner.model import Learner
from skyrl_trainer.types import GenerationOutput
from skyrl_trainer.weight_sync.canary import NUM_PREFIXES, TOLERANCE, Canary
from skyrl_trainer.weight_sync.shared_memory import SyncReport
from tests.trainer.learner.tiny_models import VOCABULARY, make_config, save_model

IDS = list(range(8))
REPORT = SyncReport(0.1, 4, "bytes", ("bytes",))


class Told(Canary):
    """Of one engine, whose logprobs are those of a policy with so much more on every token."""

    def __init__(self, ids: list[int] = IDS, dtype: str = "float32") -> None:
        super().__init__([None], ids, TOLERANCE[dtype])
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


def test_in_bfloat16_the_rounding_of_a_trained_models_logits_passes(tmp_path: Path) -> None:
    """Which are as large as 12 to 30, where a step of bfloat16 is 0.06 to 0.25. The engine: another attention, and
    weights that are bfloat16 themselves."""
    path, ids = save_model(tmp_path), [number % VOCABULARY for number in range(96)]
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.norm.weight.mul_(16.0)
    model.save_pretrained(path)
    engine = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        logits_TV = engine(torch.tensor([ids])).logits[0].float()

    class Rounds(Told):
        def _answers(self, engines: list[Any]) -> list[list[GenerationOutput]]:
            outputs = []
            for place in range(-1, -1 - NUM_PREFIXES, -1):
                top = logits_TV[place].log_softmax(-1).topk(20)
                likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
                said = {"output_ids": [1], "logprobs": [0.0], "finish_reason": "length", "weight_versions": [1]}
                outputs.append(GenerationOutput(str(-1 - place), top_logprobs=[likeliest], **said))
            return [outputs]

    AcceleratorState._reset_state()  # one precision a process
    try:
        learner = Learner(make_config(trainer={"policy": {"model": {"dtype": "bfloat16"}}}), path, 1)
        found = Rounds(ids, "bfloat16").check(1, learner.token_logprobs, REPORT)["sync/max_logprob_diff"]
    finally:
        AcceleratorState._reset_state()
    assert logits_TV.max(-1).values.mean() > 10 and found > 0.2


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


def test_a_check_of_one_restored_engine_hides_no_change_from_the_check_of_all() -> None:
    """An engine that dies while weights are published is checked alone, before all are."""
    canary = Told()
    for step in range(3):
        canary.seen(step * 1e-4, 2e-5)
    canary.version, canary.policy = canary.version + 1, 2e-4 + 2e-3 + 2e-5
    canary.check(canary.version, learner(2e-4 + 2e-3), REPORT, only=0)
    canary.policy = 2e-4 + 2e-3 - 4e-4
    with pytest.raises(SyncError, match=r"the limit is 2\.00e-04 .*a tenth of the change"):
        canary.check(canary.version, learner(2e-4 + 2e-3), REPORT)
