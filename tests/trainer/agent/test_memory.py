"""Tokens in, tokens out: whatever is remembered, what the policy sampled is trained on where it was sampled."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_trainer.agent.memory import Memory, without_thinking
from skyrl_trainer.agent.prompt import ChatPrompt
from skyrl_trainer.errors import UserError
from skyrl_trainer.learner.batch import make_rows
from skyrl_trainer.rollout.env_client import EnvClient
from skyrl_trainer.rollout.episode import How
from skyrl_trainer.rollout.rollout_worker import Episodes
from skyrl_trainer.settings import AgentConfig, GeneratorConfig
from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE, make_tokenizer
from skyrl_trainer.types import GenerationOutput, GenerationRequest, Sample, SamplingOptions, Trajectory, Turn
from tests.trainer.fakes import CHATML, FakeEngineClient, FakeEnvWorker

TEMPLATES = ("ours", "qwen2_5", "qwen3")
TOOLS = [{"type": "function", "function": {"name": "wiki", "description": "Reads.", "parameters": {}}}]


@cache
def prompt_of(template: str) -> ChatPrompt:
    """Our tokenizer with our template, or with Qwen's as TRL ships them."""
    tokenizer = make_tokenizer(["the answer is in turn 12", "user assistant"] * 9, 320)
    path = files("trl").joinpath("chat_templates", f"{template}.jinja")
    tokenizer.chat_template = CHAT_TEMPLATE if template == "ours" else path.read_text()
    return ChatPrompt(tokenizer)


class Thinker(FakeEngineClient):
    """Tokens at random, some with thoughts, some cut; `asked` has every prompt by its request's id."""

    def __init__(self, prompt: ChatPrompt) -> None:
        super().__init__()
        self.prompt, self.asked = prompt, dict[str, list[int]]()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.asked[request.request_id] = request.prompt_ids
        rng = random.Random(hashlib.sha256(request.request_id.encode()).digest())
        encode = self.prompt.tokenizer.encode
        ids = [rng.randint(3, 310) for _ in range(rng.randint(1, 9))]
        if rng.random() < 0.6:
            ids = [*encode("<think>"), *ids, *encode("</think>\n\n"), *encode("go " * rng.randint(0, 4))]
        if rng.random() < 0.8:
            ids.append(self.prompt.end_of_turn_id)
        ids = ids[: request.options.max_tokens]
        return GenerationOutput(request.request_id, ids, [-rng.random() - 0.01 for _ in ids], [0] * len(ids), "stop")


@pytest.fixture(scope="module", autouse=True)
def short_summaries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_trainer.agent.memory.SUMMARY_CHARS", 3)
        yield


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TEMPLATES),
    st.sampled_from(["full", "window", "summary", "no_thinking"]),
    st.integers(1, 3),
    st.sampled_from([None, 1, 40]),
    st.lists(st.lists(st.text(max_size=30), min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_what_the_engine_read_and_wrote_is_what_is_learned_from(
    template: str, memory: str, window: int, budget: int | None, says: list[list[str]]
) -> None:
    prompt = prompt_of(template)
    engine = Thinker(prompt)
    memory += f":{window}" * (memory in ("window", "summary"))
    agent = {"memory": memory, "max_episode_tokens": budget}
    config = GeneratorConfig(max_turns=5, max_model_len=600, agent=agent)
    sampling = SamplingOptions(max_tokens=12, stop_token_ids=prompt.stop_token_ids)
    shells = [
        Trajectory(f"0/{i}/0", Sample(f"s{i}", "fake", i, {"turns": len(texts), "says": texts}), 0, seed=i)
        for i, texts in enumerate(says)
    ]

    async def play() -> list[Trajectory]:
        envs = EnvClient([FakeEnvWorker()])
        return await Episodes(lambda trajectory: prompt, engine, envs, config).play(
            shells, How(sampling, False, False, False)
        )

    done = asyncio.run(play())
    for trajectory, row in zip(done, make_rows(done), strict=True):
        assert trajectory.turns and not trajectory.stop_reason.failed
        assert budget is None or trajectory.num_output_tokens <= budget
        ids, mask, logprobs = trajectory.token_ids(), trajectory.loss_mask(), trajectory.rollout_logprobs()
        assert len(ids) == len(mask) == len(logprobs)
        turns = trajectory.turns
        sampled = [(token, x) for turn in turns for token, x in zip(turn.output_ids, turn.logprobs, strict=True)]
        assert [(token, x) for token, x, bit in zip(ids, logprobs, mask, strict=True) if bit] == sampled
        assert memory != "full" or len(trajectory.segments()) == 1, "full memory never rewrites"
        bounds = [*row.later, len(row.token_ids)]
        number, start = 0, 0
        for segment, stop in zip(trajectory.segments(), bounds, strict=True):
            context: list[int] = []
            for turn in segment:
                context += turn.prompt_ids
                assert engine.asked[f"{trajectory.trajectory_id}#{number}"] == context, "exactly what was read"
                assert turn.action == prompt.decode(turn.output_ids)
                context += turn.output_ids
                number += 1
            assert row.token_ids[start:stop].tolist() == context
            start = stop
        assert number == len(trajectory.turns) and row.num_sampled == len(sampled)


def said(prompt: ChatPrompt, *texts: str) -> list[Turn]:
    """Turns in canonical tokens: action, observation, action, observation..."""
    turns = []
    for action, observation in zip(texts[::2], texts[1::2], strict=True):
        ids = [*prompt.tokenizer.encode(action, add_special_tokens=False), prompt.end_of_turn_id]
        turns.append(Turn([], ids, [-1.0] * len(ids), [0] * len(ids), action, observation))
    return turns


def remembered(template: str, texts: list[str], **options: Any) -> tuple[list[bool], str]:
    """Which turns began a segment, and the last context as text."""
    prompt = prompt_of(template)
    memory = Memory(prompt, AgentConfig(**options), prompt.first("Be brief.", "Go."))
    turns, segments = said(prompt, *texts), []
    for number in range(len(turns)):
        _, new_segment = memory.advance(turns[: number + 1])
        segments.append(new_segment)
    return segments, prompt.tokenizer.decode(memory.context)


def rendered(template: str, *texts: str) -> str:
    roles = ["system", "user"] + ["assistant", "user"] * len(texts)
    messages = [{"role": r, "content": c} for r, c in zip(roles, ["Be brief.", "Go.", *texts], strict=False)]
    return prompt_of(template).tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_memory_is_the_templates_own_text_of_what_is_left(template: str) -> None:
    texts = ["a 1", "one and more", "a 2", "two and more", "a 3", "three and more"]
    assert remembered(template, texts) == ([False] * 3, rendered(template, *texts))
    segments, text = remembered(template, texts, memory="window:2")
    assert (segments, text) == ([False, False, True], rendered(template, *texts[2:]))
    segments, text = remembered(template, texts, memory="summary:1")
    wanted = rendered(template, "a 1", "one [...]", "a 2", "two [...]", "a 3", "three and more")
    assert (segments, text) == ([False, True, True], wanted)


def test_thoughts_are_left_out_as_qwen3s_own_template_leaves_them_out() -> None:
    texts = [
        "<think>\nWhy?\n</think>\n\ngo 1",
        "one",
        "go 2",
        "two",
        "<think>\nHm </think> or.\n</think>\n\ngo 3",
        "three",
    ]
    segments, text = remembered("qwen3", texts, memory="no_thinking")
    assert text == rendered("qwen3", *texts) and "Why" not in text
    assert segments == [True, False, True], "a turn without a thought only adds to the context"
    assert remembered("ours", texts[2:4], memory="no_thinking")[0] == [False]


def test_of_an_output_that_is_thoughts_alone_its_end_stays() -> None:
    """What follows is the template's after a message that has ended."""
    prompt = prompt_of("ours")
    ids = [*prompt.encode("<think>\nHm.\n</think>\n\n"), prompt.end_of_turn_id]
    assert without_thinking(prompt, ids) == [prompt.end_of_turn_id]


def test_thoughts_of_tokens_that_join_the_tag_with_what_follows_leave_no_part_of_it() -> None:
    prompt = ChatPrompt(prompt_of("ours").tokenizer)
    encode = prompt.tokenizer.encode
    letters = [token for letter in "<think>x</think> ok" for token in encode(letter)]
    assert prompt.decode(without_thinking(prompt, letters)) in (" ok", "ok")
    assert without_thinking(prompt, encode("no thought")) == encode("no thought")
    assert without_thinking(prompt, encode("<think>cut")) == encode("<think>cut")


@pytest.mark.parametrize("template", TEMPLATES)
def test_tools_are_told_by_the_template(template: str) -> None:
    prompt = prompt_of(template)
    text = prompt.tokenizer.decode(prompt.first("Be brief.", "Go.", TOOLS))
    assert '"name": "wiki"' in text and text.count("Be brief.") == 1
    assert prompt.first("Be brief.", "Go.", []) == prompt.first("Be brief.", "Go.")


def test_template_without_tools_is_refused_with_the_setting() -> None:
    tokenizer = make_tokenizer(["text"], 300)
    tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match=r"generator\.agent\.tools"):
        ChatPrompt(tokenizer).first("", "Go.", TOOLS)
