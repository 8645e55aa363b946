"""A user's agent as an environment: what it asks the model is observed, and the model's answer is the action.

Its endpoint is in the same process, this episode's alone, which ends with it and with all that it has started; requests
are answered in their order. docs/agents/your-agent.md has the rest.
"""

import asyncio
import inspect
import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import gymnasium

from skyrl_gym.chat_client import past_proxies
from skyrl_trainer.agent import chat_api
from skyrl_trainer.agent.chat_api import Chat, Completion, Refusal, answer_of, application, for_template, message_of
from skyrl_trainer.agent.early_imports import EarlyImports
from skyrl_trainer.agent.http_server import HTTPServer
from skyrl_trainer.agent.parsers import check_names, named
from skyrl_trainer.agent.prompt import LONGEST_TEXT
from skyrl_trainer.agent.streaming import Json
from skyrl_trainer.agent.task import MODEL, Play, Task
from skyrl_trainer.errors import UserError
from skyrl_trainer.types import Sample
from skyrl_trainer.user_file import cause, load_user_file

if TYPE_CHECKING:  # for the annotation alone, as in user_file.py
    from skyrl_trainer.settings import Config

MOST_WAITING = 1024
"""Requests of one agent at a time."""
LONGEST_LINE = 2**16
SETTING = "generator.agent.run"
early: EarlyImports | None = None


def find_agent(given: str) -> Callable[[Any], Any]:
    """The function that `my.py:agent` names. UserError where there is none."""
    path, _, name = given.rpartition(":")
    if not path:
        raise UserError(f"{SETTING}={given}: name a file and a function in it, as my.py:agent.")
    function = getattr(load_user_file(SETTING, path, "has your agent in it"), name, None)
    if not callable(function):
        raise UserError(f"{SETTING}={given}: {path} has no function {name!r}.")
    return function


def check_agent(config: "Config") -> None:
    """UserError where the agent that the settings name is not there; before anything is started."""
    agent = config.generator.agent
    check_names(agent)
    if isinstance(agent.run, str):
        find_agent(agent.run)
    if isinstance(agent.run, list) and not (agent.run and shutil.which(agent.run[0])):
        raise UserError(f"{SETTING}={agent.run}: there is no such program on this machine.")


def prepare(given: str) -> Callable[[], None]:
    """In the process from which the episodes' are forked; returns what is called before each fork."""
    global early
    past_proxies()
    os.environ.setdefault("DEFER_PYDANTIC_BUILD", "false")  # openai builds its models now, not in episodes
    with suppress(UserError):  # each episode says it
        find_agent(given)
    early = EarlyImports()
    return early.learn


class AgentEnv(gymnasium.Env[str, str]):
    """One episode. `reset` begins the agent; a step's action is an answer (Conversation.said); info["request"] asks."""

    def __init__(self, sample: Sample) -> None:
        self.observation_space = self.action_space = gymnasium.spaces.Text(2**20)
        self._agent, self._play, self._stack = sample.agent, Play(sample), ExitStack()
        self._events: SimpleQueue[Any] = SimpleQueue()
        """What the agent asks, with the future of its answer; or, when it has ended, the reward that it returned."""
        self._future: Future[Json] = Future()
        self._kept: dict[str, Json] = {}
        """Answers that came after the client had given up, by request: it asks again, and is a turn once."""
        self._said = Json()
        """The last answer, and in `refused` what the agent was told instead of answers after it."""
        self._recorded: list[Json] | None = None  # of a replay
        self._asked, self._waiting, self._refusal = 0, 0, ""
        what = sample.sample_id, sample.env_id, sample.seed, dict(sample.options), sample.ground_truth
        self._task = Task(*what, play=self._play)
        self.name, self.limits = MODEL, Json()

    def reset(self, *, seed: int | None = None, options: Json | None = None) -> tuple[str, Json]:
        server, task = HTTPServer("127.0.0.1", 0), self._task
        task.base_url, task.api_key = server.url, secrets.token_hex(16)
        more = {"/v1/env/reset": self._env_reset, "/v1/env/step": self._env_step}
        self._stack.enter_context(server.running(application(self, task.api_key, more), wait=0.0))
        names = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": MODEL}
        names |= {"ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": task.api_key}
        os.environ.update(names | {"SKYRL_TASK": json.dumps(task.told(), default=repr)})
        threading.Thread(target=self._run, daemon=True).start()
        event = self._next()
        if not isinstance(event, tuple):
            ended = str(event).removesuffix(".") if isinstance(event, UserError) else "The agent ended"
            raise UserError(f"{ended} before it asked the model anything{self._refusal}.")
        self._request, self._future = event
        told = [for_template(each) for each in self._request["messages"]]
        system = [each["content"] for each in told if each["role"] == "system"]
        others = [each["content"] for each in told if each["role"] != "system"]
        return "\n".join(others), {"instructions": "\n".join(system), "request": self._request}

    def step(self, action: str) -> tuple[str, float, bool, bool, Json]:
        said = _read(action)
        answers = [{"refused": sentence} for sentence in said.get("refused", ())]
        if "choice" in said:  # of a record: with all that followed it
            self._said, answers = said, [said, *answers]
        else:
            self._said, answers = self._said | said, answers[-1:]
            self._play.recall()
        self._play.feed(self._recorded)
        self._recorded = None
        for answer in answers:
            event = self._told(answer)
            if not isinstance(event, tuple):
                break
        reward, info = self._play.earned()
        info["skyrl/answer"] = json.dumps(self._said)
        if isinstance(event, tuple):
            return _news(self._request["messages"]), reward, False, False, info | {"request": self._request}
        if isinstance(event, UserError):
            raise event
        reward += event["reward"] or 0.0
        told = reward > 0 if self._play.success is None else self._play.success
        info["success"] = bool(event.get("success", told))
        return "", reward, not self._play.truncated, self._play.truncated, info

    def _told(self, answer: Json) -> Any:
        """What follows, after the request has its answer."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(answer)
        else:
            self._kept[json.dumps(self._request)] = answer
        event = self._next()
        if isinstance(event, tuple):
            self._request, self._future = event
        return event

    def _next(self) -> Any:
        while isinstance(event := self._events.get(), tuple):
            asked, future = json.dumps(event[0]), event[1]
            if asked in self._kept and future.set_running_or_notify_cancel():
                future.set_result(self._kept.pop(asked))
            elif not future.cancelled():
                return event
        return event

    def feed_external(self, recorded: list[Json]) -> None:
        self._recorded = recorded

    def close(self) -> None:
        if early is not None:
            early.tell(self._play.env)
        self._future.cancel()
        self._stack.close()
        self._play.close()

    async def chat(self, request: Chat) -> Json:
        try:
            chat_api.check(request)
            return await self._chat(request)
        except Refusal as error:
            self._refusal = f"; its last request was refused: {str(error).removesuffix('.')}"
            raise

    async def _chat(self, request: Chat) -> Json:
        if request.model != MODEL:
            raise Refusal(404, f"The model {request.model!r} is not served here; {MODEL!r} is.")
        if request.n > 1:
            raise Refusal(400, "n is 1 in training: ask again for another answer.")
        asked = request.model_dump(include={"messages", "tools", "logprobs"})
        asked |= {"max_tokens": request.most, "stop": request.stops}
        if len(json.dumps(asked)) > LONGEST_TEXT:
            raise Refusal(400, f"The request is longer than {LONGEST_TEXT} characters.")
        if self._waiting >= MOST_WAITING:
            raise Refusal(429, f"{MOST_WAITING} requests of this agent wait already.")
        future: Future[Json] = Future()
        self._waiting += 1
        self._events.put((asked, future))
        try:
            answer = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            raise Refusal(503, "The episode is over.") from None
        finally:
            self._waiting -= 1
        if "choice" not in answer:
            raise Refusal(400, answer["refused"])
        self._asked += 1
        return named(answer_of(f"chatcmpl-{self._asked}", MODEL, answer["usage"]), [answer["choice"]])

    async def complete(self, request: Completion) -> Json:
        raise Refusal(404, "In training the policy answers /v1/chat/completions alone.")

    async def _env_reset(self, body: Any) -> Json:
        observation, info = await _played(self._play.reset)
        return {"observation": observation, "info": info}

    async def _env_step(self, body: Any) -> Json:
        if not isinstance(body, dict) or not isinstance(body.get("action"), str):
            raise Refusal(400, 'The body is {"action": "..."}.')
        said = await _played(self._play.step, body["action"])
        return dict(zip(("observation", "reward", "terminated", "truncated", "info"), said, strict=True))

    def _run(self) -> None:
        try:
            self._events.put(_checked(self._call() if isinstance(self._agent, str) else self._command()))
        except UserError as error:
            self._events.put(error)
        except BaseException as error:
            self._events.put(UserError(f"The agent raised {cause(error)}."))

    def _call(self) -> Any:
        assert isinstance(self._agent, str)
        returned = find_agent(self._agent)(self._task)
        return asyncio.run(asyncio.wait_for(returned, None)) if inspect.isawaitable(returned) else returned

    def _command(self) -> Any:
        assert self._agent
        with TemporaryFile() as said:  # a pipe would wait for all that it has started
            with subprocess.Popen(self._agent, stdin=subprocess.DEVNULL, stdout=said) as process:
                self._stack.callback(process.kill)
            said.seek(max(0, said.seek(0, os.SEEK_END) - LONGEST_LINE))
            tail = said.read()
        if process.returncode:
            raise UserError(f"The agent {Path(self._agent[0]).name} ended with exit status {process.returncode}.")
        with suppress(ValueError, IndexError, RecursionError):
            return json.loads(tail.split(b"\n")[-2 if tail.endswith(b"\n") else -1])
        return None


# Conversation.said, Conversation.refusal, or, of a record, both; a plain text is an answer that was not cut.
def _read(action: str) -> Json:
    with suppress(ValueError, RecursionError, AttributeError):
        said = json.loads(action)
        refused = said.get("refused", [""])
        known = said and said.keys() - {"refused"} in ({"choice", "usage"}, set())
        if known and refused and isinstance(refused, list):
            return dict(said)
    choice = {"index": 0, "message": message_of(action), "logprobs": None, "finish_reason": "stop"}
    return {"choice": choice, "usage": {"prompt_tokens": 0, "completion_tokens": 0}}


gymnasium.register("skyrl/agent-v0", entry_point=AgentEnv)  # type: ignore[arg-type]


async def _played(call: Callable[..., Any], *arguments: str) -> Any:
    try:
        said = await asyncio.to_thread(call, *arguments)
        return json.loads(json.dumps(said, allow_nan=False, default=lambda x: getattr(x, "tolist", x.__repr__)()))
    except Exception as error:
        raise Refusal(400, f"The task's env raised {cause(error)}.") from error


def _checked(returned: Any) -> Json:
    told: Json = dict(returned) if isinstance(returned, dict) else {"reward": returned}
    reward: Any = told.get("reward")
    told["reward"] = reward = reward.item() if hasattr(reward, "item") else reward  # of numpy or torch
    known = told.keys() <= {"reward", "success"}
    if not (known and (reward is None or (isinstance(reward, int | float) and isfinite(reward)))):
        raise UserError(f"The agent returned {repr(returned)[:80]}: return a number, {{'reward': ...}} or nothing.")
    return told


def _news(messages: list[Json]) -> str:
    told = [for_template(each) for each in messages]
    last = max((place for place, each in enumerate(told) if each["role"] == "assistant"), default=-1)
    return "\n".join(each["content"] for each in told[last + 1 :])
