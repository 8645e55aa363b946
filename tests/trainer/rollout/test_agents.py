"""Users' agents in real EnvWorker processes, on an engine without a model: what they are asked, told and learned from.

Its tokens are random, so text that was decoded and encoded again would be other tokens.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import skyrl_gym  # noqa: F401
from skyrl_trainer.agent.conversation import MOST_REFUSED
from skyrl_trainer.agent.task import Play
from skyrl_trainer.agent.tokenizer import load_chat_prompt
from skyrl_trainer.chats import ChatRow
from skyrl_trainer.errors import UserError
from skyrl_trainer.replay.commands import chat_rows
from skyrl_trainer.replay.player import Player, compare
from skyrl_trainer.rollout.manager import Rollouts
from skyrl_trainer.settings import Config
from skyrl_trainer.tiny.init_policy import CHAT_TEMPLATE
from skyrl_trainer.types import GenerationOutput, GenerationRequest, PromptBatch, Sample, StopReason, Trajectory
from tests.trainer import fakes
from tests.trainer.fakes import FakeEngine, fake_tokens, tiny_tokenizer

CALLS = 10_000 if os.environ.get("SKYRL_TEST_FULL") else 300
GOOD = ["returns_reward", "refused", "leaves_a_process"]
BAD = ["returns_text", "raises", "exits", "hangs", "dies_by_signal", "never_asks"]
EXAMPLE = Path(__file__).parents[3] / "examples/my_agent.py"
AGENTS = '''
import asyncio, os, subprocess, time

import gymnasium
import httpx
import numpy as np
from openai import APIStatusError, AsyncOpenAI, BadRequestError, OpenAI


def ask(task, content="hello", **more):
    given = {"model": task.model, "messages": [{"role": "user", "content": content}], **more}
    with OpenAI(max_retries=0) as client:
        return client.chat.completions.create(**given).choices[0].message.content


def does(task):
    what = task.options.get("do", task.sample_id)
    if what not in ("never_asks", "forks", "quotes", "messages", "finds_the_shop", "shows_tools"):
        ask(task)
    return globals()[what](task)


def never_asks(task):
    return 1.0


def shows_tools(task):
    ask(task, tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
    return 1.0


def returns_reward(task):
    return {"reward": 0.5, "success": True}


def finds_the_shop(task):
    """In how many languages all products had been read before it was forked."""
    from skyrl_gym.envs.webshop_lite.catalog import load

    there = load.cache_info().currsize
    if task.options["lang"] == "zh":
        ask(task)
    ask(task, task.reset()[0])
    return float(there)


def returns_text(task):
    return "fine"


def raises(task):
    raise KeyError("lost")


def exits(task):
    os._exit(3)


def hangs(task):
    time.sleep(600)


def dies_by_signal(task):
    os.kill(os.getpid(), 9)


def stops(task):
    """What follows a stop string is not said, and was not sampled, as far as anybody can tell."""
    for letter in "aeiou ":
        assert letter not in ask(task, stop=letter)
        assert "a" not in ask(task, stop=["a", letter]) and letter not in ask(task, stop=["a", letter])
    return 1.0


def solves_and_then_asks(task):
    """The env says that it is solved before the last question."""
    task.reset()
    task.step(f"\\\\boxed{{{eval(task.reset()[0].split('=')[0])}}}")
    ask(task)


def too_much(task, words=2000):
    try:
        ask(task, "word " * words)
    except BadRequestError as error:
        told = error.body["message"]
        assert "prompt is too long" in told and "maximum context length is 1024 tokens" in told, told
    else:
        raise AssertionError("It fits.")


def shortens(task):
    """What does not fit is refused, and it goes on with less; its env is played before, between and after."""
    solution = f"\\\\boxed{{{eval(task.reset()[0].split('=')[0])}}}"
    task.step(solution)
    too_much(task)
    task.reset()
    task.step(solution)
    too_much(task, 1500)
    ask(task, "shorter")
    too_much(task)
    return 0.25


def earns_and_does_not_see_it(task):
    """Its env has paid when it asks too much; nothing catches what the client raises."""
    task.step(f"\\\\boxed{{{eval(task.reset()[0].split('=')[0])}}}")
    ask(task, "word " * 2000)


def never_shortens(task):
    for _ in range(100):
        too_much(task)


def ends_at_a_stop_string(task):
    ask(task, stop=list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "))
    return 1.0


def leaves_a_process(task):
    subprocess.Popen(["sleep", "4242"], start_new_session=True)
    return 1.0


def messages(task):
    """Anthropic's client, with what the environment tells it: a dialogue of two turns, with refusals."""
    import anthropic

    told = [{"role": "user", "content": "hello"}]
    with anthropic.Anthropic(max_retries=0) as client:
        for result in ("one", "two"):
            try:
                client.messages.create(model="gpt-4", max_tokens=8, messages=told)
            except anthropic.NotFoundError as error:
                assert error.body["error"]["type"] == "not_found_error", error.body
            reply = client.messages.create(model=task.model, max_tokens=6, messages=told)
            assert reply.usage.output_tokens <= 6 and reply.stop_reason in ("end_turn", "max_tokens"), reply
            told += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": result}]
    return 0.25


class Numbers(gymnasium.Env):
    """What it says are numpy's numbers."""

    def reset(self, *, seed=None, options=None):
        return "go", {"legal": np.array([1, 0])}

    def step(self, action):
        odds = float("nan") if action == "bet" else np.float32(0.5)
        info = {"legal": np.array([1, 0, 1]), "left": np.int64(3), "success": np.bool_(True), "odds": odds}
        return "on", np.float64(1), np.bool_(False), False, info


gymnasium.register("test/Numbers-v0", entry_point=Numbers)


def plays_with_numbers(task):
    """At its endpoint, and itself; NaN is no JSON."""

    def post(what, **body):
        headers = {"Authorization": f"Bearer {task.api_key}"}
        return httpx.post(f"{task.base_url}/env/{what}", json=body, headers=headers)

    assert post("reset").json() == {"observation": "go", "info": {"legal": [1, 0]}}
    info = {"legal": [1, 0, 1], "left": 3, "success": True, "odds": 0.5}
    said = {"observation": "on", "reward": 1.0, "terminated": False, "truncated": False, "info": info}
    assert post("step", action="look").json() == said
    refused = post("step", action="bet")
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["message"].startswith("The task's env raised ValueError: "), refused.text
    ask(task)
    task.step("look")


def calls_forever(task):
    while True:
        ask(task)


def refused(task):
    """Each request that makes no sense is OpenAI's error with a sentence; none is counted as a turn."""
    user = {"role": "user", "content": "x"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    wrong = {
        404: [{"model": "gpt-4"}],
        400: [
            {"messages": [image]}, {"messages": [user, {"role": "assistant", "content": "y"}]}, {"messages": []},
            {"messages": [{"content": "no role"}]}, {"tools": [{"type": "function"}]}, {"n": 2},
            {"messages": [{"role": "user", "content": "x" * 2**21}]},
        ],
    }
    for status, requests in wrong.items():
        for request in requests:
            try:
                ask(task, **request)
            except APIStatusError as error:
                assert error.status_code == status, (error.status_code, request)
                assert error.body["message"].endswith((".", "}")), error.body
            else:
                raise AssertionError(f"{request} was answered")
    url = f"{task.base_url}/chat/completions"
    plain = {"model": task.model, "messages": [user]}
    assert httpx.post(url, json=plain).status_code == 401
    assert httpx.post(url, json=plain, headers={"Authorization": "Bearer sk-other"}).status_code == 401
    right = {"Authorization": f"Bearer {task.api_key}"}
    for garbage in (b"", b"{", b"[" * 100_000, b"\\xff"):
        assert httpx.post(url, content=garbage, headers=right).status_code == 400, garbage
    return 1.0


async def say(task, messages):
    async with AsyncOpenAI(max_retries=0) as client:
        reply = await client.chat.completions.create(model=task.model, messages=messages)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]


async def talk(task, name):
    messages = await say(task, [{"role": "user", "content": f"I am {name}."}])
    return await say(task, [*messages, {"role": "user", "content": "And then?"}])


async def forks(task):
    """Two conversations at once, each of two turns."""
    await asyncio.gather(talk(task, "one"), talk(task, "two"))
    return 0.25


async def quotes(task):
    """Two conversations in turns, and a third that quotes what was said in them."""
    one = await say(task, [{"role": "user", "content": "I am one."}])
    two = await talk(task, "two")
    one = await say(task, [*one, {"role": "user", "content": "And then?"}])
    user = {"role": "user", "content": "which?"}
    await say(task, [{"role": "system", "content": "Decide."}, *one[:2], {**user, "content": "or"}, two[3], user])
    return 0.25
'''
COMMAND = """
import json, os, subprocess
import httpx

subprocess.Popen(["sleep", "600"])  # as a browser, or a server of tools, that nobody ends
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
task = json.loads(os.environ["SKYRL_TASK"])
with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
    if task["options"]["difficulty"] == 2:
        assert http.post(f"{url}/env/step", json={"action": "x"}).status_code == 400
    first = http.post(f"{url}/env/reset", json={}).json()["observation"]
    said = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": first}]}
    text = http.post(f"{url}/chat/completions", json=said).json()["choices"][0]["message"]["content"]
    http.post(f"{url}/env/step", json={"action": text})
    assert http.post(f"{url}/env/step", json={}).status_code == 400
if task["options"]["difficulty"] == 2:
    raise SystemExit(3)
print("played", task["sample_id"])
print(json.dumps({"reward": 0.75}))
"""


class Recording(FakeEngine):
    """Remembers what it was asked, word for word."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[GenerationRequest] = []

    async def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        self.requests += requests
        await super().submit(client, requests)

    async def seen(self) -> list[GenerationRequest]:
        return self.requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, two_cores: None) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE  # shows tools
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "agents.py").write_text(AGENTS)
    (folder / "command.py").write_text(COMMAND)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.register_pickle_by_value(fakes)
    return folder


def play(
    folder: Path, agent: dict[str, Any], samples: list[Sample], tries: int = 1, in_rounds: bool = True, **more: Any
) -> tuple[list[Trajectory], dict[str, GenerationRequest]]:
    """The trajectories, and the requests by their ids."""
    config = Config()
    config.trainer.deterministic = in_rounds
    config.environment.step_timeout = 30.0  # the first agents import their clients: seconds, on a busy machine
    settings = {"max_turns": 4, "max_completion_length": 8, "max_model_len": 1024, "agent": agent} | more
    for name, value in settings.items():
        setattr(config.generator, name, value)
    engine = ray.remote(Recording).remote()
    rollouts = Rollouts(config, [engine], str(folder / "tokenizer"))
    try:
        batch = rollouts.run(PromptBatch(0, samples, tries))
        return batch.trajectories, {request.request_id: request for request in ray.get(engine.seen.remote())}
    finally:
        rollouts.close()


def tasks(*names: str) -> list[Sample]:
    return [Sample(name, "skyrl/text_math-v0", number, {"do": name}) for number, name in enumerate(names)]


def assert_faithful(trajectory: Trajectory, asked: dict[str, GenerationRequest]) -> None:
    """Its contexts are those that the engine read, and its tokens those that it sampled; nothing is missing."""
    found = {}
    for segment in trajectory.segments():
        context: list[int] = []
        for turn in segment:
            context += turn.prompt_ids
            found[tuple(context)] = turn
            context = context + turn.output_ids
    mine = {key: request for key, request in asked.items() if key.startswith(f"{trajectory.trajectory_id}#")}
    assert sorted(found) == sorted(tuple(request.prompt_ids) for request in mine.values())
    for request in mine.values():
        output: GenerationOutput = fake_tokens(request)
        turn = found[tuple(request.prompt_ids)]
        same = (turn.output_ids, turn.logprobs, turn.weight_versions)
        assert same == (output.output_ids, output.logprobs, output.weight_versions)


ROOMS = [Sample(f"sum{i}", "skyrl/text_math-v0", i, {"difficulty": 1}) for i in range(3)]
ROOMS += [Sample(f"room{i}", "skyrl/alfworld_lite-v0", i, {"difficulty": 1}) for i in range(3)]


@pytest.fixture(scope="module")
def example(folder: Path) -> list[Trajectory]:
    return play(folder, {"run": f"{EXAMPLE}:agent"}, ROOMS, tries=2, max_model_len=4096)[0]


def test_an_agent_with_our_loop_is_our_loop(folder: Path, example: list[Trajectory]) -> None:
    """Down to every token, log-probability and reward, over several turns and envs."""
    ours, theirs = play(folder, {}, ROOMS, tries=2, max_model_len=4096)[0], example
    assert len(ours) == len(theirs) == 12 and max(len(each.turns) for each in ours) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert (other.stop_reason, other.error, other.prompt) == (one.stop_reason, one.error, one.prompt)
        assert len(one.turns) == len(other.turns)
        for turn, its in zip(one.turns, other.turns, strict=True):
            same = {"prompt_ids", "output_ids", "logprobs", "reward", "reward_parts", "new_segment", "action"}
            assert {name: getattr(its, name) for name in same} == {name: getattr(turn, name) for name in same}
            assert its.tool_calls == turn.tool_calls


@pytest.fixture(scope="module")
def played(folder: Path) -> tuple[dict[str, Trajectory], dict[str, GenerationRequest]]:
    """By what the agent does; the good ones besides and among the others."""
    samples = tasks(
        *GOOD,
        *BAD,
        "calls_forever",
        "forks",
        "quotes",
        "stops",
        "messages",
        "ends_at_a_stop_string",
        "shows_tools",
        "never_shortens",
        *GOOD,
    )
    samples.insert(0, Sample("solves_and_then_asks", "skyrl/text_math-v0", 1, {"difficulty": 1}))
    for name in ("shortens", "earns_and_does_not_see_it"):
        samples.append(Sample(name, "skyrl/text_math-v0", 1, {"difficulty": 1}))
    samples.append(Sample("plays_with_numbers", "test/Numbers-v0", 1))
    run = {"run": f"{folder}/agents.py:does"}
    found, asked = play(folder, run, samples, max_turns=CALLS, episode_timeout=900.0)
    for again, first in zip(found[-len(GOOD) - 3 :], found[1 : 1 + len(GOOD)], strict=False):
        assert (again.stop_reason.failed, again.env_reward) == (first.stop_reason.failed, first.env_reward)
    return {each.sample.sample_id: each for each in found}, asked


def test_the_tools_that_the_template_showed_are_kept_for_whoever_learns_from_the_export(
    folder: Path, played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]]
) -> None:
    samples = [Sample("calc", "skyrl/tool_use-v0", 1, {"difficulty": 2})]
    (shown,) = play(folder, {"tools": "template"}, samples, max_model_len=8192)[0]
    assert [tool["function"]["name"] for tool in shown.tools or ()][:1] == ["calculator"]
    row = ChatRow.model_validate(json.loads(json.dumps(next(chat_rows(shown)))))
    messages = [message.model_dump(exclude_none=True) for message in row.messages[:2]]
    prompt = load_chat_prompt(str(folder / "tokenizer"))
    assert prompt.conversation(messages, row.tools) == shown.turns[0].prompt_ids
    theirs, without = (played[0][name] for name in ("shows_tools", "forks"))
    assert theirs.tools is not None and theirs.tools[0]["function"]["name"] == "look" and without.tools is None


def test_a_stop_string_ends_the_answer_where_it_would_have_ended_the_sampling(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    trajectory, asked = played[0]["stops"], played[1]
    assert not trajectory.stop_reason.failed and len(trajectory.turns) == 19, trajectory.error
    decode, shorter = tiny_tokenizer().decode, 0
    for number, turn in enumerate(trajectory.turns):
        whole = fake_tokens(asked[f"{trajectory.trajectory_id}#{number}"])
        size = len(turn.output_ids)
        assert turn.output_ids == whole.output_ids[:size] and turn.logprobs == whole.logprobs[:size]
        assert len(turn.weight_versions) == size >= 1
        if size < len(whole.output_ids):
            shorter += 1
            text, before = decode(turn.output_ids), decode(turn.output_ids[:-1])
            assert text.startswith(turn.action) and len(before) <= len(turn.action) < len(text)
    assert shorter, "no answer held a stop string"


def test_success_that_the_env_told_before_the_last_question_counts(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    trajectory = played[0]["solves_and_then_asks"]
    assert not trajectory.stop_reason.failed and len(trajectory.turns) == 2 and trajectory.success, trajectory.error


def test_a_call_that_does_not_fit_is_refused_and_the_agent_may_ask_a_shorter_one(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    trajectory = played[0]["shortens"]
    assert trajectory.stop_reason is StopReason.TERMINATED and trajectory.success, trajectory.error
    first, last = trajectory.turns
    once = played[0]["solves_and_then_asks"].turns[0].reward
    assert once > 0 and (first.reward, last.reward) == (2 * once, 0.25)
    assert sum(first.reward_parts.values()) == first.reward and first.observation == "shorter"
    assert [len(json.loads(turn.info["skyrl/answer"])["refused"]) for turn in trajectory.turns] == [2, 1]
    assert_faithful(trajectory, played[1])
    raising = played[0]["earns_and_does_not_see_it"]
    assert (raising.stop_reason, raising.env_reward) == (StopReason.LENGTH, once), "as before it was told"
    assert "prompt is too long" in (raising.error or "") and raising.turns[0].info["skyrl/call"] == 0
    endless = played[0]["never_shortens"]
    assert (endless.stop_reason, len(endless.turns)) == (StopReason.LENGTH, 1), endless.error
    assert len(json.loads(endless.turns[0].info["skyrl/answer"])["refused"]) == MOST_REFUSED


def test_an_env_may_tell_numpys_numbers(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    trajectory = played[0]["plays_with_numbers"]
    assert not trajectory.stop_reason.failed and trajectory.success, trajectory.error
    assert [turn.reward for turn in trajectory.turns] == [2.0, 1.0]
    assert trajectory.turns[-1].info["legal"] == [1, 0, 1] and trajectory.turns[-1].info["odds"] == 0.5


def test_an_answer_that_ends_at_a_stop_string_was_not_cut(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    trajectory = played[0]["ends_at_a_stop_string"]
    assert trajectory.turns[-1].output_ids[-1] != tiny_tokenizer().eos_token_id
    assert trajectory.stop_reason is StopReason.TERMINATED, trajectory.error


@pytest.mark.parametrize("what", ["forks", "quotes", "messages"])
def test_forks_and_calls_at_once_are_recorded_as_they_were_sampled(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]], what: str
) -> None:
    trajectory = played[0][what]
    assert not trajectory.stop_reason.failed and trajectory.env_reward == 0.25, trajectory.error
    segments = {"forks": [2, 2], "quotes": [2, 2, 1], "messages": [2]}
    assert [len(segment) for segment in trajectory.segments()] == segments[what]
    assert_faithful(trajectory, played[1])
    *others, last = trajectory.turns
    assert sorted(turn.info["skyrl/call"] for turn in trajectory.turns) == list(range(len(others) + 1))
    if what == "quotes":
        quoted = [turn for turn in others if contains(last.prompt_ids, turn.output_ids)]
        assert len(quoted) >= 2, "what it quotes stands in its prompt as it was sampled"


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def test_what_an_agent_does_costs_its_own_episode_alone(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    by_name, _ = played
    for name in GOOD:
        assert not by_name[name].stop_reason.failed, (name, by_name[name].error)
        assert len(by_name[name].turns) == 1 and by_name[name].success
    assert by_name["returns_reward"].env_reward == 0.5 and by_name["refused"].env_reward == 1.0
    errors = {name: by_name[name].error or "" for name in BAD}
    assert all(by_name[name].stop_reason is StopReason.ENV_ERROR for name in BAD), errors
    assert errors["returns_text"].startswith("The agent returned 'fine': return a number")
    assert errors["raises"].startswith("The agent raised KeyError: 'lost' (") and "agents.py, line" in errors["raises"]
    assert errors["never_asks"] == "The agent ended before it asked the model anything."
    assert "its process ended with exit status 3" in errors["exits"]
    assert "it took longer than environment.step_timeout=30 seconds" in errors["hangs"]
    assert "its process ended with SIGKILL" in errors["dies_by_signal"]
    deadline = time.monotonic() + 60
    while left := [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4242"]]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_an_agent_that_calls_without_end_is_stopped_and_every_call_is_counted_once(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]],
) -> None:
    forever, name = played[0]["calls_forever"], f"{played[0]['calls_forever'].trajectory_id}#"
    seeds = [request.seed for key, request in played[1].items() if key.startswith(name)]
    assert len(forever.turns) == len(seeds) == len(set(seeds)) == CALLS, forever.error
    assert not forever.stop_reason.failed
    assert {len(turn.output_ids) for turn in forever.turns} <= set(range(1, 9))


def test_a_command_finds_its_endpoint_and_its_task_and_prints_its_reward(folder: Path) -> None:
    samples = [Sample(f"sum{i}", "skyrl/text_math-v0", i, {"difficulty": i}) for i in (1, 2)]
    good, bad = play(folder, {"run": [sys.executable, str(folder / "command.py")]}, samples)[0]
    assert not good.stop_reason.failed and len(good.turns) == 1, good.error
    assert good.env_reward == 0.75 + sum(good.turns[0].reward_parts.values())
    assert (bad.stop_reason, bad.error) == (
        StopReason.ENV_ERROR,
        f"The agent {Path(sys.executable).name} ended with exit status 3.",
    )


def test_what_the_episodes_of_an_env_share_is_read_once(folder: Path) -> None:
    """The shop's products take nearly a second: the first episodes read them, and tell it."""
    languages = ("en", "zh", "zh", "zh", "zh", "zh")
    samples = [Sample("finds_the_shop", "skyrl/webshop_lite-v0", 0, {"lang": lang}) for lang in languages]
    one_by_one = {"in_rounds": False, "max_concurrency": 1, "max_model_len": 2048}
    found, _ = play(folder, {"run": f"{folder}/agents.py:does"}, samples, **one_by_one)
    assert [each.error for each in found] == [None] * len(found)
    assert (found[0].env_reward, found[-1].env_reward) == (0.0, 2.0)


@pytest.mark.full
def test_parsers_by_name_are_loaded_where_the_episodes_are_played(folder: Path) -> None:
    agent = {"run": f"{folder}/agents.py:does", "tools": "hermes"}
    (trajectory,), asked = play(folder, agent, tasks("messages"))
    assert not trajectory.stop_reason.failed and len(trajectory.turns) == 2, trajectory.error
    assert_faithful(trajectory, asked)
    with pytest.raises(UserError, match="does not suit this model"):
        play(folder, agent | {"tools": "hermes+deepseek_r1"}, tasks("messages"))


def test_env_steps_between_two_questions_get_each_its_own_calls_in_a_replay() -> None:
    sample = Sample("t#3", "skyrl/tool_use-v0", 3, {"split": "train", "difficulty": 3})
    code = {"name": "python_exec", "arguments": {"code": "import time; print(time.perf_counter_ns())"}}
    action = f"<tool_call>\n{json.dumps(code)}\n</tool_call>"
    first, again = Play(sample), Play(sample)
    first.reset()
    told = [first.step(action)[0] for _ in range(2)]
    assert told[0] != told[1]
    again.reset()
    again.recorded = first.earned()[1]["tool_calls"]
    assert [again.step(action)[0] for _ in range(2)] == told


def test_a_stored_episode_of_an_agent_is_played_again(
    played: tuple[dict[str, Trajectory], dict[str, GenerationRequest]], example: list[Trajectory]
) -> None:
    player = Player(5.0)
    longest = sorted(example, key=lambda each: len(each.turns))[-3:]  # with a client that the episodes have in common
    assert all(len(trajectory.turns) > 3 for trajectory in (played[0]["quotes"], *longest))
    refused = (played[0][name] for name in ("shortens", "never_shortens", "earns_and_does_not_see_it"))
    for trajectory in (played[0]["quotes"], *refused, *longest):
        assert compare(trajectory, player.play(trajectory, live=False)) is None
