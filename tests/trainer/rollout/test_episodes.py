"""Many episodes at once on a fake engine and fake envs: what comes back, in which order, and what it is made of."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RaySystemError

from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.errors import EngineDied, UserError
from skyrl_trainer.rollout.env_client import MAX_BATCH, Coalescer, EnvClient, Host
from skyrl_trainer.rollout.env_worker import EnvReply
from skyrl_trainer.rollout.episode import How
from skyrl_trainer.rollout.rollout_worker import Episodes
from skyrl_trainer.settings import GeneratorConfig
from skyrl_trainer.types import GenerationOutput, GenerationRequest, Sample, SamplingOptions, StopReason, Trajectory
from tests.trainer.fakes import FakeEngineClient, FakeEnvWorker, fake_tokens, tiny_tokenizer

PROMPT = ChatPrompt(tiny_tokenizer())
SAMPLING = SamplingOptions(max_tokens=8, stop_token_ids=PROMPT.stop_token_ids)
HOW = How(SAMPLING, False, False, False)


def shells(options: list[dict[str, Any]]) -> list[Trajectory]:
    return [
        Trajectory(f"0/{i}/0", Sample(f"s{i}", "fake", i, options=option), 0, seed=i)
        for i, option in enumerate(options)
    ]


async def play(
    trajectories: list[Trajectory],
    engine: Any,
    workers: list[FakeEnvWorker],
    deterministic: bool = False,
    **generator: Any,
) -> list[Trajectory]:
    config = GeneratorConfig(**{"max_turns": 4, "max_model_len": 4096, "max_concurrency": 4} | generator)
    envs = EnvClient(workers)
    episodes = Episodes(lambda trajectory: PROMPT, engine, envs, config)
    return await episodes.play(trajectories, How(SAMPLING, deterministic, deterministic, False))


class FlakyEngine(FakeEngineClient):
    """Refuses some requests."""

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        output = await super().generate(request)
        if random.Random(request.request_id).random() < 0.1:
            return GenerationOutput(request.request_id, [], [], [], "error", error="the engine refused it")
        return output


EPISODES = st.lists(
    st.fixed_dictionaries({"turns": st.integers(1, 6)}, optional={"raise_at": st.integers(0, 4)}),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(EPISODES, st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_every_episode_comes_back_exactly_once_under_failures_and_any_delays(
    options: list[dict[str, Any]], seed: int, deterministic: bool, num_workers: int
) -> None:
    rng = random.Random(seed)

    async def scenario() -> tuple[list[Trajectory], list[FakeEnvWorker]]:
        workers = [FakeEnvWorker(lambda: rng.choice([0, 0, 0.001])) for _ in range(num_workers)]
        engine = FlakyEngine(lambda request: rng.choice([0, 0, 0.001, 0.002]))
        killer = asyncio.get_running_loop().call_later(0.002, workers[0].kill)
        done = await play(shells(options), engine, workers, deterministic)
        killer.cancel()
        await asyncio.sleep(0.06)  # what began on a worker whose death was noticed late is closed when it answers again
        return done, workers

    done, workers = asyncio.run(scenario())
    assert [trajectory.trajectory_id for trajectory in done] == [f"0/{i}/0" for i in range(len(options))]
    assert all((trajectory.error is not None) == trajectory.stop_reason.failed for trajectory in done)
    assert not any(worker.envs for worker in workers), "every env is closed"


@settings(max_examples=40, deadline=None)
@given(EPISODES, st.booleans())
def test_next_prompt_is_previous_prompt_output_and_observation(
    options: list[dict[str, Any]], deterministic: bool
) -> None:
    engine = FakeEngineClient()

    async def scenario() -> list[Trajectory]:
        return await play(shells(options), engine, [FakeEnvWorker()], deterministic)

    sent = {}
    for trajectory in asyncio.run(scenario()):
        sent = {r.request_id: r for r in engine.requests if r.request_id.startswith(trajectory.trajectory_id + "#")}
        context: list[int] = []
        for number, turn in enumerate(trajectory.turns):
            if number:
                before = trajectory.turns[number - 1]
                assert turn.prompt_ids == PROMPT.observation(before.observation, before.output_ids)
            context += turn.prompt_ids
            assert sent[f"{trajectory.trajectory_id}#{number}"].prompt_ids == context
            context += turn.output_ids
            assert turn.action == PROMPT.decode(turn.output_ids)
        assert trajectory.token_ids() == context
        mask, logprobs = trajectory.loss_mask(), trajectory.rollout_logprobs()
        assert len(mask) == len(logprobs) == len(context)
        assert sum(mask) == trajectory.num_output_tokens
        outputs = [token for turn in trajectory.turns for token in turn.output_ids]
        assert [token for token, bit in zip(context, mask, strict=True) if bit] == outputs
        assert all((value != 0.0) == bool(bit) for value, bit in zip(logprobs, mask, strict=True))


@pytest.mark.parametrize("stop", [["e"], list("aeinorst")])
def test_an_answer_ends_at_the_texts_that_the_env_names(stop: list[str]) -> None:
    """The env is told all up to the stop and the stop; what an engine that does not know of it wrote on is gone. The
    next prompt begins with the end of the turn, and the episode was not cut off."""
    engine, options = FakeEngineClient(), [{"turns": 3, "stop": stop, "number": number} for number in range(20)]
    done = asyncio.run(play(shells(options), engine, [FakeEnvWorker()]))
    asked = {request.request_id: request for request in engine.requests}
    assert {request.options.stops for request in asked.values()} == {tuple(stop)}
    stopped = 0
    for trajectory in done:
        assert not trajectory.stop_reason.failed and len(trajectory.turns) == 3
        context: list[int] = []
        for number, turn in enumerate(trajectory.turns):
            request = asked[f"{trajectory.trajectory_id}#{number}"]
            context += turn.prompt_ids
            assert request.prompt_ids == context
            whole, size = fake_tokens(request).output_ids, len(turn.output_ids)
            assert turn.output_ids == whole[:size] and len(turn.logprobs) == len(turn.weight_versions) == size
            said = [each for each in stop if each in turn.action]
            assert len(said) == turn.action.endswith(tuple(stop))
            assert PROMPT.decode(turn.output_ids).startswith(turn.action)
            if said:
                stopped += 1
                assert PROMPT.decode(turn.output_ids[:-1]) in turn.action[:-1]
                if number + 1 < len(trajectory.turns):
                    assert trajectory.turns[number + 1].prompt_ids[0] == PROMPT.end_of_turn_id
            context += turn.output_ids
        ended = bool(said) or turn.output_ids[-1] == PROMPT.end_of_turn_id
        assert trajectory.stop_reason is (StopReason.TERMINATED if ended else StopReason.LENGTH)
    assert stopped > 5


def test_stops_that_are_none_fail_their_episode_with_a_sentence() -> None:
    engine = FakeEngineClient()
    [wrong, good] = asyncio.run(play(shells([{"stop": [7]}, {"stop": ["</a>"]}]), engine, [FakeEnvWorker()]))
    assert wrong.stop_reason is StopReason.ENV_ERROR and not wrong.turns
    assert 'info["stop"] is [7], but should be a list of texts such as ["</search>"]' in (wrong.error or "")
    assert not good.stop_reason.failed


@settings(max_examples=25, deadline=None)
@given(EPISODES, st.integers(0, 10**6), st.integers(0, 10**6))
def test_deterministic_rollouts_ask_the_same_in_the_same_order_whatever_the_delays(
    options: list[dict[str, Any]], first_seed: int, second_seed: int
) -> None:
    def run(seed: int) -> tuple[list[list[str]], list[GenerationRequest], list[list[int]]]:
        rng = random.Random(seed)

        async def scenario() -> tuple[FakeEngineClient, list[Trajectory]]:
            engine = FakeEngineClient(lambda request: rng.choice([0, 0.001]))
            workers = [FakeEnvWorker(lambda: rng.choice([0, 0, 0.001])) for _ in range(2)]
            return engine, await play(shells(options), engine, workers, deterministic=True)

        engine, done = asyncio.run(scenario())
        return engine.rounds, engine.requests, [trajectory.token_ids() for trajectory in done]

    first, second = run(first_seed), run(second_seed)
    assert first == second
    assert all(request.seed is not None for request in first[1])
    for round_ in first[0]:
        assert round_ == sorted(round_, key=lambda name: int(name.split("/")[1])), "in trajectory order"


def test_turns_of_different_episodes_do_not_wait_for_each_other() -> None:
    async def scenario() -> tuple[FakeEngineClient, list[Trajectory]]:
        engine = FakeEngineClient(lambda request: 0.2 if request.request_id == "0/0/0#0" else 0.0)
        return engine, await play(shells([{"turns": 2}, {"turns": 4}]), engine, [FakeEnvWorker()])

    engine, _ = asyncio.run(scenario())
    assert [request.request_id for request in engine.requests][-1] == "0/0/0#1", "the slow one's second turn comes last"


def test_concurrency_bounds_the_episodes_in_the_engine() -> None:
    async def scenario() -> tuple[FakeEngineClient, list[Trajectory]]:
        engine = FakeEngineClient(lambda request: 0.002)
        return engine, await play(shells([{"turns": 3}] * 40), engine, [FakeEnvWorker()], max_concurrency=8)

    engine, done = asyncio.run(scenario())
    assert engine.most_running == 8
    assert Counter(trajectory.stop_reason for trajectory in done).keys() <= {StopReason.TERMINATED, StopReason.LENGTH}


def test_what_waits_while_a_call_is_under_way_goes_in_the_next_one() -> None:
    async def scenario() -> list[list[int]]:
        calls: list[list[int]] = []
        released = asyncio.Event()

        async def call_many(items: list[int]) -> list[int]:
            calls.append(items)
            await released.wait()
            return [-item for item in items]

        join: Coalescer[int, int] = Coalescer(call_many)
        waiting = [asyncio.create_task(join(0))]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(join(number)) for number in range(1, MAX_BATCH + 6)]
        await asyncio.sleep(0)
        released.set()
        assert await asyncio.gather(*waiting) == [-number for number in range(MAX_BATCH + 6)]
        return calls

    sizes = [len(call) for call in asyncio.run(scenario())]
    assert sum(sizes) == MAX_BATCH + 6 and max(sizes) == MAX_BATCH and len(sizes) <= 3


def test_a_call_that_raises_before_it_is_under_way_is_answered_and_the_next_one_goes_out() -> None:
    async def echo(items: list[int]) -> list[int]:
        return items

    def call_many(items: list[int]) -> Awaitable[list[int]]:
        if items == [0]:
            raise OSError("no room for the arguments")
        return echo(items)

    async def scenario() -> int:
        join: Coalescer[int, int] = Coalescer(call_many)
        with pytest.raises(OSError, match="no room"):
            await asyncio.wait_for(join(0), 5)
        return await asyncio.wait_for(join(1), 5)

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize(
    ("options", "limits", "reason"),
    [
        ({"turns": 9}, {"max_turns": 1}, {StopReason.MAX_TURNS, StopReason.LENGTH}),
        ({"turns": 9}, {"max_model_len": 40, "max_turns": 9}, {StopReason.LENGTH}),
        ({"turns": 1}, {"max_model_len": 8}, {StopReason.ENGINE_ERROR}),
        ({"turns": 9}, {"agent": {"max_episode_tokens": 3}, "max_turns": 9}, {StopReason.LENGTH}),
        ({"turns": 9, "says": ["go", "x" * 10**7]}, {}, {StopReason.LENGTH}),
        ({"turns": 9, "says": ["x" * 10**7]}, {}, {StopReason.ENGINE_ERROR}),
        ({"raise_at": 0}, {}, {StopReason.ENV_ERROR}),
        ({"raise_at": 2, "turns": 9}, {}, {StopReason.ENV_ERROR}),
    ],
)
def test_stop_reasons(options: dict[str, Any], limits: dict[str, Any], reason: set[StopReason]) -> None:
    async def scenario() -> list[Trajectory]:
        return await play(shells([options] * 6), FakeEngineClient(), [FakeEnvWorker()], **limits)

    for trajectory in asyncio.run(scenario()):
        assert trajectory.stop_reason in reason
        assert len(trajectory.token_ids()) <= limits.get("max_model_len", 4096)
        assert sum(len(turn.observation) for turn in trajectory.turns) < 2**21, "what is recorded is bounded"
        if options.get("raise_at") == 2:
            assert len(trajectory.turns) == 2 and "no such move" in str(trajectory.error)


class Asking(FakeEnvWorker):
    """Each of its infos has the `request` of the sample's options."""

    def _answer(self, key: str) -> EnvReply:
        request = self.envs[key][0]["request"]
        reply = super()._answer(key)
        reply.info["request"] = request
        return reply


def test_an_env_may_report_a_request_of_its_own() -> None:
    options = [{"turns": 2, "request": request} for request in ("GET /messages", ["messages"], {"n": 1}, None, 3)]
    for trajectory in asyncio.run(play(shells(options), FakeEngineClient(), [Asking()])):
        assert not trajectory.stop_reason.failed and len(trajectory.turns) == 2, trajectory.error


def test_only_a_budget_of_the_run_cuts_an_answer_and_not_a_limit_that_its_agent_asks_for() -> None:
    asked = [{"messages": [{"role": "user", "content": "yes or no?"}], "max_tokens": most} for most in (1, 8)]
    options = [{"turns": 1, "request": request} for request in asked for _ in range(20)]
    done = asyncio.run(play(shells(options), FakeEngineClient(), [Asking()]))
    assert any(trajectory.turns[-1].output_ids[-1] not in PROMPT.stop_token_ids for trajectory in done[:20])
    assert {trajectory.stop_reason for trajectory in done[:20]} == {StopReason.TERMINATED}
    ends = [trajectory.turns[-1].output_ids[-1] in PROMPT.stop_token_ids for trajectory in done[20:]]
    expected = [StopReason.TERMINATED if end else StopReason.LENGTH for end in ends]
    assert [trajectory.stop_reason for trajectory in done[20:]] == expected and StopReason.LENGTH in expected


def test_an_answer_without_a_token_is_the_engines_failure_and_not_the_envs() -> None:
    class Empty(FakeEngineClient):
        async def generate(self, request: GenerationRequest) -> GenerationOutput:
            output = await super().generate(request)
            empty = GenerationOutput(request.request_id, [], [], [], "stop")
            return empty if request.request_id == "0/1/0#1" else output

    done = asyncio.run(play(shells([{"turns": 2}] * 3), Empty(), [FakeEnvWorker()]))
    assert [trajectory.stop_reason.failed for trajectory in done] == [False, True, False]
    assert done[1].stop_reason is StopReason.ENGINE_ERROR and len(done[1].turns) == 1
    assert done[1].error == "The engine answered turn 1 without a token."


def test_the_run_ends_in_a_sentence_when_every_worker_is_gone_and_goes_on_without_one_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyrl_trainer.rollout.env_client.RESTART_LIMIT", 0.3)

    async def scenario(gone: int) -> list[Trajectory]:
        workers = [FakeEnvWorker(restart=1e9) for _ in range(2)]
        for worker in workers[:gone]:
            asyncio.get_running_loop().call_later(0.1, worker.kill)
        return await play(shells([{"turns": 4}] * 6), FakeEngineClient(lambda request: 0.05), workers)

    assert not any(trajectory.stop_reason.failed for trajectory in asyncio.run(scenario(1)))
    with pytest.raises(UserError, match=r"No EnvWorker is left: .* not back after 0\.3 seconds"):
        asyncio.run(scenario(2))


def test_wall_clock_limit_covers_the_episode_and_only_that_one() -> None:
    async def scenario() -> list[Trajectory]:
        engine = FakeEngineClient(lambda request: 60.0 if request.request_id.startswith("0/1/") else 0.0)
        return await play(shells([{"turns": 2}] * 5), engine, [FakeEnvWorker()], episode_timeout=0.3)

    done = asyncio.run(scenario())
    assert [trajectory.stop_reason is StopReason.TIMEOUT for trajectory in done] == [False, True, False, False, False]
    assert "generator.episode_timeout=0.3 seconds" in str(done[1].error) and "turn 0" in str(done[1].error)


def test_waiting_for_a_place_in_the_engine_does_not_use_up_the_limit() -> None:
    async def scenario() -> list[Trajectory]:
        engine = FakeEngineClient(lambda request: 0.15)
        return await play(shells([{}] * 6), engine, [FakeEnvWorker()], max_concurrency=1, episode_timeout=0.4)

    assert not any(trajectory.stop_reason.failed for trajectory in asyncio.run(scenario()))


@pytest.mark.parametrize("held", ["", "always", "for a while"])
def test_while_the_engines_sleep_the_clock_stands_still(held: str) -> None:
    """Engines that share the learner's devices sleep with the requests that they have."""

    async def scenario() -> list[Trajectory]:
        engine = FakeEngineClient(lambda request: 0.6)
        config = GeneratorConfig(max_turns=1, max_model_len=4096, max_concurrency=2, episode_timeout=0.3)
        episodes = Episodes(lambda trajectory: PROMPT, engine, EnvClient([FakeEnvWorker()]), config)
        loop = asyncio.get_running_loop()
        if held:
            loop.call_later(0.05, episodes.hold, True)
        if held == "for a while":
            loop.call_later(0.1, episodes.hold, False)
        return await episodes.play(shells([{}] * 8), HOW)  # two begin while the clocks stand

    timeouts = [trajectory.stop_reason is StopReason.TIMEOUT for trajectory in asyncio.run(scenario())]
    assert timeouts == [held != "always"] * 8


def test_dead_worker_is_replayed_and_given_up_after_the_third_death() -> None:
    async def scenario(kills: int) -> list[Trajectory]:
        worker, asked = FakeEnvWorker(), Counter[str]()

        def delay(request: GenerationRequest) -> float:
            turn = request.request_id.partition("#")[2]
            asked[turn] += 1
            if asked[turn] == 3 and int(turn) < kills:
                worker.kill()
            return 0.1

        return await play(shells([{"turns": 4}] * 3), FakeEngineClient(delay), [worker])

    undisturbed, once, twice, thrice = (asyncio.run(scenario(kills)) for kills in (0, 1, 2, 3))
    for kills, survived in enumerate((once, twice), 1):
        assert [t.token_ids() for t in survived] == [t.token_ids() for t in undisturbed], "replayed to where it was"
        assert all(trajectory.metrics["env_replays"] == kills for trajectory in survived)
    assert all(trajectory.stop_reason is StopReason.ENV_ERROR for trajectory in thrice)
    assert "3 EnvWorkers died" in str(thrice[0].error)


def test_an_episode_that_cannot_begin_ends_the_rollout_with_its_own_error() -> None:
    def prompt_of(trajectory: Trajectory) -> ChatPrompt:
        raise UserError("The row has no such prompt.")

    async def begin() -> None:
        episodes = Episodes(prompt_of, FakeEngineClient(), EnvClient([FakeEnvWorker()]), GeneratorConfig())
        await episodes.play(shells([{"turns": 1}] * 3), HOW)

    with pytest.raises(UserError, match="The row has no such prompt"):
        asyncio.run(begin())


def test_a_worker_that_came_back_is_asked_again_where_it_could_not_close_at_once() -> None:
    """Whatever Ray says of the call: nobody may wait for a recovery that has ended with an error."""

    class Handle:
        def __init__(self) -> None:
            self.calls = 0
            self.call_many = SimpleNamespace(remote=self.call)

        async def call(self, calls: list[Any]) -> list[EnvReply]:
            self.calls += 1
            if self.calls < 4:
                raise ActorDiedError() if self.calls == 1 else RaySystemError("out of descriptors")
            return [EnvReply(observation="here")] * len(calls)

    async def recover() -> Host:
        client = EnvClient([Handle()])
        host = await client.place()
        assert (await host.call(False, "reset", "key", None)).kind == "lost"
        return await asyncio.wait_for(client.place(), 20)

    assert asyncio.run(recover()).recovery is None


def test_death_of_the_engine_ends_the_rollout_and_closes_every_env() -> None:
    class DeadEngine(FakeEngineClient):
        async def generate(self, request: GenerationRequest) -> GenerationOutput:
            if request.request_id == "0/2/0#1":
                raise EngineDied("The engine died.")
            return await super().generate(request)

    async def scenario() -> FakeEnvWorker:
        worker = FakeEnvWorker()
        with pytest.raises(EngineDied, match="The engine died"):
            await play(shells([{"turns": 4}] * 4), DeadEngine(), [worker])
        await asyncio.sleep(0.01)
        return worker

    assert not asyncio.run(scenario()).envs


def test_an_episode_knows_whether_its_template_begins_the_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said then is all thought until it says otherwise (skyrl_eval.solve)."""
    for thinks in (False, True):
        monkeypatch.setattr(PROMPT, "thinks", thinks)
        (played,) = asyncio.run(play(shells([{"turns": 1}]), FakeEngineClient(), [FakeEnvWorker()]))
        assert ("thinks" in played.metrics) is thinks


def test_in_deterministic_rollouts_each_turn_of_each_try_has_a_generator_of_its_own() -> None:
    async def scenario() -> FakeEngineClient:
        engine = FakeEngineClient()
        await play(shells([{"turns": 3}] * 3), engine, [FakeEnvWorker()], deterministic=True)
        return engine

    requests = asyncio.run(scenario()).requests
    assert len(requests) > 3 and len({request.seed for request in requests}) == len(requests)
