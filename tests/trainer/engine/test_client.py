"""The engine client against an engine that dies and comes back: each request is answered once, or says why."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from skyrl_trainer.engine import client as module
from skyrl_trainer.engine.client import EngineClient
from skyrl_trainer.errors import EngineDied
from skyrl_trainer.types import GenerationOutput, GenerationRequest, SamplingOptions
from tests.trainer.fakes import fake_tokens

REQUESTS = [GenerationRequest(f"0/{i}/0#0", [i + 1], SamplingOptions(3), seed=i) for i in range(12)]


class MortalEngine:
    """An actor's handle. `fate[n]` says what happens in the n-th call that reaches a living process: "" nothing,
    "die" before it does anything, "answer lost" after it did, "gone" for good."""

    def __init__(self, fate: list[str], downtime: float = 0.003) -> None:
        self.submitted: list[list[str]] = []
        """The requests of every `submit` that a process took, a list a call."""
        self._fate, self._downtime = fate, downtime
        self._down_until = 0.0
        self._done: list[GenerationOutput] = []
        self._life = 0
        self.submit = SimpleNamespace(remote=self._submit)
        self.collect = SimpleNamespace(remote=self._collect)

    def _enter(self) -> str:
        if asyncio.get_running_loop().time() < self._down_until:
            raise _unavailable()
        fate = self._fate.pop(0) if self._fate else ""
        if fate == "gone":
            self._fate = [fate]
            raise ActorDiedError
        if fate == "die":
            self._die()
        return fate

    def _die(self) -> None:
        self._down_until = asyncio.get_running_loop().time() + self._downtime
        self._done, self._life = [], self._life + 1
        raise _unavailable()

    async def _submit(self, client: str, requests: list[GenerationRequest]) -> None:
        fate = self._enter()
        self.submitted.append([request.request_id for request in requests])
        self._done += [fake_tokens(request) for request in requests]
        if fate == "out of reach":
            raise _unavailable()

    async def _collect(self, client: str, timeout: float) -> list[GenerationOutput]:
        self._enter()
        life = self._life
        await asyncio.sleep(0.001)
        if life != self._life:
            raise _unavailable()
        done, self._done = self._done[:3], self._done[3:]
        return done


def _unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("away", b"0" * 16)


async def ask(client: EngineClient, sizes: list[int]) -> list[GenerationOutput]:
    """REQUESTS in rounds of these sizes, all at once."""
    rounds, start = [], 0
    for size in sizes:
        rounds.append(asyncio.ensure_future(client.generate_round(REQUESTS[start : start + size])))
        start += size
        await asyncio.sleep(0.0005)
    return [output for outputs in await asyncio.wait_for(asyncio.gather(*rounds), 20) for output in outputs]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["", "", "die", "out of reach"]), max_size=12), st.sampled_from([[12], [5, 7], [1] * 12])
)
def test_every_request_is_answered_once_whenever_the_engine_dies(fate: list[str], sizes: list[int]) -> None:
    async def scenario() -> None:
        module.RETRY_SECONDS = 0.001
        engine = MortalEngine(list(fate))
        client = EngineClient(engine, "c")
        outputs = await ask(client, sizes)
        assert outputs == [fake_tokens(request) for request in REQUESTS]
        names = [request.request_id for request in REQUESTS]
        for batch in engine.submitted:
            assert batch == sorted(batch, key=names.index) and len({*batch}) == len(batch)

    asyncio.run(scenario())


def test_nothing_is_sent_again_that_was_answered_or_given_up() -> None:
    async def scenario() -> None:
        engine = MortalEngine(["", "", "die"])  # submit, the first three answers, death
        client = EngineClient(engine, "c")
        rest = asyncio.ensure_future(client.generate_round(REQUESTS[:5]))
        cancelled = asyncio.ensure_future(client.generate(REQUESTS[5]))
        await asyncio.sleep(0)
        await asyncio.sleep(0.0001)
        cancelled.cancel()
        assert [output.request_id for output in await asyncio.wait_for(rest, 5)] == [r.request_id for r in REQUESTS[:5]]
        first, second = engine.submitted
        assert len(first) == 6 and second == [name for name in first if name in second]
        assert REQUESTS[5].request_id not in second and len(second) == 2

    asyncio.run(scenario())


def test_an_engine_that_is_gone_for_good_is_an_error_at_once() -> None:
    async def scenario() -> None:
        client = EngineClient(MortalEngine(["", "gone"]), "c")
        with pytest.raises(EngineDied, match="process died"):
            await asyncio.wait_for(client.generate_round(REQUESTS), 5)
        with pytest.raises(EngineDied):
            await client.generate(REQUESTS[0])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        (EngineDied("The engine of m stopped. It is full."), "The engine of m stopped. It is full."),
        (KeyError("x"), "An engine failed: KeyError('x')"),
    ],
)
def test_an_engine_whose_step_loop_raised_is_its_sentence_without_a_traceback(cause: Exception, sentence: str) -> None:
    """Ray's error is an instance of the cause's class, and says a traceback in colours."""
    raised = RayTaskError("collect", "Traceback (most recent call last):\n  ...", cause).as_instanceof_cause()
    assert isinstance(raised, type(cause)) and "Traceback" not in sentence

    async def collect(client: str, timeout: float) -> list[GenerationOutput]:
        raise raised

    async def scenario() -> None:
        engine = MortalEngine([])
        engine.collect.remote = collect
        client = EngineClient(engine, "c")
        for _ in range(2):  # under way, and later
            with pytest.raises(EngineDied) as died:
                await asyncio.wait_for(client.generate_round(REQUESTS), 5)
            assert str(died.value) == sentence and not isinstance(died.value, RayTaskError)

    asyncio.run(scenario())


def test_an_engine_that_does_not_come_back_is_an_error_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.05)

    async def scenario() -> None:
        client = EngineClient(MortalEngine(["", "die"], downtime=60), "c")
        with pytest.raises(EngineDied, match="not back"):
            await asyncio.wait_for(client.generate_round(REQUESTS), 5)

    asyncio.run(scenario())


def test_an_engine_that_comes_back_after_its_limit_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster it may, and an endpoint beside a training would answer 503 for ever. Nobody waits twice."""
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.05)

    async def scenario() -> None:
        engine = MortalEngine(["die"], downtime=60)
        client = EngineClient(engine, "c")
        with pytest.raises(EngineDied, match="not back"):
            await asyncio.wait_for(client.generate_round(REQUESTS[:3]), 5)
        monkeypatch.setattr(module, "RESTART_SECONDS", 60)
        with pytest.raises(EngineDied, match="not back"):
            await asyncio.wait_for(client.generate(REQUESTS[3]), 5)
        engine._down_until = 0.0
        assert await asyncio.wait_for(client.generate(REQUESTS[4]), 5) == fake_tokens(REQUESTS[4])
        assert engine.submitted == [[REQUESTS[4].request_id]]
        engine._fate, engine._downtime = ["die"], 0.05  # the next death has all its patience
        assert await asyncio.wait_for(client.generate(REQUESTS[5]), 5) == fake_tokens(REQUESTS[5])

    asyncio.run(scenario())
